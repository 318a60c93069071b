"""The other ranks of this worker's replica, as the layers and the runner see them.

The layers are built once, when a model is loaded. The group behind this is another one in each
epoch, and there is none until the first `join`: then every operation leaves things as they are, so
that a rank can warm up by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker_service.domain.capability import RankCoordinates
from worker_service.domain.columns import IntColumn
from worker_service.domain.errors import GroupLost
from worker_service.domain.rendezvous import Rendezvous
from worker_service.parallel.group import PendingTokens, RankGroup
from worker_service.parallel.store import StoreHost


class Peers:
    """Belongs to the device's thread, but for `abandon`."""

    def __init__(self, coordinates: RankCoordinates, device: torch.device) -> None:
        self.coordinates = coordinates
        self._device = device
        self._group: RankGroup | None = None
        self._store: StoreHost | None = None
        self._oldest_epoch = 0

    def host_store(self, host: str, port: int) -> str:
        """Lets the ranks meet here; returns the address. Raises RendezvousUnavailable."""
        self._store = StoreHost(host, port)
        return self._store.address

    def join(self, rendezvous: Rendezvous) -> None:
        """See runner.interface.Ranked."""
        self.leave()
        self._group = RankGroup(
            self.coordinates,
            rendezvous,
            self._device,
            lambda: rendezvous.epoch < self._oldest_epoch,
        )

    def abandon(self, before_epoch: int) -> None:
        """See runner.interface.Ranked. Any thread."""
        self._oldest_epoch = max(self._oldest_epoch, before_epoch)
        group = self._group
        if group is not None and group.is_over:
            group.abort()

    def leave(self) -> None:
        """Parts from the group. What the others wait for from this rank fails. Idempotent."""
        if self._group is not None:
            self._group.close()

    def require(self) -> RankGroup:
        """The epoch's group. Raises GroupLost where there is none, or it is over."""
        if self._group is None:
            raise GroupLost("this rank was claimed without a rendezvous")
        if self._group.is_over:
            raise GroupLost("the group is lost; attach again")
        return self._group

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every tensor rank's x; see RankGroup.reduce."""
        return x if self._group is None else self._group.reduce(x)

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Each tensor rank's x [n, its width] side by side: [n, sum of widths] on the first of
        them, empty [0, sum of widths] on others."""
        if self._group is None:
            return x.new_zeros((x.shape[0], sum(widths)))
        gathered = self._group.gather(x, widths)
        return x.new_empty((0, sum(widths))) if gathered is None else gathered

    def send(self, x: torch.Tensor) -> None:
        """Gives x to the next stage; x may not be written any more."""
        if self._group is not None:
            self._group.send(x)

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        """Fills `out` with what the stage before this one sends."""
        return out.zero_() if self._group is None else self._group.receive(out)

    def publish(self, tokens: IntColumn) -> None:
        """Gives sampled tokens int32 [n] to every other rank."""
        self.require().publish(tokens)

    def expect(self, count: int) -> PendingTokens:
        """The next `count` tokens that the answering rank publishes."""
        return self.require().expect(count)
