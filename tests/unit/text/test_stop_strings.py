"""Stop strings against a naive search, and the pipeline from tokens to text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from control_plane.text.assembler import TextAssembler
from control_plane.text.stop_strings import StopMatcher, StopStrings
from control_plane.text.tokenizer import Tokenizer
from tests.support.quick import examples


def naive(text: str, strings: list[str]) -> tuple[str, str | None, int]:
    """Output, what matched, and after how many characters: complete first, then longest."""
    for end in range(1, len(text) + 1):
        ending = [string for string in strings if text[:end].endswith(string)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest, end
    return text, None, len(text)


def assembler_of(tokenizer: Tokenizer, strings: list[str]) -> TextAssembler:
    matcher = StopMatcher(StopStrings(strings)) if strings else None
    return TextAssembler(tokenizer.detokenizer(), tokenizer.special_ids, tokenizer.text_of, matcher)


strings = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=examples(1000))
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


@settings(max_examples=examples(300), deadline=None)
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


NAMES = ["<e>", "<e>b", "x", "ab"]
"""Of tokens without text: one begins another, one is a character, one is like text."""


def naive_with_names(symbols: list[str], strings: list[str]) -> tuple[str, str | None, int]:
    """The same search over tokens, each a character or (with a leading dash) a name.

    Of two that are equally long, the one that leaves less of the text wins: no client sees a part
    of a stop text that it can read.
    """
    for count in range(1, len(symbols) + 1):
        best: tuple[int, int, str] | None = None
        for start in range(count):
            part = symbols[start:count]
            written = "".join(symbol.removeprefix("-") for symbol in part)
            shown = "".join(symbol for symbol in part if symbol[0] != "-")
            before = [symbol for symbol in symbols[:start] if symbol[0] != "-"]
            for found in (written, shown):
                last_counts = found is written or symbols[count - 1][0] != "-"
                if found in strings and last_counts:
                    best = max(best or (0, 0, ""), (len(found), -len(before), found))
        if best is not None:
            _, cut, found = best
            kept = -cut
            text = "".join(symbol for symbol in symbols if symbol[0] != "-")
            return text[:kept], found, count
    return "".join(symbol for symbol in symbols if symbol[0] != "-"), None, len(symbols)


@settings(max_examples=examples(2000))
@given(
    symbols=st.lists(st.sampled_from([*"ab<e>x", *(f"-{name}" for name in NAMES)]), max_size=12),
    strings=st.lists(st.text("abx", min_size=1, max_size=4), max_size=2),
    wanted=st.lists(st.sampled_from(["a", "b", *NAMES]), min_size=1, max_size=4),
)
@example(symbols=["x", "-x", "b"], strings=["xb"], wanted=["a"])
def test_tokens_without_text_are_found_by_their_names(
    symbols: list[str], strings: list[str], wanted: list[str]
) -> None:
    strings = [*strings, "".join(wanted)]
    expected, found, count = naive_with_names(symbols, strings)
    matcher = StopMatcher(StopStrings(strings))
    emitted = ""
    pushed = 0
    for symbol in symbols:
        name = symbol.removeprefix("-")
        emitted += matcher.push(symbol) if name == symbol else matcher.push_token(name)
        pushed += 1
        assert expected.startswith(emitted)
        if matcher.matched is not None:
            break
    if matcher.matched is None:
        emitted += matcher.flush()
    assert (emitted, matcher.matched, pushed) == (expected, found, count)


@pytest.mark.parametrize(
    ("string", "symbols", "emitted"),
    [
        ("<e>", ["a", "-<e>"], "a"),
        ("<e>", ["a", "<", "e", ">"], "a"),
        ("a<e>", ["b", "a", "-<e>"], "b"),
        ("a<e>b", ["b", "a", "-<e>", "b"], "b"),
        ("a<e>b", ["b", "a", "-<e>b"], "b"),
        ("<e><e>", ["b", "-<e>", "-<e>"], "b"),
        ("ab", ["b", "a", "-<e>", "b"], "b"),
        ("x", ["b", "-x"], "b"),
        ("axb", ["b", "a", "-x", "b"], "b"),
    ],
)
def test_a_stop_string_with_a_token(string: str, symbols: list[str], emitted: str) -> None:
    matcher = StopMatcher(StopStrings([string]))
    text = ""
    for symbol in symbols:
        assert matcher.matched is None
        name = symbol.removeprefix("-")
        text += matcher.push(symbol) if name == symbol else matcher.push_token(name)
    assert (text, matcher.matched) == (emitted, string)


@pytest.mark.parametrize("string", ["<", "e", "e>", "e>b", "a<", "a<e", ">b"])
def test_a_part_of_a_name_is_no_text(string: str) -> None:
    matcher = StopMatcher(StopStrings([string]))
    text = matcher.push("a") + matcher.push_token("<e>") + matcher.push("b")
    assert (text + matcher.flush(), matcher.matched) == ("ab", None)


def test_a_token_that_no_stop_string_holds_does_not_disturb() -> None:
    matcher = StopMatcher(StopStrings(["abc", "q<e>"]))
    assert matcher.push("ab") == ""
    assert matcher.push_token("x") == ""
    assert matcher.push_token("<e>") == ""
    assert matcher.push("c") == ""
    assert matcher.matched == "abc"


def test_incomplete_characters_at_the_end_are_searched(byte_level: Tokenizer) -> None:
    for strings, text, matched in (
        (["\ufffd"], "a", "\ufffd"),
        (["a\ufffd"], "", "a\ufffd"),
        (["\ufffd\ufffd"], "a\ufffd", None),
    ):
        assembler = assembler_of(byte_level, strings)
        assert assembler.push(list("a€".encode()[:3])) is None
        assembler.finish()
        assert (assembler.drain(), assembler.stop_string) == (text, matched)
