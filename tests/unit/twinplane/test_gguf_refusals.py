"""A GGUF file that says or holds something else: read as what it is, or refused by name."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.quick import spread
from tests.unit.twinplane.tiny_gguf import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, TinyGguf
from twinplane.models import ConversionUnsupported, ModelInvalid, NoProgress
from twinplane.models.gguf.conversion import convert_gguf

SIZES = {
    "llama.context_length": 128,
    "llama.block_count": LAYERS,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.key_length": HEAD_DIM,
    "llama.attention.value_length": HEAD_DIM,
    "llama.rope.dimension_count": HEAD_DIM,
    "llama.vocab_size": len(TinyGguf().tokens),
}
WRONG_SIZES: tuple[Any, ...] = (0, -1, 2**32 - 1, "64", 64.5, True, [16, 16])
NUMBERS = (
    "llama.attention.layer_norm_rms_epsilon",
    "llama.rope.freq_base",
    "llama.rope.scaling.factor",
    "llama.rope.scale_linear",
)
WRONG_NUMBERS: tuple[Any, ...] = (0.0, -1.0, math.nan, math.inf, "1", 3, True, [1, 2])


def refusal(tiny: TinyGguf, folder: Path) -> str:
    """The words with which the file is refused, before any weight is written."""
    tiny.write(folder / "m.gguf")
    with pytest.raises((ModelInvalid, ConversionUnsupported)) as caught:
        convert_gguf(folder / "m.gguf", folder, NoProgress())
    assert not (folder / "model.safetensors").exists()
    return str(caught.value)


@pytest.mark.parametrize(("key", "value"), spread(product(SIZES, WRONG_SIZES), 33), ids=str)
def test_a_wrong_size_is_never_a_value(key: str, value: Any, tmp_path: Path) -> None:
    """A large one contradicts the tensors, which are named then."""
    if key == "llama.context_length" and value == 2**32 - 1:
        return
    words = refusal(TinyGguf(extra={key: value}), tmp_path)
    assert key in words or (value == 2**32 - 1 and ("tensor" in words or "rotated" in words))


@pytest.mark.parametrize("value", WRONG_NUMBERS, ids=str)
@pytest.mark.parametrize("key", NUMBERS)
def test_a_wrong_number_is_never_a_value(key: str, value: Any, tmp_path: Path) -> None:
    assert key in refusal(TinyGguf(extra={key: value}), tmp_path)


@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_is_told_again_changes_nothing(key: str, tmp_path: Path) -> None:
    TinyGguf(extra=dict(SIZES)).write(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path, NoProgress())
    other = SIZES[key] * 2
    if key == "llama.context_length":
        return
    (tmp_path / "model.safetensors").unlink()
    words = refusal(TinyGguf(extra={**SIZES, key: other}), tmp_path)
    assert key in words or "tensor" in words or "rotated" in words


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.clamp_kqv", 8.0),
        ("llama.attention.max_alibi_bias", 8.0),
        ("llama.attention.scale", 0.5),
        ("llama.attention.sliding_window", 64),
        ("llama.attention.causal", False),
        ("llama.attn_logit_softcapping", 50.0),
        ("llama.final_logit_softcapping", 30.0),
        ("llama.logit_scale", 0.5),
        ("llama.residual_scale", 0.5),
        ("llama.embedding_scale", 12.0),
        ("llama.expert_count", 8),
        ("llama.pooling_type", 1),
        ("llama.use_parallel_residual", True),
        ("llama.rope.scaling.attn_factor", 1.5),
        ("llama.rope.freq_scale", 2.0),
        ("llama.something.new", "x"),
        ("general.type", "adapter"),
        ("split.count", 3),
    ],
)
def test_what_is_not_understood_is_refused_by_its_key(key: str, value: Any, tmp_path: Path) -> None:
    words = refusal(TinyGguf(extra={key: value}), tmp_path)
    assert key in words
    assert str(value) in words


def test_what_changes_nothing_passes(tmp_path: Path) -> None:
    neutral: dict[str, Any] = {
        "llama.expert_count": 0,
        "llama.attention.causal": True,
        "llama.attention.sliding_window": 0,
        "llama.rope.scaling.attn_factor": 1.0,
        "llama.rope.scaling.finetuned": True,
        "general.type": "model",
        "split.count": 1,
        "quantize.imatrix.file": "calibration.dat",
    }
    TinyGguf(extra=neutral).write(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path, NoProgress())


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_q_norm.weight",
        "blk.0.attn_k.scale",
        "blk.0.attn_qkv.weight",
        "blk.0.attn_sinks.weight",
        "blk.0.attn_sub_norm.weight",
        "blk.0.attn_q.weight.lora_a",
        "blk.0.ffn_gate_inp.weight",
        "blk.0.ffn_up_exps.weight",
        "blk.0.post_attention_norm.weight",
        "blk.0.attn_norm.bias",
        "blk.2.attn_q.weight",
        "blk.-1.attn_q.weight",
        "output.bias",
        "output_norm.bias",
        "token_embd_norm.weight",
        "token_embd.bias",
        "position_embd.weight",
        "rope_factors_long.weight",
        "rope_freqs.bias",
        "cls.weight",
    ],
)
def test_a_tensor_that_no_llama_has_is_refused_by_name(name: str, tmp_path: Path) -> None:
    words = refusal(TinyGguf(tensors={name: np.zeros(HIDDEN, np.float32)}), tmp_path)
    assert f"tensor {name}" in words


@pytest.mark.parametrize(
    ("kind", "shown"),
    [("int8", "I8"), ("int16", "I16"), ("int32", "I32"), ("int64", "I64"), ("float64", "F64")],
)
@pytest.mark.parametrize("name", ["output_norm.weight", "blk.1.attn_norm.weight"])
def test_a_format_that_cannot_be_read_is_named_before_anything_is_written(
    name: str, kind: str, shown: str, tmp_path: Path
) -> None:
    other: Any = np.ones(HIDDEN, kind)
    words = refusal(TinyGguf(without=(name,), tensors={name: other}), tmp_path)
    assert f"tensor {name} is {shown}," in words


@pytest.mark.parametrize(
    "divisors",
    [
        np.zeros(HEAD_DIM // 2),
        np.full(HEAD_DIM // 2, math.nan),
        np.full(HEAD_DIM // 2, math.inf),
        np.full(HEAD_DIM // 2, -8.0),
        np.full(HEAD_DIM // 2, 0.5),
        np.ones(HEAD_DIM // 2 + 1),
        np.ones(0),
    ],
    ids=["zero", "nan", "infinite", "negative", "half", "too many", "none"],
)
def test_wrong_frequencies_are_refused(divisors: Any, tmp_path: Path) -> None:
    tiny = TinyGguf(tensors={"rope_freqs.weight": divisors.astype(np.float32)})
    assert "rope_freqs" in refusal(tiny, tmp_path)


def test_two_factors_must_be_one(tmp_path: Path) -> None:
    same: dict[str, Any] = {"llama.rope.scaling.factor": 2.0, "llama.rope.scale_linear": 2.0}
    TinyGguf(extra=same).write(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path, NoProgress())
    (tmp_path / "model.safetensors").unlink()
    words = refusal(TinyGguf(extra={**same, "llama.rope.scale_linear": 4.0}), tmp_path)
    assert "llama.rope.scale_linear differ" in words
