"""The built-in simulated model: a tokenizer of single bytes, words to answer with, and a chat."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.text.chat_template import ChatMessage
from control_plane.text.model_files import TextModel, load_text_model
from control_plane.text.processor import TextLimits, TextProcessor
from control_plane.text.template_pool import TemplatePool
from tests.support.quick import examples
from twinplane.models import SIMULATED_MODEL, pull, resolve

FOLDER = resolve(SIMULATED_MODEL)
CONFIG = json.loads((FOLDER / "config.json").read_text())
FIRST = CONFIG["simulated_first_token_id"]


@pytest.fixture(scope="module")
def model() -> TextModel:
    return load_text_model(FOLDER)


def test_it_is_there_without_being_pulled() -> None:
    assert pull(SIMULATED_MODEL) == FOLDER


def test_its_files_agree(model: TextModel) -> None:
    assert model.tokenizer.token_count == CONFIG["vocab_size"]
    assert model.ends.ids == model.tokenizer.special_ids == {FIRST}
    assert model.tokenizer.writes_every_text


@given(text=st.text(max_size=40))
@settings(max_examples=examples(150), deadline=None)
def test_a_text_is_its_bytes(model: TextModel, text: str) -> None:
    tokenizer = model.tokenizer
    token_ids = tokenizer.encode(text, add_special_tokens=True)
    assert token_ids == list(text.encode())
    assert tokenizer.decode(token_ids, hidden=frozenset()) == text


def test_what_it_answers_is_words(model: TextModel) -> None:
    """No control character among them: an answer is printed on a terminal."""
    words = [model.tokenizer.text_of(i) for i in range(FIRST + 1, CONFIG["vocab_size"])]
    assert len(set(words)) == len(words) > 100
    answer = model.tokenizer.decode(range(FIRST + 1, CONFIG["vocab_size"]), hidden=frozenset())
    assert len(answer.split(" ")) == len(words) + 1
    assert answer.replace(" ", "").isalpha()
    assert answer.isascii()


async def test_it_chats(model: TextModel) -> None:
    assert model.template is not None
    renderer = TemplatePool(model.template, TextLimits().rendering, now=datetime.now)
    text = TextProcessor(model, TextLimits(), renderer)
    try:
        turns = [ChatMessage("user", "hi"), ChatMessage("assistant", "ab"), ChatMessage("user", "")]
        token_ids = await text.encode_chat(turns)
        rendered = "user: hi<|end|>\nassistant: ab<|end|>\nuser: <|end|>\nassistant:"
        assert await text.decode(token_ids, skip_special_tokens=False) == rendered
        assert token_ids.count(FIRST) == 3
        assert text.ends(chat=True, ignored=False).ids == {FIRST}
    finally:
        text.close()
