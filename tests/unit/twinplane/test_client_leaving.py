"""Leaving a generation, by whatever way, ends it on the server. Each test waits for the server."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator

import grpc
import pytest

import twinplane
from tests.support.scripted_inference import (
    PATIENCE,
    Fail,
    Hang,
    ScriptedInference,
    delta,
    finished,
    serve,
    started,
)
from twinplane import AsyncClient, Client, RetryPolicy


@pytest.fixture
def service() -> ScriptedInference:
    service = ScriptedInference()
    service.scripts.append([started(), delta("a", 1), delta("b", 2), Hang()])
    return service


@pytest.fixture
def address(service: ScriptedInference) -> Iterator[str]:
    with serve(service) as address:
        yield address


# --- blocking -----------------------------------------------------------------------------------


def test_reading_delta_by_delta(address: str, service: ScriptedInference) -> None:
    with Client(address) as client, client.generate("x") as generation:
        assert (generation.seed, generation.request_id) == (None, None)
        deltas = iter(generation)
        assert next(deltas) == twinplane.Delta("a", (1,))
        assert (generation.seed, generation.request_id) == (7, "r-1")
        assert (generation.prompt_token_count, generation.model) == (3, "m")
        assert next(deltas) == twinplane.Delta("b", (2,))


def test_break_cancels_though_the_generation_is_kept(
    address: str, service: ScriptedInference
) -> None:
    with Client(address) as client:
        generation = client.generate("x")
        for _ in generation:
            break
        assert service.left.acquire(timeout=PATIENCE)
        with pytest.raises(twinplane.Cancelled):
            generation.result()


def test_exception_in_the_loop_cancels(address: str, service: ScriptedInference) -> None:
    with Client(address) as client:
        with pytest.raises(LookupError):
            for _ in client.generate("x"):
                raise LookupError
        assert service.left.acquire(timeout=PATIENCE)


def test_leaving_the_block_cancels(address: str, service: ScriptedInference) -> None:
    with Client(address) as client:
        with client.generate("x"):
            assert service.hanging.acquire(timeout=PATIENCE)
        assert service.left.acquire(timeout=PATIENCE)


def test_closing_the_iterator_cancels(address: str, service: ScriptedInference) -> None:
    with Client(address) as client:
        generation = client.generate("x")
        deltas = iter(generation)
        next(deltas)
        deltas.close()  # type: ignore[attr-defined]
        assert service.left.acquire(timeout=PATIENCE)


def test_a_generation_nobody_keeps_is_cancelled(address: str, service: ScriptedInference) -> None:
    with Client(address) as client:
        generation = client.generate("x")
        assert service.hanging.acquire(timeout=PATIENCE)
        del generation
        gc.collect()
        assert service.left.acquire(timeout=PATIENCE)


def test_cancel_from_another_thread_wakes_the_reader(
    address: str, service: ScriptedInference
) -> None:
    with Client(address) as client:
        generation = client.generate("x")

        def cancel() -> None:
            assert service.hanging.acquire(timeout=PATIENCE)
            generation.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        with pytest.raises(twinplane.Cancelled):
            generation.result()
        thread.join()
        assert service.left.acquire(timeout=PATIENCE)


def test_cancel_between_two_attempts_holds(address: str, service: ScriptedInference) -> None:
    service.failures.append(Fail(grpc.StatusCode.UNAVAILABLE))
    generation: list[twinplane.Generation] = []
    with Client(address, sleep=lambda _: generation[0].cancel()) as client:
        generation.append(client.generate("x"))
        with pytest.raises(twinplane.Cancelled):
            generation[0].result()


def test_deadline_passes(address: str, service: ScriptedInference) -> None:
    with Client(address) as client:
        with pytest.raises(twinplane.DeadlineExceeded):
            client.generate("x", timeout=0.3).result()
        assert service.left.acquire(timeout=PATIENCE)


def test_closing_the_client_ends_what_runs(address: str, service: ScriptedInference) -> None:
    client = Client(address)
    generation = client.generate("x")
    assert service.hanging.acquire(timeout=PATIENCE)
    client.close()
    assert service.left.acquire(timeout=PATIENCE)
    with pytest.raises(twinplane.Cancelled):
        generation.result()


def test_a_finished_generation_can_be_cancelled_and_asked_again(
    address: str, service: ScriptedInference
) -> None:
    service.scripts[0] = [started(), delta("a", 1), finished()]
    with Client(address) as client, client.generate("x") as generation:
        first = generation.result()
        generation.cancel()
        assert list(generation) == []
        assert generation.result() == first


# --- asynchronous -------------------------------------------------------------------------------


async def _acquired(semaphore: threading.Semaphore) -> bool:
    return await asyncio.to_thread(semaphore.acquire, timeout=PATIENCE)


async def test_async_reading_delta_by_delta(address: str) -> None:
    async with AsyncClient(address) as client, client.generate("x") as generation:
        assert (generation.seed, generation.request_id) == (None, None)
        deltas = aiter(generation)
        assert await anext(deltas) == twinplane.Delta("a", (1,))
        assert (generation.seed, generation.request_id) == (7, "r-1")
        assert (generation.prompt_token_count, generation.model) == (3, "m")
        assert await anext(deltas) == twinplane.Delta("b", (2,))


async def test_async_break_cancels_though_the_generation_is_kept(
    address: str, service: ScriptedInference
) -> None:
    async with AsyncClient(address) as client:
        generation = client.generate("x")
        async for _ in generation:
            break
        assert await _acquired(service.left)
        with pytest.raises(twinplane.Cancelled):
            await generation.result()


async def test_async_exception_in_the_loop_cancels(
    address: str, service: ScriptedInference
) -> None:
    async with AsyncClient(address) as client:
        with pytest.raises(LookupError):
            async for _ in client.generate("x"):
                raise LookupError
        assert await _acquired(service.left)


async def test_async_leaving_the_block_cancels(address: str, service: ScriptedInference) -> None:
    async with AsyncClient(address) as client:
        async with client.generate("x"):
            assert await _acquired(service.hanging)
        assert await _acquired(service.left)


async def test_async_generation_nobody_keeps_is_cancelled(
    address: str, service: ScriptedInference
) -> None:
    async with AsyncClient(address) as client:
        generation = client.generate("x")
        assert await _acquired(service.hanging)
        del generation
        gc.collect()
        assert await _acquired(service.left)


async def _result(client: AsyncClient) -> None:
    await client.generate("x").result()


async def _loop(client: AsyncClient) -> None:
    async for _ in client.generate("x"):
        pass


@pytest.mark.parametrize("read", [_result, _loop])
async def test_cancelling_the_task_cancels_the_call(
    address: str, service: ScriptedInference, read: Callable[[AsyncClient], Awaitable[None]]
) -> None:
    async with AsyncClient(address) as client:
        task = asyncio.ensure_future(read(client))
        assert await _acquired(service.hanging)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert await _acquired(service.left)


async def test_async_timeout_around_a_generation_cancels_the_call(
    address: str, service: ScriptedInference
) -> None:
    async with AsyncClient(address) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as patience:

                async def end_once_it_runs() -> None:
                    await _acquired(service.hanging)
                    patience.reschedule(0.0)

                async with asyncio.TaskGroup() as group:
                    group.create_task(end_once_it_runs())
                    await client.generate("x").result()
        assert await _acquired(service.left)


async def test_async_cancel_from_another_task_wakes_the_reader(
    address: str, service: ScriptedInference
) -> None:
    async with AsyncClient(address) as client:
        generation = client.generate("x")
        reader = asyncio.create_task(generation.result())
        assert await _acquired(service.hanging)
        generation.cancel()
        with pytest.raises(twinplane.Cancelled):
            await reader
        assert await _acquired(service.left)


async def test_async_cancel_between_two_attempts_holds(
    address: str, service: ScriptedInference
) -> None:
    service.failures.append(Fail(grpc.StatusCode.UNAVAILABLE))
    generation: list[twinplane.AsyncGeneration] = []

    async def sleep(_: float) -> None:
        generation[0].cancel()

    async with AsyncClient(address, sleep=sleep) as client:
        generation.append(client.generate("x"))
        with pytest.raises(twinplane.Cancelled):
            await generation[0].result()


async def test_async_deadline_passes(address: str, service: ScriptedInference) -> None:
    async with AsyncClient(address) as client:
        with pytest.raises(twinplane.DeadlineExceeded):
            await client.generate("x", timeout=0.3).result()
        assert await _acquired(service.left)


async def test_closing_the_async_client_ends_what_runs(
    address: str, service: ScriptedInference
) -> None:
    client = AsyncClient(address)
    reader = asyncio.create_task(client.generate("x").result())
    assert await _acquired(service.hanging)
    await client.close()
    with pytest.raises(twinplane.Cancelled):
        await reader
    assert await _acquired(service.left)


async def test_an_async_client_is_made_outside_the_loop_it_serves(address: str) -> None:
    client = await asyncio.to_thread(AsyncClient, address, retry=RetryPolicy(max_attempts=1))
    async with client:
        assert [model.name for model in await client.list_models()] == ["m"]
