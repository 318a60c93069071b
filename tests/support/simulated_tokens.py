"""What a simulated worker samples, computed from a sequence's tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from worker_service.domain.sampling import SamplingParameters
from worker_service.simulated.arithmetic import (
    adapter_word,
    choose,
    mix,
    position_weights,
    preferences,
)


def expected_tokens(
    prompt: Sequence[int],
    count: int,
    sampling: SamplingParameters,
    vocabulary_size: int,
    first_token: int = 0,
    salt: int = 0,
    adapter_digest: str | None = None,
) -> list[int]:
    """The `count` tokens a simulated worker samples after a prompt, whatever the batching. `salt`
    is that of its weights, see worker_service.simulated.weights.salt_of."""
    own = np.uint64(adapter_word(adapter_digest))
    tokens = list(prompt)
    seed = np.array([sampling.seed if sampling.temperature > 0 else 0], dtype=np.uint64)
    for _ in range(count):
        positions = np.arange(len(tokens), dtype=np.uint64)
        kv = mix(np.array(tokens, dtype=np.int32), positions.astype(np.int32), salt) ^ own
        total = (kv * position_weights(positions)).sum(dtype=np.uint64, keepdims=True)
        preference = preferences(total, seed, np.array([len(tokens)], dtype=np.uint64))
        tokens.append(int(choose(preference, vocabulary_size, first_token)[0]))
    return tokens[len(prompt) :]
