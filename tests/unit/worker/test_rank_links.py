"""What a rank asks of NCCL, told by a stand-in: no machine here has two GPUs."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from worker_service.domain.capability import RankCoordinates
from worker_service.domain.errors import GroupLost
from worker_service.domain.rendezvous import Rendezvous
from worker_service.parallel import group as rank_group
from worker_service.parallel import links
from worker_service.parallel.group import RankGroup
from worker_service.parallel.links import Link, Links
from worker_service.parallel.store import StoreHost
from worker_service.runner import device as devices

PATIENCE = 30.0
GPU = torch.device("cuda", 1)
ENVIRONMENT = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")


class Work:
    """An operation that is over."""

    def is_completed(self) -> bool:
        return True

    def wait(self, *timeout: object) -> None:
        pass


class FakeNCCL:
    """In the place of torch's process group. `hold` keeps who aborts."""

    made: list[FakeNCCL]
    hold: threading.Event

    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.place = (rank, size)
        self.environment = [os.environ.get(name) for name in ENVIRONMENT]
        self.connected: list[torch.device] = []
        self.aborted = threading.Event()
        self.timeout = options._timeout
        FakeNCCL.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)

    def abort(self) -> None:
        assert FakeNCCL.hold.wait(PATIENCE)
        self.aborted.set()

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        if self.aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted on rank 0.\nits stack")
        return Work()


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[FakeNCCL]:
    FakeNCCL.made, FakeNCCL.hold = [], threading.Event()
    FakeNCCL.hold.set()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "1")
    gloo = links._process_group

    def made(store: Any, rank: int, size: int, device: torch.device, address: str) -> Any:
        """The hosts' group has nobody to meet here."""
        return gloo(store, rank, size, device, address) if device.type == "cuda" else None

    monkeypatch.setattr(links, "_process_group", made)
    return FakeNCCL


def opened(coordinates: RankCoordinates) -> RankGroup:
    """One rank that has found the others."""
    host = StoreHost("127.0.0.1", 0)
    rendezvous = Rendezvous(1, host.host, host.port, "key", PATIENCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_group, "meet", lambda *arguments: host._store)
        return RankGroup(coordinates, rendezvous, GPU, lambda: False)


MIDDLE = RankCoordinates(tensor=(1, 2), pipeline=(1, 3))


def test_communicators_are_made_on_the_ranks_gpu_and_before_the_first_step() -> None:
    """Both neighbours and the stage; torch may not end the process where one fails."""
    opened(MIDDLE)
    assert [each.place for each in FakeNCCL.made] == [(1, 2), (0, 2), (1, 2)]
    for each in FakeNCCL.made:
        assert each.connected == [GPU]
        assert each.environment == ["0", "0"]
        assert each.timeout == links.OPERATION_TIMEOUT


def test_a_gpu_that_can_not_connect_is_a_lost_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: FakeNCCL, device: torch.device) -> None:
        raise dist.DistBackendError("NCCL error: remote process exited")

    monkeypatch.setattr(FakeNCCL, "eager_connect_single_device", fails)
    with pytest.raises(GroupLost, match="can't reach each other: NCCL error"):
        opened(MIDDLE)


def test_abort_keeps_nobody_waiting_and_ends_every_link() -> None:
    """It is called by whoever answers a newer claim."""
    group = opened(MIDDLE)
    FakeNCCL.hold.clear()
    group.abort()  # returns although no communicator does
    assert not any(each.aborted.is_set() for each in FakeNCCL.made)
    FakeNCCL.hold.set()
    assert all(each.aborted.wait(PATIENCE) for each in FakeNCCL.made)


def test_what_is_started_on_an_aborted_communicator_finds_the_group_lost() -> None:
    """No request is to blame for it."""
    group = opened(MIDDLE)
    x = torch.zeros(2)
    assert group.reduce(x) is x
    for each in FakeNCCL.made:
        each.abort()
    with pytest.raises(GroupLost, match="the group has ended: NCCL communicator was aborted"):
        group.reduce(x)


def test_close_aborts_what_the_device_may_wait_for() -> None:
    group = opened(MIDDLE)
    group.close()
    assert all(each.aborted.is_set() for each in FakeNCCL.made)
    group.close()
    group.abort()
    with pytest.raises(GroupLost):
        group.reduce(torch.zeros(2))


def test_a_link_that_was_dropped_has_nothing_to_abort() -> None:
    """The claim's thread and the device's may both end a group."""
    link = Link(FakeNCCL(None, 0, 2, FakeNCCL.Options()))
    link.close()
    link.abort()
    nobody = Link(None)
    Links(None, nobody, nobody, nobody, nobody).abort()  # type: ignore[arg-type]
    assert not FakeNCCL.made[0].aborted.is_set()


def test_the_devices_thread_means_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    devices.own_device(torch.device("cpu"))
    devices.own_device(GPU)
    assert chosen == [GPU]
