"""docs/first-day.md as data: its tasks, and in each what is run, pressed and seen, in order.

- A ```bash block is typed into the reader's own terminal. A word behind `bash` says more: `install`
  (what an environment that is there already makes needless), `node` (needs Node), `fails` (the last
  command refuses), or the name of another terminal, in which a server starts.
- A ```text block is what one sees then: its lines, in this order, among others. `…` is any text,
  `PID` a number, which later commands have in its place. If the words before it speak of "the
  server's terminal", it is seen there.
- "Press Ctrl-C in the server's terminal" is done.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MARKS = frozenset({"install", "node", "fails"})


@dataclass(frozen=True, slots=True)
class Typed:
    """Commands. `terminal` is empty for the reader's own; `marks` are those of MARKS."""

    text: str
    terminal: str = ""
    marks: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Pressed:
    """Ctrl-C in a terminal, so many times."""

    terminal: str
    count: int


@dataclass(frozen=True, slots=True)
class Seen:
    """Lines of a terminal's output. `terminal` is empty for the reader's own."""

    lines: tuple[str, ...]
    terminal: str = ""


Act = Typed | Pressed | Seen


@dataclass(frozen=True, slots=True)
class Task:
    """One section: its title, which begins with a number, and its acts."""

    title: str
    acts: tuple[Act, ...]


def read_page(path: Path) -> list[Task]:
    """The tasks of the page. Raises ValueError for a block that nobody would run or look for."""
    _, *sections = re.split(r"^## ", path.read_text(), flags=re.M)
    return [_task(*section.split("\n", 1)) for section in sections]


def _task(title: str, text: str) -> Task:
    acts: list[Act] = []
    pieces = re.split(r"^```([^\n]*)\n(.*?)^```$", text, flags=re.S | re.M)
    words = ""
    for number, piece in enumerate(pieces):
        match number % 3:
            case 0:
                words = " ".join(piece.split())
                acts += [
                    Pressed(found["terminal"], 2 if found["twice"] else 1)
                    for found in re.finditer(
                        r"Press Ctrl-C (?P<twice>twice )?in the (?P<terminal>\w+)'s terminal", words
                    )
                ]
            case 2:
                acts.append(_block(pieces[number - 1], piece, words))
    return Task(title.strip(), tuple(acts))


def _block(language: str, text: str, words: str) -> Act:
    kind, *more = language.split() or [""]
    if kind == "text" and not more:
        where = re.findall(r"the (\w+)'s terminal", words)
        return Seen(tuple(text.splitlines()), where[-1] if where else "")
    if kind == "bash" and len(more) <= 1:
        if MARKS.issuperset(more):
            return Typed(text, marks=frozenset(more))
        return Typed(text, terminal=more[0])
    raise ValueError(f"a block of {language!r} is neither run nor looked for")
