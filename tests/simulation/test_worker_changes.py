"""Over sockets: a worker that comes back as another backend, or refuses one sequence's plans."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from control_plane.core.events import FinishReason
from control_plane.rpc import convert
from control_plane.rpc.answers import finished
from control_plane.rpc.errors import RowFailed, status_of
from control_plane.rpc.worker_client import GrpcWorker
from control_plane.shell.engine import EngineLost
from control_plane.shell.fleet import Fleet
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.stream import TokenStream
from tests.simulation.rig import Answer, read, request, until
from tests.simulation.test_loopback import COUNT, PROMPTS, alone, driven, facade, server
from tests.support import runner_rig, tiny_llama
from worker_service.domain.errors import PlanInvalid
from worker_service.domain.plan import RowFault, StepPlan
from worker_service.facade import WorkerFacade
from worker_service.rpc.convert import info_to_pb
from worker_service.runner.model_runner import ModelRunner
from worker_service.simulated.runner import SimulatedLatency

BAD_SEED = 666


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tiny_llama.llama(), tmp_path_factory.mktemp("llama"))


def test_the_name_of_the_arithmetic_is_the_backends_and_the_builds(llama: Path) -> None:
    """Equal for equal settings, whatever rounds alike; another for each backend. It crosses."""
    kinds = {
        "compiled": {"executor": "compiled"},
        "torch": {"executor": "torch", "attention_backend": "torch"},
        "reference": {"executor": "torch", "attention_backend": "reference"},
    }
    made = {name: runner_rig.build(llama, **kind).capability() for name, kind in kinds.items()}
    names = {name: capability.arithmetic for name, capability in made.items()}
    assert all(names.values()) and len(set(names.values())) == 3
    assert len({capability.weight_version for capability in made.values()}) == 1
    for changes in ({"block_size": 8}, {"thread_count": 1}, {"max_step_token_count": 16}):
        again = runner_rig.build(llama, executor="compiled", **changes).capability()
        assert again.arithmetic == names["compiled"]


async def submit(fleet: Fleet, group: asyncio.TaskGroup, names: Sequence[str]) -> list[Answer]:
    answers = []
    for number, name in enumerate(names):
        stream, answer = TokenStream(), Answer()
        prompt = [token % tiny_llama.VOCABULARY for token in PROMPTS[name]]
        asked = request(name, prompt, COUNT, arrival=time.monotonic(), seed=number)
        fleet.submit(asked, stream)
        group.create_task(read(stream, answer))
        answers.append(answer)
    return answers


async def test_a_worker_that_comes_back_as_another_backend_ends_what_has_tokens(
    llama: Path, tmp_path: Path
) -> None:
    names = list(PROMPTS)[:6]
    uds = tmp_path / "worker.sock"

    async def serving(stack: AsyncExitStack, build: Callable[[], ModelRunner]) -> WorkerFacade:
        worker = WorkerFacade(build, worker_id="w", incarnation_id=str(time.monotonic()))
        await worker.load()
        stack.push_async_callback(worker.close)
        await stack.enter_async_context(server(worker, uds))
        return worker

    port = GrpcWorker(f"unix:{uds}", controller_id="test", attach_timeout=5.0)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(AsyncExitStack())
        worker = await serving(first, lambda: runner_rig.build(llama, executor="compiled"))
        crossed = convert.info_from_pb(info_to_pb(worker.worker_info()))
        assert crossed.arithmetic == worker.worker_info().capability.arithmetic != ""
        fleet = await stack.enter_async_context(driven(port, SchedulingSettings()))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        whole = await submit(fleet, group, names)
        await until(lambda: all(answer.end_count for answer in whole))
        begun = await submit(fleet, group, names)
        await until(lambda: any(answer.tokens for answer in begun))
        await first.aclose()
        cut = [len(answer.tokens) for answer in begun]
        other = {"executor": "torch", "attention_backend": "reference"}
        await serving(stack, lambda: runner_rig.build(llama, **other))
        await until(lambda: all(answer.end_count for answer in begun))
    assert any(0 < count < COUNT for count in cut)
    for expected, answer, count in zip(whole, begun, cut, strict=True):
        if 0 < count < COUNT:
            assert isinstance(answer.error, EngineLost), "tokens of two minds in one stream"
            assert answer.tokens == expected.tokens[: len(answer.tokens)]
        else:
            assert answer.finish is not None and len(answer.tokens) == COUNT


@pytest.mark.parametrize("effect", ["refuses", "fails"])
async def test_the_request_that_is_to_blame_ends_alone(effect: str) -> None:
    """Beside one whose prompt is longer than a step: its chunks come back in every claim."""
    expected = await alone()
    added: set[int] = set()

    def provoke(plan: StepPlan) -> list[RowFault]:
        for index, sequence in enumerate(plan.added):
            if sequence.sampling.seed == BAD_SEED:
                added.add(plan.epoch)
                if effect == "refuses":
                    path = f"plan.added[{index}].sampling.top_k"
                    raise PlanInvalid(path, "made up", [sequence.row])
                raise MemoryError
        return []

    names = [name for name in PROMPTS if len(PROMPTS[name]) > 32] + ["r0", "r1"]
    async with AsyncExitStack() as stack:
        latency = SimulatedLatency(step=0.002)
        worker = await stack.enter_async_context(facade(latency=latency, provoke=provoke))
        address = await stack.enter_async_context(server(worker))
        port = GrpcWorker(address, controller_id="test")
        fleet = await stack.enter_async_context(driven(port, SchedulingSettings()))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        answers = {name: Answer() for name in [*names, "bad"]}
        for name in answers:
            prompt = [9, 9, 9] if name == "bad" else PROMPTS[name]
            seed = BAD_SEED if name == "bad" else 0
            asked = request(name, prompt, COUNT, arrival=time.monotonic(), seed=seed)
            stream = TokenStream()
            fleet.submit(asked, stream)
            group.create_task(read(stream, answers[name]))
        await until(lambda: all(answer.end_count for answer in answers.values()))
        await until(lambda: not fleet.replicas[0].stats().inflight)  # type: ignore[union-attr]
        stats, pool = fleet.replicas[0].stats(), await worker.memory_pool()
        claims = worker.worker_info().epoch
    assert stats is not None
    assert stats.running == stats.waiting == stats.kv_active_tokens == pool.used_block_count == 0
    for name in names:
        assert answers[name].tokens == expected[name], "a neighbour lost something"
    finish = answers["bad"].finish
    assert finish is not None and finish.reason is FinishReason.FAULT
    assert len(added) == (1 if effect == "refuses" else 5) == claims - 1
    with pytest.raises(RowFailed) as raised:
        finished(finish, None)
    status = status_of(raised.value)
    assert status is not None and (status.code.name, status.reason) == ("INTERNAL", "ROW_FAULT")
