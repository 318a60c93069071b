"""Stop strings against a naive search, and the pipeline from tokens to text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.text.assembler import TextAssembler
from control_plane.text.stop_strings import StopMatcher, StopStrings, TokenNames
from control_plane.text.tokenizer import Tokenizer


def naive(text: str, strings: list[str]) -> tuple[str, str | None, int]:
    """Output, what matched, and after how many characters: complete first, then longest."""
    for end in range(1, len(text) + 1):
        ending = [string for string in strings if text[:end].endswith(string)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest, end
    return text, None, len(text)


def assembler_of(tokenizer: Tokenizer, strings: list[str]) -> TextAssembler:
    names = TokenNames(map(tokenizer.text_of, tokenizer.special_ids))
    matcher = StopMatcher(StopStrings(strings, names)) if strings else None
    return TextAssembler(tokenizer.detokenizer(), tokenizer.special_ids, tokenizer.text_of, matcher)


strings = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=1000)
@given(pieces=st.lists(st.text("abc", max_size=5), max_size=8), strings=strings)
def test_matches_as_the_naive_search(pieces: list[str], strings: list[str]) -> None:
    output, matched, _ = naive("".join(pieces), strings)
    matcher = StopMatcher(StopStrings(strings))
    emitted = ""
    seen = ""
    for piece in pieces:
        seen += piece
        emitted += matcher.push(piece)
        if matcher.matched is not None:
            break
        held = seen[len(emitted) :]
        possible = [
            seen[-length:]
            for string in strings
            for length in range(1, len(string))
            if seen.endswith(string[:length])
        ]
        assert held == max(possible, key=len, default=""), "holds back just what it must"
    if matcher.matched is None:
        emitted += matcher.flush()
    assert (emitted, matcher.matched) == (output, matched)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab€", max_size=12),
    strings=st.lists(st.text("ab€", min_size=1, max_size=3), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 100), max_size=6),
)
def test_tokens_end_with_the_one_that_completes_the_stop_string(
    byte_level: Tokenizer, text: str, strings: list[str], cuts: list[int]
) -> None:
    tokens = list(text.encode())  # one token per byte
    output, matched, end = naive(text, strings)
    assembler = assembler_of(byte_level, strings)
    ends = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    consumed = 0
    for start, stop in pairwise(ends):
        count = assembler.push(tokens[start:stop])
        consumed += stop - start if count is None else count
        if count is not None:
            break
    assembler.finish()
    assert assembler.drain() == output
    assert assembler.stop_string == matched
    assert consumed == len(text[:end].encode())


def test_text_is_held_back_and_comes_when_it_is_no_stop_string(byte_level: Tokenizer) -> None:
    assembler = assembler_of(byte_level, ["###"])
    assert assembler.push(list(b"ok ##")) is None
    assert assembler.drain() == "ok "
    assert assembler.push(list(b"!")) is None
    assert assembler.drain() == "##!"
    assert assembler.push(list(b"#")) is None
    assembler.finish()
    assert assembler.drain() == "#"


def test_without_stop_strings_nothing_is_held(byte_level: Tokenizer) -> None:
    assembler = assembler_of(byte_level, [])
    assert assembler.push(list("a€".encode()[:3])) is None
    assert assembler.drain() == "a"
    assert assembler.drain() == ""
    assembler.finish()
    assert assembler.drain() == "\ufffd"
    assert assembler.stop_string is None


def test_an_empty_stop_string_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        StopStrings([""])
