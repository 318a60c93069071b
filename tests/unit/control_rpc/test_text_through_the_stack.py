"""Ends, stop texts and spaces through both planes, with models that say what a test wrote down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from tests.support.chain_model import chained, ids, write_chain_model
from tests.support.edge_rig import refusal_of
from tests.support.quick import spread
from tests.support.toy_tokenizers import BYTE_TOKENS, bytetoy, sptoy
from tests.support.whole_stack import serving
from twinplane.common.v1.types_pb2 import TokenIds
from twinplane.inference.v1.inference_pb2 import (
    Chat,
    ChatMessage,
    DetokenizeRequest,
    GenerateRequest,
    StopConditions,
    TokenizeRequest,
)

END, START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HI = Chat(messages=[ChatMessage(role="user", content="hi")])
SMILE = [BYTE_TOKENS[byte] for byte in "🙂".encode()]


def special(name: str) -> AddedToken:
    return AddedToken(name, special=True, normalized=False)


def plain(name: str) -> AddedToken:
    return AddedToken(name, special=False, normalized=False)


def stop(*strings: str, tokens: int = 8, **more: Any) -> StopConditions:
    return StopConditions(max_tokens=tokens, strings=strings, **more)


@pytest.mark.parametrize(
    "files",
    spread(
        [
            {"config.json": {"eos_token_id": 256}},
            {"generation_config.json": {"eos_token_id": []}},
            {"generation_config.json": {"eos_token_id": None}},
            {"generation_config.json": {"eos_token_id": [256]}},
        ],
        1,
    ),
)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("in_chat", [special(TURN_END), plain(TURN_END)], ids=["special", "plain"])
async def test_a_chat_ends_with_what_any_file_or_the_template_says(
    tmp_path: Path, files: dict[str, Any], named: bool, in_chat: AddedToken
) -> None:
    tokenizer = bytetoy([special(END), special(START), in_chat])
    [newline, end] = ids(tokenizer, ["Ċ", TURN_END])
    config = {"chat_template": CHATML} | ({"eos_token": TURN_END} if named else {})
    write_chain_model(
        tmp_path,
        tokenizer,
        chained(newline, *ids(tokenizer, ["a"]), end, newline),
        files={"tokenizer_config.json": config, **files},
    )
    async with serving(tmp_path) as stack:
        answer = await stack.generate(chat=HI, stop=stop())
        assert (answer.text, len(answer.token_ids), answer.reason) == ("a", 2, "STOP")
        assert answer.finished.WhichOneof("matched") is None
        asked = await stack.generate(chat=HI, stop=stop(token_ids=[end]))
        assert (asked.text, asked.finished.stop_token_id) == ("a", end)
        on = await stack.generate(chat=HI, stop=stop(ignore_end_of_sequence=True))
        assert (on.text, len(on.token_ids), on.reason) == ("a\na\na", 8, "LENGTH")
        text = await stack.generate(text="hi\n", stop=stop())
        assert text.reason == ("STOP" if named else "LENGTH")


async def test_the_first_token_keeps_its_space(tmp_path: Path) -> None:
    tokenizer = sptoy()
    [ab, cd, ef, eos] = ids(tokenizer, ["▁ab", "▁cd", "▁ef", "</s>"])
    files = {
        "config.json": {"eos_token_id": eos},
        "tokenizer_config.json": {"chat_template": "{{ messages[-1].content }}"},
    }
    write_chain_model(tmp_path, tokenizer, chained(ab, cd, ef, eos), files=files)
    async with serving(tmp_path) as stack:
        assert (await stack.generate(text="ab", stop=stop())).text == " cd ef"
        prompt = TokenIds(ids=[ab])
        assert (await stack.generate(token_ids=prompt, stop=stop())).text == " cd ef"
        chat = Chat(messages=[ChatMessage(role="user", content="ab")])
        assert (await stack.generate(chat=chat, stop=stop())).text == " cd ef"
        answer = await stack.generate(text="ab", stop=stop(" cd"))
        assert (answer.text, answer.finished.stop_string) == ("", " cd")
        # Behind the beginning of a text alone, it is the beginning.
        begin = TokenIds(ids=ids(tokenizer, ["<s>"]))
        assert (await stack.generate(token_ids=begin, stop=stop())).text == ""


async def test_characters_of_byte_tokens_leave_when_they_are_whole(tmp_path: Path) -> None:
    tokenizer = sptoy()
    [a, *smile] = ids(tokenizer, ["▁ab", *SMILE])
    write_chain_model(tmp_path, tokenizer, chained(a, *smile, smile[0]))
    async with serving(tmp_path) as stack:
        endless = await stack.generate(text="ab", stop=stop(tokens=64))
        assert (endless.text, endless.reason) == ("🙂" * 16, "LENGTH")
        assert all(text in ("", "🙂", "🙂🙂") for text in endless.texts)
        answer = await stack.generate(text="ab", stop=stop("🙂", tokens=64))
        assert (answer.text, len(answer.token_ids)) == ("", 4)
        assert (answer.reason, answer.finished.stop_string) == ("STOP", "🙂")
        cut = await stack.generate(text="ab", stop=stop(tokens=6))
        assert cut.text == "🙂\ufffd\ufffd"
        found = await stack.generate(text="ab", stop=stop("\ufffd", tokens=6))
        assert (found.text, found.reason, found.finished.stop_string) == ("🙂", "STOP", "\ufffd")
        half = TokenIds(ids=smile[:2])
        assert (await stack.generate(token_ids=half, stop=stop(tokens=2))).text == "🙂"


@pytest.mark.parametrize("token", [special(TURN_END), plain(TURN_END)], ids=["special", "plain"])
@pytest.mark.parametrize(
    ("string", "text"),
    [(TURN_END, "ab"), (f"b{TURN_END}", "a"), (f"{TURN_END}c", "ab"), (f"b{TURN_END}cd", "a")],
)
async def test_a_stop_text_may_hold_a_special_token(
    tmp_path: Path, token: AddedToken, string: str, text: str
) -> None:
    tokenizer = bytetoy([token])
    tokens = ids(tokenizer, ["x", "a", "b", TURN_END, "c", "d", "e"])
    write_chain_model(tmp_path, tokenizer, chained(*tokens))
    async with serving(tmp_path) as stack:
        answer = await stack.generate(text="x", stop=stop(string))
        assert (answer.text, answer.finished.stop_string) == (text, string)
        shown = "abcdee" if token.special else f"ab{TURN_END}cdee"
        assert (await stack.generate(text="x", stop=stop(tokens=7))).text == shown


async def test_a_token_beyond_the_models_vocabulary_is_refused_by_its_field(
    tmp_path: Path,
) -> None:
    tokenizer = bytetoy([special(END), plain("<extra>")])
    write_chain_model(tmp_path, tokenizer, {}, vocabulary_size=257)
    ids_of_it = TokenIds(ids=[5, 257])
    async with serving(tmp_path) as stack:
        for request, field in (
            (GenerateRequest(text="a<extra>"), "text"),
            (GenerateRequest(token_ids=ids_of_it), "token_ids"),
            (GenerateRequest(text="a", stop=StopConditions(token_ids=[257])), "stop.token_ids"),
            (TokenizeRequest(text="a<extra>"), "text"),
            (DetokenizeRequest(token_ids=[257]), "token_ids"),
        ):
            refused = await refusal_of(stack.stub, request)
            assert (refused.code.name, refused.info.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
            assert refused.fields == [field]
            assert "257" in refused.message
        assert (await stack.generate(text="a", stop=stop(tokens=3))).text == "aaa"
        assert (await stack.stub.Tokenize(TokenizeRequest(text="a"))).token_ids


async def test_ids_that_only_the_model_has_give_no_text(tmp_path: Path) -> None:
    """Tensors are filled up to a round size, and an untrained row may win."""
    tokenizer = bytetoy([special(END)])
    [x, a] = ids(tokenizer, ["x", "a"])
    write_chain_model(tmp_path, tokenizer, chained(x, 300, a, 301, x), vocabulary_size=320)
    async with serving(tmp_path) as stack:
        answer = await stack.generate(text="x", stop=stop(tokens=6))
        assert (answer.text, answer.token_ids) == ("axa", (300, a, 301, x, 300, a))
        stopped = await stack.generate(text="x", stop=stop("ax"))
        assert (stopped.text, stopped.finished.stop_string) == ("", "ax")
        taken = await stack.generate(token_ids=TokenIds(ids=[300, x]), stop=stop(tokens=2))
        assert taken.text == "a"
        shown = await stack.stub.Detokenize(DetokenizeRequest(token_ids=[300, a, 319]))
        assert shown.text == "a"
