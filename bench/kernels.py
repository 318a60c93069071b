"""The CPU kernels against torch, oneDNN and the machine's peaks, alternating in one run.

Shapes are SmolLM2-135M's: 30 layers and the head, all weights distinct, so that they come from
memory as in a real step. The floor of a case is the larger of its bytes at the machine's best
read rate and its arithmetic at the machine's best float32 rate, both measured in this run by the
best of several programs.

    python -m bench.kernels [--threads 2] [--rounds 7] [--only linear attention step]
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from bench import options as flags
from bench.results import Measurement, Results
from worker_service.domain.batch import StepBatch
from worker_service.kernels.cpu.compiler import default_cache, ensure_library
from worker_service.kernels.cpu.decoder import Decoder, DecoderLayer, DecoderShape, Projection
from worker_service.kernels.cpu.library import Context
from worker_service.kernels.cpu.ops import (
    CpuKernels,
    PackedWeight,
    PagedCache,
    RopeTables,
)

LAYERS, HIDDEN, INNER, VOCABULARY = 30, 576, 1536, 49152
Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 16
QKV = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
LAYER_SHAPES = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
GROUP = 128

Program = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Peaks:
    """The machine's best, all threads."""

    read_gigabytes_per_second: float
    float32_gigaflops: float

    def floor(self, byte_count: float, flop_count: float) -> float:
        """Seconds below which no float32 program can do it."""
        return max(
            byte_count / self.read_gigabytes_per_second, flop_count / self.float32_gigaflops
        ) / 1e9  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """One program in one case; milliseconds."""

    case: str
    program: str
    best: float
    median: float
    floor: float


def alternate(programs: dict[str, Program], repeats: int) -> dict[str, list[float]]:
    """Seconds of each program, one run of each in turn, after one unmeasured."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(repeats + 1):
        for name, program in programs.items():
            started = time.perf_counter()
            program()
            if repeat:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def measure(
    case: str, programs: dict[str, Program], repeats: int, floor: float
) -> Iterator[Measured]:
    for name, seconds in alternate(programs, repeats).items():
        best, median = min(seconds), statistics.median(seconds)
        yield Measured(case, name, best * 1e3, median * 1e3, floor * 1e3)


def measure_peaks(cpu: CpuKernels, repeats: int) -> Peaks:
    """The best of torch's reductions and of our own stream; of torch's product and ours."""
    size = 512 << 20
    data = torch.empty(size // 4)
    cpu.context.advise_huge_pages(data.data_ptr(), size)
    data.fill_(1)
    wide = cpu.pack(data.view(-1, 1024))
    row, out = torch.ones(1, 1024), torch.empty(1, wide.out_features)
    reads = alternate(
        {
            "sum": data.sum,
            "max": data.max,
            "dot": lambda: torch.dot(data, data),
            "ours": lambda: cpu.linear(row, wide, out),
        },
        repeats,
    )
    square = torch.randn(1536, 1536)
    packed, product = cpu.pack(square), torch.empty(1536, 1536)
    products = alternate(
        {
            "mm": lambda: torch.mm(square, square, out=product),
            "ours": lambda: cpu.linear(square, packed, product),
        },
        2 * repeats,
    )
    return Peaks(
        size / min(min(each) for each in reads.values()) / 1e9,
        2 * 1536**3 / min(min(each) for each in products.values()) / 1e9,
    )


def linear_cases(cpu: CpuKernels, peaks: Peaks, repeats: int) -> Iterator[Measured]:
    """All of a step's products at several numbers of rows."""
    weights = [torch.randn(shape) * 0.02 for _ in range(LAYERS) for shape in LAYER_SHAPES]
    weights.append(torch.randn(VOCABULARY, HIDDEN) * 0.02)
    full = [cpu.pack(weight) for weight in weights]
    quantized = [cpu.pack(weight, group_size=GROUP) for weight in weights]
    parameters = sum(weight.numel() for weight in weights)
    for rows in (1, 8, 32, 256):
        inputs = {width: torch.randn(rows, width) for width in (HIDDEN, INNER)}
        outputs = {weight.shape[0]: torch.empty(rows, weight.shape[0]) for weight in weights}
        blocked = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights]

        def ours(
            packed: list[PackedWeight],
            inputs: dict[int, torch.Tensor] = inputs,
            outputs: dict[int, torch.Tensor] = outputs,
        ) -> None:
            for each in packed:
                cpu.linear(inputs[each.in_features], each, outputs[each.out_features])

        def plain(inputs: dict[int, torch.Tensor] = inputs) -> None:
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)

        def onednn(
            blocked: list[torch.Tensor] = blocked, inputs: dict[int, torch.Tensor] = inputs
        ) -> None:
            for weight, each in zip(weights, blocked, strict=True):
                torch.ops.mkldnn._linear_pointwise(
                    inputs[weight.shape[1]], each, None, "none", [], ""
                )

        flops = 2.0 * parameters * rows
        for name, size in (("float32", 4.0), ("int8", 1 + 4 / GROUP)):
            programs: dict[str, Program] = (
                {"ours": lambda: ours(full), "torch": plain, "oneDNN packed": onednn}
                if name == "float32"
                else {"ours": lambda: ours(quantized)}
            )
            floor = peaks.floor(parameters * size, flops)
            yield from measure(f"linear {name}, {rows} rows", programs, repeats, floor)


