"""Whether a checkpoint and a spec fit: every tensor is used, known to be needless, or refused."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

import torch

from twinplane.process.logs import fields
from worker_service.load_errors import CheckpointInvalid
from worker_service.model.spec import DecoderSpec, ProjectionSpec, TensorSpec
from worker_service.weights.sources.interface import TensorSource

_logger = logging.getLogger(__name__)

STORED_FORMATS = ("F32", "BF16", "F16", "F64")
# torch's words for the formats that are refused.
_WORDS = MappingProxyType(
    {
        "BOOL": " (bool)",
        "U8": " (uint8)",
        "I8": " (int8)",
        "I16": " (int16)",
        "I32": " (int32)",
        "I64": " (int64)",
        "C64": " (complex64)",
        "F8_E4M3": " (float8_e4m3fn)",
        "F8_E5M2": " (float8_e5m2)",
    }
)
_NAMES_TOLD = 4
_ROWS_COMPARED = 4096


def account_for(checkpoint: TensorSource, spec: DecoderSpec) -> DecoderSpec:
    """The spec with its head settled by what the checkpoint holds (see `_settle_head`).

    Raises CheckpointInvalid, naming the tensors, where the two differ or a tensor's format is not
    one that is read.
    """
    found = checkpoint.names()
    known = {tensor.name for tensor in spec.tensors()} | {spec.tied_head}
    for name in sorted(found & known):
        stored = checkpoint.stored_format(name)
        if stored not in STORED_FORMATS:
            raise CheckpointInvalid(
                f"{checkpoint.origin}: the tensor {name} is stored as {stored}"
                f"{_WORDS.get(stored, '')}; only {', '.join(STORED_FORMATS)} are read, "
                "no quantized weights"
            )
    unknown = found - known - spec.ignored
    if unknown:
        raise CheckpointInvalid(
            f"{checkpoint.origin}: config.json does not account for {listed(unknown)}; "
            "without them the model would compute something else. "
            "The files do not belong together, or this worker cannot run such a model"
        )
    settled = _settle_head(checkpoint, spec)
    for tensor in sorted(settled.tensors(), key=lambda tensor: tensor.name):
        checkpoint.tensor(tensor.name, tensor.shape)
    return settled


def listed(names: Iterable[str]) -> str:
    """The first few names and the number of the others."""
    ordered = sorted(names)
    told = ", ".join(ordered[:_NAMES_TOLD])
    rest = len(ordered) - _NAMES_TOLD
    kind = "the tensor" if len(ordered) == 1 else "the tensors"
    return f"{kind} {told}" + (f" and {rest} more" if rest > 0 else "")


def _settle_head(checkpoint: TensorSource, spec: DecoderSpec) -> DecoderSpec:
    """What transformers makes of a tied head that the checkpoint holds under its own name.

    It takes the place of an embedding that is not there. Beside an embedding it is needless if the
    two are equal, else it is the head.
    """
    if spec.tied_head is None or spec.tied_head not in checkpoint.names():
        return spec
    head = TensorSpec(spec.tied_head, spec.embedding.shape)
    if spec.embedding.name not in checkpoint.names():
        return replace(spec, embedding=head)
    if _are_equal(checkpoint, spec.embedding, head):
        return spec
    _logger.warning(
        "config.json ties the head to the embedding, but they differ: the head is used",
        extra=fields(head=head.name, embedding=spec.embedding.name),
    )
    return replace(spec, head=ProjectionSpec((head,)))


def _are_equal(checkpoint: TensorSource, first: TensorSpec, second: TensorSpec) -> bool:
    one = checkpoint.tensor(first.name, first.shape)
    other = checkpoint.tensor(second.name, second.shape)
    starts = range(0, first.shape[0], _ROWS_COMPARED)
    pairs = ((one[at : at + _ROWS_COMPARED], other[at : at + _ROWS_COMPARED]) for at in starts)
    return all(torch.equal(a.double(), b.double()) for a, b in pairs)
