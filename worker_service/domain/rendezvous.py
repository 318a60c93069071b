"""Where the ranks of a replica meet. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """What Attach gives every rank of a replica, so that they find each other for one epoch.

    `host` and `port` are of the store that the replica's first rank keeps (Capability's
    rendezvous_address). `key` names the meeting: the controller draws a new one for each epoch, and
    gives the same one to every rank. `timeout_seconds` bounds the wait for the last to come.
    """

    epoch: int
    host: str
    port: int
    key: str
    timeout_seconds: float = 10.0
