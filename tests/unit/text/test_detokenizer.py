"""Incremental detokenization against whole decoding."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.text.detokenizer import Detokenizer, WindowDetokenizer
from control_plane.text.model_files import load_text_model
from control_plane.text.tokenizer import Tokenizer
from tests.support.quick import examples
from tests.support.toy_tokenizers import BYTE_TOKENS, KINDS
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


def streamed(detokenizer: Detokenizer, groups: list[list[int]]) -> str:
    return "".join(detokenizer.push(group) for group in groups) + detokenizer.flush()


def added_by(before: str, whole: str) -> str:
    """What follows the part that both begin with."""
    pairs = enumerate(zip(before, whole, strict=False))
    return whole[next((i for i, (a, b) in pairs if a != b), min(len(before), len(whole))) :]


def check(tokenizer: Tokenizer, tokens: list[int], cuts: list[int]) -> None:
    hidden = tokenizer.special_ids
    whole = tokenizer.decode(tokens, hidden=hidden)
    shown = [token for token in tokens if token not in hidden]
    assert streamed(tokenizer.detokenizer(), grouped(shown, cuts)) == whole
    assert streamed(tokenizer.detokenizer(), [[token] for token in shown]) == whole
    for start in {cut % (len(shown) + 1) for cut in cuts}:
        before = tokenizer.decode(shown[:start], hidden=hidden)
        behind = streamed(tokenizer.detokenizer(shown[:start]), [[t] for t in shown[start:]])
        assert behind == added_by(before, whole)


def decoded(backend: tokenizers.Tokenizer, tokens: list[int]) -> str:
    """By the library, with a token U+FFFD for each byte token that is not part of a character."""
    names = [backend.id_to_token(token) or "" for token in tokens]
    replacement = backend.token_to_id("\ufffd")
    clean: list[int] = []
    start = 0
    while start < len(tokens):
        size = next((n for n in range(4, 0, -1) if is_character(names[start : start + n])), 1)
        broken = names[start] in BYTE_TOKENS and not is_character(names[start : start + size])
        clean += [replacement] if broken else tokens[start : start + size]
        start += size
    return backend.decode(clean, skip_special_tokens=False)


def is_character(names: list[str]) -> bool:
    if not all(name in BYTE_TOKENS for name in names):
        return False
    try:
        return len(bytes(BYTE_TOKENS.index(name) for name in names).decode()) == 1
    except UnicodeDecodeError:
        return False


cuts = st.lists(st.integers(0, 1000), max_size=20)
EURO = [3 + byte for byte in "€".encode()]
SMILE = [3 + byte for byte in "🙂".encode()]


@cache
def of_kind(kind: str) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    backend = KINDS[kind]()
    return backend, Tokenizer(backend)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(120), deadline=None)
@given(data=st.data(), cuts=cuts)
def test_what_comes_behind_a_prompt_is_what_it_adds(
    kind: str, data: st.DataObject, cuts: list[int]
) -> None:
    backend, tokenizer = of_kind(kind)
    # Some ids beyond the vocabulary, as models with filled-up vocabularies can give.
    ids = st.integers(0, tokenizer.token_count + 1)
    if "fallback" in kind:
        words = st.integers(259, tokenizer.token_count - 1)
        ids = words | st.sampled_from([*EURO, *SMILE, 3 + 0x20, 3 + 0xFF]) | ids
    tokens = data.draw(st.lists(ids, max_size=30) | st.lists(ids, max_size=3))
    if "fallback" in kind and data.draw(st.booleans()):
        tokens += SMILE * data.draw(st.integers(1, 3))
    start = data.draw(st.integers(0, len(tokens)))
    prompt, answer = tokens[:start], tokens[start:]
    whole, before = decoded(backend, tokens), decoded(backend, prompt)
    added = added_by(before, whole)
    assert streamed(tokenizer.detokenizer(prompt), grouped(answer, cuts)) == added
    assert streamed(tokenizer.detokenizer(prompt), [[token] for token in answer]) == added
    assert tokenizer.decode(tokens, hidden=frozenset()) == whole


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data(), cuts=cuts)
def test_byte_level_deltas_join_to_the_whole_decoding(
    byte_level: Tokenizer, data: st.DataObject, cuts: list[int]
) -> None:
    size = byte_level.token_count
    ids = st.integers(0, size + 1)
    multibyte = st.sampled_from([*range(0x80, 0x100), *range(256, size)])
    check(byte_level, data.draw(st.lists(ids | multibyte, max_size=40)), cuts)


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(max_size=60), cuts=cuts)
def test_texts_come_out_as_they_went_in(
    byte_level: Tokenizer, byte_fallback: Tokenizer, text: str, cuts: list[int]
) -> None:
    for tokenizer in (byte_level, byte_fallback):
        check(tokenizer, tokenizer.encode(text, add_special_tokens=False), cuts)


@pytest.mark.parametrize("text", ["€", "🙂", "日", "é"])
def test_a_character_comes_with_its_last_byte(
    byte_level: Tokenizer, byte_fallback: Tokenizer, text: str
) -> None:
    for tokenizer, first in ((byte_level, 0), (byte_fallback, 3)):
        tokens = [first + byte for byte in text.encode()]
        detokenizer = tokenizer.detokenizer()
        expected = [*[""] * (len(tokens) - 1), text]
        assert [detokenizer.push([token]) for token in tokens * 3] == expected * 3
        assert detokenizer.flush() == ""


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ([], SMILE[:3], "\ufffd" * 3),
        (SMILE[:3], SMILE[3:], "🙂"),
        (SMILE[:3], [], ""),
        (SMILE[:3], SMILE[:1], "\ufffd"),
        (SMILE[:1], [*SMILE[1:3], *EURO], "\ufffd\ufffd€"),
        (EURO, SMILE, "🙂"),
        ([], [3 + 0xFF, *SMILE, 3 + 0x80, *EURO], "\ufffd🙂\ufffd€"),
        ([], [*SMILE, 3 + 0xF0, 3 + 0x20], "🙂\ufffd "),
    ],
)
def test_bytes_that_become_no_character(
    byte_fallback: Tokenizer, prompt: list[int], answer: list[int], expected: str
) -> None:
    for groups in ([answer], [[token] for token in answer]):
        assert streamed(byte_fallback.detokenizer(prompt), groups) == expected


@pytest.mark.parametrize("end", [b"\xed\xa0", b"\xed", b"\xf0\x9f", b"\xe2\x82", b"\xef\xbf"])
@pytest.mark.parametrize("answer", [b"", b"a", b"\x80", b"\xac", b"\xbd", b"\x99\x82", b"\xed\xa0"])
def test_what_a_prompt_begins(byte_level: Tokenizer, end: bytes, answer: bytes) -> None:
    """Half of a surrogate pair, too, of which Python's decoder waits for the rest."""
    before, whole = end.decode(errors="replace"), (end + answer).decode(errors="replace")
    for prompt in (list(end), list(b"abc" + end)):
        for groups in ([list(answer)], [[byte] for byte in answer]):
            detokenizer = byte_level.detokenizer(prompt)
            assert streamed(detokenizer, groups) == added_by(before, whole)


