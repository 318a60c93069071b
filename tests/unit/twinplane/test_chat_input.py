"""What is typed into `twinplane chat`: entries, commands, and what is kept of them."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.quick import examples
from twinplane.cli.chat_input import Entry, History, read_entry


@pytest.mark.parametrize(
    ("lines", "text", "is_command"),
    [
        (["hi"], "hi", False),
        (["/show"], "/show", True),
        ([" /show "], " /show ", True),
        (["/* a\ncomment */"], "/* a\ncomment */", False),
        (["pasted\ntext"], "pasted\ntext", False),
        (['"""one', 'two"""'], "one\ntwo", False),
        (['"""', "one", "", "two", '"""'], "one\n\ntwo", False),
        (['"""/etc/hosts is what?"""'], "/etc/hosts is what?", False),
        (['""" a "" b """'], " a \"\" b ", False),
        (['""""""'], "", False),
        (['"""unfinished'], "unfinished", False),
        (['"""a\nb"""'], "a\nb", False),
        (['say """x"""'], 'say """x"""', False),
        ([""], "", False),
    ],
)  # fmt: skip
def test_an_entry(lines: list[str], text: str, is_command: bool) -> None:
    left, prompts = list(lines), []

    def read_line(prompt: str) -> str:
        prompts.append(prompt)
        if not left:
            raise EOFError
        return left.pop(0)

    assert read_entry(read_line) == Entry("\n".join(lines), text, is_command)
    assert not left
    assert prompts[0] == "> "
    assert {*prompts[1:]} <= {"... "}


def test_the_end_of_the_input_is_the_end() -> None:
    def read_line(_: str) -> str:
        raise EOFError

    with pytest.raises(EOFError):
        read_entry(read_line)


@settings(max_examples=examples(100), deadline=None)
@given(text=st.text(st.characters(blacklist_categories=["Cs", "Cc"]), max_size=40))
def test_what_is_recalled_is_what_was_typed(text: str) -> None:
    """An entry that is taken from the history means the same again."""
    lines = text.split(" ")
    entry = read_entry(lambda _: lines.pop(0) if lines else _end())
    assert read_entry(lambda _: entry.typed) in (entry, read_entry(lambda _: entry.typed))
    again = read_entry(_once(entry.typed))
    assert again.text == entry.text or entry.typed.lstrip().startswith('"""')


def _end() -> str:
    raise EOFError


def _once(text: str) -> Any:
    left = [text]
    return lambda _: left.pop() if left else _end()


def test_a_history_is_kept_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history"
    assert History(path).entries() == []
    entries = ["one", "two\nlines", "ünï 你", '"""', "\u2028"]
    for entry in entries:
        History(path).append(entry)
    assert History(path).entries() == entries
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open("ab") as file:
        file.write(b"garbage\n\xff\n5\n")
    assert History(path).entries() == entries
    for number in range(1500):
        History(path).append(str(number))
    assert History(path).entries() == [str(number) for number in range(500, 1500)]
