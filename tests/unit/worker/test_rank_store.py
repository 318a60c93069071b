"""The store in which ranks meet, and what is said where they can't."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support import runner_rig
from tests.support.tiny_spec import TINY_CONFIG, save_random, tiny_spec
from worker_service.domain.capability import RankCoordinates
from worker_service.domain.errors import GroupLost
from worker_service.domain.rendezvous import Rendezvous
from worker_service.load_errors import (
    ExecutorUnavailable,
    LoadError,
    RanksUnfit,
    RendezvousUnavailable,
)
from worker_service.parallel.digest import digest_of
from worker_service.parallel.peers import Peers
from worker_service.parallel.store import StoreHost, local_address, meet
from worker_service.runner.load import check_load
from worker_service.weights.checkpoint import Checkpoint

COLUMNS = st.lists(st.integers(-1, 2**31 - 1), max_size=4)


def never() -> None:
    pass


def test_a_store_outlives_its_meetings() -> None:
    host = StoreHost("127.0.0.1", 0)
    assert host.address == f"127.0.0.1:{host.port}"
    for epoch in range(1, 9):
        place = Rendezvous(epoch, "127.0.0.1", host.port, f"key {epoch}", 5.0)
        meet(place, 0, ["0"], never)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousUnavailable, match=f"127.0.0.1:{port}: Address already in"):
            StoreHost("127.0.0.1", port)


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(RendezvousUnavailable, match=r"can't meet at 192\.0\.2\.1:0"):
        StoreHost("192.0.2.1", 0)


def test_a_store_that_nobody_keeps() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(GroupLost, match="no store answers"):
        meet(Rendezvous(1, "127.0.0.1", port, "k", 0.1), 0, ["0", "1"], never)


def test_what_ends_a_wait_is_raised_from_it() -> None:
    host = StoreHost("127.0.0.1", 0)
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise GroupLost("abandoned")

    with pytest.raises(GroupLost, match="abandoned"):
        meet(Rendezvous(1, "127.0.0.1", host.port, "k", 60.0), 0, ["0", "1"], check)


def test_ranks_of_other_meetings_do_not_count() -> None:
    host = StoreHost("127.0.0.1", 0)
    first = Rendezvous(1, "127.0.0.1", host.port, "one", 0.1)
    with pytest.raises(GroupLost, match="ranks 1, 2 did not come"):
        meet(first, 0, ["0", "1", "2"], never)
    with pytest.raises(GroupLost, match="ranks 0, 1 did not come"):
        meet(Rendezvous(1, "127.0.0.1", host.port, "two", 0.1), 2, ["0", "1", "2"], never)
    with pytest.raises(GroupLost, match="rank 1 did not come"):
        meet(first, 2, ["0", "1", "2"], never)


def test_the_address_for_others_is_on_the_way_to_the_store() -> None:
    assert local_address(Rendezvous(1, "127.0.0.1", 29500, "k")) == "127.0.0.1"


def test_before_the_first_group_a_rank_keeps_to_itself() -> None:
    """It warms up alone."""
    peers = Peers(RankCoordinates(tensor=(1, 2), pipeline=(1, 2)), torch.device("cpu"))
    x = torch.ones(2, 3)
    assert peers.reduce(x) is x
    assert peers.gather(x, [4, 3]).shape == (2, 7)
    assert not peers.receive(torch.ones(2, 3)).any()
    peers.send(x)
    peers.leave()
    peers.abandon(7)
    for use in (peers.require, lambda: peers.expect(1)):
        with pytest.raises(GroupLost, match="without a rendezvous"):
            use()


@given(st.data())
def test_a_digest_tells_everything_apart(data: st.DataObject) -> None:
    """Equal steps have equal digests; a number that differs, or stands in another column, tells."""

    def step() -> tuple[int, int, tuple[tuple[int, ...], ...]]:
        columns = tuple(tuple(data.draw(COLUMNS)) for _ in range(4))
        return data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), columns

    def digest(value: tuple[int, int, tuple[tuple[int, ...], ...]]) -> bytes:
        epoch, step_id, columns = value
        return digest_of(epoch, step_id, *(np.array(each, dtype=np.int32) for each in columns))

    one, other = step(), step()
    assert digest(one) == digest(one)
    if len(one[2][0]) == len(one[2][1]) and len(other[2][0]) == len(other[2][1]):
        assert (digest(one) == digest(other)) == (one == other)


@pytest.mark.parametrize(
    ("ranks", "changes", "error", "words"),
    [
        (RankCoordinates((0, 3)), {}, RanksUnfit, "2 query heads over 1 KV heads"),
        (RankCoordinates((0, 1), (0, 3)), {}, RanksUnfit, "2 layers can't make 3 stages"),
        (
            RankCoordinates((0, 2)),
            {"executor": "compiled"},
            ExecutorUnavailable,
            "a whole model, not a rank's part of one",
        ),
    ],
    ids=["heads", "layers", "executor"],
)
def test_what_can_not_be_split_is_refused_before_the_weights_are_read(
    ranks: RankCoordinates,
    changes: dict[str, str],
    error: type[LoadError],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = save_random(tiny_spec(), tmp_path)
    monkeypatch.setattr(Checkpoint, "describe", lambda *given: pytest.fail("weights are read"))
    with pytest.raises(error, match=words):
        check_load(runner_rig.options(folder, ranks=ranks, **changes), TINY_CONFIG)


def test_the_summary_of_a_start_names_the_rank(tmp_path: Path) -> None:
    folder = save_random(tiny_spec(), tmp_path)
    options = runner_rig.options(folder, ranks=RankCoordinates((1, 2), (0, 2)))
    assert "2 layers (rank 1 of 4)" in check_load(options, TINY_CONFIG).describe()