def test_the_window_stays_small(byte_fallback: Tokenizer) -> None:
    """Work per token does not grow with the sequence."""
    lengths: list[int] = []

    def decode(token_ids: list[int]) -> str:
        lengths.append(len(token_ids))
        return byte_fallback.decode(token_ids, hidden=frozenset())

    word, spaces, empty = (byte_fallback.id_of(token) for token in ("▁the", "▁", ""))
    for tokens, most in (([word], 2), ([spaces], 4), ([empty], 80), ([99_999], 80)):
        detokenizer = WindowDetokenizer(decode, lambda _: None)
        lengths.clear()
        for _ in range(500):
            detokenizer.push(tokens)  # type: ignore[arg-type]
        assert max(lengths) <= most


def test_a_long_prompt_costs_no_more_than_its_end(byte_fallback: Tokenizer) -> None:
    prompt = range(100_000, 200_000)
    lengths: list[int] = []

    def decode(token_ids: list[int]) -> str:
        lengths.append(len(token_ids))
        return "a" * len(token_ids)

    WindowDetokenizer(decode, lambda _: None, None, prompt)
    assert sum(lengths) < 64


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    folder = resolve("smollm2-135m-instruct")
    return load_text_model(folder).tokenizer


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_real_texts(smollm2: Tokenizer, text: str) -> None:
    tokens = smollm2.encode(text, add_special_tokens=False)
    assert smollm2.decode(tokens, hidden=frozenset()) == text
    check(smollm2, tokens, [])
    check(smollm2, tokens[::-1], [3, 5])


@pytest.mark.model
@settings(max_examples=examples(300), deadline=None)
@given(tokens=st.lists(st.integers(0, 49_153), max_size=60), cuts=cuts)
def test_real_random_tokens(smollm2: Tokenizer, tokens: list[int], cuts: list[int]) -> None:
    check(smollm2, tokens, cuts)


@pytest.mark.model
@settings(max_examples=examples(100), deadline=None)
@given(text=st.text(max_size=80), cuts=cuts)
def test_real_random_texts(smollm2: Tokenizer, text: str, cuts: list[int]) -> None:
    check(smollm2, smollm2.encode(text, add_special_tokens=True), cuts)
