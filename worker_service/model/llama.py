"""The Llama family: Llama, Mistral and Qwen2 differ in biases and windows only.

Pre-norm decoder with rotary positions, grouped-query attention and a gated MLP (Touvron et al.
2023, arXiv:2302.13971). Query, key and value are one projection, as are gate and up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker_service.attention.interface import StepAttention
from worker_service.layers.linear import DenseLinear, Linear, make_linear
from worker_service.layers.mlp import GatedMlp
from worker_service.layers.norm import RmsNorm
from worker_service.layers.rope import RopeTable, build_table, rotate
from worker_service.model.config import ModelConfig
from worker_service.model.loader import WeightLoader


class LlamaLayer:
    """One decoder layer."""

    def __init__(self, index: int, config: ModelConfig, loader: WeightLoader) -> None:
        self._index = index
        self._head_count = config.head_count
        self._kv_head_count = config.kv_head_count
        self._head_dim = config.head_dim
        prefix, hidden = f"model.layers.{index}", config.hidden_size
        query_size = config.head_count * config.head_dim
        kv_size = config.kv_head_count * config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self._input_norm = loader.norm(f"{prefix}.input_layernorm", hidden, config.norm_epsilon)
        self._qkv = loader.linear(
            {
                f"{attention}.q_proj": query_size,
                f"{attention}.k_proj": kv_size,
                f"{attention}.v_proj": kv_size,
            },
            hidden,
            config.qkv_bias,
        )
        self._output = loader.linear(
            {f"{attention}.o_proj": hidden}, query_size, config.output_bias
        )
        self._mlp_norm = loader.norm(
            f"{prefix}.post_attention_layernorm", hidden, config.norm_epsilon
        )
        intermediate = config.intermediate_size
        self._mlp = GatedMlp(
            loader.linear(
                {f"{mlp}.gate_proj": intermediate, f"{mlp}.up_proj": intermediate},
                hidden,
                config.mlp_bias,
            ),
            loader.linear({f"{mlp}.down_proj": hidden}, intermediate, config.mlp_bias),
        )

    @property
    def byte_count(self) -> int:
        parts = (self._input_norm, self._qkv, self._output, self._mlp_norm, self._mlp)
        return sum(part.byte_count for part in parts)

    def __call__(
        self, hidden: torch.Tensor, angles: RopeTable, attention: StepAttention
    ) -> torch.Tensor:
        """Adds the layer's two blocks to hidden [T, hidden], in place."""
        hidden += self._attend(self._input_norm(hidden), angles, attention)
        hidden += self._mlp(self._mlp_norm(hidden))
        return hidden

    def _attend(self, x: torch.Tensor, angles: RopeTable, attention: StepAttention) -> torch.Tensor:
        heads = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        rotated_count = self._head_count + self._kv_head_count
        rotated = rotate(heads[:, :rotated_count], angles)
        attention.write_kv(self._index, rotated[:, self._head_count :], heads[:, rotated_count:])
        attended = attention.forward(self._index, rotated[:, : self._head_count])
        return self._output(attended.flatten(1))


class LlamaModel:
    """See interface.Model."""

    def __init__(
        self,
        config: ModelConfig,
        loader: WeightLoader,
        max_length: int,
        data_type: torch.dtype,
        device: torch.device,
        progress: Callable[[str], None],
    ) -> None:
        self._config = config
        shape = (config.vocabulary_size, config.hidden_size)
        self._embedding = loader.parameter("model.embed_tokens.weight", shape)
        layers = []
        for index in range(config.layer_count):
            layers.append(LlamaLayer(index, config, loader))
            progress(f"layer {index + 1} of {config.layer_count}")
        self._layers = tuple(layers)
        self._norm: RmsNorm = loader.norm("model.norm", config.hidden_size, config.norm_epsilon)
        self._head: Linear
        if config.tied_embeddings:
            self._head = make_linear(self._embedding, None, shared=True)
        else:
            self._head = loader.linear(
                {"lm_head": config.vocabulary_size}, config.hidden_size, bias=False
            )
        self._angles = build_table(config.rope, max_length, data_type, device)

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def weights_bytes(self) -> int:
        total = self._embedding.nbytes + self._norm.byte_count + self._angles.byte_count
        total += sum(layer.byte_count for layer in self._layers)
        if self._config.tied_embeddings and isinstance(self._head, DenseLinear):
            return total  # the head is the embedding's own memory
        return total + self._head.byte_count

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        logit_indices: torch.Tensor,
    ) -> torch.Tensor:
        hidden = self._embedding.index_select(0, token_ids)
        angles = self._angles.gather(positions)
        for layer in self._layers:
            hidden = layer(hidden, angles, attention)
        if not logit_indices.numel():
            return hidden.new_empty((0, self._config.vocabulary_size))
        return self._head(self._norm(hidden.index_select(0, logit_indices)))
