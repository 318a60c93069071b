"""What one decode step costs the control plane, and what it costs the wire.

The real driver, core and message conversion run against a worker that answers at once; every row's
tokens go to a stream that a client task reads. So the time between two plans, less the echo's own,
is all that the control plane does for a step: decode the result, update, deliver, wake the clients,
schedule, encode. It has no peer to be
compared with, so it prints milliseconds and bytes; bench/scheduler_cost.py has one.

    python bench/control_cost.py [--rows 256] [--steps 300] [--context 512]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import time
from dataclasses import dataclass, field

from control_plane.core.plan import StepPlan, StepResult, WeightVersion
from control_plane.core.request import Request, RequestId
from control_plane.core.sampling_params import SamplingParams, StopConditions
from control_plane.observability.metrics import Telemetry
from control_plane.rpc import convert
from control_plane.shell.driver import Driver, DriverSettings
from control_plane.shell.ports import MemoryPool, WorkerInfo
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

    def __init__(self, rows: int, length: int, samples: Samples) -> None:
        self._rows = rows
        self._length = length
        self._samples = samples
        self._rng = random.Random(0)
        self._results: asyncio.Queue[bytes] = asyncio.Queue()
        self._prompt_ends: dict[int, int] = {}
        self._last: float | None = None
        self._echo_seconds = 0.0

    async def attach(self, epoch: int | None = None) -> tuple[WorkerInfo, MemoryPool]:
        blocks = self._rows * (self._length // BLOCK_SIZE + 2) + 1
        info = WorkerInfo(
            worker_id="echo",
            incarnation_id="1",
            epoch=1,
            model_name="echo",
            architecture="Echo",
            vocabulary_size=VOCABULARY,
            data_type="float32",
            weight_version=WeightVersion(1, "0" * 64),
            max_sequence_count=self._rows,
            max_step_token_count=8192,
            max_sequence_token_count=self._length,
            max_prompt_token_count=self._length,
            max_inflight_step_count=4,
            features=frozenset(),
            device="echo",
            attention_backend="none",
        )
        return info, MemoryPool(blocks, BLOCK_SIZE, 1)

    async def send(self, plan: StepPlan) -> None:
        started = time.perf_counter()
        message = model_runner_pb2.ExecuteRequest(
            forward=model_runner_pb2.ForwardRequest(plan=convert.plan_to_pb(plan))
        ).SerializeToString()
        encoded = time.perf_counter()
        is_decode = not plan.added and plan.token_count == self._rows == len(plan.scheduled.rows)
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
        _, finish = await stream.take()
        takes += 1
    return takes


async def measure(rows: int, steps: int, context: int) -> Samples:
    samples = Samples()
    worker = EchoWorker(rows, context + steps + BLOCK_SIZE, samples)
    attached = asyncio.Event()
    driver = Driver(
        worker,
        DriverSettings(),
        clock=time.monotonic,
        rng=random.Random(0),
        telemetry=Telemetry("bench"),
        on_readiness=lambda ready: attached.set() if ready else None,
    )
    async with asyncio.TaskGroup() as group:
        engine = group.create_task(driver.run())
        await attached.wait()
        rng = random.Random(1)
        readers = []
        for index in range(rows):
            stream = TokenStream()
            driver.submit(
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
        engine.cancel()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--context", type=int, default=512)
    arguments = parser.parse_args()
    gc.collect()
    gc.freeze()
    samples = asyncio.run(measure(arguments.rows, arguments.steps, arguments.context))
    median = statistics.median(samples.step)
    print(
        json.dumps(
            {
                "rows": arguments.rows,
                "decode_steps": len(samples.step),
                "control_ms_per_step": {
                    "median": round(median * 1e3, 3),
                    "p99": round(statistics.quantiles(samples.step, n=100)[98] * 1e3, 3),
                },
                "of_which_encode_ms": round(statistics.median(samples.encode) * 1e3, 3),
                "of_which_decode_ms": round(statistics.median(samples.decode) * 1e3, 3),
                "plan_bytes": {"median": statistics.median(samples.sent), "max": max(samples.sent)},
                "result_bytes": {"max": max(samples.received)},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
