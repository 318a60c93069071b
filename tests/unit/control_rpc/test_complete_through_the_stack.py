"""Complete and Generate give the same through both planes, and disturb nobody beside them."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import grpc
import pytest

from tests.support import tiny_llama
from tests.support.whole_stack import Stack, serving
from twinplane.inference.v1 import inference_pb2 as pb

REQUEST_COUNT = 60
NEIGHBOUR = {
    "token_ids": {"ids": [5, 6, 7]},
    "sampling": {"seed": 11},
    "stop": {"max_tokens": 60, "ignore_end_of_sequence": True},
}


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, over the bytes and three special tokens."""
    folder = tmp_path_factory.mktemp("complete")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    return tiny_llama.save(tiny_llama.llama(vocab_size=259, eos_token_id=256), folder)


def fields(number: int) -> dict[str, object]:
    """A request of any kind; the same for the same number."""
    draw = random.Random(number)
    sampling: dict[str, object] = {"seed": draw.getrandbits(64)}
    if draw.random() < 0.3:
        sampling["temperature"] = draw.choice([0.0, 0.5, 2.0])
    if draw.random() < 0.3:
        sampling["top_k"] = draw.randint(1, 50)
    if draw.random() < 0.3:
        sampling["top_p"] = draw.uniform(0.1, 1.0)
    stop: dict[str, object] = {
        "max_tokens": draw.randint(1, 12), "ignore_end_of_sequence": draw.random() < 0.5,
    }  # fmt: skip
    if draw.random() < 0.4:
        stop["strings"] = [chr(draw.randint(33, 126)) for _ in range(16)]
    if draw.random() < 0.4:
        stop["token_ids"] = [draw.randint(0, 255) for _ in range(20)]
    text = "".join(draw.choice("abc ÄÖ€🙂") for _ in range(draw.randint(1, 12)))
    prompt: dict[str, object] = draw.choice(
        [
            {"text": text},
            {"token_ids": {"ids": [draw.randint(0, 255) for _ in range(draw.randint(1, 9))]}},
            {"chat": {"messages": [{"role": "user", "content": text}]}},
        ]
    )
    return {**prompt, "sampling": sampling, "stop": stop, "request_id": f"r{number}"}


async def streamed(stack: Stack, request: dict[str, object]) -> pb.CompleteResponse:
    """What Generate gives, as one answer."""
    whole = pb.CompleteResponse()
    async for message in stack.stub.Generate(pb.GenerateRequest(**request)):
        started, finished = message.started, message.finished
        whole.text += message.delta.text
        whole.token_ids.extend(message.delta.token_ids)
        whole.MergeFrom(
            pb.CompleteResponse(
                seed=started.seed,
                weights_spans=finished.weights_spans,
                request_id=started.request_id,
                model=started.model,
                reason=finished.reason,
                usage=finished.usage if message.HasField("finished") else None,
                stop_string=finished.stop_string if finished.HasField("stop_string") else None,
                stop_token_id=(
                    finished.stop_token_id if finished.HasField("stop_token_id") else None
                ),
            )
        )
    return whole


async def test_one_answer_is_what_the_stream_would_be(folder: Path) -> None:
    async with serving(folder) as stack:
        alone = await streamed(stack, NEIGHBOUR)
        beside = asyncio.create_task(streamed(stack, NEIGHBOUR))
        requests = [fields(number) for number in range(REQUEST_COUNT)]
        streams = [await streamed(stack, request) for request in requests]
        answers = await asyncio.gather(
            *(stack.stub.Complete(pb.CompleteRequest(**request)) for request in requests)
        )
        for answer, stream in zip(answers, streams, strict=True):
            for each in (answer, stream):  # the second of the two finds the first one's blocks
                each.usage.ClearField("cached_prompt_token_count")
            assert answer == stream
        assert len({answer.WhichOneof("matched") for answer in answers}) == 3
        neighbour = await beside
        assert (neighbour.text, neighbour.token_ids) == (alone.text, alone.token_ids)


@pytest.mark.parametrize("after", [0.0, 0.005, 0.02])
async def test_whoever_leaves_frees_what_the_answer_held(folder: Path, after: float) -> None:
    async with serving(folder) as stack:
        alone = await streamed(stack, NEIGHBOUR)
        beside = asyncio.create_task(streamed(stack, NEIGHBOUR))
        endless = {"stop": {"ignore_end_of_sequence": True}}
        calls = [
            stack.stub.Complete(pb.CompleteRequest(text=f"call {number}", **endless))
            for number in range(20)
        ]
        await asyncio.sleep(after)  # wherever they are by then
        for call in calls:
            call.cancel()
        for call in calls:
            assert await call.code() is grpc.StatusCode.CANCELLED
        neighbour = await beside
        assert (neighbour.text, neighbour.token_ids) == (alone.text, alone.token_ids)
    # And `serving` holds that no row, request or block is in use at its end.
