"""The command line: what it prints and returns."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.planes import ROOT, Planes, free_port, plane_environment
from tests.support.scripted_inference import (
    Hang,
    ScriptedInference,
    delta,
    finished,
    serve,
    started,
)
from tests.unit.twinplane.cli_process import PATIENCE, run
from twinplane import Delta, Message, TwinplaneError
from twinplane.cli import main
from twinplane.cli.chat import Chat
from twinplane.cli.failures import one_line
from twinplane.errors import InvalidRequest, Overloaded, Unavailable, Violation
from twinplane.inference.v1 import inference_pb2 as pb

# The front door.


def test_help_is_one_screen_and_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 24
    for name in ("up", "control", "worker", "generate", "chat", "status", "model", "doctor",
                 "completion"):  # fmt: skip
        assert re.search(rf"^  {name} ", text, re.M)


def test_version_and_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    from twinplane import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"twinplane {__version__}\n"
    assert main([]) == 2
    assert main(["gnerate"]) == 2
    assert "gnerate" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["up", "control", "worker", "generate", "chat", "doctor"])
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: twinplane {command}" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    script = "import sys, twinplane.cli as c; c.main(['--help']); print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split()
    heavy = {"torch", "numpy", "grpc", "google.protobuf", "rich", "tokenizers", "asyncio"}
    assert heavy.isdisjoint(found)


def test_errors_say_what_to_do_in_one_line() -> None:
    assert "`twinplane up`" in one_line(Unavailable("failed to connect\nto all"))
    draining = Unavailable("the server\nis draining", reason="DRAINING")
    assert one_line(draining) == "the server is draining"
    assert "try again in 2.5 s" in one_line(Overloaded("full", retry_after=2.5))
    invalid = InvalidRequest("bad", violations=(Violation("sampling.top_p", "is 2"),))
    assert one_line(invalid) == "sampling.top_p (--top-p): is 2"


# generate.


def test_generate_streams_text_and_tells_its_usage(simulated_planes: Planes) -> None:
    flags = ("--address", simulated_planes.address, "--max-tokens", "8", "--seed", "3")
    plain = run("generate", "ab", *flags, "-v")
    assert plain.returncode == 0, plain.stderr
    assert "8 generated, finish length, seed 3" in plain.stderr
    as_json = json.loads(run("generate", "--json", "ab", *flags).stdout)
    assert as_json["text"] + "\n" == plain.stdout
    assert as_json["usage"]["completion_tokens"] == len(as_json["token_ids"]) == 8
    assert as_json["model"] == "tiny"
    for argument in ((), ("-",)):
        assert run("generate", *argument, *flags, stdin="ab").stdout == plain.stdout


def test_generate_fails_in_one_line(simulated_planes: Planes) -> None:
    nobody = run("generate", "x", "--address", f"127.0.0.1:{free_port()}")
    assert nobody.returncode == 1
    assert nobody.stdout == ""
    assert len(nobody.stderr.splitlines()) == 1
    assert "is `twinplane up` running?" in nobody.stderr
    wrong = run("generate", "x", "--address", simulated_planes.address, "--top-p", "7")
    assert wrong.returncode == 1
    assert "top_p" in wrong.stderr
    assert len(wrong.stderr.splitlines()) == 1


def test_generate_into_a_closed_pipe_ends_quietly(simulated_planes: Planes) -> None:
    # Closed before the command starts: a reader that leaves midway races the stream's end.
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed_pipe:
        done = subprocess.run(
            [sys.executable, "-m", "twinplane.cli", "generate", "ab",
             "--address", simulated_planes.address, "--max-tokens", "200"],
            stdout=closed_pipe,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=plane_environment(),
            timeout=PATIENCE,
            check=False,
        )  # fmt: skip
    assert done.stderr == b""
    assert done.returncode == 1


def test_ctrl_c_cancels_the_generation_on_the_server() -> None:
    service = ScriptedInference(scripts=deque([[started(), delta("a", 1), Hang()]]))
    with (
        serve(service) as address,
        subprocess.Popen(
            [sys.executable, "-m", "twinplane.cli", "generate", "x", "--address", address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=plane_environment(),
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) == b"a"
        process.send_signal(signal.SIGINT)
        assert service.left.acquire(timeout=PATIENCE)
        assert process.wait(PATIENCE) == 130
        assert process.stderr.read() == b""


def test_what_is_asked_for_reaches_the_server() -> None:
    service = ScriptedInference(scripts=deque([[started(), delta("a", 1), finished()]]))
    flags = ("--max-tokens=5", "--temperature=0.5", "--top-k=4", "--top-p=0.75", "--min-p=0.25",
             "--seed=9", "--stop=x", "--stop=y", "--model=m")  # fmt: skip
    with serve(service) as address:
        assert main(["generate", "the prompt", f"--address={address}", *flags]) == 0
    (request,) = service.requests
    assert isinstance(request, pb.GenerateRequest)
    assert (request.text, request.model) == ("the prompt", "m")
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 4, 0.75)
    assert (sampling.min_p, sampling.seed) == (0.25, 9)
    assert request.stop.max_tokens == 5
    assert list(request.stop.strings) == ["x", "y"]


# chat.


@dataclass
class FakeClient:
    """Plays one answer per call: texts, or an exception raised after those before it."""

    answers: list[list[str | BaseException]]
    seen: list[list[Message]] = field(default_factory=list)

    def generate(self, prompt: list[Message], **_: object) -> FakeClient:
        self.seen.append(prompt)
        return self

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __iter__(self) -> Iterator[Delta]:
        for item in self.answers.pop(0):
            if isinstance(item, BaseException):
                raise item
            yield Delta(item, (1,))


def chat_with(
    *answers: list[str | BaseException], system: str | None = None
) -> tuple[Any, FakeClient, io.StringIO]:
    client, output = FakeClient(list(answers)), io.StringIO()
    untyped: Any = client
    return Chat(untyped, {}, system, output), client, output


def test_a_conversation_carries_its_turns() -> None:
    chat, client, output = chat_with(["He", "llo"], ["Bye"], system="Be kind.")
    assert chat.take("hi")
    assert chat.take("  ")
    assert chat.take("more")
    assert output.getvalue() == "Hello\nBye\n"
    assert client.seen[1] == [
        Message("system", "Be kind."),
        Message("user", "hi"),
        Message("assistant", "Hello"),
        Message("user", "more"),
    ]
    assert not chat.take("/exit")


def test_reset_and_system_begin_again() -> None:
    chat, client, _ = chat_with(["1"], ["2"], ["3"], ["4"])
    for line in ("a", "/reset", "b", "/system Be brief.", "c", "/system", "d"):
        assert chat.take(line)
    assert client.seen[1] == [Message("user", "b")]
    assert client.seen[2] == [Message("system", "Be brief."), Message("user", "c")]
    assert client.seen[3] == [Message("user", "d")]


def test_unknown_commands_are_not_sent() -> None:
    chat, client, output = chat_with()
    assert chat.take("/rest")
    assert client.seen == []
    assert "/help" in output.getvalue()


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said() -> None:
    chat, client, output = chat_with(["par", KeyboardInterrupt()], ["ok"])
    assert chat.take("hi")
    assert chat.take("go on")
    assert output.getvalue() == "par …\nok\n"
    assert client.seen[1][1] == Message("assistant", "par")


def test_a_failed_turn_is_undone() -> None:
    chat, client, _ = chat_with([TwinplaneError("no")], ["ok"])
    with pytest.raises(TwinplaneError):
        chat.take("first")
    assert chat.take("second")
    assert client.seen[1] == [Message("user", "second")]


def test_chat_through_a_pipe(simulated_planes: Planes) -> None:
    flags = ("--address", simulated_planes.address, "--max-tokens", "4", "--seed", "1")
    done = run("chat", *flags, stdin="ab\n/exit\nnever\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert ">" not in done.stdout.splitlines()[0][:1]


def test_on_a_terminal_ctrl_c_stops_the_answer_and_the_chat_goes_on() -> None:
    service = ScriptedInference(
        scripts=deque(
            [
                [started(), delta("half", 1), Hang()],
                [started(), delta("whole", 2), finished()],
            ]
        )
    )
    ours, theirs = pty.openpty()
    seen = ""

    def read_until(text: str) -> None:
        nonlocal seen
        while text not in seen:
            seen += os.read(ours, 1 << 12).decode(errors="replace")
        seen = seen.partition(text)[2]

    with (
        serve(service) as address,
        subprocess.Popen(
            [sys.executable, "-c", _ON_TERMINAL, "chat", "--address", address],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            cwd=ROOT,
            env=plane_environment(TERM="dumb"),
        ) as process,
    ):
        os.close(theirs)
        read_until("> ")
        os.write(ours, b"hi\n")
        read_until("half")
        os.write(ours, b"\x03")
        assert service.left.acquire(timeout=PATIENCE)
        read_until("> ")
        os.write(ours, b"again\n")
        read_until("whole")
        read_until("> ")
        os.write(ours, b"\x04")
        assert process.wait(PATIENCE) == 0
    os.close(ours)


# Makes the terminal it was given its own, so that ^C typed there becomes a signal.
_ON_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from twinplane.cli import main
sys.exit(main())
"""


# model.


def test_model_list_and_an_unknown_name(tmp_path: Path) -> None:
    empty = run("model", "list", TWINPLANE_HOME=str(tmp_path), HF_HOME=str(tmp_path))
    assert "run: twinplane model pull" in empty.stdout
    folder = tmp_path / "models" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    listed = run("model", "list", "--json", TWINPLANE_HOME=str(tmp_path), HF_HOME=str(tmp_path))
    assert json.loads(listed.stdout) == [
        {
            "name": "mine",
            "architecture": "LlamaForCausalLM",
            "bytes": 39,
            "has_weights": False,
            "folder": str(folder),
        }
    ]
    unknown = run("model", "pull", "nothing")
    assert unknown.returncode == 1
    assert "smollm2-135m-instruct" in unknown.stderr
