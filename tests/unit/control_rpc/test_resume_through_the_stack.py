"""A stream cut at any token and resumed is the stream that nobody cut, through both planes."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.support import tiny_llama
from tests.support.chain_model import chained, ids, write_chain_model
from tests.support.quick import examples
from tests.support.resuming import Told, resumption, told
from tests.support.toy_tokenizers import BYTE_TOKENS, bytetoy, sptoy
from tests.support.whole_stack import Stack, serving
from twinplane.inference.v1 import inference_pb2 as pb

TURN_END = "<|im_end|>"
REQUEST_COUNT = 50
NEIGHBOUR = pb.GenerateRequest(
    token_ids={"ids": [5, 6, 7]},
    sampling={"seed": 11},
    stop={"max_tokens": 150, "ignore_end_of_sequence": True},
)


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, over the bytes and three special tokens: its text is full of
    characters that never become whole."""
    folder = tmp_path_factory.mktemp("resume")
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    return tiny_llama.save(tiny_llama.llama(vocab_size=259, eos_token_id=256), folder)


def request_of(number: int) -> pb.GenerateRequest:
    """A request of any kind; the same for the same number."""
    draw = random.Random(number)
    text = "".join(draw.choice("abc ÄÖ€🙂") for _ in range(draw.randint(1, 12)))
    prompts: list[dict[str, Any]] = [
        {"text": text},
        {"token_ids": {"ids": [draw.randint(0, 258) for _ in range(draw.randint(1, 30))]}},
        {"chat": {"messages": [{"role": "user", "content": text}]}},
    ]
    request = pb.GenerateRequest(**prompts[number % 3], cache_salt=draw.choice(["", "a"]))
    if draw.random() < 0.7:
        request.sampling.seed = draw.getrandbits(64)
    if draw.random() < 0.4:
        request.sampling.temperature = draw.choice([0.0, 0.5, 2.0])
    if draw.random() < 0.3:
        request.sampling.top_k = draw.randint(1, 50)
    if draw.random() < 0.3:
        request.sampling.top_p = draw.uniform(0.1, 1.0)
    request.stop.max_tokens = draw.randint(1, 12)
    request.stop.ignore_end_of_sequence = draw.random() < 0.5
    if draw.random() < 0.5:
        strings = [chr(draw.randint(33, 126)) for _ in range(12)]
        request.stop.strings.extend([*strings, "\ufffd" * draw.randint(2, 4), TURN_END])
    if draw.random() < 0.3:
        request.stop.token_ids.extend(draw.randint(0, 255) for _ in range(20))
    return request


async def check_every_cut(stack: Stack, request: pb.GenerateRequest) -> int:
    """Cuts a request's stream at every token, with what a client could have of its text."""
    whole = await told(stack.stub.Generate(request))
    assert whole.finished is not None
    assert len(whole.token_ids) == whole.finished.usage.completion_token_count
    shown = dict(whole.points)
    for count in range(len(whole.token_ids) + 1):
        behind = await told(stack.stub.Generate(resumption(request, whole, count)))
        check(whole, behind, count, whole.text[: len(whole.text) - len(behind.text)])
        for text in {"", shown.get(count, "")}:
            again = resumption(request, whole, count, text)
            check(whole, await told(stack.stub.Generate(again)), count, text)
        again = resumption(request, whole, count, "")
        fields = {name.name: value for name, value in again.ListFields()}
        answer = await stack.stub.Complete(pb.CompleteRequest(**fields))
        assert (answer.text, list(answer.token_ids)) == (whole.text, whole.token_ids[count:])
        assert answer.usage.completion_token_count == len(whole.token_ids)
    return len(whole.token_ids) + 1


