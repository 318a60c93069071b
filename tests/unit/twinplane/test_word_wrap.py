"""Streamed text on a terminal: where rows end, whatever the pieces are."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.quick import examples
from twinplane.cli.word_wrap import WordWrap


class Screen:
    """A terminal of so many columns that knows line feeds, backspaces and characters."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows: list[list[str]] = [[]]
        self.column = 0

    def write(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self.rows.append([])
                self.column = 0
            elif character == "\b":
                assert self.column > 0, "the cursor would leave the row"
                self.column -= 1
            elif character == "\t":
                self.put(" ", 8 - self.column % 8)
            elif unicodedata.category(character) in ("Mn", "Me", "Cf"):
                row = self.rows[-1]
                if self.column:
                    row[self.column - 1] += character
                else:
                    row[:1] = [character]
            else:
                assert character.isprintable() or character == "\ufffd", ascii(character)
                self.put(character, 2 if unicodedata.east_asian_width(character) in "WF" else 1)

    def put(self, character: str, cells: int) -> None:
        if self.column + cells > self.columns:  # the terminal's own break
            self.rows.append([])
            self.column = 0
        row = self.rows[-1]
        row += [" "] * (self.column - len(row))
        row[self.column : self.column + cells] = [character, *[""] * (cells - 1)]
        self.column += cells

    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.rows]


def shown(text: str, columns: int, *, pieces: int = 3) -> list[str]:
    screen = Screen(columns)
    wrap = WordWrap(screen.write, lambda: columns)
    for start in range(0, len(text), pieces):
        wrap.push(text[start : start + pieces])
    return screen.lines()


@pytest.mark.parametrize("pieces", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", [""]),
        ("short", ["short"]),
        ("one two three", ["one two", "three"]),
        ("one two  three", ["one two", "three"]),
        ("eight888 x", ["eight888", "x"]),
        ("123456789 x", ["123456789", "x"]),
        ("a\nb\n\nc", ["a", "b", "", "c"]),
        ("  code here", ["  code", "here"]),
        ("x" * 23 + " yy", ["x" * 10, "x" * 10, "xxx yy"]),
        ("ab " + "x" * 12, ["ab", "x" * 10, "xx"]),
        ("你好世界你好", ["你好世界", "你好"]),
        ("a 你好世界", ["a 你好世", "界"]),
        ("caf\u0065\u0301 eclair", ["caf\u0065\u0301", "eclair"]),
        ("\x1b[2Jx", ["␛[2Jx"]),
        ("a\rb\x07\x7f\x9b", ["a␍b␇\ufffd\ufffd"]),
    ],
)
def test_rows_end_between_words(text: str, lines: list[str], pieces: int) -> None:
    assert shown(text, 10, pieces=pieces) == lines


def test_a_word_is_seen_before_it_is_complete() -> None:
    screen = Screen(20)
    WordWrap(screen.write, lambda: 20).push("hal")
    assert screen.lines() == ["hal"]


def test_a_window_may_change() -> None:
    columns = [20]
    screen = Screen(20)
    wrap = WordWrap(screen.write, lambda: columns[0])
    wrap.push("one two three ")
    columns[0] = screen.columns = 10
    wrap.push("four five six")
    assert screen.lines() == ["one two three", "four five", "six"]


@pytest.mark.parametrize("width", [0, 1, 2])
def test_any_width_ends(width: int) -> None:
    written: list[str] = []
    WordWrap(written.append, lambda: width).push("some words of text 你好")
    assert "".join(written).replace("\n", "")


CHARACTERS = ("a", "b", "cc", "你", "\U0001f469\u200d\U0001f680", "e\u0301", " ", "  ", "\n", "\t")
WORDS = st.lists(st.sampled_from(CHARACTERS), max_size=60).map("".join)


@settings(max_examples=examples(300), deadline=None)
@given(text=WORDS, columns=st.integers(4, 30), pieces=st.integers(1, 9))
def test_nothing_is_lost_and_pieces_do_not_matter(text: str, columns: int, pieces: int) -> None:
    lines = shown(text, columns, pieces=pieces)
    assert lines == shown(text, columns, pieces=1000)
    assert "".join("".join(lines).split()) == "".join(text.split())
    longest = max((len(word) * 2 for word in text.split()), default=0)
    if longest < columns - 1:  # no word had to be broken
        assert {*" ".join(lines).split()} <= {*text.split()} or "你" in text
