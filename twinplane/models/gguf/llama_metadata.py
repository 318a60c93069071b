"""Which of a GGUF file's metadata a llama model may have: what is read, and what changes nothing.

Every other key of the model is refused by its name, because it may change what the model computes.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from twinplane.models.errors import ConversionUnsupported
from twinplane.models.gguf.file import GgufFile

_READ = frozenset(
    f"llama.{key}"
    for key in (
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "vocab_size",
    )
)
_IGNORED = frozenset({"llama.rope.scaling.finetuned", "llama.tensor_data_layout"})
# By llama.cpp, what changes nothing: only this has an equivalent.
_NEUTRAL: MappingProxyType[str, tuple[Any, ...]] = MappingProxyType(
    {
        "llama.attention.causal": (True,),
        "llama.attention.sliding_window": (0,),
        "llama.expert_count": (0,),
        "llama.expert_used_count": (0,),
        "llama.leading_dense_block_count": (0,),
        "llama.pooling_type": (0,),
        "llama.use_parallel_residual": (False,),
        "llama.rope.scaling.attn_factor": (1.0,),
        "llama.rope.scaling.yarn_attn_factor": (1.0,),
        "llama.rope.scaling.yarn_ext_factor": (1.0,),
        "llama.rope.scaling.yarn_log_multiplier": (0.0,),
    }
)


def check_metadata(file: GgufFile) -> None:
    """Raises ConversionUnsupported unless the file is a whole llama model whose metadata are all
    understood."""
    architecture = file.find_text("general.architecture")
    if architecture != "llama":
        raise ConversionUnsupported(
            f"{file.path}: architecture {architecture} can't be converted, only llama"
        )
    kind = file.find_text("general.type")
    if kind not in (None, "model"):
        raise ConversionUnsupported(f"{file.path}: general.type is {kind}, only model is converted")
    parts = file.find_int("split.count")
    if parts not in (None, 0, 1):
        raise ConversionUnsupported(
            f"{file.path} is one of {parts} parts (split.count); merge them first, with "
            "llama.cpp's `llama-gguf-split --merge`"
        )
    for key in file.metadata_keys():
        if not key.startswith("llama.") or key in _READ or key in _IGNORED:
            continue
        if file.value(key) not in _NEUTRAL.get(key, ()):
            raise ConversionUnsupported(
                f"{file.path}: {key} is {file.value(key)}, which can't be converted"
            )
