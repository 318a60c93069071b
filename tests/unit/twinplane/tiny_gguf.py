"""Writes small GGUF files: a llama of two layers with random weights and a byte-level tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

Array = npt.NDArray[np.float32]

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte, by byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_level_tokens() -> list[str]:
    """Two control tokens, all bytes, and what the merges make."""
    return ["<|begin|>", "<|end|>", *byte_alphabet(), "12", "123", "ab", "Ġab", "Ġa"]


@dataclass(frozen=True)
class TinyGguf:
    """What to write; `extra` adds metadata or overrides them."""

    tokens: list[str] = field(default_factory=byte_level_tokens)
    token_types: list[int] = field(
        default_factory=lambda: [3, 3] + [1] * (len(byte_level_tokens()) - 2)
    )
    merges: list[str] = field(default_factory=lambda: ["1 2", "12 3", "a b", "Ġ ab", "Ġ a"])
    scores: list[float] = field(default_factory=list)
    tokenizer: str = "gpt2"
    pre: str | None = "smollm"
    tied: bool = True
    attention_bias: bool = False
    rope_theta: float = 10000.0
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32
    extra: dict[str, str | int | float | bool | list[int]] = field(default_factory=dict)
    tensors: dict[str, Array] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def write(self, path: Path) -> dict[str, Array]:
        """Writes the file; returns the weights under their Hugging Face names."""
        writer = GGUFWriter(path, "llama")
        writer.add_context_length(128)
        writer.add_block_count(LAYERS)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FFN)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(self.rope_theta)
        writer.add_tokenizer_model(self.tokenizer)
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.token_types)
        writer.add_token_merges(self.merges)
        writer.add_token_scores(self.scores)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_chat_template("{{ messages[0]['content'] }}")
        for key, value in self.extra.items():
            match value:
                case bool():
                    writer.add_bool(key, value)
                case int() if value < 0:
                    writer.add_int32(key, value)
                case int():
                    writer.add_uint32(key, value)
                case list():
                    writer.add_array(key, value)
                case float():
                    writer.add_float32(key, value)
                case str():
                    writer.add_string(key, value)
        expected = {}
        for name, (stored_name, array) in self._weights().items():
            if stored_name not in self.without:
                expected[name] = self._add(writer, name, stored_name, array)
        for name, array in self.tensors.items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return expected

    def _weights(self) -> dict[str, tuple[str, Array]]:
        random = np.random.default_rng(7)

        def draw(*shape: int) -> Array:
            return random.standard_normal(shape, dtype=np.float32) * np.float32(0.1)

        query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        weights = {
            "model.embed_tokens.weight": ("token_embd.weight", draw(len(self.tokens), HIDDEN)),
            "model.norm.weight": ("output_norm.weight", draw(HIDDEN)),
        }
        if not self.tied:
            weights["lm_head.weight"] = ("output.weight", draw(len(self.tokens), HIDDEN))
        linear = {
            "self_attn.q_proj": ("attn_q", query, HIDDEN),
            "self_attn.k_proj": ("attn_k", kv, HIDDEN),
            "self_attn.v_proj": ("attn_v", kv, HIDDEN),
            "self_attn.o_proj": ("attn_output", HIDDEN, query),
            "mlp.gate_proj": ("ffn_gate", FFN, HIDDEN),
            "mlp.up_proj": ("ffn_up", FFN, HIDDEN),
            "mlp.down_proj": ("ffn_down", HIDDEN, FFN),
        }
        for layer in range(LAYERS):
            ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
            weights[f"{ours}.input_layernorm.weight"] = (f"{theirs}.attn_norm.weight", draw(HIDDEN))
            weights[f"{ours}.post_attention_layernorm.weight"] = (
                f"{theirs}.ffn_norm.weight",
                draw(HIDDEN),
            )
            for name, (stored, rows, columns) in linear.items():
                weights[f"{ours}.{name}.weight"] = (
                    f"{theirs}.{stored}.weight",
                    draw(rows, columns),
                )
                if self.attention_bias and "attn" in name:
                    weights[f"{ours}.{name}.bias"] = (f"{theirs}.{stored}.bias", draw(rows))
        return weights

    def _add(self, writer: GGUFWriter, name: str, stored_name: str, array: Array) -> Array:
        """Stores as llama.cpp's converter does; returns what a reader should find."""
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        kind = self.quantization if array.ndim == 2 else GGMLQuantizationType.F32
        # Rows are quantised on their own, so before or after reordering is the same.
        data = quantize(array, kind)
        writer.add_tensor(stored_name, _permute(data, heads) if heads else data, raw_dtype=kind)
        read: Array = dequantize(data, kind).astype(np.float32)
        return read


def _permute(rows: npt.NDArray[np.generic], heads: int) -> npt.NDArray[np.generic]:
    """convert_hf_to_gguf.py's reordering of query and key rows."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))
