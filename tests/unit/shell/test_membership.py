"""Which replicas join and leave as lists change: the comparison, the lists, and the task."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from control_plane.shell import worker_lists
from control_plane.shell.membership import Membership, difference
from control_plane.shell.ports import Worker
from control_plane.shell.replica import Replica
from control_plane.shell.worker_lists import (
    MAX_REPLICAS,
    ListedInDns,
    ListedInFile,
    ListUnusable,
    resolve_host,
)
from tests.support.quick import examples

ADDRESSES = [f"h{number}:1" for number in range(5)]
REPLICAS = [*ADDRESSES, "h0:1,h1:1", "h2:1,h3:1", "h1:1,h4:1"]


class Books:
    """A fleet that only notes who is there. Nobody may leave twice, or be there twice."""

    def __init__(self) -> None:
        self.present: dict[object, str] = {}
        self.join_count = 0
        self.leave_count = 0

    def join(self, worker: Worker, address: str = "") -> Replica:
        assert worker == f"port of {address}"
        taken = {rank for one in self.present.values() for rank in one.split(",")}
        assert taken.isdisjoint(address.split(",")), "an address twice"
        replica = object()
        self.present[replica] = address
        self.join_count += 1
        return cast("Replica", replica)

    def leave(self, replica: Replica) -> None:
        del self.present[replica]
        self.leave_count += 1


class Scripted:
    """A list that names what it is told to, or raises it."""

    def __init__(self, name: str, now: tuple[str, ...] | Exception = ()) -> None:
        self.name = name
        self.now: tuple[str, ...] | Exception = now or ListUnusable("names no worker")

    async def read(self) -> tuple[str, ...]:
        if isinstance(self.now, Exception):
            raise self.now
        return self.now


def port_of(address: str) -> Worker:
    return cast("Worker", f"port of {address}")


def told(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    records = [record for record in caplog.records if record.getMessage() == message]
    return [record.__dict__["fields"] for record in records]


# --- the comparison and the task, against a naive model ----------------------------------------


def conflict_free(replicas: Sequence[str]) -> bool:
    ranks = [rank for one in replicas for rank in one.split(",")]
    return len(ranks) == len(set(ranks))


class Lists(RuleBasedStateMachine):
    """Two lists and names that stay. The model: what should be there is whatever they named last;
    where ranks don't contradict, that is exactly what is there after each look."""

    @initialize(named=strategies.lists(strategies.sampled_from(ADDRESSES), unique=True, max_size=2))
    def start(self, named: list[str]) -> None:
        self.books = Books()
        self.lists = [Scripted("file"), Scripted("dns")]
        self.named = tuple(named)
        self.last: dict[str, tuple[str, ...]] = {}
        self.members = Membership(self.books, port_of, self.named, self.lists)

    def look(self, which: int) -> None:
        asyncio.run(self.members.look(self.lists[which]))

    @rule(
        which=strategies.integers(0, 1),
        named=strategies.lists(strategies.sampled_from(REPLICAS), unique=True, min_size=1),
    )
    def names(self, which: int, named: list[str]) -> None:
        before = set(self.books.present.values())
        self.lists[which].now = tuple(named)
        self.look(which)
        self.last[self.lists[which].name] = tuple(named)
        assert not (before & self.desired()) - set(self.books.present.values()), (
            "who is meant stays"
        )

    @rule(
        which=strategies.integers(0, 1),
        error=strategies.sampled_from(
            [ListUnusable("names no worker"), ListUnusable("can't be read"), RuntimeError("a bug")]
        ),
    )
    def fails(self, which: int, error: Exception) -> None:
        counts = self.books.join_count, self.books.leave_count
        self.lists[which].now = error
        self.look(which)
        assert (self.books.join_count, self.books.leave_count) == counts, "a failure changed it"

    @rule(which=strategies.integers(0, 1))
    def is_looked_at_again(self, which: int) -> None:
        """A second look at the same finds nothing to do, unless a rank has become free."""
        if isinstance(self.lists[which].now, tuple):
            self.look(which)
            counts = self.books.join_count, self.books.leave_count
            self.look(which)
            assert (self.books.join_count, self.books.leave_count) == counts

    def desired(self) -> set[str]:
        return {*self.named, *(one for found in self.last.values() for one in found)}

    @invariant()
    def what_should_be_there_is(self) -> None:
        present, desired = set(self.books.present.values()), self.desired()
        assert present == set(self.members.present)
        assert present <= desired
        taken = {rank for one in present for rank in one.split(",")}
        for missing in desired - present:
            assert not taken.isdisjoint(missing.split(",")), f"{missing} could have joined"
        if conflict_free(sorted(desired)):
            assert present == desired


