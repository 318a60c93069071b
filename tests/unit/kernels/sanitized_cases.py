"""Random calls of every kernel on exactly sized buffers, for a library built with sanitizers.

Run as a program: `sanitized_cases.py LIBRARY SEED`. Needs no torch: the sanitizers watch numpy's
allocations, whose edges any stray read or write would cross.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from worker_service.kernels.cpu import library
from worker_service.kernels.cpu.library import Context, InstructionSet

Floats = npt.NDArray[np.float32]


class Cases:
    """One context and the source of shapes."""

    def __init__(self, context: Context, seed: int) -> None:
        self.context = context
        self.random = np.random.default_rng(seed)

    def floats(self, *shape: int) -> Floats:
        return self.random.standard_normal(shape).astype(np.float32)

    def size(self, limit: int) -> int:
        return int(self.random.integers(1, limit))

    def packed(self, outputs: int, inputs: int) -> tuple[library.Packed, npt.NDArray[np.uint8]]:
        quantized = bool(self.random.integers(2))
        group = self.size(min(inputs + 2, library.MAX_GROUP_SIZE + 1)) if quantized else 0
        shape = library.Packed(None, outputs, inputs, int(quantized), min(group, inputs))
        storage = np.empty(self.context.packed_bytes(shape), dtype=np.uint8)
        shape.data = storage.ctypes.data
        weight = self.floats(outputs, inputs)
        self.context.run(
            library.PackCall(
                packed=ctypes.pointer(shape), weight=weight.ctypes.data, weight_stride=inputs
            )
        )
        return shape, storage

    def linear(self) -> None:
        outputs, inputs, rows = self.size(150), self.size(300), self.size(160)
        packed, kept = self.packed(outputs, inputs)
        x, bias, y = self.floats(rows, inputs), self.floats(outputs), self.floats(rows, outputs)
        self.context.run(
            library.LinearCall(
                *(ctypes.pointer(packed), bias.ctypes.data, x.ctypes.data, inputs),
                *(rows, y.ctypes.data, outputs),
            )
        )
        ids = self.random.integers(0, outputs, rows).astype(np.int32)
        out = self.floats(rows, inputs)
        self.context.run(
            library.GatherCall(ctypes.pointer(packed), ids.ctypes.data, rows, out.ctypes.data)
        )
        assert kept.size and np.isfinite(y).all() and np.isfinite(out).all()

    def elementwise(self) -> None:
        rows, width = self.size(20), self.size(300)
        x, added, weight = self.floats(rows, width), self.floats(rows, width), self.floats(width)
        out, gates = self.floats(rows, width), self.floats(rows, 2 * width)
        self.context.run(
            library.RmsNormCall(
                *(x.ctypes.data, added.ctypes.data, weight.ctypes.data, 1e-5),
                *(rows, width, out.ctypes.data),
            )
        )
        self.context.run(library.SiluMultiplyCall(gates.ctypes.data, rows, width, out.ctypes.data))
        assert np.isfinite(out).all()

    def adapters(self) -> None:
        width, tokens, inputs = self.context.head_dim_multiple, self.size(90), self.size(200)
        sizes = [self.size(150) for _ in range(self.size(4))]
        packed, kept = self.packed(sum(sizes), inputs)
        x, y = self.floats(tokens, inputs), self.floats(tokens, sum(sizes))
        targets = (library.AdapterTarget * len(sizes))()
        parts = (library.AdapterPart * (2 * len(sizes)))()
        matrices = []
        for index, size in enumerate(sizes * 2):
            targets[index % len(sizes)] = library.AdapterTarget(
                sum(sizes[: index % len(sizes)]), size
            )
            if self.random.integers(4):
                rank, narrow = self.size(40), bool(self.random.integers(2))
                shapes = (-(-rank // width), inputs, width), (-(-size // width), rank, width)
                a, b = (np.zeros(shape, np.uint16 if narrow else np.float32) for shape in shapes)
                matrices += [a, b]
                kind = 2 if narrow else 0
                parts[index] = library.AdapterPart(a.ctypes.data, b.ctypes.data, rank, kind, 0.5)
        runs = np.unique(np.append(self.random.integers(0, tokens, 4), [0, tokens])).astype(
            np.int32
        )
        slots = self.random.integers(0, 2, runs.size - 1).astype(np.int32)
        order = self.random.permutation(tokens).astype(np.int32)
        batch = library.AdapterBatch(
            *(slots.size, runs.ctypes.data, slots.ctypes.data, order.ctypes.data),
            -(-40 // width) * width,
        )
        own = library.LinearCall(
            *(ctypes.pointer(packed), None, x.ctypes.data, inputs),
            *(tokens, y.ctypes.data, sum(sizes)),
        )
        for beside in (None, ctypes.pointer(own)):
            self.context.run(
                library.AdaptCall(
                    *(beside, ctypes.pointer(batch), targets, len(sizes), parts, len(sizes)),
                    *(x.ctypes.data, inputs, inputs, y.ctypes.data, sum(sizes)),
                )
            )
        assert kept.size and np.isfinite(y).all() and len(matrices) % 2 == 0

    def attention(self) -> None:
        kv_heads, group = self.size(4), self.size(5)
        head_dim = self.context.head_dim_multiple * self.size(6)
        block, kind = self.size(20), int(self.random.integers(2))
        lengths = [self.size(400) for _ in range(self.size(4))]
        counts = [-(-length // block) for length in lengths]
        tables = np.zeros((len(lengths), max(counts)), dtype=np.int32)
        order = self.random.permutation(sum(counts)).astype(np.int32) + 1
        for row, count in enumerate(counts):
            tables[row, :count], order = order[:count], order[count:]
        shape = (sum(counts) + 1, block, kv_heads, head_dim)
        stored = np.float32 if kind == 0 else np.uint16
        keys, values = np.zeros(shape, dtype=stored), np.zeros(shape, dtype=stored)
        scheduled = [int(self.random.integers(0, length + 1)) for length in lengths]
        starts = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
        positions = np.concatenate(
            [np.arange(n - m, n) for n, m in zip(lengths, scheduled, strict=True)]
        ).astype(np.int32)
        rows = np.repeat(np.arange(len(lengths)), scheduled)
        slots = (tables[rows, positions // block] * block + positions % block).astype(np.int32)
        contexts, tokens = np.array(lengths, dtype=np.int32), int(starts[-1])
        batch = library.Batch(
            *(tokens, len(lengths), starts.ctypes.data, contexts.ctypes.data),
            *(tables.ctypes.data, tables.shape[1], positions.ctypes.data, slots.ctypes.data),
        )
        cache = library.Cache(
            *(keys.ctypes.data, values.ctypes.data, kind, block, kv_heads, head_dim)
        )
        q_heads = kv_heads * group
        width, rotary = (q_heads + 2 * kv_heads) * head_dim, 2 * self.size(head_dim // 2 + 1)
        qkv, norms = self.floats(tokens, width), self.floats(2, head_dim)
        cosines, sines = self.floats(400, rotary // 2), self.floats(400, rotary // 2)
        self.context.run(
            library.RopeWriteCall(
                *(qkv.ctypes.data, width, q_heads, rotary, cosines.ctypes.data, sines.ctypes.data),
                *(norms[0].ctypes.data, norms[1].ctypes.data, 1e-5),
                *(ctypes.pointer(cache), ctypes.pointer(batch)),
            )
        )
        out = np.full((tokens, q_heads, head_dim), np.nan, dtype=np.float32)
        window = int(self.random.choice([0, 1, 17, 100]))
        self.context.run(
            library.AttentionCall(
                *(qkv.ctypes.data, width, out.ctypes.data, q_heads * head_dim),
                *(q_heads, window, 0.1, ctypes.pointer(cache), ctypes.pointer(batch)),
            )
        )
        assert np.isfinite(out).all()


def main() -> None:
    path, seed = Path(sys.argv[1]), int(sys.argv[2])
    for instruction_set in InstructionSet:
        for threads in (1, 3):
            context = Context(path, 1, InstructionSet.PORTABLE)
            if instruction_set not in context.head_dim_multiples:
                continue
            context = Context(path, threads, instruction_set)
            cases = Cases(context, seed)
            for _ in range(12):
                cases.linear()
                cases.elementwise()
                cases.adapters()
                cases.attention()
            context.close()
    print("clean")


if __name__ == "__main__":
    main()
