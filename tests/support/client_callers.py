"""One way to call both clients, so that a test says once what holds for both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from twinplane import AsyncClient, Client

Call = Callable[..., Any]


def blocking(address: str, method: str, *args: Any, sleeps: list[float], **kwargs: Any) -> Any:
    """One call of the blocking client; `client` holds its settings."""
    settings = kwargs.pop("client", {})
    with Client(address, sleep=sleeps.append, jitter=lambda: 0.5, **settings) as client:
        answer = getattr(client, method)(*args, **kwargs)
        return answer.result() if method == "generate" else answer


def asynchronous(address: str, method: str, *args: Any, sleeps: list[float], **kwargs: Any) -> Any:
    """The same of the asynchronous client."""
    settings = kwargs.pop("client", {})

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)

    async def run() -> Any:
        async with AsyncClient(address, sleep=sleep, jitter=lambda: 0.5, **settings) as client:
            answer = getattr(client, method)(*args, **kwargs)
            return await (answer.result() if method == "generate" else answer)

    return asyncio.run(run())
