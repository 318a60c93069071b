"""What is written down of rollouts: read again as it was, by one control plane at a time."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.core.rollout import Canary, Rollout, RolloutState, Strategy, Weights
from control_plane.core.weights import DiskSource, InFlightPolicy, Placement, SpooledSource
from control_plane.shell.rollout_store import (
    RolloutStore,
    StoreUnusable,
    document_of,
    rollout_from,
)
from tests.support.quick import examples

DIGESTS = st.sampled_from(("", "ab" * 32, "cd" * 32))
SOURCES = st.one_of(
    st.none(),
    st.builds(DiskSource, st.text(min_size=1)),
    st.builds(
        SpooledSource,
        st.text(min_size=1),
        st.dictionaries(st.text(), st.binary(min_size=32, max_size=32), max_size=3).map(
            lambda digests: tuple(digests.items())
        ),
    ),
)
WEIGHTS = st.recursive(
    st.builds(Weights, st.text(), DIGESTS, SOURCES),
    lambda base: st.builds(Weights, st.text(), DIGESTS, SOURCES, base),
    max_leaves=4,
)
ROLLOUTS = st.builds(
    Rollout,
    rollout_id=st.text(min_size=1),
    target=WEIGHTS,
    before=WEIGHTS,
    strategy=st.sampled_from(Strategy),
    policy=st.sampled_from(InFlightPolicy),
    placement=st.sampled_from(Placement),
    canary=st.one_of(
        st.none(), st.builds(Canary, st.integers(1, 99), st.floats(0, 86400, allow_nan=False))
    ),
    state=st.sampled_from(RolloutState),
    commits=st.booleans(),
    is_proven=st.booleans(),
    reason=st.text(),
)
ONE = Rollout("r", Weights("v2", "", DiskSource("v2")), Weights("", "ab" * 32))


@settings(max_examples=examples(200), deadline=None)
@given(rollout=ROLLOUTS)
def test_a_rollout_is_read_as_it_was_written(rollout: Rollout) -> None:
    assert rollout_from(document_of(rollout)) == rollout
    store = RolloutStore(None)
    store.save(rollout)
    assert store.load() == rollout
    store.close()


def test_the_last_one_counts_and_few_are_kept(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    assert store.load() is None
    for number in range(120):
        store.save(replace(ONE, rollout_id=f"r{number}"))
    store.save(replace(ONE, rollout_id="r119", state=RolloutState.DONE))
    store.close()
    store = RolloutStore(tmp_path)
    last = store.load()
    assert last is not None
    assert (last.rollout_id, last.state) == ("r119", RolloutState.DONE)
    store.close()
    with sqlite3.connect(tmp_path / "control.sqlite3") as database:
        assert database.execute("SELECT COUNT(*) FROM rollouts").fetchone() == (100,)
    database.close()


def test_two_control_planes_cannot_have_one_folder(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    store.save(ONE)
    with pytest.raises(StoreUnusable, match="another control plane uses it"):
        RolloutStore(tmp_path)
    store.close()
    again = RolloutStore(tmp_path)
    assert again.load() == ONE
    again.close()


@pytest.mark.parametrize("harm", ["newer", "no database", "no json", "a word", "no folder"])
def test_what_cannot_be_read_is_said(tmp_path: Path, harm: str) -> None:
    file = tmp_path / "control.sqlite3"
    store = RolloutStore(tmp_path)
    store.save(ONE)
    store.close()
    match harm:
        case "no database":
            file.write_bytes(b"x" * 5000)
        case "no folder":
            tmp_path = tmp_path / "control.sqlite3"
        case _:
            database = sqlite3.connect(file)
            database.execute(
                {
                    "newer": "PRAGMA user_version = 2",
                    "no json": "UPDATE rollouts SET document = '{'",
                    "a word": "UPDATE rollouts SET document = replace(document, 'rolling', 'x')",
                }[harm]
            )
            database.commit()
            database.close()
    with pytest.raises(StoreUnusable, match=r"newer release|can't be"):
        made = RolloutStore(tmp_path)
        try:
            made.load()
        finally:
            made.close()


def test_streamed_weights_go_when_nobody_needs_them(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    paths = [store.new_spool(f"s{number}") for number in range(6)]
    for path in paths:
        path.write_bytes(b"x")
    sources = [SpooledSource(str(path)) for path in paths]
    base = Weights("base", "", sources[1])
    needed = replace(
        ONE, target=Weights("t", "", sources[0], base), before=Weights("b", "", sources[2])
    )
    store.prune(needed, {paths[3]})
    assert [path.exists() for path in paths] == [True] * 4 + [False] * 2
    store.prune(None, ())
    assert not any(path.exists() for path in paths)
    store.close()
    passing = RolloutStore(None)
    passing.prune(None, ())
    folder = passing.new_spool("s").parent
    assert folder.is_dir()
    passing.close()
    assert not folder.exists()
