"""Incremental detokenization against whole decoding."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.text.detokenizer import WindowDetokenizer
from control_plane.text.model_files import load_text_model
from control_plane.text.tokenizer import Tokenizer
from twinplane.models import resolve

TEXTS = [
    "",
    "plain words, and   many    spaces\n\n\ttabs",
    "naïve café größe",
    "日本語のテキスト 中文 한국어",
    "مرحبا بالعالم שלום",
    "हिन्दी தமிழ் ไทย",
    "🙂👩‍👩‍👧‍👦🇩🇪 👍🏽",
    "Ελληνικά русский ქართული",
    "a\u0301 combining, \u200b zero width, \ufffd replacement, \u2028",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(3)]}",
]


def grouped(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    ends = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    return [tokens[start:end] for start, end in pairwise(ends)]


def check(tokenizer: Tokenizer, tokens: list[int], cuts: list[int]) -> None:
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.push(group) for group in grouped(tokens, cuts)]
    assert "".join(parts) + detokenizer.flush() == whole
    one_by_one = tokenizer.detokenizer()
    assert "".join(one_by_one.push([token]) for token in tokens) + one_by_one.flush() == whole


def after(tokenizer: Tokenizer, last: str) -> int:
    """The id after that of the vocabulary's last token: the number of tokens."""
    token_id = tokenizer.id_of(last)
    assert token_id is not None
    return token_id + 1


cuts = st.lists(st.integers(0, 1000), max_size=20)


@settings(max_examples=400, deadline=None)
@given(data=st.data(), cuts=cuts)
def test_byte_level_deltas_join_to_the_whole_decoding(
    byte_level: Tokenizer, data: st.DataObject, cuts: list[int]
) -> None:
    # Two ids beyond the vocabulary, as models with padded vocabularies can give.
    size = after(byte_level, "two words")
    ids = st.integers(0, size + 1)
    multibyte = st.sampled_from([*range(0x80, 0x100), *range(256, size)])
    check(byte_level, data.draw(st.lists(ids | multibyte, max_size=40)), cuts)


@settings(max_examples=600, deadline=None)
@given(data=st.data(), cuts=cuts)
def test_byte_fallback_deltas_join_to_the_whole_decoding(
    byte_fallback: Tokenizer, data: st.DataObject, cuts: list[int]
) -> None:
    size = after(byte_fallback, "")
    ids = st.integers(0, size + 1)
    words = st.integers(259, size - 1)
    euro = st.sampled_from([3 + 0xE2, 3 + 0x82, 3 + 0xAC])
    check(byte_fallback, data.draw(st.lists(ids | words | euro, max_size=40)), cuts)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60), cuts=cuts)
def test_texts_come_out_as_they_went_in(
    byte_level: Tokenizer, byte_fallback: Tokenizer, text: str, cuts: list[int]
) -> None:
    for tokenizer in (byte_level, byte_fallback):
        check(tokenizer, tokenizer.encode(text, add_special_tokens=False), cuts)


@pytest.mark.parametrize("text", ["€", "🙂", "日", "é"])
def test_a_character_comes_with_its_last_byte(byte_level: Tokenizer, text: str) -> None:
    detokenizer = byte_level.detokenizer()
    *first, last = text.encode()
    assert [detokenizer.push([byte]) for byte in first] == [""] * len(first)
    assert detokenizer.push([last]) == text
    assert detokenizer.flush() == ""


def test_a_run_of_byte_tokens_comes_when_it_ends(byte_fallback: Tokenizer) -> None:
    detokenizer = byte_fallback.detokenizer()
    euro = [3 + byte for byte in "€".encode()]
    letter = byte_fallback.id_of("a")
    assert letter is not None
    assert detokenizer.push([letter]) == "a"
    assert [detokenizer.push([byte]) for byte in euro] == ["", "", ""]
    assert detokenizer.push([letter]) == "€a"


def test_incomplete_characters_become_replacements_at_the_end(
    byte_level: Tokenizer, byte_fallback: Tokenizer
) -> None:
    for tokenizer, first in ((byte_level, 0), (byte_fallback, 3)):
        tokens = [first + byte for byte in "🙂".encode()[:3]]
        detokenizer = tokenizer.detokenizer()
        assert detokenizer.push(tokens) == ""
        assert detokenizer.flush() == tokenizer.decode(tokens, skip_special_tokens=True) != ""


def test_the_byte_window_stays_small(byte_fallback: Tokenizer) -> None:
    """Work per token does not grow with the sequence."""
    lengths: list[int] = []

    def decode(token_ids: list[int]) -> str:
        lengths.append(len(token_ids))
        return byte_fallback.decode(token_ids, skip_special_tokens=False)

    detokenizer = WindowDetokenizer(decode, lambda _: True, lambda _: False)
    word = byte_fallback.id_of("▁the")
    assert word is not None
    for _ in range(500):
        detokenizer.push([word])
    assert max(lengths) <= 2


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    folder = resolve("smollm2-135m-instruct")
    return load_text_model(folder).tokenizer


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_real_texts(smollm2: Tokenizer, text: str) -> None:
    tokens = smollm2.encode(text, add_special_tokens=False)
    assert smollm2.decode(tokens, skip_special_tokens=True) == text
    check(smollm2, tokens, [])
    check(smollm2, tokens[::-1], [3, 5])


@pytest.mark.model
@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.integers(0, 49_153), max_size=60), cuts=cuts)
def test_real_random_tokens(smollm2: Tokenizer, tokens: list[int], cuts: list[int]) -> None:
    check(smollm2, tokens, cuts)


@pytest.mark.model
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=80), cuts=cuts)
def test_real_random_texts(smollm2: Tokenizer, text: str, cuts: list[int]) -> None:
    check(smollm2, smollm2.encode(text, add_special_tokens=True), cuts)
