"""A replica of several simulated ranks over real loopback gRPC: as good as one worker."""

from __future__ import annotations

import pytest

from control_plane.shell.limits import SchedulingSettings
from tests.simulation.test_loopback import PROMPTS, alone, driven, generate
from tests.support.rank_rig import ranks
from worker_service.simulated.runner import SimulatedLatency

SLOW = SimulatedLatency(step=0.004)
SECONDS = 60.0


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2), (3, 1)])
async def test_tokens_are_those_of_one_worker(tensor: int, pipeline: int) -> None:
    async with (
        ranks(tensor, pipeline) as replica,
        driven(replica.worker(), SchedulingSettings()) as fleet,
    ):
        for _ in range(2):  # cold, then with the prefix cache warm
            assert await generate(fleet, list(PROMPTS)) == await alone()
        epochs = {server.facade.worker_info().epoch for server in replica.servers}
        assert epochs == {1}
        stats = fleet.replicas[0].stats()
        assert stats is not None
        assert (stats.running, stats.waiting, stats.kv_active_tokens) == (0, 0, 0)
