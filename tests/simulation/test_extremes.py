"""Every number of a request at its extremes, through edge, fleet, contract, rows and sampler.

Each request is answered or refused by the name of its field. Nothing reaches a worker that it
refuses: the claim of the start is that of the end, and the streams beside get the same tokens.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
from google.protobuf.message import Message

from control_plane.core import invariants
from control_plane.core.events import Stats
from tests.simulation.rig import until
from tests.support import tiny_llama
from tests.support.edge_rig import generate_request, refused
from tests.support.whole_stack import Stack, serving
from tests.unit.control_rpc.test_bounds import CASES
from twinplane.common.v1.types_pb2 import SamplingParameters, TokenIds
from twinplane.inference.v1 import inference_pb2
from twinplane.inference.v1.inference_pb2 import StopConditions

VOCABULARY = 259
LENGTH = tiny_llama.MAX_LENGTH
PROMPT = [72, 101, 108]
ROOM = LENGTH - len(PROMPT)
NEIGHBOUR_TOKENS = 120

Request = inference_pb2.GenerateRequest


def asking(**fields: object) -> Request:
    """A valid request of few tokens but for the given fields."""
    fields.setdefault("token_ids", TokenIds(ids=PROMPT))
    fields.setdefault("stop", StopConditions(max_tokens=3))
    return generate_request(**fields)


def stop(**fields: object) -> Request:
    return asking(stop=StopConditions(**({"max_tokens": 3} | fields)))  # type: ignore[arg-type]


REQUESTS: dict[str, tuple[str, Request]] = {
    **{
        f"{name} {value!r}": (
            f"sampling.{name}",
            asking(sampling=SamplingParameters(**{name: value})),  # type: ignore[arg-type]
        )
        for name, value in CASES
    },
    **{
        f"max_tokens {most}": ("stop.max_tokens", stop(max_tokens=most))
        for most in (0, 1, 2, ROOM - 1, ROOM, ROOM + 1, 2**31 - 1, 2**31, 2**32 - 1)
    },
    **{
        f"stop token {token}": ("stop.token_ids", stop(token_ids=[token]))
        for token in (0, VOCABULARY - 1, VOCABULARY, 2**31 - 1, 2**31, 2**32 - 1)
    },
    **{
        f"prompt token {token}": ("token_ids", asking(token_ids=TokenIds(ids=[5, token])))
        for token in (0, VOCABULARY - 1, VOCABULARY, 2**31 - 1, 2**31, 2**32 - 1)
    },
    **{
        f"prompt of {length}": ("token_ids", asking(token_ids=TokenIds(ids=[7] * length)))
        for length in (0, 1, LENGTH - 3, LENGTH, LENGTH + 1)
    },
    **{
        f"priority {priority}": ("priority", asking(priority=priority))
        for priority in (-(2**31), -101, -100, -1, 0, 1, 100, 101, 2**31 - 1)
    },
    **{
        f"salt {salt[:1]!r} {len(salt)}": ("cache_salt", asking(cache_salt=salt))
        for salt in ("", "\0", "\0" * 128, "é" * 64, "é" * 65, "\U0010ffff" * 32, "s" * 100_000)
    },
    "all at once": (
        "",
        asking(
            sampling=SamplingParameters(
                temperature=1e-45, top_k=2**31 - 1, top_p=1e-45, min_p=1.0, seed=2**64 - 1
            ),
            priority=100,
        ),
    ),
}
TIMEOUTS = (1e-9, 1e-6, 1e-4, 0.01, 1e5, 1e8)


async def tokens_of(made: Stack, request: Request, seconds: float | None = None) -> list[int]:
    """All of a generation's. Raises AioRpcError."""
    ids: list[int] = []
    finished = False
    async for message in made.stub.Generate(request, timeout=seconds):
        ids += message.delta.token_ids
        finished |= message.WhichOneof("event") == "finished"
    assert finished
    return ids


def neighbours() -> list[Request]:
    """A greedy stream and a drawn one."""
    ends = StopConditions(max_tokens=NEIGHBOUR_TOKENS, ignore_end_of_sequence=True)
    return [
        asking(sampling=SamplingParameters(temperature=0), stop=ends),
        asking(sampling=SamplingParameters(temperature=1.5, top_p=0.9, seed=11), stop=ends),
    ]


def is_idle(stats: Stats | None) -> bool:
    return stats is not None and not stats.running and not stats.inflight


async def outcome(made: Stack, field: str, request: Message) -> str:
    assert isinstance(request, Request)
    try:
        ids = await tokens_of(made, request)
    except grpc.aio.AioRpcError as error:
        why = refused(error)
        assert why.code is grpc.StatusCode.INVALID_ARGUMENT, why
        assert why.fields == [field]
        return "refused"
    assert all(0 <= token < VOCABULARY for token in ids) and ids
    return "answered"


async def test_every_extreme_is_answered_or_refused_by_name(
    tmp_path: Path, tiny_model: Path
) -> None:
    model = tmp_path / "llama"
    tiny_llama.save(tiny_llama.llama(vocab_size=VOCABULARY), model)
    async with serving(model, tiny_model, max_waiting_count=10_000) as made:
        alone = [await tokens_of(made, request) for request in neighbours()]
        beside = [asyncio.create_task(tokens_of(made, request)) for request in neighbours()]
        outcomes = await asyncio.gather(
            *(outcome(made, field, request) for field, request in REQUESTS.values())
        )
        assert [await task for task in beside] == alone, "a neighbour's stream changed"
        assert outcomes.count("answered") > 60 and outcomes.count("refused") > 40
        beside = [asyncio.create_task(tokens_of(made, request)) for request in neighbours()]
        for timeout in TIMEOUTS:
            try:
                await tokens_of(made, asking(), timeout)
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert timeout < 1e5
        assert [await task for task in beside] == alone
        assert made.worker.worker_info().epoch == 1, "a worker refused what the edge had accepted"
        replica = made.fleet.replicas[0]
        await until(lambda: is_idle(replica.stats()))
        stats = replica.stats()
        assert stats is not None and stats.waiting == stats.kv_active_tokens == 0
        invariants.check(replica._core)  # type: ignore[arg-type]