class TestLists(Lists.TestCase):
    settings = settings(max_examples=examples(80), stateful_step_count=20, deadline=None)


def test_a_comparison_keeps_to_the_maximum() -> None:
    many = [f"h:{number}" for number in range(1, MAX_REPLICAS + 3)]
    change = difference(many, many[-2:])
    assert len(change.joining) == MAX_REPLICAS - 2
    assert change.refused == tuple(many[MAX_REPLICAS - 2 : MAX_REPLICAS])
    assert not change.leaving


def test_a_rank_goes_from_one_replica_to_another_in_one_look() -> None:
    change = difference(["a:1,c:1"], ["a:1,b:1"])
    assert (change.joining, change.leaving, change.refused) == (("a:1,c:1",), ("a:1,b:1",), ())


async def test_a_trouble_is_told_once_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    one = Scripted("file", ("a:1", "b:1"))
    books = Books()
    members = Membership(books, port_of, (), [one])
    await members.look(one)
    one.now = ListUnusable("can't be read: gone")
    for _ in range(3):
        await members.look(one)
    one.now = ListUnusable("names no worker")
    await members.look(one)
    unusable = told(caplog, "the list of workers can't be used: its last workers stay")
    assert [(each["reason"], each["kept_replica_count"]) for each in unusable] == [
        ("can't be read: gone", 2),
        ("names no worker", 2),
    ]
    one.now = ("b:1",)
    await members.look(one)
    assert told(caplog, "the list of workers can be used again") == [{"source": "file"}]
    assert list(books.present.values()) == ["b:1"]
    changes = told(caplog, "the fleet changes")
    assert [(each["joining"], each["leaving"]) for each in changes] == [
        ("a:1 b:1", ""),
        ("", "a:1"),
    ]


async def test_a_bug_in_a_list_costs_nothing_that_runs(caplog: pytest.LogCaptureFixture) -> None:
    one, other = Scripted("one", ("a:1",)), Scripted("other", ("b:1",))
    books = Books()
    members = Membership(books, port_of, (), [one, other], refresh_seconds=0.001)
    task = asyncio.create_task(members.run())
    await until(lambda: len(books.present) == 2)
    one.now = RuntimeError("a bug")
    other.now = ("c:1",)
    await until(lambda: sorted(books.present.values()) == ["a:1", "c:1"])
    assert not task.done()
    one.now = ("d:1",)
    await until(lambda: sorted(books.present.values()) == ["c:1", "d:1"])
    task.cancel()
    await asyncio.wait([task])
    assert "looking at a list of workers failed" in caplog.text


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_without_lists_there_is_nothing_to_follow() -> None:
    members = Membership(Books(), port_of, ("a:1", "b:1,c:1"))
    await members.run()
    assert list(members.present) == ["a:1", "b:1,c:1"]


# --- a file ------------------------------------------------------------------------------------

GOOD = {
    "plain": ("a:1\nb:2\n", ("a:1", "b:2")),
    "no newline at the end": ("a:1\nb:2", ("a:1", "b:2")),
    "comments": ("# all\na:1 # first\n#b:2\n\n  c:3  \n", ("a:1", "c:3")),
    "windows": ("a:1\r\nb:2\r\n", ("a:1", "b:2")),
    "ranks": ("a:1,b:1\nc:1\n", ("a:1,b:1", "c:1")),
    "sockets": ("unix:/run/w.sock\n", ("unix:/run/w.sock",)),
    "version 6": ("[::1]:1\n", ("[::1]:1",)),
    "names": ("gpu-0.workers.default.svc:50061\n", ("gpu-0.workers.default.svc:50061",)),
}
BAD = {
    "empty": ("", "names no worker"),
    "only comments": ("# none\n\n", "names no worker"),
    "no port": ("a\n", "must be host:port"),
    "port 0": ("a:0\n", "must be host:port"),
    "port too large": ("a:65536\n", "must be host:port"),
    "a url": ("http://a:1\n", "must be host:port"),
    "half a line": ("a:1\nb:\n", "must be host:port"),
    "two on a line": ("a:1 b:1\n", "more than one replica on a line"),
    "twice": ("a:1\na:1\n", "twice"),
    "a rank twice": ("a:1,b:1\nb:1\n", "twice"),
    "an empty rank": ("a:1,\n", "must be host:port"),
    "too many": ("".join(f"a:{n}\n" for n in range(1, MAX_REPLICAS + 2)), "the maximum is 1024"),
    "too long": ("#" * (1024 * 1024 + 1), "more than 1048576 bytes"),
    "zeros": ("a:1\0\n", "must be host:port"),
}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_lists, "_SETTLE_SECONDS", 0.0)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("case", GOOD)
async def test_a_good_file(case: str, tmp_path: Path) -> None:
    text, expected = GOOD[case]
    path = tmp_path / "workers"
    path.write_text(text, newline="")
    assert await ListedInFile(path).read() == expected


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("case", BAD)
async def test_a_bad_file(case: str, tmp_path: Path) -> None:
    text, reason = BAD[case]
    path = tmp_path / "workers"
    path.write_text(text)
    with pytest.raises(ListUnusable, match=reason):
        await ListedInFile(path).read()


