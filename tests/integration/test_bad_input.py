"""Bad input against running planes: refused at the edge, quickly, and nobody beside it notices."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.support.planes import Planes
from twinplane import Client
from twinplane.common.v1 import types_pb2
from twinplane.inference.v1 import inference_pb2 as pb
from twinplane.inference.v1 import inference_pb2_grpc

pytestmark = pytest.mark.slow

# A bound for refusing, not a speed: refusing may not cost what serving costs.
PROMPTLY = 1.0
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def generate(**fields: object) -> pb.GenerateRequest:
    request = pb.GenerateRequest(**fields)  # type: ignore[arg-type]
    if request.WhichOneof("prompt") is None:
        request.text = "Hello"
    return request


def sampling(**fields: float) -> pb.GenerateRequest:
    return generate(sampling=types_pb2.SamplingParameters(**fields))  # type: ignore[arg-type]


def stop(**fields: object) -> pb.GenerateRequest:
    return generate(stop=pb.StopConditions(**fields))  # type: ignore[arg-type]


BAD: dict[str, tuple[Callable[[], pb.GenerateRequest], str]] = {
    "no prompt": (lambda: pb.GenerateRequest(), "prompt"),
    "empty text": (lambda: pb.GenerateRequest(text=""), "text"),
    "no tokens": (lambda: pb.GenerateRequest(token_ids=types_pb2.TokenIds()), "token_ids"),
    "no messages": (lambda: pb.GenerateRequest(chat=pb.Chat()), "chat.messages"),
    "an unknown token": (
        lambda: pb.GenerateRequest(token_ids=types_pb2.TokenIds(ids=[2**31])),
        "token_ids",
    ),
    "too many tokens": (
        lambda: pb.GenerateRequest(token_ids=types_pb2.TokenIds(ids=[1] * 300_000)),
        "token_ids",
    ),
    "too much text": (lambda: pb.GenerateRequest(text="long " * 400_000), "text"),
    "temperature NaN": (lambda: sampling(temperature=math.nan), "sampling.temperature"),
    "temperature below": (lambda: sampling(temperature=-0.1), "sampling.temperature"),
    "temperature above": (lambda: sampling(temperature=101), "sampling.temperature"),
    "top_p zero": (lambda: sampling(top_p=0), "sampling.top_p"),
    "top_p infinite": (lambda: sampling(top_p=math.inf), "sampling.top_p"),
    "min_p above": (lambda: sampling(min_p=1.5), "sampling.min_p"),
    "min_p NaN": (lambda: sampling(min_p=math.nan), "sampling.min_p"),
    "max_tokens zero": (lambda: stop(max_tokens=0), "stop.max_tokens"),
    "max_tokens above": (lambda: stop(max_tokens=2**31), "stop.max_tokens"),
    "an empty stop text": (lambda: stop(strings=["a", ""]), "stop.strings[1]"),
    "a long stop text": (lambda: stop(strings=["x" * 257]), "stop.strings[0]"),
    "many stop texts": (lambda: stop(strings=["x"] * 17), "stop.strings"),
    "many stop tokens": (lambda: stop(token_ids=range(65)), "stop.token_ids"),
    "an unknown stop token": (lambda: stop(token_ids=[2**31]), "stop.token_ids"),
    "priority above": (lambda: generate(priority=101), "priority"),
    "a long salt": (lambda: generate(cache_salt="x" * 129), "cache_salt"),
    "an unprintable id": (lambda: generate(request_id="a\nb"), "request_id"),
}


def refusal(planes: Planes, request: pb.GenerateRequest) -> tuple[grpc.RpcError, float]:
    started = time.perf_counter()
    with (
        grpc.insecure_channel(planes.address, [("grpc.enable_http_proxy", 0)]) as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=30))
    return refused.value, time.perf_counter() - started


def control_answer(planes: Planes) -> tuple[int, ...]:
    """What a fixed request gets: the same before and after whatever else arrives."""
    with Client(planes.address) as client:
        generation = client.generate("control", max_tokens=16, seed=11, ignore_eos=True)
        return generation.result().token_ids


@pytest.mark.parametrize("name", BAD)
def test_a_bad_field_is_named_and_the_next_request_gets_what_the_last_one_got(
    simulated_planes: Planes, name: str
) -> None:
    make, field = BAD[name]
    request = make()
    before = control_answer(simulated_planes)
    error, seconds = refusal(simulated_planes, request)
    assert error.code() is INVALID, error.details()
    status = rpc_status.from_call(error)
    assert status is not None
    named: list[str] = []
    for detail in status.details:
        violations = error_details_pb2.BadRequest()
        if detail.Unpack(violations):
            named += [violation.field for violation in violations.field_violations]
    assert named == [field]
    assert seconds < PROMPTLY
    assert control_answer(simulated_planes) == before


def test_over_long_prompts_quote_the_limit(simulated_planes: Planes) -> None:
    with Client(simulated_planes.address) as client:
        limit = client.list_models()[0].max_sequence_token_count
    tokens = types_pb2.TokenIds(ids=[1] * (limit + 1))
    error, _ = refusal(simulated_planes, pb.GenerateRequest(token_ids=tokens))
    assert str(limit) in (error.details() or "")


def test_an_unknown_model_is_not_found(simulated_planes: Planes) -> None:
    before = control_answer(simulated_planes)
    error, seconds = refusal(simulated_planes, generate(model="no-such-model"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "tiny" in (error.details() or ""), "the message says what is served"
    assert seconds < PROMPTLY
    assert control_answer(simulated_planes) == before


def test_ten_megabytes_are_refused_before_they_are_read(simulated_planes: Planes) -> None:
    before = control_answer(simulated_planes)
    error, seconds = refusal(simulated_planes, pb.GenerateRequest(text="x" * 10_000_000))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert seconds < PROMPTLY
    assert control_answer(simulated_planes) == before


def test_bad_requests_among_good_ones_change_nothing(simulated_planes: Planes) -> None:
    """While a stream runs, everything bad arrives at once."""
    with Client(simulated_planes.address) as client:
        alone = client.generate("among", max_tokens=200, seed=3, ignore_eos=True).result()
        beside = client.generate("among", max_tokens=200, seed=3, ignore_eos=True)
        for make, _ in BAD.values():
            refusal(simulated_planes, make())
        assert beside.result().token_ids == alone.token_ids
