"""A GGUF's llama tensors under their Hugging Face names and in Hugging Face row order.

llama.cpp rotates neighbouring pairs of a head's dimensions, Hugging Face its two halves. Its
converter therefore interleaves the rows of the query and key projections
(convert_hf_to_gguf.py, LlamaModel.permute); this module puts them back.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from twinplane.models.errors import ConversionUnsupported
from twinplane.models.gguf.file import GgufFile
from twinplane.models.gguf.llama_config import LlamaShape
from twinplane.models.gguf.safetensors_writer import TensorStream

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Positions are computed from the configuration; `rope_freqs` is read there.
_NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")


def half_split_order(row_count: int, head_count: int) -> npt.NDArray[np.int64]:
    """The source row of each output row, from interleaved to half-split order: int64 [row_count].

    Within a head of d rows, output row h * d/2 + i (half h) is source row 2 * i + h.
    """
    import numpy as np

    source = np.arange(row_count, dtype=np.int64)
    return source.reshape(head_count, -1, 2).swapaxes(1, 2).reshape(row_count)


def tensor_streams(file: GgufFile, shape: LlamaShape) -> list[TensorStream]:
    """Every weight of the model, unread. Raises ConversionUnsupported for one it doesn't know,
    ModelInvalid for one that is missing or of another shape."""
    expected = shape.tensor_shapes()
    streams = []
    for name in file.tensor_names():
        if _NOT_WEIGHTS.fullmatch(name):
            continue
        target = _target_name(name)
        if target is None or target not in expected:
            raise ConversionUnsupported(f"{file.path}: no Llama model has a tensor {name}")
        if file.shape(name) != expected[target]:
            raise ConversionUnsupported(
                f"{file.path}: tensor {name} is {file.shape(name)}, expected {expected[target]}"
            )
        next(file.rows(name, chunk_bytes=1))  # refuses a format that can't be read
        order = None
        if heads := _interleaved_heads(name, shape):
            order = half_split_order(expected[target][0], heads)
        streams.append(TensorStream(target, expected.pop(target), file.rows(name, order)))
    if expected:
        raise ConversionUnsupported(f"{file.path}: no tensor for {sorted(expected)[0]}")
    return streams


def _target_name(name: str) -> str | None:
    if name in _TOP:
        return _TOP[name]
    if (match := _LAYER_NAME.fullmatch(name)) and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    return None


def _interleaved_heads(name: str, shape: LlamaShape) -> int:
    """How many heads' rows are interleaved in this tensor; 0 when none are."""
    match = _LAYER_NAME.fullmatch(name)
    match match[2] if match else "":
        case "attn_q":
            return shape.head_count
        case "attn_k":
            return shape.kv_head_count
        case _:
            return 0
