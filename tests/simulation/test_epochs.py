"""Claims by others near the last epoch there is: nobody falls over, and a restart heals."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from control_plane.rpc.worker_client import GrpcWorker
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.ports import WorkerRefused, WorkerUnusable
from tests.simulation.rig import until
from tests.simulation.test_loopback import alone, driven, facade, generate, server
from tests.support.wire import Wire
from tests.support.worker_rig import attach_request, refusal, serving
from twinplane.bounds import MAX_EPOCH
from worker_service.facade import WorkerFacade

PROMPT_NAMES = ["r0", "r3"]
NEAR = [2**31, 2**32, 2**63 - 1, 2**63, MAX_EPOCH - 2, MAX_EPOCH - 1]


async def test_the_last_epoch_of_all_is_refused_and_changes_nothing() -> None:
    async with serving() as rig:
        await rig.attach(7)
        refused = await refusal(rig.stub.Attach(attach_request(2**64 - 1)))
        assert (refused.reason, refused.field) == ("INVALID_PLAN", "epoch")
        assert rig.facade.worker_info().epoch == 7
        assert (await rig.attach(MAX_EPOCH)).worker_info.epoch == MAX_EPOCH


async def claim_by_another(worker: WorkerFacade, epoch: int) -> None:
    await worker.attach(epoch, "another", 1, 1)


@pytest.mark.parametrize("epoch", NEAR)
async def test_a_rival_at_a_large_epoch_is_only_a_rival(epoch: int) -> None:
    async with facade() as worker, server(worker) as address:
        await claim_by_another(worker, epoch)
        port = GrpcWorker(address, controller_id="test")
        assert (await port.attach()).info.epoch == epoch + 1
        await port.detach()


async def test_a_worker_without_a_next_epoch_is_unusable_until_it_restarts(tmp_path: Path) -> None:
    uds = tmp_path / "worker.sock"
    port = GrpcWorker(f"unix:{uds}", controller_id="test", attach_timeout=5.0)
    async with facade() as worker, server(worker, uds):
        await claim_by_another(worker, MAX_EPOCH)
        with pytest.raises(WorkerUnusable, match="restart the worker"):
            await port.attach()
        with pytest.raises(WorkerUnusable):
            await port.attach(epoch=2**64 - 1)
        with pytest.raises(WorkerRefused):
            await port.attach(epoch=3)
    async with facade() as worker, server(worker, uds):
        assert (await port.attach()).info.epoch == 1
        await port.detach()


async def test_the_control_plane_outlives_a_claim_of_the_last_epoch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It says what is wrong, tries on, and serves again once the worker has been restarted."""
    expected = await alone()
    right = {name: expected[name] for name in PROMPT_NAMES}
    async with AsyncExitStack() as stack:
        async with facade() as worker, server(worker) as address:
            number = int(address.rpartition(":")[2])
            wire = await stack.enter_async_context(Wire(number))
            port = GrpcWorker(f"127.0.0.1:{wire.port}", controller_id="test", attach_timeout=5.0)
            fleet = await stack.enter_async_context(driven(port, SchedulingSettings()))
            assert await generate(fleet, PROMPT_NAMES) == right
            await claim_by_another(worker, MAX_EPOCH)
            wire.reset()
            await until(lambda: "restart the worker" in str([vars(r) for r in caplog.records]))
            assert not fleet.ready
        async with facade() as worker, server(worker, port=number):
            await until(lambda: fleet.ready)
            assert await generate(fleet, PROMPT_NAMES) == right