@pytest.mark.usefixtures("at_once")
async def test_a_file_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(ListUnusable, match="can't be read: No such file"):
        await ListedInFile(tmp_path / "none").read()
    with pytest.raises(ListUnusable, match="can't be read: Is a directory"):
        await ListedInFile(tmp_path).read()
    path = tmp_path / "latin"
    path.write_bytes(b"caf\xe9:1\n")
    with pytest.raises(ListUnusable, match="no UTF-8"):
        await ListedInFile(path).read()


@pytest.mark.usefixtures("at_once")
async def test_a_file_counts_once_it_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that has written half is not taken at its word."""
    path = tmp_path / "workers"
    path.write_text("a:1\nb:1\n")
    listed = ListedInFile(path)
    assert await listed.read() == ("a:1", "b:1")
    path.write_text("a:1\n")
    looks = []
    text = ListedInFile._text

    def finishing(self: ListedInFile) -> str:
        looks.append(1)
        if len(looks) == 2:
            path.write_text("a:1\nb:1\nc:1\n")
        return text(self)

    monkeypatch.setattr(ListedInFile, "_text", finishing)
    assert await listed.read() == ("a:1", "b:1", "c:1")


@pytest.mark.usefixtures("at_once")
async def test_a_file_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    """As `mv` does it, and Kubernetes with a link to a folder."""
    for number in (1, 2):
        (tmp_path / f"v{number}").mkdir()
        (tmp_path / f"v{number}" / "workers").write_text(f"a:{number}\n")
    (tmp_path / "now").symlink_to("v1")
    listed = ListedInFile(tmp_path / "now" / "workers")
    assert await listed.read() == ("a:1",)
    (tmp_path / "next").symlink_to("v2")
    os.replace(tmp_path / "next", tmp_path / "now")  # noqa: PTH105
    assert await listed.read() == ("a:2",)


# --- a name ------------------------------------------------------------------------------------


async def test_a_name_has_the_addresses_it_resolves_to() -> None:
    asked = []

    def resolver(host: str, port: int) -> list[str]:
        asked.append((host, port))
        return ["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"]

    listed = ListedInDns("workers.default.svc:50061", resolver)
    assert await listed.read() == ("10.0.0.1:50061", "10.0.0.2:50061", "[fd00::1]:50061")
    assert asked == [("workers.default.svc", 50061)]


@pytest.mark.parametrize(
    "error", [socket.gaierror(-2, "unknown"), TimeoutError("late"), UnicodeError("label too long")]
)
async def test_a_name_that_does_not_resolve(error: Exception) -> None:
    def resolver(host: str, port: int) -> list[str]:
        raise error

    with pytest.raises(ListUnusable, match="does not resolve"):
        await ListedInDns("nobody:1", resolver).read()


async def test_an_empty_answer_names_no_worker() -> None:
    with pytest.raises(ListUnusable, match="names no worker"):
        await ListedInDns("nobody:1", lambda host, port: []).read()


async def test_the_system_resolves_localhost() -> None:
    found = await ListedInDns("localhost:7", resolve_host).read()
    assert set(found) <= {"127.0.0.1:7", "[::1]:7"} and found


async def test_a_resolver_that_hangs_holds_nobody_up() -> None:
    """Neither the loop, nor its end."""
    released = threading.Event()

    def resolver(host: str, port: int) -> list[str]:
        released.wait()
        return []

    reading = asyncio.create_task(ListedInDns("h:1", resolver).read())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()
    released.set()
