"""One line for each request at its end, whatever its end: ids, counts and times, never its text."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from control_plane.rpc import request_log
from control_plane.text.model_files import TextModel
from tests.support.edge_rig import refused
from tests.support.planes import ROOT
from tests.support.whole_stack import LENGTH, Stack, simulating
from twinplane.common.v1.types_pb2 import SamplingParameters, TokenIds
from twinplane.inference.v1 import inference_pb2 as pb

MESSAGE = "request finished"
SECRET = "a secret"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
KINDS = (
    *("length", "stop", "cancelled", "deadline"),
    *("complete", "complete and leave"),
    *("invalid", "unknown model", "too long", "duplicate", "late"),
)
METHODS = [f"/twinplane.inference.v1.InferenceService/{one}" for one in ("Generate", "Complete")]


@pytest.fixture(autouse=True)
def many_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "LINES_WITHOUT_TOKENS", 100_000)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "control_plane.rpc.request_log")
    return caplog


def lines(log: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of all requests' lines, in order."""
    return [vars(record)["fields"] for record in log.records if record.message == MESSAGE]


def asking(name: str, most: int, **fields: Any) -> pb.GenerateRequest:
    fields.setdefault("text", SECRET)
    return pb.GenerateRequest(
        request_id=name,
        sampling=SamplingParameters(temperature=0),
        stop=pb.StopConditions(max_tokens=most, ignore_end_of_sequence=True),
        **fields,
    )


@dataclass
class Seen:
    """What a client saw of its request. `code` and `reason` are those of its line."""

    name: str
    code: str = "OK"
    reason: str = ""
    prompt: int | None = None
    tokens: int = 0
    whole: bool = False

    @property
    def must_be_told(self) -> bool:
        """A deadline can pass before the server hears of a call."""
        return self.code != "DEADLINE_EXCEEDED" or self.prompt is not None


async def generate(made: Stack, request: pb.GenerateRequest, seconds: float = 600.0) -> Seen:
    """Reads to the end."""
    seen = Seen(request.request_id)
    try:
        async for message in made.stub.Generate(request, timeout=seconds):
            seen.tokens += len(message.delta.token_ids)
            match message.WhichOneof("event"):
                case "started":
                    seen.prompt = message.started.prompt_token_count
                case "finished":
                    name = pb.FinishReason.Name(message.finished.reason)
                    seen.reason = name.removeprefix("FINISH_REASON_").lower()
                    seen.whole = True
    except grpc.aio.AioRpcError as error:
        seen.code = error.code().name
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            seen.reason = "DEADLINE_PASSED"
        else:
            seen.reason = refused(error).info.reason
    return seen


async def leave(made: Stack, request: pb.GenerateRequest, token_count: int) -> Seen:
    """Leaves after so many tokens."""
    seen = Seen(request.request_id, "CANCELLED", "cancelled")
    call = made.stub.Generate(request)
    while seen.prompt is None or seen.tokens < token_count:
        message = await call.read()
        if message.WhichOneof("event") == "started":
            seen.prompt = message.started.prompt_token_count
        seen.tokens += len(message.delta.token_ids)
    call.cancel()
    return seen


def complete(name: str, most: int) -> pb.CompleteRequest:
    made = pb.CompleteRequest()
    made.ParseFromString(asking(name, most).SerializeToString())
    return made


async def play(made: Stack, kind: str, name: str, rng: random.Random) -> list[Seen]:
    """One request of a kind, or two, and what their clients saw."""
    match kind:
        case "length":
            return [await generate(made, asking(name, rng.randrange(1, 40)))]
        case "stop":
            first = asking(name, 40)
            first.stop.token_ids.extend(range(0, 259, 2))
            return [await generate(made, first)]
        case "cancelled":
            return [await leave(made, asking(name, 240), rng.randrange(20))]
        case "deadline":
            return [await generate(made, asking(name, 248), rng.choice((0.03, 0.08)))]
        case "late":
            return [await generate(made, asking(name, 4), 1e-6)]
        case "invalid":
            bad = asking(name, 4)
            bad.sampling.top_p = 2.0
            return [await generate(made, bad)]
        case "unknown model":
            return [await generate(made, asking(name, 4, model=SECRET))]
        case "too long":
            ids = TokenIds(ids=[5] * LENGTH)
            request = pb.GenerateRequest(request_id=name, token_ids=ids)
            return [await generate(made, request)]
        case "complete":
            request = complete(name, rng.randrange(1, 40))
            answer = await made.stub.Complete(request)
            usage = answer.usage
            count = usage.completion_token_count
            return [Seen(name, "OK", "length", usage.prompt_token_count, count, whole=True)]
        case "complete and leave":
            call = made.stub.Complete(complete(name, 240))
            await made.submitted(name)
            call.cancel()
            return [Seen(name, "CANCELLED", "cancelled")]
        case "duplicate":
            ready = made.stub.Generate(asking(name, 200))
            first = Seen(name, "CANCELLED", "cancelled")
            first.prompt = (await ready.read()).started.prompt_token_count
            second = await generate(made, asking(name, 4))
            ready.cancel()
            return [first, second]
        case _:
            raise AssertionError(kind)


