"""Reinforcement learning with a worker that generates: train a step, broadcast, generate, repeat.

    python -m examples.rl_loop [--model MODEL] [--rounds 20] [--way broadcast|stream|memory]

The policy is trained here, by transformers; the reward is the share of even numbers among the
tokens that it writes, with the mean reward of the round as the baseline (REINFORCE). Each round the
worker samples from the weights of the round before, which its answers name. At the end it prints
the share of the time that updates took.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import grpc
import torch
from torch._C._distributed_c10d import TCPStore
from transformers import AutoModelForCausalLM

from examples.weight_broadcast import broadcast
from examples.worker_updates import Trained, WorkerUpdates, described, generate
from twinplane.models import DEFAULT_MODEL, resolve
from twinplane.worker.v1 import weights_pb2

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)
BUCKET_BYTES = 32 << 20
WAYS = ("broadcast", "stream", "memory")


@dataclass(slots=True)
class Times:
    """Seconds of all rounds."""

    training: float = 0.0
    updating: float = 0.0
    generating: float = 0.0
    pauses: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of updates in all."""
        return self.updating / (self.training + self.updating + self.generating)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the loop."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--way", choices=WAYS, default="broadcast")
    options = parser.parse_args(arguments)
    folder = resolve(options.model)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=options.learning_rate)
    times = Times()
    with worker(str(folder)) as updates, giver(options.way, updates) as give:
        started = time.perf_counter()
        for number in range(1, options.rounds + 1):
            outputs = generate(updates, PROMPT, options.samples, options.tokens, seed=number)
            generated = time.perf_counter()
            rewards = torch.tensor(
                [sum(token % 2 == 0 for token in each) / len(each) for each in outputs]
            )
            loss = train(policy, optimizer, outputs, rewards)
            trained = time.perf_counter()
            prepared = give(f"round-{number}", tensors_of(policy))
            committed = updates.commit(prepared)
            updated = time.perf_counter()
            times.generating += generated - started
            times.training += trained - generated
            times.updating += updated - trained
            times.pauses.append(committed.paused.ToTimedelta().total_seconds())
            started = updated
            print(
                f"round {number}: reward {rewards.mean():.3f}, loss {loss:.4f}, "
                f"weights {updates.version.generation} {updates.version.digest[:12]}",
                flush=True,
            )
    print(
        f"{options.rounds} rounds: generating {times.generating:.1f} s, training "
        f"{times.training:.1f} s, updating {times.updating:.1f} s; updates took "
        f"{100 * times.share:.0f} % of the time, and held up steps for at most "
        f"{1000 * max(times.pauses):.1f} ms each"
    )


def train(
    policy: Any,
    optimizer: torch.optim.Optimizer,
    outputs: Sequence[Sequence[int]],
    rewards: torch.Tensor,
) -> float:
    """One step of REINFORCE; returns the loss."""
    tokens = torch.tensor([[*PROMPT, *output] for output in outputs])
    logits = policy(tokens[:, :-1]).logits[:, len(PROMPT) - 1 :]
    chosen = tokens[:, len(PROMPT) :].unsqueeze(-1)
    log_probabilities = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
    advantages = (rewards - rewards.mean()).unsqueeze(-1)
    loss = -(advantages * log_probabilities).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def tensors_of(policy: Any) -> Trained:
    """Its weights by the names of its files. A tied head is no tensor of its own there."""
    return {name: parameter.detach() for name, parameter in policy.named_parameters()}


@contextlib.contextmanager
def worker(model: str) -> Iterator[WorkerUpdates]:
    """A worker of its own process, claimed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "twinplane.cli", "worker", "--model", model]
    command += ["--port", str(port), "--device", "cpu", "--dtype", "float32"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            updates = WorkerUpdates(channel, "rl")
            deadline = time.monotonic() + 120
            while True:
                try:
                    updates.attach()
                    break
                except grpc.RpcError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise
                    time.sleep(0.1)
            yield updates
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def giver(way: str, updates: WorkerUpdates) -> Iterator[Any]:
    """What prepares an update of these tensors in the chosen way: (update_id, tensors)."""
    keys = itertools.count()
    with contextlib.ExitStack() as stack:
        if way == "stream":
            yield lambda name, tensors: updates.prepare(
                name, tensors, stream=weights_pb2.StreamSource(tensors=described(tensors))
            )
        elif way == "broadcast":
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            pool = stack.enter_context(ThreadPoolExecutor(1))

            def give(name: str, tensors: Trained) -> Any:
                key = f"round:{next(keys)}"
                sent = pool.submit(broadcast, tensors, store, key, bucket_bytes=BUCKET_BYTES)
                source = weights_pb2.DistributedSource(
                    address=f"127.0.0.1:{store.port}",
                    world_size=2,
                    rank=1,
                    source_rank=0,
                    backend=weights_pb2.GROUP_BACKEND_GLOO,
                    key=key,
                    tensors=described(tensors),
                    bucket_bytes=BUCKET_BYTES,
                )
                prepared = updates.prepare(name, {}, distributed=source)
                sent.result()
                return prepared

            yield give
        else:
            yield lambda name, tensors: _from_memory(updates, name, tensors)


def _from_memory(updates: WorkerUpdates, name: str, tensors: Trained) -> Any:
    """The worker has copied them when it answers, so the memory lives only as long as the call."""
    memory = SharedMemory(create=True, size=sum(each.nbytes for each in tensors.values()))
    try:
        source = weights_pb2.IpcSource(
            posix=weights_pb2.PosixSharedMemory(name=f"/{memory.name.removeprefix('/')}"),
            byte_count=memory.size,
        )
        start = 0
        for description, tensor in zip(described(tensors), tensors.values(), strict=True):
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            memory.buf[start : start + len(data)] = data.data
            source.tensors.add(tensor=description, offset=start)
            start += len(data)
        return updates.prepare(name, {}, ipc=source)
    finally:
        memory.close()
        memory.unlink()


if __name__ == "__main__":
    main()
