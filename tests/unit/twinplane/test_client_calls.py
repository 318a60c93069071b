"""Both clients over a loopback server: what they send and what they answer."""

from __future__ import annotations

from typing import Any

import pytest

import twinplane
from tests.support.client_callers import Call
from tests.support.scripted_inference import (
    ScriptedInference,
    delta,
    finished,
    started,
)
from twinplane import (
    FinishReason,
    GenerationResult,
    Message,
    SamplingDefaults,
    ServedModel,
    ServingWorker,
    Usage,
    WeightVersion,
    WorkerState,
)
from twinplane.inference.v1 import inference_pb2 as pb


def test_result_carries_everything_the_stream_said(call: Call, service: ScriptedInference) -> None:
    end = finished(
        reason=pb.FINISH_REASON_STOP,
        stop_string="!",
        usage={
            "prompt_token_count": 3,
            "cached_prompt_token_count": 2,
            "completion_token_count": 4,
        },
    )
    service.scripts.append([started(), delta("Hel", 1, 2), delta("", 3), delta("lo", 4), end])
    assert call("generate", "Say hello") == GenerationResult(
        text="Hello",
        token_ids=(1, 2, 3, 4),
        finish_reason=FinishReason.STOP,
        stop_string="!",
        stop_token_id=None,
        usage=Usage(3, 2, 4),
        seed=7,
        request_id="r-1",
        model="m",
    )


def test_stop_token_zero_is_told_from_none(call: Call, service: ScriptedInference) -> None:
    service.scripts.append([started(), finished(reason=pb.FINISH_REASON_STOP, stop_token_id=0)])
    result = call("generate", "x")
    assert (result.stop_token_id, result.stop_string) == (0, None)


def test_unset_arguments_stay_unset_on_the_wire(call: Call, service: ScriptedInference) -> None:
    service.scripts.append([started(), finished()])
    call("generate", "x")
    (request,) = service.requests
    expected = pb.GenerateRequest(text="x", sampling={}, stop={})
    assert request == expected
    assert service.time_left[0] is None or service.time_left[0] > 1e6


def test_every_argument_reaches_its_field(call: Call, service: ScriptedInference) -> None:
    service.scripts.append([started(), finished()])
    call(
        "generate",
        [5, 0, 6],
        model="m",
        max_tokens=9,
        temperature=0.0,
        top_k=0,
        top_p=0.5,
        min_p=0.25,
        seed=2**64 - 1,
        stop=["a", "b"],
        stop_token_ids=[0, 2],
        ignore_eos=True,
        priority=-3,
        cache_salt="tenant",
        request_id="mine",
        timeout=30.0,
    )
    (request,) = service.requests
    assert request == pb.GenerateRequest(
        model="m",
        token_ids={"ids": [5, 0, 6]},
        sampling={"temperature": 0.0, "top_k": 0, "top_p": 0.5, "min_p": 0.25, "seed": 2**64 - 1},
        stop={
            "max_tokens": 9,
            "strings": ["a", "b"],
            "token_ids": [0, 2],
            "ignore_end_of_sequence": True,
        },
        priority=-3,
        cache_salt="tenant",
        request_id="mine",
    )
    assert 0 < service.time_left[0] < 35


def test_conversation_is_sent_as_a_chat(call: Call, service: ScriptedInference) -> None:
    service.scripts.append([started(), finished()])
    call("generate", [Message("system", "Be brief."), Message("user", "Hi")])
    (request,) = service.requests
    assert request.chat == pb.Chat(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ]
    )


def test_no_tokens_is_still_the_token_form(call: Call, service: ScriptedInference) -> None:
    service.scripts.append([started(), finished()])
    call("generate", [])
    assert service.requests[0].WhichOneof("prompt") == "token_ids"


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"max_tokens": -1}, "stop.max_tokens"),
        ({"max_tokens": 2**32}, "stop.max_tokens"),
        ({"top_k": -1}, "sampling.top_k"),
        ({"seed": 2**64}, "sampling.seed"),
        ({"seed": -1}, "sampling.seed"),
        ({"priority": 2**31}, "priority"),
        ({"stop_token_ids": [1, -1]}, "stop.token_ids[1]"),
        ({"stop": ["ok", "\ud800"]}, "stop.strings[1]"),
        ({"prompt": "\ud800"}, "text"),
        ({"prompt": [1, -2]}, "token_ids.ids[1]"),
        ({"prompt": [Message("user", "\ud800")]}, "chat.messages[0].content"),
    ],
)
def test_what_no_message_can_carry_is_an_invalid_request(
    call: Call, service: ScriptedInference, arguments: dict[str, Any], path: str
) -> None:
    with pytest.raises(twinplane.InvalidRequest) as caught:
        call("generate", **{"prompt": "x", **arguments})
    assert [violation.field for violation in caught.value.violations] == [path]
    assert service.requests == []


@pytest.mark.parametrize("prompt", [b"bytes", [1, "two"], [Message("user", "x"), 3], 5, [1.5]])
def test_prompt_of_another_type_is_a_type_error(call: Call, prompt: Any) -> None:
    with pytest.raises(TypeError):
        call("generate", prompt)


def test_one_string_as_stop_is_a_type_error(call: Call) -> None:
    with pytest.raises(TypeError, match="sequence of strings"):
        call("generate", "x", stop="end")


def test_an_option_that_does_not_exist_is_a_type_error(
    call: Call, service: ScriptedInference
) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'min_q'"):
        call("generate", "x", min_q=0.5)
    assert service.requests == []


def test_tokenize_text_and_chat(call: Call, service: ScriptedInference) -> None:
    assert call("tokenize", "abc", model="m", add_special_tokens=False) == (1, 2, 3)
    assert call("tokenize", [Message("user", "abc")]) == (1, 2, 3)
    assert service.requests == [
        pb.TokenizeRequest(model="m", text="abc", omit_special_tokens=True),
        pb.TokenizeRequest(chat={"messages": [{"role": "user", "content": "abc"}]}),
    ]
    with pytest.raises(TypeError):
        call("tokenize", [1, 2])


def test_detokenize(call: Call, service: ScriptedInference) -> None:
    assert call("detokenize", [4, 5], model="m", keep_special_tokens=True) == "one two"
    assert service.requests == [
        pb.DetokenizeRequest(model="m", token_ids=[4, 5], keep_special_tokens=True)
    ]


def test_list_models(call: Call) -> None:
    defaults = SamplingDefaults(0.5, 20, 0.75, 0.0)
    version = WeightVersion(1, "ab")
    assert call("list_models") == (ServedModel("m", 64, 9, True, version, defaults),)


def test_list_workers(call: Call, service: ScriptedInference) -> None:
    assert call("list_workers") == (), "the server is too old to tell"
    service.workers = [
        pb.ServingWorker(
            state=pb.WORKER_STATE_ATTACHED, worker_id="w", device="cpu", kv_token_count=64,
            free_kv_token_count=48, max_sequence_count=4, running_sequence_count=1,
        ),
        pb.ServingWorker(state=pb.WORKER_STATE_AWAY, waiting_sequence_count=3),
    ]  # fmt: skip
    service.workers[1].away.seconds = 12
    assert call("list_workers") == (
        ServingWorker(WorkerState.ATTACHED, "w", "cpu", None, 64, 48, 4, 1, 0),
        ServingWorker(WorkerState.AWAY, "", "", 12.0, 0, 0, 0, 0, 3),
    )


def test_a_server_that_is_too_old_to_tell_its_sampling(
    call: Call, service: ScriptedInference
) -> None:
    service.default_sampling = None
    [model] = call("list_models")
    assert model.default_sampling is None
