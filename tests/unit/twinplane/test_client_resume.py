"""Both clients when a stream breaks: they resume, and their caller sees one generation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
import pytest
from google.rpc import error_details_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import twinplane
from tests.support.client_callers import Call, asynchronous, blocking
from tests.support.quick import examples
from tests.support.scripted_inference import (
    Fail,
    ScriptedInference,
    delta,
    finished,
    retry_info,
    serve,
    started,
)
from twinplane import FinishReason, GenerationResult, RetryPolicy
from twinplane.client.responses import GenerationFold
from twinplane.common.v1 import types_pb2
from twinplane.inference.v1 import inference_pb2 as pb

NO_WORKER = error_details_pb2.ErrorInfo(reason="NO_WORKER", domain="twinplane")
UNAVAILABLE = Fail(grpc.StatusCode.UNAVAILABLE, "gone", (NO_WORKER, retry_info(0.2)))
BROKEN = Fail(grpc.StatusCode.UNAVAILABLE, "Socket closed")
SAMPLING = types_pb2.SamplingParameters(temperature=0.5, top_k=20, top_p=0.75, min_p=0, seed=7)


def cannot_resume() -> Fail:
    info = error_details_pb2.ErrorInfo(
        reason="CANNOT_RESUME", domain="twinplane", metadata={"differs": "weights"}
    )
    return Fail(grpc.StatusCode.FAILED_PRECONDITION, "the weights changed", (info,))


def begun(**fields: object) -> pb.GenerateResponse:
    """The first message of a server that can resume."""
    message = started()
    message.started.sampling.CopyFrom(SAMPLING)
    message.started.max_tokens = 20
    message.started.MergeFrom(pb.GenerationStarted(**fields))  # type: ignore[arg-type]
    return message


def with_origin(message: pb.GenerateResponse, digest: str = "ab") -> pb.GenerateResponse:
    message.delta.origin.weights_digest = digest
    return message


@dataclass
class Resuming(ScriptedInference):
    """Generates `whole`, of one token a delta, and ends calls early as `cuts` say: after so many
    messages, with that status. It checks that it is asked to go on where it was left."""

    whole: list[tuple[str, int]] = field(default_factory=list)
    cuts: deque[tuple[int, Fail]] = field(default_factory=deque)
    sent: int = 0
    """Deltas that the client has."""

    def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        has = self.whole[: self.sent]
        resume = request.resume
        assert list(resume.token_ids) == [token for _, token in has]
        assert resume.text_byte_count == len("".join(text for text, _ in has).encode())
        assert resume.origin.weights_digest == ("ab" if has else "")
        self.scripts.append(self._script())
        yield from super().Generate(request, context)

    def _script(self) -> list[pb.GenerateResponse | Fail]:
        messages = [delta(text, token) for text, token in self.whole[self.sent :]]
        if self.sent == 0 and messages:
            with_origin(messages[0])
        script: list[pb.GenerateResponse | Fail] = [begun(), *messages, finished(stop_string="!")]
        if self.cuts:
            count, status = self.cuts.popleft()
            script = [*script[:count], status]
        self.sent += sum(
            isinstance(step, pb.GenerateResponse) and step.HasField("delta") for step in script
        )
        return script


statuses = st.sampled_from([UNAVAILABLE, BROKEN, Fail(grpc.StatusCode.UNAVAILABLE, "GOAWAY")])


@pytest.mark.parametrize("caller", [blocking, asynchronous])
def test_cuts_anywhere_are_not_seen(caller: Call) -> None:
    service = Resuming()

    @settings(max_examples=examples(50), deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        whole=st.lists(st.tuples(st.sampled_from(["", "a", "é", "🙂b"]), st.integers(0, 99))),
        cuts=st.lists(st.tuples(st.integers(1, 6), statuses), max_size=6),
    )
    def check(whole: list[tuple[str, int]], cuts: list[tuple[int, Fail]]) -> None:
        service.whole, service.cuts, service.sent = whole, deque(cuts), 0
        result: GenerationResult = caller(address, "generate", "x", sleeps=[])
        assert result.text == "".join(text for text, _ in whole)
        assert result.token_ids == tuple(token for _, token in whole)
        assert (result.stop_string, result.seed, result.request_id) == ("!", 7, "r-1")

    with serve(service) as address:
        check()


def test_it_goes_on_as_the_same_request(call: Call, service: ScriptedInference) -> None:
    service.scripts += [
        [begun(), with_origin(delta("a é", 4, 5)), UNAVAILABLE],
        [begun(), with_origin(delta("b", 6), "cd"), BROKEN],
        [begun(), delta("c", 7), finished(stop_string="!")],
    ]
    options = {"top_k": 3, "stop": ["!"], "priority": 2, "cache_salt": "s"}
    result = call("generate", "x", **options)
    assert (result.text, result.token_ids) == ("a ébc", (4, 5, 6, 7))
    first, second, third = service.requests
    assert isinstance(first, pb.GenerateRequest) and not first.HasField("resume")
    assert isinstance(second, pb.GenerateRequest) and isinstance(third, pb.GenerateRequest)
    assert second.request_id == "r-1" and second.model == "m"
    assert second.sampling == SAMPLING, "what the first server made of what was asked"
    assert second.stop.max_tokens == 20 and list(second.stop.strings) == ["!"]
    assert (second.text, second.priority, second.cache_salt) == ("x", 2, "s")
    assert list(third.resume.token_ids) == [4, 5, 6]
    assert third.resume.text_byte_count == len("a éb".encode())
    assert third.resume.origin.weights_digest == "cd", "the one told last"


def test_nothing_is_resumed_unless_wanted(call: Call, service: ScriptedInference) -> None:
    service.scripts.append([begun(), delta("a", 1), UNAVAILABLE])
    with pytest.raises(twinplane.Unavailable, match="gone") as caught:
        call("generate", "x", resume=False)
    assert caught.value.partial is not None and caught.value.partial.token_ids == (1,)


def test_an_older_server_is_not_asked_to(call: Call, service: ScriptedInference) -> None:
    service.scripts.append([started(), delta("a", 1), UNAVAILABLE])
    with pytest.raises(twinplane.Unavailable, match="gone"):
        call("generate", "x")
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (cannot_resume(), twinplane.Unavailable),
        (Fail(grpc.StatusCode.INVALID_ARGUMENT, "no"), twinplane.Unavailable),
        (Fail(grpc.StatusCode.NOT_FOUND, "no"), twinplane.Unavailable),
        (Fail(grpc.StatusCode.UNIMPLEMENTED, "no"), twinplane.Unavailable),
        (Fail(grpc.StatusCode.INTERNAL, "no"), twinplane.InternalError),
        (Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "no"), twinplane.Overloaded),
    ],
)
def test_what_waiting_does_not_mend_ends_it(
    call: Call, service: ScriptedInference, refusal: Fail, error: type[twinplane.TwinplaneError]
) -> None:
    service.scripts += [[begun(), delta("a", 1), UNAVAILABLE], [refusal]]
    with pytest.raises(error, match=refusal.message) as caught:
        call("generate", "x")
    if error is twinplane.Unavailable:  # what broke it, not what its caller has asked for
        assert str(caught.value).startswith("gone; it can't be resumed: ")
        assert (caught.value.reason, caught.value.retry_after) == ("NO_WORKER", 0.2)
    assert caught.value.partial is not None and caught.value.partial.text == "a"
    assert len(service.requests) == 2


def test_a_full_server_is_waited_for(call: Call, service: ScriptedInference) -> None:
    full = Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (retry_info(3.0),))
    service.scripts += [[begun(), delta("a", 1), BROKEN], [full], [begun(), finished()]]
    result = call("generate", "x")
    assert (result.text, result.finish_reason) == ("a", FinishReason.LENGTH)


def test_what_misses_only_its_status_is_whole(call: Call, service: ScriptedInference) -> None:
    service.scripts.append([begun(), delta("a", 1), finished(), BROKEN])
    assert call("generate", "x").token_ids == (1,)
    assert len(service.requests) == 1


@pytest.mark.parametrize("other", [{"seed": 8}, {"prompt_token_count": 9}, {"request_id": "r-2"}])
def test_another_generation_is_not_taken_for_it(
    call: Call, service: ScriptedInference, other: dict[str, object]
) -> None:
    service.scripts += [[begun(), delta("a", 1), UNAVAILABLE], [begun(**other), delta("b", 2)]]
    with pytest.raises(twinplane.InternalError, match="another generation"):
        call("generate", "x")


def test_a_server_that_never_comes_to_a_token_is_left(
    call: Call, service: ScriptedInference
) -> None:
    """Each one takes it up and fails: patience alone would begin anew for ever."""
    service.scripts += [
        [begun(), delta("a", 1), UNAVAILABLE],
        *([begun(), UNAVAILABLE] for _ in range(1000)),
    ]
    retry = RetryPolicy(resume_patience=0.3)
    with pytest.raises(twinplane.Unavailable, match="gone") as caught:
        call("generate", "x", client={"retry": retry})
    assert caught.value.partial is not None and caught.value.partial.token_ids == (1,)
    assert 5 < len(service.requests) < 1000


class Clock:
    """Time that passes only while a client sleeps, or when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("patience", [0.0, 5.0, 60.0])