def make_batch(lengths: list[int], contexts: list[int]) -> StepBatch:
    """Sequences of scattered blocks; block 0 is the null block."""
    counts = [-(-context // BLOCK) for context in contexts]
    order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32) + 1
    tables = np.zeros((len(contexts), max(counts)), dtype=np.int32)
    for row, count in enumerate(counts):
        tables[row, :count], order = order[:count], order[count:]
    positions = np.concatenate(
        [np.arange(end - count, end) for count, end in zip(lengths, contexts, strict=True)]
    ).astype(np.int32)
    rows = np.repeat(np.arange(len(contexts)), lengths)
    slots = (tables[rows, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ends = np.array(contexts, dtype=np.int32)
    return StepBatch(starts, ends, tables, positions, slots, positions)


def make_caches(cpu: CpuKernels, blocks: int) -> list[PagedCache]:
    def pool(*block: int) -> torch.Tensor:
        tensor = torch.empty(blocks, KV_HEADS, *block)
        cpu.context.advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
        return tensor.normal_()

    return [PagedCache(pool(HEAD_DIM, BLOCK), pool(BLOCK, HEAD_DIM)) for _ in range(LAYERS)]


def gathered(batch: StepBatch, caches: list[PagedCache], queries: torch.Tensor) -> None:
    """Torch's way: gather each sequence's blocks, then its fused attention, layer by layer.

    All sequences have the same lengths here.
    """
    count = batch.context_lengths.size
    length, context = queries.shape[0] // count, int(batch.context_lengths[0])
    tables = torch.from_numpy(batch.block_tables).long().flatten()
    own = queries.view(count, length, Q_HEADS, HEAD_DIM).transpose(1, 2)
    for cache in caches:
        keys, values = (
            part.view(-1, BLOCK, KV_HEADS, HEAD_DIM)  # as torch would keep them
            .index_select(0, tables)
            .view(count, -1, KV_HEADS, HEAD_DIM)[:, :context]
            .transpose(1, 2)
            for part in (cache.keys, cache.values)
        )
        F.scaled_dot_product_attention(own, keys, values, is_causal=length > 1, enable_gqa=True)


def attention_cases(cpu: CpuKernels, peaks: Peaks, repeats: int) -> Iterator[Measured]:
    """All layers' attention: decodes and one whole prompt."""
    for case, lengths, contexts in (
        ("decode 8 x 512", [1] * 8, [512] * 8),
        ("decode 32 x 256", [1] * 32, [256] * 32),
        ("prefill 1024", [1024], [1024]),
    ):
        batch = make_batch(lengths, contexts)
        caches = make_caches(cpu, int(batch.block_tables.max()) + 1)
        queries = torch.randn(batch.token_count, Q_HEADS, HEAD_DIM)
        out = torch.empty_like(queries)

        def ours(
            batch: StepBatch = batch,
            caches: list[PagedCache] = caches,
            queries: torch.Tensor = queries,
            out: torch.Tensor = out,
        ) -> None:
            for cache in caches:
                cpu.attention(queries, cache, batch, out, scale=HEAD_DIM**-0.5)

        def peer(
            batch: StepBatch = batch,
            caches: list[PagedCache] = caches,
            queries: torch.Tensor = queries,
        ) -> None:
            gathered(batch, caches, queries)

        pairs = sum(n * end - n * (n - 1) // 2 for n, end in zip(lengths, contexts, strict=True))
        floor = peaks.floor(
            8.0 * sum(contexts) * KV_HEADS * HEAD_DIM * LAYERS,
            4.0 * pairs * Q_HEADS * HEAD_DIM * LAYERS,
        )
        programs: dict[str, Program] = {"ours": ours, "torch gather + SDPA": peer}
        yield from measure(f"attention {case}", programs, repeats, floor)


def step_cases(cpu: CpuKernels, peaks: Peaks, repeats: int) -> Iterator[Measured]:
    """Whole steps in one call, embedding to logits, contexts of 192 tokens."""
    angles = torch.arange(2048).float()[:, None] * torch.linspace(1e-4, 1, HEAD_DIM // 2)
    tables = RopeTables(angles.cos(), angles.sin())
    caches = make_caches(cpu, 32 * 192 // BLOCK + 1)
    parameters = LAYERS * sum(n * k for n, k in LAYER_SHAPES) + VOCABULARY * HIDDEN
    shape = DecoderShape(HIDDEN, INNER, Q_HEADS, 1e-5, HEAD_DIM**-0.5)
    for name, group, size in (("float32", None, 4.0), ("int8", GROUP, 1 + 4 / GROUP)):

        def packed(outputs: int, inputs: int, group: int | None = group) -> Projection:
            return Projection(cpu.pack(torch.randn(outputs, inputs) * 0.03, group_size=group))

        qkv, output, gate_up, down = LAYER_SHAPES
        layers = [
            DecoderLayer(
                packed(*qkv),
                packed(*output),
                packed(*gate_up),
                packed(*down),
                torch.ones(HIDDEN),
                torch.ones(HIDDEN),
                cache,
            )
            for cache in caches
        ]
        head = packed(VOCABULARY, HIDDEN).weight
        decoder = Decoder(cpu, shape, layers, tables, torch.ones(HIDDEN), head)
        for case, lengths, contexts in (
            ("1 row", [1], [192]),
            ("8 rows", [1] * 8, [192] * 8),
            ("32 rows", [1] * 32, [192] * 32),
            ("prefill 1024", [1024], [1024]),
        ):
            batch = make_batch(lengths, contexts)
            hidden = torch.randn(batch.token_count, HIDDEN)
            ends = (batch.query_starts[1:] - 1).astype(np.int32)
            logits = torch.empty(len(lengths), VOCABULARY)

            def step(
                decoder: Decoder = decoder,
                hidden: torch.Tensor = hidden,
                batch: StepBatch = batch,
                ends: np.ndarray = ends,
                logits: torch.Tensor = logits,
            ) -> None:
                decoder.forward(hidden.clone(), batch, ends, logits)

            pairs = sum(
                n * end - n * (n - 1) // 2 for n, end in zip(lengths, contexts, strict=True)
            )
            layer_flops = 2.0 * (parameters - VOCABULARY * HIDDEN) * batch.token_count
            flops = layer_flops + 2.0 * VOCABULARY * HIDDEN * len(lengths)
            kv_bytes = 8.0 * sum(contexts) * KV_HEADS * HEAD_DIM * LAYERS
            # KV is read, and attended to, after the products: the two floors add up.
            floor = peaks.floor(parameters * size, flops) + peaks.floor(
                kv_bytes, 4.0 * pairs * Q_HEADS * HEAD_DIM * LAYERS
            )
            yield from measure(f"step {name}, {case}", {"ours": step}, repeats, floor)


def open_kernels(threads: int) -> CpuKernels:
    """The kernels with this CPU's best instruction set, compiled first if need be."""
    path = ensure_library(default_cache(os.environ), print, os.environ)
    return CpuKernels(Context(path, threads, None))


def main() -> None:
    parser = flags.parser(__doc__, rounds=7, peers=False)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="+", choices=["linear", "attention", "step"])
    options = parser.parse_args()
    results = flags.open_results("kernels", options)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    cpu = open_kernels(options.threads)
    results.note(f"{cpu.context.instruction_set.name}, {options.threads} threads")
    peaks = measure_peaks(cpu, options.rounds)
    results.measured("peak", "read", "GB/s", [peaks.read_gigabytes_per_second])
    results.measured("peak", "float32", "GFLOP/s", [peaks.float32_gigaflops])
    sections = {"linear": linear_cases, "attention": attention_cases, "step": step_cases}
    with torch.inference_mode():
        for name in options.only or sections:
            record(results, list(sections[name](cpu, peaks, options.rounds)))
    results.show()


def record(results: Results, taken: list[Measured]) -> None:
    """Ours against the floor, and against the others of the same case."""
    by_case: dict[str, list[Measurement]] = {}
    for each in taken:
        made = results.measured(
            each.case, each.program, "ms", [each.median], best=each.best, floor=each.floor
        )
        by_case.setdefault(each.case, []).append(made)
    for case, (own, *others) in by_case.items():
        share = own.detail["floor"] / own.median
        results.ratio(case, "floor", "ours", "share of the floor's rate reached", share)
        for other in others:
            results.ratio(case, "ours", other.program, "rate", other.median / own.median)


if __name__ == "__main__":
    main()
