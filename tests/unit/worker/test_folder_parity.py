"""A model folder that somebody changed: the logits that transformers gets from it, or a refusal."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.loaded_decoder import Loaded
from tests.support.tiny_llama import llama, mistral, qwen2, reference_logits, save
from worker_service.load_errors import CheckpointInvalid, LoadError

Tensors = dict[str, torch.Tensor]

TOKENS = [int(token) for token in torch.randint(131, (90,), generator=torch.manual_seed(2))]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LINEAR = {"rope_type": "linear", "factor": 3.0}


def served_as_by_transformers(folder: Path) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(
        Loaded(folder).logits(TOKENS, [90]),
        reference_logits(reference, TOKENS),
        rtol=1e-4,
        atol=2e-4,
    )


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> Path:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def reconfigure(folder: Path, without: tuple[str, ...] = (), **values: Any) -> Path:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: config[key] for key in config if key not in without}))
    return folder


THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 523.0}}
CHANGED: dict[str, tuple[Callable[[], PreTrainedModel], tuple[str, ...], dict[str, Any]]] = {
    "no epsilon": (lambda: llama(rms_norm_eps=0.3), ("rms_norm_eps",), {}),
    "no theta": (lambda: llama(**THETA), ("rope_parameters",), {}),
    "no theta in the scaling": (llama, ("rope_parameters",), {"rope_scaling": LINEAR}),
    "theta in one place": (
        lambda: llama(**THETA),
        (),
        {"rope_parameters": {**LINEAR, "rope_theta": 77.0}},
    ),
    "theta in two places": (
        llama,
        (),
        {"rope_parameters": {**LINEAR, "rope_theta": 77.0}, "rope_theta": 77.0},
    ),
    "both spellings": (
        llama,
        (),
        {
            "rope_parameters": {**LINEAR, "rope_theta": 77.0},
            "rope_scaling": {"type": "linear", "factor": 3.0},
            "rope_theta": 77.0,
        },
    ),
    "no length": (llama, ("max_position_embeddings",), {}),
    "no length for yarn": (
        llama,
        ("max_position_embeddings",),
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "no head size": (llama, ("head_dim",), {}),
    "null head size": (llama, (), {"head_dim": None}),
    "no key heads": (lambda: llama(num_key_value_heads=6), ("num_key_value_heads",), {}),
    "no activation": (llama, ("hidden_act",), {}),
    "no biases": (llama, ("attention_bias", "mlp_bias"), {}),
    "no tie": (llama, ("tie_word_embeddings",), {}),
    "no architecture": (llama, ("architectures",), {}),
    "no window": (lambda: mistral(sliding_window=13), ("sliding_window",), {}),
    "a null window": (lambda: mistral(sliding_window=13), (), {"sliding_window": None}),
    "a window of Llama": (llama, (), {"sliding_window": 13}),
    "windows off": (
        lambda: qwen2(use_sliding_window=True, sliding_window=11, max_window_layers=1),
        ("use_sliding_window", "layer_types"),
        {},
    ),
    "windows from the default layer": (
        lambda: qwen2(use_sliding_window=True, sliding_window=11, max_window_layers=1),
        ("max_window_layers", "layer_types"),
        {},
    ),
    "windows by layer": (
        qwen2,
        (),
        {
            "use_sliding_window": True,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "Qwen's epsilon": (lambda: qwen2(rms_norm_eps=0.3), ("rms_norm_eps",), {}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_config_that_says_less_or_more_means_the_same(name: str, tmp_path: Path) -> None:
    make, without, values = CHANGED[name]
    served_as_by_transformers(reconfigure(save(make(), tmp_path), without, **values))


def test_a_missing_number_of_key_heads_is_the_familys_default(tmp_path: Path) -> None:
    """Mistral has 8: that doesn't fit six heads."""
    folder = reconfigure(save(mistral(), tmp_path), ("num_key_value_heads",))
    with pytest.raises(LoadError, match="num_key_value_heads 8"):
        Loaded(folder)


def test_a_key_with_two_values_is_refused_by_name(tmp_path: Path) -> None:
    path = save(llama(), tmp_path) / "config.json"
    text = path.read_text()
    path.write_text(text[: text.rindex("}")] + ', "rms_norm_eps": 0.25}')
    with pytest.raises(CheckpointInvalid, match=r"says rms_norm_eps twice, as 1e-06 and as 0\.25"):
        Loaded(tmp_path)
    path.write_text(text[: text.rindex("}")] + ', "rms_norm_eps": 1e-06}')
    served_as_by_transformers(tmp_path)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return save(llama(tie_word_embeddings=True), tmp_path)


HEADS: dict[str, Callable[[Tensors], object]] = {
    "no head": lambda tensors: None,
    "an equal head": lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}),
    "another head": lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].flip(0)}),
    "one number differs": lambda tensors: tensors.update(
        {HEAD: tensors[EMBEDDING].index_fill(0, torch.tensor([130]), 0.5)}
    ),
    "a rounded head": lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].bfloat16()}),
    "a head of more digits": lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].double()}),
    "only the head": lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_beside_a_tie_is_what_transformers_makes_of_it(name: str, tied: Path) -> None:
    served_as_by_transformers(rewrite(tied, HEADS[name]))


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.update({HEAD: tensors[EMBEDDING][:-1].clone()}),
        lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].to(torch.int8)}),
        lambda tensors: tensors.pop(EMBEDDING),
    ],
    ids=["smaller", "int8", "neither"],
)
def test_a_head_that_cannot_be_one_is_refused(
    change: Callable[[Tensors], object], tied: Path
) -> None:
    with pytest.raises(CheckpointInvalid, match=rf"{HEAD}|{EMBEDDING}"):
        Loaded(rewrite(tied, change))


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    folder = rewrite(save(llama(), tmp_path), lambda tensors: tensors.pop(HEAD))
    with pytest.raises(CheckpointInvalid, match=f"lack the tensor {HEAD}"):
        Loaded(folder)


def test_a_model_in_double_precision_is_served(tmp_path: Path) -> None:
    """Its config.json names float64, too."""
    folder = save(llama().double(), tmp_path)
    assert "float64" in (folder / "config.json").read_text()
    served_as_by_transformers(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.rotary_emb.inv_freq",
        "model.layers.1.self_attn.rotary_emb.cos_cached",
        "model.layers.1.self_attn.masked_bias",
        "model.rotary_emb.inv_freq",
    ],
)
def test_a_buffer_of_an_old_checkpoint_changes_nothing(name: str, tmp_path: Path) -> None:
    folder = save(llama(), tmp_path)
    served_as_by_transformers(
        rewrite(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    )
