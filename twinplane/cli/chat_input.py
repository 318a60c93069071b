"""Reads what is typed into a chat: lines, pasted texts, texts between quotes, and a history."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

QUOTES = '"""'
_KEPT_ENTRIES = 1000

ReadLine = Callable[[str], str]
"""Reads a line after a prompt, without its line end. Raises EOFError."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What was typed. `typed` is all of it, `text` what is meant; a command is one line."""

    typed: str
    text: str
    is_command: bool


def read_entry(read_line: ReadLine) -> Entry:
    """One line or pasted text, or all between two QUOTES. Raises EOFError: there is nothing."""
    typed = read_line("> ")
    start = typed.strip()
    if not start.startswith(QUOTES):
        return Entry(typed, typed, start.startswith("/") and "\n" not in start)
    while not (start.endswith(QUOTES) and len(start) >= 2 * len(QUOTES)):
        try:
            typed += "\n" + read_line("... ")
        except EOFError:
            break
        start = typed.strip()
    text = start.removeprefix(QUOTES).removesuffix(QUOTES)
    return Entry(typed, text.strip("\n"), is_command=False)


class History:
    """Entries of earlier chats in a file that only this user may read; one JSON text a line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def entries(self) -> list[str]:
        """The last of them, oldest first. Raises OSError, but not for a file that isn't there."""
        try:
            with self._path.open(encoding="utf-8", errors="replace") as file:
                lines = deque(file, _KEPT_ENTRIES)
        except FileNotFoundError:
            return []
        return [entry for line in lines if (entry := _entry(line)) is not None]

    def append(self, entry: str) -> None:
        """Adds one. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(os.open(self._path, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _entry(line: str) -> str | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, str) else None


def _readline() -> ModuleType | None:
    """Python's line editor, where there is one, told to take a pasted text as it is."""
    try:
        import readline
    except ImportError:
        return None
    # Python turns this off for programs whose output is read by others; this one's is a terminal.
    if os.environ.get("TERM", "dumb") != "dumb":
        readline.parse_and_bind("set enable-bracketed-paste on")
    readline.set_auto_history(False)
    return readline


class TerminalInput:
    """Line editing on a terminal. A pasted text arrives as one entry, however many lines it has.

    `history` is None where nothing is to be kept beyond this chat.
    """

    def __init__(self, history: History | None) -> None:
        self._history = history
        self._readline = _readline()
        for entry in history.entries() if history is not None else ():
            self._remember(entry)

    def read(self) -> Entry:
        """The next entry. Raises EOFError, KeyboardInterrupt."""
        entry = read_entry(input)
        if entry.typed.strip():
            self._remember(entry.typed)
            self._keep(entry.typed)
        return entry

    def _remember(self, typed: str) -> None:
        if self._readline is not None:
            self._readline.add_history(typed)

    def _keep(self, typed: str) -> None:
        if self._history is None:
            return
        try:
            self._history.append(typed)
        except OSError as error:
            print(f"the history is not kept: {error}", file=sys.stderr)
            self._history = None
