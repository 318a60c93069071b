"""Writes streamed text on a terminal, broken between words."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

_JOINER = "\u200d"
_TAB = 8


class WordWrap:
    """Text is shown as it comes. A word that grows beyond the edge moves to the next row.

    The last column stays free: in it, terminals differ about where the cursor is. Control
    characters are shown as pictures, so that no model steers the terminal. `width` is asked at each
    `push`, because windows change.
    """

    def __init__(self, write: Callable[[str], object], width: Callable[[], int]) -> None:
        self._write = write
        self._width = width
        self._column = 0
        self._word = ""
        self._word_cells = 0
        self._after_wide = False
        self._is_long = False
        """Whether the word is longer than a row: the terminal breaks it."""

    def push(self, text: str) -> None:
        """Shows more text."""
        width = max(self._width(), 3)
        self._write("".join(self._shown(character, width) for character in text))

    def _shown(self, character: str, width: int) -> str:
        if character == "\n":
            self._break(column=0)
            return "\n"
        if character in " \t":
            return self._space(character, width)
        character, cells = _picture(character), _cells(character)
        if cells and self._after_wide and self._word[-1:] != _JOINER:
            self._break()  # between Chinese characters or emoji a row may end
        self._after_wide = cells == 2 or (self._after_wide and not cells)
        moved = ""
        if self._column + cells > width - 1 and not self._is_long:
            if self._column == self._word_cells > 0:
                self._is_long = True
            else:
                moved = "\b" * self._word_cells + " " * self._word_cells + "\n" + self._word
                self._column = self._word_cells
        if not self._is_long:
            self._word += character
            self._word_cells += cells
        self._column += cells
        if self._is_long:
            self._column %= width
        return moved + character

    def _space(self, character: str, width: int) -> str:
        self._break()
        cells = 1 if character == " " else _TAB - self._column % _TAB
        if self._column + cells > width - 1:
            self._column = width  # the next word begins a row; no space is needed
            return ""
        self._column += cells
        return character

    def _break(self, column: int | None = None) -> None:
        """What comes now is another word."""
        self._word, self._word_cells = "", 0
        self._after_wide = self._is_long = False
        if column is not None:
            self._column = column


def _picture(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\ufffd" if 0x7F <= code < 0xA0 else character


def _cells(character: str) -> int:
    """Columns that a character takes."""
    if character < "\u0300":
        return 1
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
