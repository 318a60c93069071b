"""Waiting for a lost worker, with an end to what waits with it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from twinplane.process.logs import fields

T = TypeVar("T")

_logger = logging.getLogger(__name__)


async def in_patience(
    waiting: Coroutine[Any, Any, T], seconds: float, at_end: Callable[[], None]
) -> T:
    """The outcome of `waiting`, however long it takes. Calls `at_end` if it takes more than
    `seconds`, which may be infinite.
    """
    task = asyncio.create_task(waiting)
    try:
        await asyncio.wait((task,), timeout=None if seconds == math.inf else seconds)
        if not task.done():
            at_end()
        return await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


def tell_given_up(replica: int, sequence_count: int, lost_seconds: float) -> None:
    """Says that patience with a lost worker is over, if anybody waited for it."""
    if sequence_count:
        _logger.warning(
            "requests given up: the worker stays away",
            extra=fields(
                replica=replica,
                sequence_count=sequence_count,
                lost_seconds=round(lost_seconds, 1),
            ),
        )