@pytest.mark.parametrize("seed", range(4))
async def test_every_end_has_its_line(
    tiny_text: TextModel, log: pytest.LogCaptureFixture, seed: int
) -> None:
    """55 requests at once, five of each kind, beside a neighbour that nothing of this changes."""
    rng = random.Random(seed)
    async with simulating(tiny_text, step_seconds=0.001) as made:
        alone = [m async for m in made.stub.Generate(asking("alone", 200))]
        neighbour = asyncio.create_task(generate(made, asking("neighbour", 200)))
        kinds = list(KINDS) * 5
        rng.shuffle(kinds)
        played = await asyncio.gather(
            *(play(made, kind, f"r{n}", rng) for n, kind in enumerate(kinds))
        )
        beside = await neighbour
        late = {f"r{n}" for n, kind in enumerate(kinds) if kind in ("late", "deadline")}
        assert beside.tokens == sum(len(m.delta.token_ids) for m in alone)
        seen = [one for several in played for one in several] + [beside]
        required = [one for one in seen if one.must_be_told]
        await made.ended(len(required) + 1)
        await made.idle()
    told = Counter(
        (line.get("request_id", ""), line["code"], line["reason"]) for line in lines(log)
    )
    told.subtract([("alone", "OK", "length")])
    told.subtract((one.name, one.code, one.reason) for one in required)
    assert min(told.values()) == 0, "an end without its line"
    for (name, code, _), count in told.items():
        # Its client saw nothing of it. It may have ended before its name was read.
        assert not count or (code == "DEADLINE_EXCEEDED" and name in {"", *late}), name
    by_name = {(line.get("request_id"), line["code"]): line for line in lines(log)}
    for one in seen:
        line = by_name.get((one.name, one.code), {})
        if one.whole:
            assert line["output_tokens"] == one.tokens
            assert 0 <= line["queue_seconds"] <= line["first_token_seconds"]
            assert line["first_token_seconds"] <= line["duration_seconds"]
            assert line["model"] == "told" and line["method"] in ("Generate", "Complete")
        if one.prompt is not None and line:
            assert line["prompt_tokens"] == one.prompt
            assert line["cached_tokens"] <= one.prompt
            assert line["output_tokens"] >= one.tokens
    table = OPERATIONS.split("\n## Logs\n")[1].split("\n\nRequests that")[0]
    documented = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\|(.*?)\|", table, re.MULTILINE)))
    told = {name for line in lines(log) for name in line}
    assert told == set(documented) - {"resumed_tokens"}, "none of them was"
    assert SECRET not in "".join(str(vars(record)) for record in log.records)