@pytest.mark.parametrize("timeout", [None, 30.0])
def test_it_is_given_up_in_the_end(
    service: ScriptedInference, patience: float, timeout: float | None
) -> None:
    """Counted from where the stream broke, and anew each time that it has gone on."""
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.now += seconds

    service.scripts += [
        [begun(), delta("a", 1), BROKEN],
        *([UNAVAILABLE] for _ in range(3) if patience),
        *([begun(), delta("b", 2), BROKEN] for _ in range(1) if patience),
        *([UNAVAILABLE] for _ in range(1000)),
    ]
    with serve(service) as address:
        retry = RetryPolicy(resume_patience=patience)
        client = twinplane.Client(address, retry=retry, clock=clock, sleep=sleep)
        with client, pytest.raises(twinplane.Unavailable) as caught:
            client.generate("x", timeout=timeout).result()
    assert caught.value.partial is not None
    assert caught.value.partial.token_ids == ((1, 2) if patience else (1,))
    bound = min(2 * patience, timeout or 1e9)
    assert clock.now <= bound
    if patience:
        assert clock.now >= min(patience, timeout or 1e9) - 1.0
    assert len(service.requests) < 1000


def span(token_count: int, digest: str, name: str = "", kept: bool = False) -> pb.WeightsSpan:
    return pb.WeightsSpan(
        token_count=token_count,
        weights_digest=digest,
        weights_name=name,
        kv_of_other_weights=kept,
    )


