"""What both clients give when a generation breaks, and when they can't be used any more."""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

import twinplane
from tests.support.client_callers import Call
from tests.support.scripted_inference import (
    Fail,
    Hang,
    ScriptedInference,
    delta,
    finished,
    serve,
    started,
)
from twinplane import (
    AsyncClient,
    Client,
    ClientUnusable,
    PartialGeneration,
)

# --- the text so far ----------------------------------------------------------------------------

BREAKS = [
    Fail(grpc.StatusCode.UNAVAILABLE),
    Fail(grpc.StatusCode.INTERNAL),
    Fail(grpc.StatusCode.CANCELLED),
    Fail(grpc.StatusCode.RESOURCE_EXHAUSTED),
]
SO_FAR = PartialGeneration("Hello", (1, 2), seed=7, request_id="r-1", model="m")


@pytest.mark.parametrize("end", [*BREAKS, None, started()], ids=lambda end: str(end)[:40])
def test_a_broken_generation_keeps_what_came(
    call: Call, service: ScriptedInference, end: Any
) -> None:
    script = [started(), delta("Hel", 1), delta("lo", 2)]
    service.scripts.append(script if end is None else [*script, end])
    with pytest.raises(twinplane.TwinplaneError) as caught:
        call("generate", "x")
    assert caught.value.partial == SO_FAR


def test_without_a_beginning_there_is_nothing_to_keep(
    call: Call, service: ScriptedInference
) -> None:
    service.scripts.append([Fail(grpc.StatusCode.INTERNAL)])
    with pytest.raises(twinplane.InternalError) as caught:
        call("generate", "x")
    assert caught.value.partial is None


def test_a_deadline_and_a_cancelled_call_say_so_plainly(service: ScriptedInference) -> None:
    service.scripts.extend([[started(), delta("Hello", 1, 2), Hang()]] * 2)
    with serve(service) as address, Client(address) as client:
        with pytest.raises(twinplane.DeadlineExceeded) as late:
            client.generate("x", timeout=0.5).result()
        assert str(late.value) == f"{address} had not answered in full after 0.5 s"
        assert late.value.partial == SO_FAR
        generation = client.generate("x")
        deltas = iter(generation)
        next(deltas)
        generation.cancel()
        with pytest.raises(
            twinplane.Cancelled, match=r"^the call was cancelled by its client$"
        ) as left:
            next(deltas)
        assert left.value.partial == SO_FAR


# --- one answer for one call --------------------------------------------------------------------


def test_complete_gives_what_generate_gives(call: Call, service: ScriptedInference) -> None:
    end = finished(stop_token_id=0, arithmetic_changed=True, usage={"completion_token_count": 2})
    service.scripts.extend([[started(), delta("Hel", 1), delta("lo", 2), end]] * 2)
    options = {"max_tokens": 5, "seed": 3, "stop": ["x"], "request_id": "mine", "priority": 2}
    assert call("complete", "Say", **options) == call("generate", "Say", **options)
    whole, streamed = service.requests
    assert whole.SerializeToString() == streamed.SerializeToString()


# --- closed, in another loop, in another process --------------------------------------------------

METHODS: list[tuple[str, list[Any]]] = [
    ("generate", ["x"]), ("complete", ["x"]), ("tokenize", ["x"]), ("detokenize", [[1]]),
    ("list_models", []), ("list_workers", []), ("health", []), ("wait_ready", []),
]  # fmt: skip
every_method = pytest.mark.parametrize(("method", "arguments"), METHODS)


@every_method
def test_a_closed_client_says_so(
    service: ScriptedInference, method: str, arguments: list[Any]
) -> None:
    with serve(service) as address:
        client = Client(address)
        client.close()
        client.close()
        with pytest.raises(ClientUnusable, match="was closed"):
            getattr(client, method)(*arguments)


@every_method
@pytest.mark.parametrize("used", [True, False])
async def test_a_closed_async_client_says_so(
    service: ScriptedInference, method: str, arguments: list[Any], used: bool
) -> None:
    with serve(service) as address:
        client = AsyncClient(address)
        if used:
            await client.list_models()
        await client.close()
        await client.close()
        with pytest.raises(ClientUnusable, match="was closed"):
            await _called(client, method, arguments)


@pytest.mark.parametrize("method", ["generate", "complete"])
def test_closing_during_a_wait_ends_the_attempts(service: ScriptedInference, method: str) -> None:
    with serve(service) as address:
        service.failures.extend([Fail(grpc.StatusCode.UNAVAILABLE)] * 2)
        clients: list[Client] = []
        clients.append(Client(address, sleep=lambda _: clients[0].close()))
        with pytest.raises(ClientUnusable):
            answer = getattr(clients[0], method)("x")
            answer.result()

        async def again() -> None:
            async def close(_: float) -> None:
                await client.close()

            client = AsyncClient(address, sleep=close)
            await _called(client, method, ["x"])

        with pytest.raises(ClientUnusable):
            asyncio.run(again())


@every_method
def test_another_event_loop_is_refused_without_noise(
    service: ScriptedInference, method: str, arguments: list[Any]
) -> None:
    with serve(service) as address, warnings.catch_warnings():
        warnings.simplefilter("error")
        client = AsyncClient(address)

        async def first() -> None:
            assert await client.list_models()

        async def second() -> None:
            with pytest.raises(ClientUnusable, match="another event loop"):
                await _called(client, method, arguments)
            await client.close()

        asyncio.run(first())
        asyncio.run(second())
        gc.collect()


def test_without_an_event_loop(service: ScriptedInference) -> None:
    with serve(service) as address, pytest.raises(ClientUnusable, match="event loop"):
        AsyncClient(address).generate("x")


def test_another_process_is_refused(
    service: ScriptedInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(address: str) -> None:
        async with AsyncClient(address) as client:
            await client.list_models()
            monkeypatch.setattr(os, "getpid", lambda: -1)
            with pytest.raises(ClientUnusable, match="forked"):
                await client.list_models()
            monkeypatch.undo()

    with serve(service) as address:
        asyncio.run(run(address))


async def _called(client: AsyncClient, method: str, arguments: list[Any]) -> object:
    call: Callable[..., Any] = getattr(client, method)
    answer = call(*arguments)
    awaited: Awaitable[object] = answer.result() if method == "generate" else answer
    return await awaited
