"""The digest of weights by content. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from worker_service.domain.weights import TensorDescription


def content_digest(config: bytes, tensors: Iterable[TensorDescription]) -> str:
    """Hex SHA-256 over config.json's bytes and, by name, what each tensor is. So it is the same,
    however the weights came and into whatever files they are split."""
    total = hashlib.sha256(f"config\0{len(config)}\0".encode() + config)
    for tensor in sorted(tensors, key=lambda each: each.name):
        shape = ",".join(map(str, tensor.shape))
        head = f"{tensor.name}\0{tensor.number_format}\0{shape}\0"
        total.update(head.encode(errors="surrogatepass") + tensor.sha256)
    return total.hexdigest()
