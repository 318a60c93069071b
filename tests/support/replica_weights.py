"""Fleets of fake workers whose weights are exchanged; virtual time."""

from __future__ import annotations

from control_plane.core.weights import DiskSource, InFlightPolicy, PreparedWeights, WeightsUpdate
from control_plane.shell.replica import Replica
from tests.simulation.fake_machine import (
    Machine,
    digest_at,
    expected_over,
)
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import Answer, Rig

ABORT, KEEP, CONTINUE, FINISH = (
    InFlightPolicy.ABORT,
    InFlightPolicy.KEEP_KV,
    InFlightPolicy.CONTINUE_ON_NEW,
    InFlightPolicy.FINISH_ON_OLD,
)
COUNT = 20
PROMPTS = [[2 + n, *range(2, 20)] for n in range(8)]


def fake(**changes: int) -> FakeWorker:
    limits = {"block_count": 200, "max_step_token_count": 40, **changes}
    return FakeWorker(Machine(**limits), lambda: 0.01)  # type: ignore[arg-type]


def update(path: str) -> WeightsUpdate:
    return WeightsUpdate(f"update {path}", DiskSource(path))


async def exchanged(replica: Replica, path: str, policy: InFlightPolicy) -> PreparedWeights:
    prepared = await replica.weights.prepare(update(path))
    version = await replica.weights.switch(prepared.update_id, prepared.digest, policy)
    assert version.digest == prepared.digest == digest_at(path)
    return prepared


def checked(rig: Rig, number: int, answer: Answer, digests: set[str], done: int = 0) -> None:
    """Its tokens are those of its spans, and these have only such weights."""
    assert answer.finish is not None, answer.error
    spans = answer.finish.spans
    assert sum(span.token_count for span in spans) == len(answer.tokens) == COUNT
    assert {span.weights_digest for span in spans} <= digests
    assert answer.tokens == expected_over(PROMPTS[number], spans)


def nothing_is_held(rig: Rig) -> None:
    for number in range(len(rig.workers)):
        stats = rig.stats(number)
        assert not (stats.running or stats.waiting or stats.kv_active_tokens)
