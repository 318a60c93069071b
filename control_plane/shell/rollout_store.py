"""Where rollouts are written down, so that a control plane goes on with them after a restart."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from control_plane.core.rollout import Canary, Rollout, RolloutState, Strategy, Weights
from control_plane.core.weights import (
    DiskSource,
    InFlightPolicy,
    Placement,
    Source,
    SpooledSource,
)

_FILE = "control.sqlite3"
_SPOOL = ".safetensors"
_FORMAT = 1
_MOST_ROLLOUTS = 100
"""The last ones are kept, for people who look into the file."""
_TABLE = (
    "CREATE TABLE IF NOT EXISTS rollouts ("
    "number INTEGER PRIMARY KEY AUTOINCREMENT, rollout_id TEXT NOT NULL UNIQUE,"
    " document TEXT NOT NULL)"
)


class StoreUnusable(Exception):
    """The folder can't be written, another control plane uses it, or a newer release has."""


class RolloutStore:
    """An SQLite file in `folder`, for this process alone; without a folder, memory.

    Methods may be called on any thread, one at a time. What `save` has returned from survives the
    machine.
    """

    def __init__(self, folder: Path | None) -> None:
        """Opens it, and makes what is missing. Raises StoreUnusable."""
        self.path = None if folder is None else folder / _FILE
        self._passing: TemporaryDirectory[str] | None = None
        self._spools = None if folder is None else folder / "weights"
        try:
            if self._spools is not None:
                self._spools.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._database = sqlite3.connect(
                self.path or ":memory:", timeout=0.0, check_same_thread=False, isolation_level=None
            )
        except (OSError, sqlite3.Error) as error:
            raise StoreUnusable(f"the state in {folder} can't be used: {_words(error)}") from error
        try:
            self._prepare()
        except sqlite3.Error as error:
            self._database.close()
            raise StoreUnusable(f"the state in {folder} can't be used: {_words(error)}") from error

    def load(self) -> Rollout | None:
        """The last rollout. Raises StoreUnusable."""
        query = "SELECT document FROM rollouts ORDER BY number DESC LIMIT 1"
        row = self._database.execute(query).fetchone()
        if row is None:
            return None
        try:
            return rollout_from(json.loads(row[0]))
        except (ValueError, KeyError, TypeError) as error:
            raise StoreUnusable(f"{self.path} has a rollout that can't be read") from error

    def save(self, rollout: Rollout) -> None:
        """Writes a rollout down, in place of what is there of it."""
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute(
                "INSERT INTO rollouts (rollout_id, document) VALUES (?, ?)"
                " ON CONFLICT (rollout_id) DO UPDATE SET document = excluded.document",
                (rollout.rollout_id, json.dumps(document_of(rollout))),
            )
            self._database.execute(
                "DELETE FROM rollouts WHERE number <= (SELECT MAX(number) FROM rollouts) - ?",
                (_MOST_ROLLOUTS,),
            )

    def new_spool(self, name: str) -> Path:
        """Where streamed weights may be written."""
        if self._spools is None:
            self._passing = TemporaryDirectory(prefix="twinplane-weights-")
            self._spools = Path(self._passing.name)
        return self._spools / f"{name}{_SPOOL}"

    def prune(self, rollout: Rollout | None, arriving: Collection[Path]) -> None:
        """Removes streamed weights that are neither arriving nor needed by the rollout."""
        needed = {str(path) for path in arriving}
        if rollout is not None:
            needed |= _spools_of(rollout.target) | _spools_of(rollout.before)
        for path in self._spools.glob(f"*{_SPOOL}") if self._spools is not None else ():
            if str(path) not in needed:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the file. Streamed weights go, unless there is a folder for them."""
        self._database.close()
        if self._passing is not None:
            self._passing.cleanup()

    def _prepare(self) -> None:
        run = self._database.execute
        # Two control planes would have the same workers in turn, each to its own mind.
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        (version,) = run("PRAGMA user_version").fetchone()
        if version > _FORMAT:
            raise sqlite3.DatabaseError("a newer release has written it")
        run("BEGIN IMMEDIATE")
        run(_TABLE)
        run(f"PRAGMA user_version = {_FORMAT}")
        run("COMMIT")


def _spools_of(weights: Weights | None) -> set[str]:
    found: set[str] = set()
    while weights is not None:
        if isinstance(weights.source, SpooledSource):
            found.add(weights.source.path)
        weights = weights.base
    return found


def _words(error: Exception) -> str:
    if "locked" in str(error):
        return "another control plane uses it"
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def document_of(rollout: Rollout) -> dict[str, Any]:
    """A rollout as what JSON can say."""
    return {
        "rollout_id": rollout.rollout_id,
        "target": _weights_document(rollout.target),
        "before": _weights_document(rollout.before),
        "strategy": rollout.strategy.value,
        "policy": rollout.policy.value,
        "placement": rollout.placement.name,
        "canary": None if rollout.canary is None else asdict(rollout.canary),
        "state": rollout.state.value,
        "commits": rollout.commits,
        "is_proven": rollout.is_proven,
        "reason": rollout.reason,
    }


def rollout_from(document: dict[str, Any]) -> Rollout:
    """What `document_of` has said. Raises ValueError, KeyError or TypeError."""
    canary = document["canary"]
    return Rollout(
        rollout_id=document["rollout_id"],
        target=_weights_from(document["target"]),
        before=_weights_from(document["before"]),
        strategy=Strategy(document["strategy"]),
        policy=InFlightPolicy(document["policy"]),
        placement=Placement[document["placement"]],
        canary=None if canary is None else Canary(**canary),
        state=RolloutState(document["state"]),
        commits=document["commits"],
        is_proven=document["is_proven"],
        reason=document["reason"],
    )


def _weights_document(weights: Weights) -> dict[str, Any]:
    return {
        "name": weights.name,
        "digest": weights.digest,
        "source": _source_document(weights.source),
        "base": None if weights.base is None else _weights_document(weights.base),
    }


def _weights_from(document: dict[str, Any]) -> Weights:
    base = document["base"]
    return Weights(
        document["name"],
        document["digest"],
        _source_from(document["source"]),
        None if base is None else _weights_from(base),
    )


def _source_document(source: Source | None) -> dict[str, Any] | None:
    match source:
        case DiskSource(path=path):
            return {"disk": path}
        case SpooledSource(path=path, sha256=digests):
            return {"spool": path, "sha256": {name: each.hex() for name, each in digests}}
        case _:
            return None


def _source_from(document: dict[str, Any] | None) -> Source | None:
    if document is None:
        return None
    if "disk" in document:
        return DiskSource(document["disk"])
    digests = tuple((name, bytes.fromhex(each)) for name, each in document["sha256"].items())
    return SpooledSource(document["spool"], digests)