@pytest.mark.parametrize("seed", range(3))
async def test_the_metrics_count_the_same_ends(tiny_text: TextModel, seed: int) -> None:
    rng = random.Random(100 + seed)
    async with simulating(tiny_text, step_seconds=0.001) as made:
        kinds = [rng.choice(KINDS) for _ in range(30)]
        played = await asyncio.gather(
            *(play(made, kind, f"r{n}", rng) for n, kind in enumerate(kinds))
        )
        seen = [one for several in played for one in several]
        await made.ended(sum(one.must_be_told for one in seen))
        await made.idle()
        ends = list(made.ends)
        text = made.telemetry.render().decode()
    pairs = re.findall(r"^(twinplane_\w+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
    found = {name: float(value) for name, value in pairs}
    codes = Counter(end.code for end in ends)
    for code in ("OK", "CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS"):
        assert codes[code] == sum(one.code == code for one in seen)
    for (method, code), count in Counter((end.method, end.code) for end in ends).items():
        assert found[f'twinplane_rpcs_total{{code="{code}",method="{method}"}}'] == count
    for method in METHODS:
        count = sum(end.method == method for end in ends)
        assert found[f'twinplane_rpc_duration_seconds_count{{method="{method}"}}'] == count
    for reason, count in Counter(end.reason for end in ends if end.reason).items():
        assert found[f'twinplane_rpc_errors_total{{reason="{reason}"}}'] == count
    submitted = found['twinplane_requests_submitted_total{replica="0"}']
    ended = {
        reason: found[f'twinplane_requests_finished_total{{reason="{reason}",replica="0"}}']
        for reason in ("stop", "length", "cancelled", "deadline", "fault")
    }
    assert sum(ended.values()) == submitted
    for name in ("queue_seconds", "prompt_tokens", "output_tokens"):
        assert found[f"twinplane_request_{name}_count"] == submitted
    assert found["twinplane_request_duration_seconds_count"] == ended["stop"] + ended["length"]
    assert ended["stop"] + ended["length"] == codes["OK"]
    assert ended["cancelled"] == codes["CANCELLED"]
    assert ended["deadline"] <= codes["DEADLINE_EXCEEDED"]
    assert ended["fault"] == 0
    generated = found['twinplane_tokens_total{kind="generated",replica="0"}']
    assert found["twinplane_request_output_tokens_sum"] == generated


async def test_a_full_queue_refuses_with_a_line_and_its_reason(
    tiny_text: TextModel, log: pytest.LogCaptureFixture
) -> None:
    async with simulating(tiny_text, step_seconds=0.004, waiting=1) as made:
        running = [asyncio.create_task(generate(made, asking(f"r{n}", 100))) for n in range(12)]
        seen = await asyncio.gather(*running)
    refusals = [one for one in seen if one.reason == "QUEUE_FULL"]
    told = [line for line in lines(log) if line["reason"] == "QUEUE_FULL"]
    assert len(told) == len(refusals) > 0
    assert len(lines(log)) == 12
    assert all(line["duration_seconds"] >= 0 for line in told)


@pytest.mark.parametrize("most", [1, 7, 20])
async def test_a_flood_of_refusals_is_told_by_number(
    tiny_text: TextModel,
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    """Who gets tokens has a line in the middle of it all the same."""
    monkeypatch.setattr(request_log, "LINES_WITHOUT_TOKENS", most)
    bad = asking("bad", 4)
    bad.sampling.top_p = 2.0
    async with simulating(tiny_text) as made:
        good = [asking(f"good-{n}", 8) for n in range(30)]
        flood = [generate(made, request) for _ in range(5) for request in (*good[:6], bad, bad)]
        flood += [generate(made, bad) for _ in range(200)]
        # Requests of one name at a time.
        seen = await asyncio.gather(*flood)
        await made.ended(len(seen))
    with_tokens = [one for one in seen if one.tokens]
    told = lines(log)
    assert len([line for line in told if line.get("output_tokens")]) == len(with_tokens)
    without = [line for line in told if not line.get("output_tokens")]
    left_out = sum(
        vars(record)["fields"]["count"] for record in log.records if "too many" in record.message
    )
    assert left_out > 0
    assert len(without) + left_out == len(seen) - len(with_tokens)


@pytest.mark.parametrize("ends_by", ["deadline", "leaving"])
async def test_a_deadline_is_told_apart_from_leaving(
    tiny_text: TextModel, log: pytest.LogCaptureFixture, ends_by: str
) -> None:
    async with simulating(tiny_text, step_seconds=0.05) as made:
        seconds = 3.0 if ends_by == "deadline" else 600.0
        call = made.stub.Generate(asking("one", 240), timeout=seconds)
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            while True:
                message = await call.read()
                if ends_by == "leaving" and message.delta.token_ids:
                    call.cancel()
        await made.ended(1)
        await made.idle()
        text = made.telemetry.render().decode()
    [line] = lines(log)
    reason = "deadline" if ends_by == "deadline" else "cancelled"
    assert f'requests_finished_total{{reason="{reason}",replica="0"}} 1.0' in text
    expected = ("DEADLINE_EXCEEDED", "DEADLINE_PASSED")
    if ends_by == "leaving":
        expected = ("CANCELLED", "cancelled")
    assert (line["code"], line["reason"]) == expected
    assert line["output_tokens"] > 0


@pytest.mark.parametrize("most", [1, 4])
async def test_what_a_request_brings_is_told_and_buys_no_line(
    tiny_text: TextModel,
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    """Nothing has worked for an end that the tokens reach: there may be any number of those."""
    monkeypatch.setattr(request_log, "LINES_WITHOUT_TOKENS", most)
    async with simulating(tiny_text) as made:
        for number in range(20):
            over = asking(f"over-{number}", 3, resume=pb.Resumption(token_ids=[64, 65, 66]))
            over.sampling.seed = 1
            assert (await generate(made, over)).tokens == 0
        goes_on = asking("goes-on", 5, resume=pb.Resumption(token_ids=[64, 65, 66]))
        goes_on.sampling.seed = 1
        assert (await generate(made, goes_on)).tokens == 2
        await made.ended(21)
    told = lines(log)
    assert all(line["resumed_tokens"] == 3 for line in told)
    assert told[-1]["request_id"] == "goes-on" and told[-1]["output_tokens"] == 5
    assert 1 < len(told) < 21
