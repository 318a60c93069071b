"""The shape of a GGUF's llama model, and the config.json that says the same."""

from __future__ import annotations

from dataclasses import dataclass

from twinplane.models.errors import ConversionUnsupported, ModelInvalid
from twinplane.models.gguf.file import GgufFile
from twinplane.models.gguf.llama_metadata import check_metadata
from twinplane.models.gguf.llama_rope import RopeScaling, read_rope_scaling


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """What a Llama model is made of. Sizes are in elements."""

    vocabulary_size: int
    context_length: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_size: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name and shape of every weight, outermost dimension first."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        query, kv = self.head_count * self.head_size, self.kv_head_count * self.head_size
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocabulary_size, hidden)
        linear = {
            "self_attn.q_proj": ((query, hidden), self.attention_bias),
            "self_attn.k_proj": ((kv, hidden), self.attention_bias),
            "self_attn.v_proj": ((kv, hidden), self.attention_bias),
            "self_attn.o_proj": ((hidden, query), self.attention_bias),
            "mlp.gate_proj": ((ffn, hidden), self.mlp_bias),
            "mlp.up_proj": ((ffn, hidden), self.mlp_bias),
            "mlp.down_proj": ((hidden, ffn), self.mlp_bias),
        }
        for layer in range(self.layer_count):
            prefix = f"model.layers.{layer}"
            shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
            for name, (shape, biased) in linear.items():
                shapes[f"{prefix}.{name}.weight"] = shape
                if biased:
                    shapes[f"{prefix}.{name}.bias"] = shape[:1]
        return shapes

    def config(self, bos: int | None, eos: list[int], pad: int | None) -> dict[str, object]:
        """The content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "bos_token_id": bos,
            "dtype": "float32",
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.context_length,
            "mlp_bias": self.mlp_bias,
            "model_type": "llama",
            "num_attention_heads": self.head_count,
            "num_hidden_layers": self.layer_count,
            "num_key_value_heads": self.kv_head_count,
            "pad_token_id": pad,
            "pretraining_tp": 1,
            "rms_norm_eps": self.norm_epsilon,
            "rope_scaling": None if self.rope_scaling is None else self.rope_scaling.config(),
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied_embeddings,
            "use_cache": True,
            "vocab_size": self.vocabulary_size,
        }


def read_shape(file: GgufFile) -> LlamaShape:
    """Reads the metadata.

    Raises ModelInvalid for metadata that is missing or contradicts itself, ConversionUnsupported
    for a feature that LlamaForCausalLM doesn't compute.
    """
    check_metadata(file)
    hidden = file.need_size("llama.embedding_length")
    heads = file.need_size("llama.attention.head_count")
    head_size = file.find_size("llama.attention.key_length") or hidden // heads
    value_size = file.find_size("llama.attention.value_length") or head_size
    rotated = file.find_size("llama.rope.dimension_count") or head_size
    if value_size != head_size or rotated != head_size:
        raise ConversionUnsupported(
            f"{file.path}: heads of {head_size} with {rotated} rotated and values of {value_size}"
            " can't be converted, only equal sizes"
        )
    epsilon = file.find_float("llama.attention.layer_norm_rms_epsilon")
    if epsilon is None:
        raise ModelInvalid(f"{file.path}: llama.attention.layer_norm_rms_epsilon is missing")
    theta = file.find_float("llama.rope.freq_base")
    if theta is None:
        theta = 10000.0
    for key, number, least in (
        ("llama.attention.layer_norm_rms_epsilon", epsilon, 0.0),
        ("llama.rope.freq_base", theta, 1.0),
    ):
        if number <= least:
            raise ModelInvalid(f"{file.path}: {key} is {number}, must be above {least:g}")
    names = file.tensor_names()
    vocabulary = file.shape("token_embd.weight")[0]
    if file.find_int("llama.vocab_size") not in (None, vocabulary):
        raise ModelInvalid(
            f"{file.path}: llama.vocab_size is {file.find_int('llama.vocab_size')}, and "
            f"token_embd.weight has {vocabulary} rows"
        )
    layers = file.need_size("llama.block_count")
    if layers > len(names):
        raise ModelInvalid(
            f"{file.path}: llama.block_count is {layers}, and there are {len(names)} tensors"
        )
    return LlamaShape(
        vocabulary_size=vocabulary,
        context_length=file.need_size("llama.context_length"),
        hidden_size=hidden,
        intermediate_size=file.need_size("llama.feed_forward_length"),
        layer_count=layers,
        head_count=heads,
        kv_head_count=file.find_size("llama.attention.head_count_kv") or heads,
        head_size=head_size,
        norm_epsilon=epsilon,
        rope_theta=theta,
        rope_scaling=read_rope_scaling(file, head_size, theta),
        tied_embeddings=not file.has_tensor("output.weight"),
        attention_bias=any(".attn_" in name and name.endswith(".bias") for name in names),
        mlp_bias=any(".ffn_" in name and name.endswith(".bias") for name in names),
    )
