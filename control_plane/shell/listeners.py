"""Whom a replica tells what becomes of its sequences and of its worker."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

from control_plane.core.events import SequenceOutput
from control_plane.core.request import SequenceId
from control_plane.shell.engine import EngineLost
from control_plane.shell.ports import WorkerInfo
from control_plane.shell.successor import FailureKind

if TYPE_CHECKING:
    from control_plane.shell.replica import Replica


class Register(Protocol):
    """Who knows the streams of a replica's sequences."""

    def deliver(self, outputs: list[SequenceOutput], now: float) -> None:
        """These sequences got tokens, or ended."""
        ...

    def fail(
        self,
        replica: Replica,
        why: str,
        *,
        only: Collection[SequenceId] | None = None,
        kind: FailureKind = EngineLost,
    ) -> None:
        """The replica can't go on with its sequences, or with some of them.

        All of them are finished, with FAULT, before this returns.
        """
        ...


class ReplicaListener(Protocol):
    """Whom a replica tells what concerns the others."""

    def took_turn(self, replica: Replica) -> None:
        """It has taken results, and has not planned the next step."""
        ...

    def changed(self, replica: Replica) -> None:
        """Its worker was attached or lost."""
        ...

    def evacuate(self, replica: Replica) -> None:
        """Whoever is here and can go on elsewhere should go now."""
        ...

    def has_others(self, replica: Replica) -> bool:
        """Whether the worker of another one is there, and is to stay."""
        ...

    def admit(self, replica: Replica, info: WorkerInfo) -> None:
        """It is about to claim this worker. Raises WorkerUnusable where that can't serve beside
        those that do."""
        ...
