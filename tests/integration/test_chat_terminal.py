"""`twinplane chat` on a pseudo-terminal: what a person types, pastes and sees."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.planes import ROOT, free_port, plane_environment
from tests.support.scripted_inference import (
    Hang,
    Script,
    ScriptedInference,
    delta,
    finished,
    serve,
    started,
)
from tests.unit.twinplane.cli_process import PATIENCE
from tests.unit.twinplane.test_word_wrap import Screen
from twinplane.inference.v1 import inference_pb2 as pb

CTRL_C, CTRL_D, UP, ENTER = b"\x03", b"\x04", b"\x1b[A", b"\r"

# Makes the terminal it was given its own, so that ^C typed there becomes a signal.
_ON_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from twinplane.cli import main
sys.exit(main())
"""


class Terminal:
    """A chat in a pseudo-terminal of so many columns. `seen` is what was not read past yet."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.seen = ""
        self._master = master

    def read_until(self, text: str, *, again: bytes = b"") -> str:
        """Waits for a text; returns what came before it. `again` is typed once a second."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen!r}"
            if select.select([self._master], [], [], 1.0)[0]:
                self.seen += os.read(self._master, 1 << 12).decode(errors="replace")
            else:
                self.type(again)
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, keys: bytes | str) -> None:
        os.write(self._master, keys.encode() if isinstance(keys, str) else keys)

    def interrupt(self) -> None:
        """Ctrl-C at a prompt, which brings another. One that comes in the instant between a prompt
        and Python's waiting for a key has no effect before the next key."""
        self.type(CTRL_C)
        self.read_until("> ", again=CTRL_C)

    def paste(self, text: str) -> None:
        """As terminals do it, in brackets, with carriage returns between lines."""
        self.type(f"\x1b[200~{text.replace(chr(10), chr(13))}\x1b[201~")


