"""A converted folder holds the GGUF's weights, shape and tokenizer, or says why not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from tests.support.quick import examples
from tests.unit.twinplane.tiny_gguf import HEAD_DIM, HIDDEN, TinyGguf
from twinplane.models import ConversionUnsupported, ModelInvalid, NoProgress
from twinplane.models.gguf.conversion import convert_gguf
from twinplane.models.gguf.file import GgufFile
from twinplane.models.gguf.llama_rope import Llama3Scaling
from twinplane.models.gguf.tokenizer_conversion import build_tokenizer
from twinplane.models.gguf.tokenizer_metadata import TokenizerMetadata, TokenType


def convert(tiny: TinyGguf, folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Writes and converts into `folder`; returns the weights that should be there."""
    source = folder.parent / f"{folder.name}.gguf"
    expected = tiny.write(source)
    folder.mkdir()
    convert_gguf(source, folder, NoProgress())
    return expected


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


@pytest.mark.parametrize(
    "tiny",
    [
        TinyGguf(),
        TinyGguf(tied=False),
        TinyGguf(attention_bias=True),
        TinyGguf(quantization=GGMLQuantizationType.Q8_0),
        TinyGguf(quantization=GGMLQuantizationType.Q4_1),
        TinyGguf(quantization=GGMLQuantizationType.F16),
        TinyGguf(quantization=GGMLQuantizationType.BF16),
    ],
    ids=["tied", "untied", "biases", "q8_0", "q4_1", "f16", "bf16"],
)
def test_every_weight_is_there_in_hugging_face_order(tiny: TinyGguf, tmp_path: Path) -> None:
    expected = convert(tiny, tmp_path / "model")
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    config = config_of(tmp_path / "model")
    assert config["tie_word_embeddings"] is tiny.tied
    assert config["attention_bias"] is tiny.attention_bias


def test_a_big_tensor_is_read_in_pieces(tmp_path: Path) -> None:
    expected = TinyGguf(quantization=GGMLQuantizationType.Q8_0).write(tmp_path / "m.gguf")
    file = GgufFile(tmp_path / "m.gguf")
    pieces = list(file.rows("token_embd.weight", chunk_bytes=10 * 4 * HIDDEN))
    assert {len(piece) for piece in pieces[:-1]} == {10}
    np.testing.assert_array_equal(np.concatenate(pieces), expected["model.embed_tokens.weight"])


