"""Output rate of two pipeline stages: rows in turns, all rows in each step, and one rank.

Three workers of one machine, in the torch executor: one rank with two threads, and two stages of
one thread each. All get the same prompts from the same fleet, one after another. A controller that
does not know of stages schedules every row in each step, so that one stage waits for the other.

Two steps of half the rows are more work than one of all: each reads all weights. Stages in turns do
both at once, which is no slower where each stage has a device of its own, and the faster the more a
step's time grows with its rows. On cores that others use, too, it is slower.

    python -m bench.pipeline_stages [--rows 2 8 32]
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import replace

from bench import fleet
from bench import options as flags
from bench.contestants import VOCABULARY
from bench.load import random_prompts
from bench.results import Measurement
from bench.service import free_port, worker_process
from control_plane.core.plan import Message, StepResult
from control_plane.rpc.worker_client import GrpcWorker
from control_plane.shell.ports import Admit, Attachment, RankCoordinates, Worker
from control_plane.shell.rank_group import RankGroupWorker

STAGES = 2
# Wanted of turns against all at once on two idle cores, by rows.
_AT_LEAST = {32: 1.1}


class OneStage:
    """A Worker whose controller does not know that it has stages."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def attach(self, epoch: int | None = None, admit: Admit | None = None) -> Attachment:
        attachment = await self._worker.attach(epoch, admit)
        return replace(attachment, info=replace(attachment.info, ranks=RankCoordinates()))

    async def send(self, message: Message) -> None:
        await self._worker.send(message)

    async def receive(self) -> StepResult:
        return await self._worker.receive()

    async def ping(self) -> None:
        await self._worker.ping()

    async def detach(self) -> None:
        await self._worker.detach()


def main() -> None:
    parser = flags.parser(__doc__, rounds=3, peers=False)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    options = parser.parse_args()
    results = flags.open_results("pipeline_stages", options)
    with contextlib.ExitStack() as stack:

        def started(*arguments: str) -> str:
            address = f"127.0.0.1:{free_port()}"
            port = address.rpartition(":")[2]
            model = ("--model", options.model, "--device", "cpu", "--dtype", "float32")
            arguments_of_one = ("--port", port, *model, "--executor", "torch", *arguments)
            stack.enter_context(worker_process(address, *arguments_of_one))
            return address

        one = started("--threads", str(STAGES))
        sizes = ("--pipeline-parallel-size", str(STAGES), "--threads", "1")
        stages = [started(*sizes, "--rank", str(rank)) for rank in range(STAGES)]
        keys = itertools.count()

        def worker(name: str) -> Worker:
            if name == "one rank":
                return GrpcWorker(one, controller_id="bench")
            ranks = [GrpcWorker(address, controller_id="bench") for address in stages]
            group = RankGroupWorker(ranks, new_key=lambda: f"bench-{next(keys)}")
            return group if name == "stages, in turns" else OneStage(group)

        async def rate(name: str, rows: int, seed: int) -> float:
            length: int = options.prompt_tokens
            count: int = options.output_tokens
            async with fleet.running(worker(name)) as made:
                await made.generate(random_prompts(rows, length, VOCABULARY, seed + 1), 4)
                seconds = await made.generate(random_prompts(rows, length, VOCABULARY, seed), count)
            return rows * count / seconds

        for rows in options.rows:
            names = ("one rank", "stages, all at once", "stages, in turns")
            samples: dict[str, list[float]] = {name: [] for name in names}
            for number in range(options.rounds):
                for name in names:
                    samples[name].append(asyncio.run(rate(name, rows, 1000 * rows + 2 * number)))
            case = f"{rows} rows"
            measured: dict[str, Measurement] = {
                name: results.measured(case, name, "output tok/s", taken)
                for name, taken in samples.items()
            }
            turns = measured["stages, in turns"]
            results.compared(
                turns,
                measured["stages, all at once"],
                "output rate",
                at_least=_AT_LEAST.get(rows),
            )
            results.compared(turns, measured["one rank"], "output rate")
    results.show()


if __name__ == "__main__":
    main()