@contextmanager
def chatting(*arguments: str, columns: int = 80, term: str = "xterm") -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = plane_environment(TERM=term, INPUTRC="/dev/null")
    environment.pop("COLUMNS", None)
    try:
        with subprocess.Popen(
            [sys.executable, "-c", _ON_TERMINAL, "chat", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            cwd=ROOT,
            env=environment,
        ) as process:
            os.close(slave)
            try:
                yield Terminal(master, process)
            finally:
                if process.poll() is None:
                    process.kill()
    finally:
        os.close(master)


def answer(text: str) -> Script:
    return [started(), delta(text, 1), finished(reason=pb.FINISH_REASON_STOP)]


def questions(service: ScriptedInference) -> list[str]:
    """The last turn of each request."""
    requests = [r for r in service.requests if isinstance(r, pb.GenerateRequest)]
    return [request.chat.messages[-1].content for request in requests]


def test_it_says_who_answers_and_ctrl_d_leaves() -> None:
    with serve(ScriptedInference()) as address, chatting("--address", address) as terminal:
        assert f"m at {address}, context 64 tokens" in terminal.read_until("> ")
        terminal.type("/show\r")
        terminal.read_until("temperature  0.5 (default)")
        terminal.read_until("> ")
        terminal.type("/help\r")
        terminal.read_until("/set NAME [VALUE]")
        terminal.read_until("> ")
        terminal.type(CTRL_D)
        assert terminal.process.wait(PATIENCE) == 0


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on() -> None:
    service = ScriptedInference(
        scripts=deque([[started(), delta("half", 1), Hang()], answer("whole")])
    )
    with serve(service) as address, chatting("--address", address, term="dumb") as terminal:
        terminal.read_until("> ")
        terminal.type("hi\n")
        terminal.read_until("half")
        terminal.type(CTRL_C)
        assert service.left.acquire(timeout=PATIENCE)
        terminal.read_until("> ")
        terminal.type("unfinished")
        terminal.read_until("unfinished")
        terminal.interrupt()
        terminal.type('"""\n')
        terminal.read_until("... ")
        terminal.interrupt()
        terminal.type("again\n")
        terminal.read_until("whole")
        terminal.read_until("> ")
        terminal.type("/exit\n")
        assert terminal.process.wait(PATIENCE) == 0
    assert questions(service) == ["hi", "again"]


def test_a_pasted_text_is_one_turn() -> None:
    text = "first line\n\n\tindented\n/exit\nlast: ünï 你"
    service = ScriptedInference(scripts=deque([answer("one"), answer("two")]))
    with serve(service) as address, chatting("--address", address) as terminal:
        terminal.read_until("> ")
        terminal.paste(text)
        terminal.type(" and typed" + ENTER.decode())
        terminal.read_until("one")
        terminal.read_until("> ")
        terminal.type(UP + ENTER)  # recalled whole
        terminal.read_until("two")
    assert questions(service) == [text + " and typed"] * 2


def test_quotes_begin_and_end_a_text_of_several_lines() -> None:
    service = ScriptedInference(scripts=deque([answer("fine")]))
    with serve(service) as address, chatting("--address", address) as terminal:
        terminal.read_until("> ")
        terminal.type('"""one\r')
        terminal.read_until("... ")
        terminal.type("/exit\r")
        terminal.read_until("... ")
        terminal.type('two"""\r')
        terminal.read_until("fine")
    assert questions(service) == ["one\n/exit\ntwo"]


def test_an_answer_is_wrapped_at_words() -> None:
    words = "Some words that are longer than a row of this narrow window here.".split()  # noqa: SIM905
    parts = [delta(word + " ", 1) for word in words]
    service = ScriptedInference(scripts=deque([[started(), *parts, finished()]]))
    with serve(service) as address, chatting("x", "--address", address, columns=20) as terminal:
        shown = terminal.read_until("here.")
    screen = Screen(20)
    screen.write(shown.replace("\r\n", "\n"))
    rows = screen.lines()
    assert len(rows) > 3
    assert " ".join(rows).split() == words[:-1], "every row ends between words"


def test_a_history_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "history"
    service = ScriptedInference(scripts=deque([answer("one"), answer("two"), answer("three")]))
    with serve(service) as address:
        for said in ("one", "two"):
            with chatting("--address", address, "--history", str(path)) as terminal:
                terminal.read_until("> ")
                if said == "one":
                    terminal.paste("some\ntext")
                    terminal.type(ENTER)
                else:
                    terminal.type(UP + ENTER)
                terminal.read_until(said)
                terminal.read_until("> ")
                terminal.type(CTRL_D)
                assert terminal.process.wait(PATIENCE) == 0
        kept = path.read_text()
        with chatting("--address", address) as terminal:
            terminal.read_until("> ")
            terminal.type(UP + b"new" + ENTER)
            terminal.read_until("three")
    assert questions(service) == ["some\ntext", "some\ntext", "new"]
    assert path.read_text() == kept, "it is not kept unless asked for"


def test_a_history_that_can_not_be_kept_costs_nothing_else(tmp_path: Path) -> None:
    service = ScriptedInference(scripts=deque([answer("one")]))
    path = tmp_path / "history"
    with (
        serve(service) as address,
        chatting("--address", address, "--history", str(path)) as terminal,
    ):
        terminal.read_until("> ")
        path.mkdir()
        terminal.type("hi\r")
        terminal.read_until("the history is not kept")
        terminal.read_until("one")


def test_a_server_that_starts_is_waited_for() -> None:
    service = ScriptedInference(scripts=deque([answer("here")]), unready=2)
    with serve(service) as address, chatting("--address", address) as terminal:
        terminal.read_until(f"waiting for the server's model at {address}")
        terminal.read_until("> ")
        terminal.type("hi\r")
        terminal.read_until("here")
    nowhere = f"127.0.0.1:{free_port()}"
    with chatting("--address", nowhere) as terminal:
        terminal.read_until(f"waiting for a server at {nowhere}")
        terminal.type(CTRL_C)
        assert terminal.process.wait(PATIENCE) == 130
