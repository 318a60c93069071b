"""Which weights a fleet's replicas may answer with: what an operator's rollout says of that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from control_plane.core.plan import WeightVersion

_MOST_NAMES = 64
"""Names of weights that are remembered, the newest."""


class ServedWeights:
    """Shared by a fleet and its replicas. `on_change` is called when any of it has changed.

    As long as nobody has called `serve`, any weights may answer that all replicas have.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._digests: frozenset[str] | None = None
        self._names: dict[str, str] = {}
        self.continues = False
        """Whoever has tokens of other weights may go on with those that answer."""
        self.is_paused = False
        """No replica plans a step, those that join neither."""

    def serve(
        self, digests: Iterable[str], *, continues: bool, names: Mapping[str, str] | None = None
    ) -> None:
        """From now on only weights of these digests answer; during a rollout, the old and the new.

        A worker with others is claimed, and waits to get some of these. `names`: what the operator
        calls weights, by their digests.
        """
        self._digests = frozenset(digests)
        self.continues = continues
        for digest, name in (names or {}).items():
            self._names.pop(digest, None)
            self._names[digest] = name
            if len(self._names) > _MOST_NAMES:
                del self._names[next(iter(self._names))]
        self._on_change()

    @property
    def is_decided(self) -> bool:
        """Whether somebody has said which weights answer."""
        return self._digests is not None

    def may_answer(self, digest: str) -> bool:
        """Whether a worker with these weights may be given steps."""
        return self._digests is None or digest in self._digests

    def named(self, version: WeightVersion) -> WeightVersion:
        """The version with its name, if it has one."""
        name = self._names.get(version.digest, "")
        return WeightVersion(version.generation, version.digest, name)
