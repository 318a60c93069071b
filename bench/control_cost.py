"""What one decode step costs the control plane, and what it costs the wire.

The real fleet, core and message conversion run against a worker that answers at once; every row's
tokens go to a stream that a client task reads. So the time between two plans, less the echo's own,
is all that the control plane does for a step: decode the result, update, deliver, wake the clients,
schedule, encode. It has no peer to be compared with, so it prints milliseconds and bytes;
bench/scheduler_cost.py has one.

    python -m bench.control_cost [--rows 256] [--steps 300] [--context 512]
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from dataclasses import dataclass, field

from bench import options as flags
from bench.results import Results
from control_plane.core.plan import StepPlan, StepResult, WeightVersion
from control_plane.core.request import Request, RequestId, SamplingParams, StopConditions
from control_plane.observability.metrics import Telemetry
from control_plane.rpc import convert
from control_plane.rpc.turns import Turns
from control_plane.shell.fleet import Fleet
from control_plane.shell.ports import Admit, Attachment, MemoryPool, WorkerInfo
from control_plane.shell.replica import ReplicaSettings
from control_plane.shell.stream import TokenStream
from twinplane.worker.v1 import model_runner_pb2, step_pb2

BLOCK_SIZE = 16
VOCABULARY = 49152


@dataclass(slots=True, eq=False)
class Samples:
    """One entry per decode step of all rows: seconds, and bytes each way."""

    step: list[float] = field(default_factory=list)
    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)


class EchoWorker:
    """Answers each plan at once with a token for every row that reaches its end."""

    def __init__(self, rows: int, length: int, samples: Samples, name: str = "echo") -> None:
        self._name = name
        self._rows = rows
        self._length = length
        self._samples = samples
        self._rng = random.Random(0)
        self._results: asyncio.Queue[bytes] = asyncio.Queue()
        self._prompt_ends: dict[int, int] = {}
        self._last: float | None = None
        self._echo_seconds = 0.0

    async def attach(self, epoch: int | None = None, admit: Admit | None = None) -> Attachment:
        blocks = self._rows * (self._length // BLOCK_SIZE + 2) + 1
        info = WorkerInfo(
            worker_id=self._name,
            incarnation_id=self._name,
            epoch=1,
            model_name="echo",
            vocabulary_size=VOCABULARY,
            weight_version=WeightVersion(1, "0" * 64),
            max_sequence_count=self._rows,
            max_step_token_count=8192,
            max_sequence_token_count=self._length,
            max_prompt_token_count=self._length,
            max_inflight_step_count=4,
            features=frozenset(),
            rank_count=1,
            device="echo",
        )
        if admit is not None:
            admit(info)
        return Attachment(info, MemoryPool(blocks, BLOCK_SIZE), previous_epoch=0)

    async def send(self, plan: StepPlan) -> None:
        started = time.perf_counter()
        message = model_runner_pb2.ExecuteRequest(
            forward=model_runner_pb2.ForwardRequest(plan=convert.plan_to_pb(plan))
        ).SerializeToString()
        encoded = time.perf_counter()
        counts = plan.scheduled.token_counts
        is_decode = not plan.added and counts == [1] * self._rows
        if is_decode and self._last is not None:
            self._samples.step.append(started - self._last - self._echo_seconds)
            self._samples.encode.append(encoded - started)
            self._samples.sent.append(len(message))
        self._results.put_nowait(self._answer(plan))
        self._last = started if is_decode else None
        self._echo_seconds = time.perf_counter() - encoded

    async def receive(self) -> StepResult:
        message = await self._results.get()
        started = time.perf_counter()
        response = model_runner_pb2.ExecuteResponse.FromString(message)
        result = convert.result_from_pb(response.forward.result)
        self._samples.decode.append(time.perf_counter() - started)
        self._samples.received.append(len(message))
        return result

    async def ping(self) -> None:
        """It is always there."""

    async def detach(self) -> None:
        """Nothing to close."""

    def _answer(self, plan: StepPlan) -> bytes:
        for added in plan.added:
            self._prompt_ends[added.row] = len(added.token_ids)
        scheduled = plan.scheduled
        rows = [
            row
            for row, start, count in zip(
                scheduled.rows, scheduled.start_positions, scheduled.token_counts, strict=True
            )
            if start + count >= self._prompt_ends[row]
        ]
        result = step_pb2.StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            rows=rows,
            tokens=[self._rng.randrange(VOCABULARY) for _ in rows],
        )
        return model_runner_pb2.ExecuteResponse(
            forward=model_runner_pb2.ForwardResponse(result=result)
        ).SerializeToString()


async def read(stream: TokenStream) -> int:
    """A client that takes tokens as they come; the number of takes."""
    takes, finish = 0, None
    while finish is None:
        finish = (await stream.take()).finish
        takes += 1
    return takes


async def ask(fleet: Fleet, group: asyncio.TaskGroup, count: int, context: int, steps: int) -> None:
    """So many clients, each with a prompt of `context` tokens, until each has `steps` tokens."""
    rng = random.Random(1)
    readers, turns = [], Turns()
    for index in range(count):
        stream = TokenStream(gate=turns)
        fleet.submit(
            Request(
                request_id=RequestId(str(index)),
                prompt_token_ids=tuple(rng.randrange(VOCABULARY) for _ in range(context)),
                sampling=SamplingParams(),
                seed=index,
                stop=StopConditions(max_tokens=steps),
                arrival=time.monotonic(),
            ),
            stream,
        )
        readers.append(group.create_task(read(stream)))
    await asyncio.wait(readers)


async def measure(rows: int, steps: int, context: int) -> Samples:
    samples = Samples()
    worker = EchoWorker(rows, context + steps + BLOCK_SIZE, samples)
    attached = asyncio.Event()
    fleet = Fleet(
        [worker],
        ReplicaSettings(),
        clock=time.monotonic,
        jitter=random.Random(0).random,
        metrics=Telemetry("bench"),
        on_readiness=lambda ready: attached.set() if ready else None,
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(fleet.run())
        await attached.wait()
        await ask(fleet, group, rows, context, steps)
        running.cancel()
    return samples


def main() -> None:
    parser = flags.parser(__doc__, rounds=1, peers=False)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--context", type=int, default=512)
    options = parser.parse_args()
    results = flags.open_results("control_cost", options)
    gc.collect()
    gc.freeze()
    for rows in options.rows:
        for _ in range(options.rounds):
            record(results, rows, asyncio.run(measure(rows, options.steps, options.context)))
    results.show()


def record(results: Results, rows: int, samples: Samples) -> None:
    """Milliseconds and bytes per step; the 99th percentile beside the median."""
    case = f"{rows} rows"
    for name, seconds in (
        ("whole step", samples.step),
        ("of it: encode the plan", samples.encode),
        ("of it: decode the result", samples.decode),
    ):
        results.measured(
            case, name, "ms", [1e3 * statistics.median(seconds)],
            p99=1e3 * statistics.quantiles(seconds, n=100)[98],
        )  # fmt: skip
    for name, sizes in (("plan", samples.sent), ("result", samples.received)):
        results.measured(case, name, "bytes", [statistics.median(sizes)], largest=max(sizes))


if __name__ == "__main__":
    main()