def check(whole: Told, behind: Told, count: int, text: str) -> None:
    """What was resumed, behind so many tokens and a text, makes the whole."""
    assert whole.token_ids[:count] + behind.token_ids == whole.token_ids
    assert text + behind.text == whole.text
    assert behind.end() == whole.end()
    same = ("request_id", "seed", "prompt_token_count", "sampling", "max_tokens", "model")
    for name in same:
        assert getattr(behind.started, name) == getattr(whole.started, name), name
    assert behind.origin is None or count == 0, "told again, though nothing has changed"


@pytest.mark.slow
async def test_a_stream_cut_anywhere_goes_on_as_if_it_were_not(folder: Path) -> None:
    async with serving(folder) as stack:
        alone = await told(stack.stub.Generate(NEIGHBOUR))
        beside = asyncio.create_task(told(stack.stub.Generate(NEIGHBOUR)))
        counts = [await check_every_cut(stack, request_of(n)) for n in range(REQUEST_COUNT)]
        assert sum(counts) > 200
        neighbour = await beside
        assert (neighbour.text, neighbour.token_ids) == (alone.text, alone.token_ids)


def special(name: str) -> AddedToken:
    return AddedToken(name, special=True, normalized=False)


@pytest.mark.slow
async def test_pieces_spaces_and_names_of_tokens_go_on_where_they_stopped(tmp_path: Path) -> None:
    """Vocabularies whose text depends on what comes before, and texts that are held back."""
    pieces = sptoy(more=[special(TURN_END)])
    smile = [BYTE_TOKENS[byte] for byte in "🙂".encode()]
    half = [BYTE_TOKENS[byte] for byte in "日".encode()[:2]]
    said = ["▁ab", "▁cd", *smile, "▁", "é", *half, "▁ef", TURN_END, "日本", "."]
    letters = bytetoy([special(TURN_END)])
    spelt = ["x", "a", "b", TURN_END, "c", "d", "e"]
    stops = [[], ["d é"], ["🙂 "], [f"b{TURN_END}"], ["cde", f"b{TURN_END}cx"], ["\ufffd\ufffd "]]
    for name, tokenizer, words in (("pieces", pieces, said), ("letters", letters, spelt)):
        chain = ids(tokenizer, words)
        write_chain_model(tmp_path / name, tokenizer, chained(*chain, chain[0]))
        async with serving(tmp_path / name) as stack:
            for strings in stops:
                for max_tokens in (5, 9, 15):
                    request = pb.GenerateRequest(token_ids={"ids": chain[:1]})
                    request.sampling.temperature = 0
                    request.stop.max_tokens = max_tokens
                    request.stop.strings.extend(strings)
                    await check_every_cut(stack, request)


def test_several_cuts_change_as_little_as_one(folder: Path) -> None:
    """Each stream resumes the one before, which its client has left wherever it was."""
    with asyncio.Runner() as runner:
        serving_stack = serving(folder)
        stack = runner.run(_entered(serving_stack))

        @settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.integers(0, 2**32), st.lists(st.integers(0, 5), min_size=1, max_size=5))
        def cut(number: int, reads: list[int]) -> None:
            runner.run(_cut_often(stack, request_of(number), reads))

        try:
            cut()
        finally:
            runner.run(serving_stack.__aexit__(None, None, None))


async def _entered(serving_stack: Any) -> Stack:
    stack: Stack = await serving_stack.__aenter__()
    return stack


async def _cut_often(stack: Stack, request: pb.GenerateRequest, reads: list[int]) -> None:
    request.request_id = "cut"
    first = await told(stack.stub.Generate(request))
    request.sampling.seed = first.started.seed
    got, again = Told(), request
    for read in [*reads, None]:
        call = stack.stub.Generate(again)
        got.started.Clear()
        count = 0
        async for message in call:
            got.take(message)
            count += 1
            if read is not None and count > read:
                break
        # The server may not have noticed yet that its client is gone: it goes on all the same.
        call.cancel()
        if got.finished is not None:
            break
        again = resumption(request, got, len(got.token_ids), got.text)
    assert (got.text, got.token_ids) == (first.text, first.token_ids)
    assert got.end() == first.end()