def test_which_weights_made_which_tokens_is_told_and_handed_back(
    call: Call, service: ScriptedInference
) -> None:
    kept = with_origin(delta("c", 7), "cd")
    kept.delta.origin.weights_name, kept.delta.origin.kv_of_other_weights = "v2", True
    spans = [span(3, "ab"), span(2, "cd", "v2", True)]
    service.scripts += [
        [begun(), with_origin(delta("a", 4, 5)), delta("b", 6), kept, UNAVAILABLE],
        [begun(), delta("d", 8), finished(stop_string="!", weights_spans=spans)],
    ]
    result = call("generate", "x")
    second = service.requests[1]
    assert isinstance(second, pb.GenerateRequest)
    assert list(second.resume.weights_spans) == [spans[0], span(1, "cd", "v2", True)]
    assert result.weights_spans == (
        twinplane.WeightsSpan(3, "ab"),
        twinplane.WeightsSpan(2, "cd", "v2", kv_of_other_weights=True),
    )


def test_deltas_have_their_origin() -> None:
    fold = GenerationFold()
    messages = [
        begun(),
        with_origin(delta("a", 4)),
        delta("b", 5),
        with_origin(delta("c", 6), "cd"),
    ]
    deltas = [fold.apply(message) for message in messages]
    assert [None if each is None else each.origin for each in deltas] == [
        None,
        twinplane.GenerationOrigin("ab"),
        None,
        twinplane.GenerationOrigin("cd"),
    ]


def test_weights_that_changed_are_an_error_of_their_own(
    call: Call, service: ScriptedInference
) -> None:
    info = error_details_pb2.ErrorInfo(reason="WEIGHTS_CHANGED", domain="twinplane")
    changed = Fail(grpc.StatusCode.ABORTED, "the weights were exchanged", (info,))
    service.scripts.append([begun(), delta("a", 1), changed])
    with pytest.raises(twinplane.WeightsChanged, match="exchanged") as caught:
        call("generate", "x")
    assert caught.value.partial is not None and caught.value.partial.token_ids == (1,)
    assert len(service.requests) == 1, "it is not resumed with what others have made"
