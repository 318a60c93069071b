"""How near a whole decode step comes to what the machine allows.

The peaks, memory read and float32 products on all threads, are measured in the same run by the
best of several programs. A step's floor is the larger of its weights' bytes and its arithmetic,
plus the same of its KV, which is read after them. (int8 products are cheaper than the float32 ones
that its floor counts.) The step is the runner's own, inputs, model and
sampler, as the device thread executes it for the driver; plans don't overlap here.

    python -m bench.floor [--rows 1 32] [--quantization int8]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from dataclasses import dataclass

from bench import fleet
from bench import options as flags
from bench.load import random_prompts
from bench.results import Results
from bench.split_cost import VOCABULARY, in_process
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.ports import Worker
from twinplane.models import resolve
from twinplane.process.event_loop import new_event_loop

_AT_LEAST = {1: 0.85, 32: 0.75}
_INT8_GROUP_BYTES = 1 + 4 / 128


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-like model's sizes: `parameters` are those of all linear layers and the head."""

    parameters: int
    layers: int
    kv_width: int
    query_width: int


def read_shape(model: str) -> Shape:
    """From the model's config.json."""
    config = json.loads((resolve(model) / "config.json").read_text())
    hidden, inner, heads = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    head_dim = config.get("head_dim") or hidden // heads
    kv_width, query_width = config["num_key_value_heads"] * head_dim, heads * head_dim
    layers = config["num_hidden_layers"]
    per_layer = hidden * (2 * query_width + 2 * kv_width) + 3 * hidden * inner
    return Shape(layers * per_layer + config["vocab_size"] * hidden, layers, kv_width, query_width)


def main() -> None:
    parser = flags.parser(__doc__, rounds=3, peers=False)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--quantization", default=None, choices=["int8"])
    options = parser.parse_args()
    kind = options.quantization or "float32"
    results = flags.open_results("floor" if kind == "float32" else f"floor_{kind}", options)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(measure(options, results, kind))
    results.show()


async def measure(options: argparse.Namespace, results: Results, kind: str) -> None:
    shape = read_shape(options.model)
    samples: dict[int, list[float]] = {rows: [] for rows in options.rows}
    floors: dict[int, list[float]] = {rows: [] for rows in options.rows}
    async with in_process(options) as worker:
        # Not before: torch reads its settings when it is imported, and the worker makes them.
        from bench.kernels import measure_peaks, open_kernels

        cpu = open_kernels(os.cpu_count() or 1)
        for number in range(options.rounds):
            peaks = measure_peaks(cpu, 7)
            results.measured(
                f"round {number + 1}", "peak read", "GB/s", [peaks.read_gigabytes_per_second]
            )
            results.measured(
                f"round {number + 1}", "peak float32", "GFLOP/s", [peaks.float32_gigaflops]
            )
            for rows in options.rows:
                times = await decode(options, worker, rows, number)
                samples[rows] += times
                context = options.prompt_tokens + options.output_tokens / 2
                size = 4.0 if kind == "float32" else _INT8_GROUP_BYTES
                floors[rows].append(
                    peaks.floor(shape.parameters * size, 2.0 * shape.parameters * rows)
                    + peaks.floor(
                        8.0 * rows * context * shape.kv_width * shape.layers,
                        4.0 * rows * context * shape.query_width * shape.layers,
                    )
                )
    for rows in options.rows:
        case = f"decode step, {kind}, {rows} rows"
        step = results.measured(case, "twinplane", "ms", [1e3 * each for each in samples[rows]])
        floor = results.measured(case, "floor", "ms", [1e3 * each for each in floors[rows]])
        results.ratio(
            case, "floor", "twinplane", "share of the floor's rate reached",
            floor.median / step.median,
            at_least=_AT_LEAST.get(rows) if kind == "float32" else None,
        )  # fmt: skip


async def decode(
    options: argparse.Namespace, worker: Worker, rows: int, number: int
) -> list[float]:
    """Seconds of each step in which all rows decoded."""
    timed = fleet.StepTimes(worker, rows)
    plain = SchedulingSettings(async_scheduling=False)
    prompts = random_prompts(rows, options.prompt_tokens, VOCABULARY, 1000 * rows + number)
    async with fleet.running(timed, plain) as made:
        await made.generate(prompts, options.output_tokens)
    return timed.seconds[3:]


if __name__ == "__main__":
    main()
