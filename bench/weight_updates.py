"""Updates of a worker's weights: bytes a second by each way in, and the pause of a commit.

One worker process with the model in float32. Each way gives it all tensors with a wrong digest for
the last, so that it takes in and digests every byte, and then refuses: that is the receipt alone,
without the load that follows. Against it, in the same run: what torch copies into memory that was
touched before and into fresh memory, what one thread digests, and a bare broadcast over Gloo
between two processes. Then whole updates are prepared and
committed; a commit's pause is what the worker tells.

    python -m bench.weight_updates [--rounds 5]
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import grpc
import torch
from safetensors.torch import load_file
from torch._C._distributed_c10d import TCPStore

from bench import options as flags
from bench.results import Results
from bench.service import free_port, worker_process
from examples.weight_broadcast import broadcast
from examples.worker_updates import Trained, WorkerUpdates, described
from twinplane.models import resolve
from twinplane.worker.v1 import weights_pb2

BUCKET_BYTES = 32 << 20
_LIMITS = (
    "Ways in end in fresh memory, whose pages the kernel clears first, and include a SHA-256 of "
    "every byte. Where the digest of one thread is slower than half of the copy, a stream, which "
    "is digested as it comes, cannot reach its bar"
)
_LIMIT = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def main() -> None:
    """Runs the benchmark."""
    options = flags.parser(__doc__, rounds=5, peers=False).parse_args()
    results = flags.open_results("weight_updates", options)
    files = load_file(resolve(options.model) / "model.safetensors")
    tensors = {name: each.clone() for name, each in files.items()}  # not the mapped files
    case = f"{sum(each.nbytes for each in tensors.values()) / 1e6:.0f} MB"
    address = f"127.0.0.1:{free_port()}"
    port = address.rpartition(":")[2]
    model = ("--model", options.model, "--device", "cpu", "--dtype", "float32")
    with (
        worker_process(address, "--port", port, *model),
        grpc.insecure_channel(address, options=_LIMIT) as channel,
        shared(tensors) as memory,
    ):
        worker = WorkerUpdates(channel, "bench")
        worker.attach()
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ways = Ways(worker, tensors, memory, store)
        samples: dict[str, list[float]] = {}
        for _ in range(options.rounds):  # in turns: the machine is not the same all the time
            for name, measure in ways.all().items():
                samples.setdefault(name, []).append(measure())
        report(results, case, samples)
        whole_updates(results, case, worker, tensors, options.rounds)
    results.show()


class Ways:
    """What is measured, each in GB a second."""

    def __init__(
        self,
        worker: WorkerUpdates,
        tensors: Trained,
        memory: weights_pb2.IpcSource,
        store: TCPStore,
    ) -> None:
        self._worker = worker
        self._tensors = tensors
        self._memory = memory
        self._store = store
        self._bytes = sum(each.nbytes for each in tensors.values())
        self._keys = itertools.count()

    def all(self) -> dict[str, Callable[[], float]]:
        """By name."""
        return {
            "copy": self._copy,
            "copy, fresh": self._copy_fresh,
            "digest": self._digest,
            "stream": lambda: self._receipt(stream=self._stream()),
            "shared memory": lambda: self._receipt(ipc=self._spoiled(self._memory)),
            "Gloo, bare": self._bare,
            "Gloo": self._broadcast,
        }

    def _rate(self, work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        return self._bytes / (time.perf_counter() - started) / 1e9

    def _copy(self) -> float:
        """Into memory that the process has touched before."""
        pairs = [(each, torch.zeros_like(each)) for each in self._tensors.values()]
        return self._rate(lambda: [into.copy_(each) for each, into in pairs])

    def _copy_fresh(self) -> float:
        return self._rate(lambda: [each.clone() for each in self._tensors.values()])

    def _digest(self) -> float:
        parts = [_bytes(each) for each in self._tensors.values()]
        return self._rate(lambda: [hashlib.sha256(each).digest() for each in parts])

    def _stream(self) -> weights_pb2.StreamSource:
        return weights_pb2.StreamSource(tensors=_last_spoiled(described(self._tensors)))

    def _spoiled(self, source: weights_pb2.IpcSource) -> weights_pb2.IpcSource:
        changed = weights_pb2.IpcSource()
        changed.CopyFrom(source)
        changed.tensors[-1].tensor.sha256 = bytes(32)
        return changed

    def _receipt(self, **source: Any) -> float:
        given = self._tensors if "stream" in source else {}

        def refused() -> None:
            with suppress(grpc.RpcError):
                self._worker.prepare(f"bench-{next(self._keys)}", given, **source)
                raise AssertionError("an update with a wrong digest was taken")

        return self._rate(refused)

    def _broadcast(self) -> float:
        key = f"update:{next(self._keys)}"
        host = f"127.0.0.1:{self._store.port}"
        source = weights_pb2.DistributedSource(
            address=host, world_size=2, rank=1, source_rank=0,
            backend=weights_pb2.GROUP_BACKEND_GLOO, key=key, bucket_bytes=BUCKET_BYTES,
            tensors=_last_spoiled(described(self._tensors)),
        )  # fmt: skip
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(
                broadcast, self._tensors, self._store, key, bucket_bytes=BUCKET_BYTES
            )
            rate = self._receipt(distributed=source)
            sent.result()
        return rate

    def _bare(self) -> float:
        """From the first member that is there to the last byte."""
        key = f"bare:{next(self._keys)}"
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        other = context.Process(
            target=_receive, args=(self._store.port, key, self._bytes, ready), daemon=True
        )
        other.start()
        ready.wait(120)
        rate = self._rate(
            lambda: broadcast(self._tensors, self._store, key, bucket_bytes=BUCKET_BYTES)
        )
        other.join()
        return rate


def report(results: Results, case: str, samples: dict[str, list[float]]) -> None:
    """The rates, and their ratios."""
    results.note(_LIMITS)
    measured = {
        name: results.measured(case, name, "GB/s", rates) for name, rates in samples.items()
    }
    results.compared(measured["stream"], measured["copy"], "bytes/s", at_least=0.5)
    results.compared(measured["shared memory"], measured["copy"], "bytes/s", at_least=0.8)
    results.compared(measured["Gloo"], measured["Gloo, bare"], "bytes/s", at_least=0.8)
    for name in ("stream", "shared memory"):
        results.compared(measured[name], measured["copy, fresh"], "bytes/s")
        results.compared(measured[name], measured["digest"], "bytes/s")


def whole_updates(
    results: Results, case: str, worker: WorkerUpdates, tensors: Trained, rounds: int
) -> None:
    """Prepared beside and committed; the pause in milliseconds."""
    seconds, pauses = [], []
    for index in range(rounds):
        started = time.perf_counter()
        source = weights_pb2.StreamSource(tensors=described(tensors))
        prepared = worker.prepare(f"whole-{index}", tensors, stream=source)
        seconds.append(time.perf_counter() - started)
        pauses.append(1000 * worker.commit(prepared).paused.ToTimedelta().total_seconds())
    results.measured(case, "prepare from a stream", "s", seconds)
    results.measured(case, "pause of a commit", "ms", pauses)


@contextmanager
def shared(tensors: Trained) -> Iterator[weights_pb2.IpcSource]:
    """The tensors in shared memory."""
    memory = SharedMemory(create=True, size=sum(each.nbytes + 8 for each in tensors.values()))
    try:
        source = weights_pb2.IpcSource(
            posix=weights_pb2.PosixSharedMemory(name=f"/{memory.name.removeprefix('/')}"),
            byte_count=memory.size,
        )
        start = 0
        for description, tensor in zip(described(tensors), tensors.values(), strict=True):
            memory.buf[start : start + tensor.nbytes] = _bytes(tensor)
            source.tensors.add(tensor=description, offset=start)
            start = -(-(start + tensor.nbytes) // 8) * 8
        yield source
    finally:
        memory.close()
        memory.unlink()


def _receive(port: int, key: str, byte_count: int, ready: Any) -> None:
    """The other member of a bare broadcast, in a process of its own."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    store = PrefixStore(key, TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    gloo: Any = dist.ProcessGroupGloo
    how = gloo._Options()
    how._timeout = timedelta(minutes=2)
    how._threads = 1
    how._devices = [gloo.create_device(hostname="127.0.0.1")]
    ready.set()
    sizes = [int(each) for each in store.get("buckets").split(b",")]
    memory = torch.zeros(max(sizes), dtype=torch.uint8)
    group = gloo(store, 1, 2, how)
    for size in sizes:
        group.broadcast([memory[:size]], dist.BroadcastOptions()).wait()


def _last_spoiled(
    tensors: list[weights_pb2.TensorDescription],
) -> list[weights_pb2.TensorDescription]:
    tensors[-1].sha256 = bytes(32)
    return tensors


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


if __name__ == "__main__":
    main()
