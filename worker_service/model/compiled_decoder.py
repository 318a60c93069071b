"""A decoder in the compiled CPU kernels, as its spec describes it: one call a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from worker_service.domain.batch import StepBatch
from worker_service.domain.columns import IntColumn
from worker_service.kernels.cpu.adapters import CompiledAdapters
from worker_service.kernels.cpu.decoder import Decoder, DecoderLayer, DecoderShape, Projection
from worker_service.kernels.cpu.ops import (
    CpuKernels,
    HeadNorms,
    PackedWeight,
    PagedCache,
    RopeTables,
)
from worker_service.layers.rope import build_table
from worker_service.model.loader import WeightLoader
from worker_service.model.spec import AttentionSpec, DecoderSpec, NormSpec, ProjectionSpec
from worker_service.model.traits import Trait

SUPPORTED_TRAITS = frozenset({Trait.WINDOWS, Trait.HEAD_NORMS, Trait.PARTIAL_ROPE})


class CompiledDecoder:
    """Owns the kernels' context, the packed weights, and the buffers of a step."""

    def __init__(
        self,
        kernels: CpuKernels,
        spec: DecoderSpec,
        loader: WeightLoader,
        caches: Sequence[PagedCache],
        *,
        max_length: int,
        max_tokens: int,
        max_rows: int,
        group_size: int | None,
        progress: Callable[[str], None],
        adapters: CompiledAdapters | None = None,
    ) -> None:
        """`spec` has no other than SUPPORTED_TRAITS. `caches`, one per layer. `max_length` bounds
        positions, `max_tokens` a step's tokens, `max_rows` the logits that memory is kept for.
        `group_size`: columns that share a scale when weights are packed to int8; None keeps
        float32. `adapters` add to the layers' projections."""
        self._kernels = kernels
        self._adapters = adapters
        self._loader = loader
        self._group_size = group_size
        self._byte_count = 0
        layers = []
        for index, cache in enumerate(caches):
            layers.append(self._layer(spec, index, cache))
            progress(f"layer {index + 1} of {len(caches)}")
        self._embedding, head = self._ends(spec)
        first = spec.layers[0]
        assert first.attention.rope is not None
        table = build_table(first.attention.rope, max_length, torch.float32, torch.device("cpu"))
        self._byte_count += table.byte_count
        self._decoder = Decoder(
            kernels,
            DecoderShape(
                hidden=spec.hidden_size,
                intermediate=first.feed_forward.intermediate_size,
                q_heads=first.attention.heads.head_count,
                epsilon=spec.final_norm.epsilon,
                scale=first.attention.heads.scale,
            ),
            layers,
            RopeTables(table.cos, table.sin),
            self._norm(spec.final_norm),
            head,
        )
        del self._loader
        # Kept, because fresh pages cost more than what is written into them.
        self._hidden = torch.empty(max_tokens, spec.hidden_size)
        self._logits = torch.empty(max_rows, spec.vocabulary_size)

    @property
    def weights_bytes(self) -> int:
        """Memory of weights and tables."""
        return self._byte_count

    @property
    def workspace_bytes(self) -> int:
        """Memory of the buffers kept between steps."""
        buffers = self._hidden.nbytes + self._logits.nbytes
        return buffers + self._kernels.context.scratch_bytes

    def forward(self, batch: StepBatch, logit_indices: IntColumn) -> torch.Tensor:
        """Logits float32 [L, vocabulary] of the tokens at `logit_indices` int32 [L]; writes KV.

        The result is valid until the next call. More than `max_rows` have memory of their own.
        """
        hidden = self._hidden[: batch.token_count]
        self._kernels.embed(self._embedding, batch.token_ids, hidden)
        count = int(logit_indices.size)
        kept, vocabulary = self._logits.shape
        logits = self._logits[:count] if count <= kept else torch.empty(count, vocabulary)
        if self._adapters is None or (step := self._adapters.runs_of(batch)) is None:
            return self._decoder.forward(hidden, batch, logit_indices, logits)
        view = self._adapters.describe(step)
        return self._decoder.forward(hidden, batch, logit_indices, logits, view)

    def _layer(self, spec: DecoderSpec, index: int, cache: PagedCache) -> DecoderLayer:
        attention, block = spec.layers[index].attention, spec.layers[index].feed_forward
        assert attention.pre_norm is not None and block.pre_norm is not None
        return DecoderLayer(
            qkv=self._projection(attention.qkv),
            output=self._projection(attention.output),
            gate_up=self._projection(block.up),
            down=self._projection(block.down),
            input_norm=self._norm(attention.pre_norm),
            post_norm=self._norm(block.pre_norm),
            cache=cache,
            head_norms=self._head_norms(attention),
            window=attention.heads.window,
        )

    def _head_norms(self, attention: AttentionSpec) -> HeadNorms | None:
        norms = attention.head_norms
        if norms is None:
            return None
        return HeadNorms(self._norm(norms.query), self._norm(norms.key), norms.query.epsilon)

    def _ends(self, spec: DecoderSpec) -> tuple[PackedWeight, PackedWeight]:
        """The embedding and the head; one and the same where the model ties them."""
        embedding = ProjectionSpec((spec.embedding,))
        if spec.head is None:
            both = self._projection(embedding).weight
            return both, both
        head = self._projection(spec.head).weight
        # The embedding is only looked up, so float32 costs no time.
        weight, _ = self._loader.projection(embedding)
        packed = self._kernels.pack(weight)
        self._byte_count += packed.byte_count
        return packed, head

    def _projection(self, spec: ProjectionSpec) -> Projection:
        weight, bias = self._loader.projection(spec)
        packed = self._kernels.pack(weight, group_size=self._group_size)
        self._byte_count += packed.byte_count + (0 if bias is None else bias.nbytes)
        return Projection(packed, bias)

    def _norm(self, spec: NormSpec) -> torch.Tensor:
        weight = self._loader.tensor(spec.weight)
        self._byte_count += weight.nbytes
        return weight
