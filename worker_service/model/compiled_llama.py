"""The Llama family over the compiled CPU kernels: packs a checkpoint and runs it, one call a step.

The same decoder as llama.py, whose words it uses; that one runs anywhere and is easier to read.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from worker_service.domain.columns import IntColumn
from worker_service.kernels.cpu.decoder import Decoder, DecoderLayer, DecoderShape, Projection
from worker_service.kernels.cpu.ops import (
    CpuKernels,
    PackedWeight,
    PagedCache,
    RopeTables,
    StepBatch,
)
from worker_service.layers.rope import build_table
from worker_service.model.config import ModelConfig
from worker_service.model.loader import WeightLoader


class CompiledLlama:
    """Owns the kernels' context, the packed weights, and the buffers of a step."""

    def __init__(
        self,
        kernels: CpuKernels,
        config: ModelConfig,
        loader: WeightLoader,
        caches: list[PagedCache],
        *,
        max_length: int,
        max_tokens: int,
        max_rows: int,
        group_size: int | None,
        progress: Callable[[str], None],
    ) -> None:
        """`caches`, one per layer; `max_length` bounds positions, `max_tokens` a step's tokens,
        `max_rows` its logits. `group_size`: pack to int8 with a scale per so many columns; None
        keeps float32. Raises CheckpointInvalid when the weights do not fit the config."""
        self._kernels = kernels
        self._group_size = group_size
        self._byte_count = 0
        layers = []
        for index, (window, cache) in enumerate(zip(config.layer_windows, caches, strict=True)):
            layers.append(self._layer(index, config, loader, cache, window))
            progress(f"layer {index + 1} of {config.layer_count}")
        self._embedding, head = self._ends(config, loader)
        table = build_table(config.rope, max_length, torch.float32, torch.device("cpu"))
        self._byte_count += table.byte_count
        self._decoder = Decoder(
            kernels,
            DecoderShape(
                hidden=config.hidden_size,
                intermediate=config.intermediate_size,
                q_heads=config.head_count,
                epsilon=config.norm_epsilon,
                scale=1.0 / math.sqrt(config.head_dim),
            ),
            layers,
            RopeTables(table.cos, table.sin),
            self._vector(loader, "model.norm.weight", config.hidden_size),
            head,
        )
        # Kept, because fresh pages cost more than what is written into them.
        self._hidden = torch.empty(max_tokens, config.hidden_size)
        self._logits = torch.empty(max_rows, config.vocabulary_size)

    @property
    def weights_bytes(self) -> int:
        """Memory of weights and tables."""
        return self._byte_count

    @property
    def workspace_bytes(self) -> int:
        """Memory of the buffers kept between steps."""
        buffers = self._hidden.nbytes + self._logits.nbytes
        return buffers + self._kernels.context.scratch_bytes

    def forward(
        self, token_ids: IntColumn, batch: StepBatch, logit_indices: IntColumn
    ) -> torch.Tensor:
        """Logits float32 [S, vocabulary] of the tokens at `logit_indices` int32 [S]; writes KV.

        `token_ids` int32 [T]. The result is valid until the next call.
        """
        hidden = self._hidden[: token_ids.size]
        self._kernels.embed(self._embedding, token_ids, hidden)
        logits = self._logits[: logit_indices.size]
        return self._decoder.forward(hidden, batch, logit_indices, logits)

    def _layer(
        self,
        index: int,
        config: ModelConfig,
        loader: WeightLoader,
        cache: PagedCache,
        window: int | None,
    ) -> DecoderLayer:
        hidden, intermediate = config.hidden_size, config.intermediate_size
        query_size = config.head_count * config.head_dim
        kv_size = config.kv_head_count * config.head_dim
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = {
            f"{attention}.q_proj": query_size,
            f"{attention}.k_proj": kv_size,
            f"{attention}.v_proj": kv_size,
        }
        gate_up = {f"{mlp}.gate_proj": intermediate, f"{mlp}.up_proj": intermediate}
        output, down = {f"{attention}.o_proj": hidden}, {f"{mlp}.down_proj": hidden}
        return DecoderLayer(
            qkv=self._projection(loader, qkv, hidden, config.qkv_bias),
            output=self._projection(loader, output, query_size, config.output_bias),
            gate_up=self._projection(loader, gate_up, hidden, config.mlp_bias),
            down=self._projection(loader, down, intermediate, config.mlp_bias),
            input_norm=self._vector(loader, f"{prefix}.input_layernorm.weight", hidden),
            post_norm=self._vector(loader, f"{prefix}.post_attention_layernorm.weight", hidden),
            cache=cache,
            window=window,
        )

    def _ends(self, config: ModelConfig, loader: WeightLoader) -> tuple[PackedWeight, PackedWeight]:
        """The embedding and the head; one and the same where the model ties them."""
        vocabulary, hidden = config.vocabulary_size, config.hidden_size
        name = "model.embed_tokens" if config.tied_embeddings else "lm_head"
        head = self._projection(loader, {name: vocabulary}, hidden, False).weight
        if config.tied_embeddings:
            return head, head
        # Only looked up, so float32 costs no time.
        weight, _ = loader.stack({"model.embed_tokens": vocabulary}, hidden, False)
        embedding = self._kernels.pack(weight)
        self._byte_count += embedding.byte_count
        return embedding, head

    def _projection(
        self, loader: WeightLoader, outputs: dict[str, int], inputs: int, bias: bool
    ) -> Projection:
        weight, biases = loader.stack(outputs, inputs, bias)
        packed = self._kernels.pack(weight, group_size=self._group_size)
        self._byte_count += packed.byte_count + (0 if biases is None else biases.nbytes)
        return Projection(packed, biases)

    def _vector(self, loader: WeightLoader, name: str, size: int) -> torch.Tensor:
        vector = loader.parameter(name, (size,))
        self._byte_count += vector.nbytes
        return vector