@pytest.mark.slow
def test_transformers_loads_the_folder_and_misses_nothing(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    convert(TinyGguf(attention_bias=True), tmp_path / "model")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.generation_config.eos_token_id == 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|end|>")
    chat = [{"role": "user", "content": "ab12"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "ab12"


def test_the_config_says_what_the_file_says(tmp_path: Path) -> None:
    convert(TinyGguf(), tmp_path / "model")
    config = config_of(tmp_path / "model")
    assert config["rms_norm_eps"] == 1e-5  # not its float32 neighbour
    assert config["head_dim"] == HEAD_DIM
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)
    assert config["rope_scaling"] is None


def test_several_end_tokens_all_end(tmp_path: Path) -> None:
    tiny = TinyGguf(extra={"tokenizer.ggml.eot_token_id": 2})
    convert(tiny, tmp_path / "model")
    assert config_of(tmp_path / "model")["eos_token_id"] == [1, 2]


# RoPE scaling.


def test_linear_and_yarn_scaling_are_named(tmp_path: Path) -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    convert(TinyGguf(extra={**scaling}), tmp_path / "linear")
    assert config_of(tmp_path / "linear")["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    scaling |= {"llama.rope.scaling.type": "yarn"}
    original = {"llama.rope.scaling.original_context_length": 32}
    convert(TinyGguf(extra={**scaling, **original}), tmp_path / "yarn")
    assert config_of(tmp_path / "yarn")["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 32,
    }


YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 4096,
}


def ramp(config: dict[str, object]) -> list[float]:
    """By what share each frequency is scaled, as transformers computes it: 1 is all the way."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**config["rope_scaling"], "rope_theta": config["rope_theta"]}
    llama = LlamaConfig(
        head_dim=HEAD_DIM, rope_parameters=parameters, max_position_embeddings=16384
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["yarn"](llama, "cpu")
    plain = config["rope_theta"] ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return ((1.0 - scaled.numpy() / plain) / (1.0 - 1.0 / 4.0)).tolist()


def test_yarns_own_ramp_is_kept(tmp_path: Path) -> None:
    betas = {
        "llama.rope.scaling.yarn_beta_fast": 200.0,
        "llama.rope.scaling.yarn_beta_slow": 2.5,
        "llama.rope.scaling.yarn_attn_factor": 1.0,
    }
    convert(TinyGguf(extra={**YARN, **betas}), tmp_path / "own")
    convert(TinyGguf(extra={**YARN}), tmp_path / "usual")
    own, usual = config_of(tmp_path / "own"), config_of(tmp_path / "usual")
    scaling = own["rope_scaling"]
    assert (scaling["beta_fast"], scaling["beta_slow"]) == (200.0, 2.5)

    def dimension(turns: float) -> float:
        """llama.cpp's ggml_rope_yarn_corr_dim."""
        return HEAD_DIM * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = math.floor(dimension(200.0)), math.ceil(dimension(2.5))
    expected = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(HEAD_DIM // 2)]
    assert ramp(own) == pytest.approx(expected, abs=1e-5)
    assert ramp(usual) != pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize(
    ("scaling", "theta"),
    [
        (Llama3Scaling(8.0, 1.0, 4.0, 8192), 500000.0),
        (Llama3Scaling(32.0, 1.0, 4.0, 8192), 500000.0),
        (Llama3Scaling(4.0, 1.0, 16.0, 2048), 10000.0),
    ],
)
def test_llama3_scaling_is_recovered_from_its_divisors(
    scaling: Llama3Scaling, theta: float, tmp_path: Path
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # transformers' own frequencies, with and without scaling, give the divisors a GGUF holds.
    plain = theta ** -(np.arange(0, HEAD_DIM, 2, dtype=np.float64) / HEAD_DIM)
    config = LlamaConfig(
        head_dim=HEAD_DIM,
        rope_parameters={**scaling.config(), "rope_theta": theta},
        max_position_embeddings=131072,
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    divisors = (plain / scaled.numpy()).astype(np.float32)
    tiny = TinyGguf(tensors={"rope_freqs.weight": divisors}, rope_theta=theta)
    convert(tiny, tmp_path / "model")
    assert config_of(tmp_path / "model")["rope_scaling"] == scaling.config()


def test_divisors_that_are_not_llama3s_are_refused(tmp_path: Path) -> None:
    noise = np.linspace(1.0, 9.0, HEAD_DIM // 2, dtype=np.float32) ** 2
    with pytest.raises(ConversionUnsupported, match="rope_freqs"):
        convert(TinyGguf(tensors={"rope_freqs.weight": noise}), tmp_path / "model")


# What is refused, before anything big is written.


@pytest.mark.parametrize(
    ("tiny", "named"),
    [
        (TinyGguf(extra={"llama.expert_count": 8}), "expert_count is 8"),
        (TinyGguf(extra={"llama.rope.dimension_count": 8}), "8 rotated"),
        (TinyGguf(extra={"llama.rope.scaling.type": "longrope"}), "longrope"),
        (TinyGguf(extra={**YARN, "llama.rope.scaling.yarn_beta_slow": 33.0}), "yarn_beta_slow"),
        (TinyGguf(extra={**YARN, "llama.rope.scaling.yarn_beta_slow": 0.0}), "yarn_beta_slow"),
        (TinyGguf(extra={**YARN, "llama.rope.scaling.yarn_beta_fast": 0.5}), "yarn_beta_fast"),
        (TinyGguf(extra={**YARN, "llama.rope.scaling.attn_factor": 1.5}), "attn_factor"),
        (TinyGguf(extra={**YARN, "llama.rope.scaling.yarn_attn_factor": 2.0}), "yarn_attn_factor"),
        (TinyGguf(extra={**YARN, "llama.rope.scaling.yarn_log_multiplier": 1.0}), "yarn_log_mul"),
        (TinyGguf(tensors={"blk.0.strange.weight": np.zeros(4, np.float32)}), "strange"),
        (TinyGguf(without=("blk.1.ffn_up.weight",)), r"layers\.1\.mlp\.up_proj"),
        (TinyGguf(attention_bias=True, without=("blk.0.attn_q.bias",)), "q_proj.bias"),
        (TinyGguf(pre="tekken"), "tekken"),
        (TinyGguf(pre=None), "pre-tokenizer None"),
        (TinyGguf(tokenizer="bert"), "bert"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_change_the_model_is_refused(tiny: TinyGguf, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConversionUnsupported, match=named):
        convert(tiny, tmp_path / "model")
    assert not (tmp_path / "model" / "model.safetensors").exists()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    TinyGguf().write(whole)
    content = whole.read_bytes()
    for length in (0, 3, 100, 2000, len(content) // 2):
        cut = tmp_path / f"cut{length}.gguf"
        cut.write_bytes(content[:length])
        with pytest.raises(ModelInvalid, match=cut.name):
            convert_gguf(cut, tmp_path, NoProgress())
    other = tmp_path / "other.gguf"
    other.write_bytes(b"not a model at all" * 100)
    with pytest.raises(ModelInvalid, match=other.name):
        convert_gguf(other, tmp_path, NoProgress())


def test_contradicting_metadata_is_named(tmp_path: Path) -> None:
    doubled = [*TinyGguf().tokens[:-1], "ab"]
    with pytest.raises(ModelInvalid, match="twice"):
        convert(TinyGguf(tokens=doubled), tmp_path / "doubled")
    with pytest.raises(ModelInvalid, match="eot_token_id is 9999"):
        convert(TinyGguf(extra={"tokenizer.ggml.eot_token_id": 9999}), tmp_path / "range")


# Byte-level tokenizers.

TEXTS = [
    "Hello, world! 12345\n\n  indented",
    "Grüße, naïve café",
    "Привет, мир",
    "こんにちは世界",
    "مرحبا بالعالم",
    "हिन्दी",
    "👋🏽 👨‍👩‍👧",
    "a\u0301 e\u0301",
    "\x00\x7f\u2028",
]


def tokenizer_for(tiny: TinyGguf, folder: Path) -> Tokenizer:
    convert(tiny, folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["ab", "1", "2", "3", "4"]),
        ("qwen2", ["ab", "1", "2", "3", "4"]),
        ("gpt-2", ["ab", "123", "4"]),
        ("llama-bpe", ["<|begin|>", "ab", "123", "4"]),
    ],
)
def test_digits_stay_together_as_the_pre_tokenizer_says(
    pre: str, pieces: list[str], tmp_path: Path
) -> None:
    tokenizer = tokenizer_for(TinyGguf(pre=pre), tmp_path / "model")
    assert tokenizer.encode("ab1234").tokens == pieces


@pytest.mark.parametrize(
    ("pre", "pieces"), [("gpt-2", ["x", "y"]), ("llama-bpe", ["<|begin|>", "xy"])]
)
def test_only_llama3_takes_a_whole_word_that_no_merges_lead_to(
    pre: str, pieces: list[str], tmp_path: Path
) -> None:
    tokens, types = [*TinyGguf().tokens, "xy"], [*TinyGguf().token_types, 1]
    tokenizer = tokenizer_for(TinyGguf(pre=pre, tokens=tokens, token_types=types), tmp_path / "m")
    assert tokenizer.encode("xy").tokens == pieces


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe"])
def test_any_text_round_trips(pre: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_for(TinyGguf(pre=pre), tmp_path / "model")
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_control_tokens_are_special_and_keep_their_ids(tmp_path: Path) -> None:
    types = [3, 3] + [1] * 256 + [1, 4, 1, 1, 1]
    tokenizer = tokenizer_for(TinyGguf(token_types=types), tmp_path / "model")
    encoding = tokenizer.encode("<|begin|>x123<|end|>")
    assert encoding.tokens == ["<|begin|>", "x", "123", "<|end|>"]  # user-defined: matched whole
    assert encoding.ids[0] == 0
    assert encoding.ids[-1] == 1
    assert tokenizer.decode(encoding.ids) == "x123"


@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, False), (True, True), (False, True)])
def test_text_is_put_between_the_tokens_the_file_asks_for(
    add_bos: bool, add_eos: bool, tmp_path: Path
) -> None:
    flags = {
        "tokenizer.ggml.add_bos_token": add_bos,
        "tokenizer.ggml.add_eos_token": add_eos,
    }
    tokenizer = tokenizer_for(TinyGguf(extra={**flags}), tmp_path / "model")
    expected = ["<|begin|>"] * add_bos + ["x"] + ["<|end|>"] * add_eos
    assert tokenizer.encode("x").tokens == expected
    assert tokenizer.encode("x", add_special_tokens=False).tokens == ["x"]


# SentencePiece.

PIECES = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "ca", "aa", "▁▁"]
PIECE_SCORES = [-20.0, -21.0, -22.0, -23.0, -3.0, -2.0, -5.0, -4.0, -1.0, -6.0, -7.0, -8.0]


def sentence_piece(add_space_prefix: bool = True) -> TokenizerMetadata:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    kinds += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(PIECES)
    return TokenizerMetadata(
        source="test",
        model="llama",
        pre_tokenizer=None,
        tokens=tokens,
        types=kinds,
        merges=[],
        scores=[0.0] * 259 + PIECE_SCORES,
        bos=1,
        eos=[2],
        unknown=0,
        padding=None,
        add_bos=None,
        add_eos=False,
        add_space_prefix=add_space_prefix,
        chat_template=None,
    )


def naive_sentence_piece(text: str) -> list[str]:
    """The algorithm as it is defined: join the neighbours whose joint piece scores best, leftmost
    first, until none can be joined; what is no piece falls back to bytes."""
    scores = dict(zip(PIECES, PIECE_SCORES, strict=True))
    parts = list(text.replace(" ", "▁"))
    while True:
        joints = [
            (-scores[parts[i] + parts[i + 1]], i)
            for i in range(len(parts) - 1)
            if parts[i] + parts[i + 1] in scores
        ]
        if not joints:
            break
        _, i = min(joints)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    fallen = [[p] if p in scores else [f"<0x{b:02X}>" for b in p.encode()] for p in parts]
    return [token for group in fallen for token in group]


@settings(max_examples=examples(300), deadline=None)
@given(st.text(alphabet="abc é世", min_size=1, max_size=16))
def test_sentence_piece_joins_the_best_neighbours_first(text: str) -> None:
    tokenizer = build_tokenizer(sentence_piece())
    assert tokenizer.encode(text).tokens == ["<s>", *naive_sentence_piece(" " + text)]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_sentence_piece_without_a_space_prefix() -> None:
    tokenizer = build_tokenizer(sentence_piece(add_space_prefix=False))
    assert tokenizer.encode("ab ab").tokens == ["<s>", "ab", "▁ab"]
    assert tokenizer.decode(tokenizer.encode(" ab").ids) == " ab"
