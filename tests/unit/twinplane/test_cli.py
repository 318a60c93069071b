"""The command line: what it prints and returns."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import deque
from dataclasses import fields
from pathlib import Path

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
from twinplane import cli
from twinplane.cli import main
from twinplane.cli.failures import one_line
from twinplane.errors import InvalidRequest, Overloaded, Unavailable, Violation
from twinplane.inference.v1 import inference_pb2 as pb
from twinplane.settings.command_parser import MOST_USED
from twinplane.settings.control import ControlConfig
from twinplane.settings.worker import WorkerConfig

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


WITH_SETTINGS = ("up", "control", "worker", "doctor")
HELPS = [
    *((name, "--help") for name in cli.commands()),
    *((name, "--help-all") for name in WITH_SETTINGS),
]


@pytest.mark.parametrize(("command", "flag"), HELPS)
def test_each_help_is_for_a_narrow_terminal_and_ends_with_examples_that_parse(
    command: str, flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        main([command, flag])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"usage: twinplane {command}")
    assert re.match(r"[A-Z][a-z]+ ", lines[2]), "a verb first"
    if flag == "--help":
        assert len(lines) <= 48, "a screen"
    options, _, examples = text.partition("\nexamples:\n")
    known = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", options))
    assert examples
    for example in examples.splitlines():
        assert f"twinplane {command}" in example
        flags = {word for word in example.split() if word.startswith("--")}
        assert flags <= known | {"--revision"}, example


@pytest.mark.parametrize("command", WITH_SETTINGS)
def test_the_short_help_is_a_part_of_the_whole(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main([command, flag])
        shown.append(set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", capsys.readouterr().out, re.M)))
    short, whole = shown
    assert short < whole
    assert {"--help-all", "--config", "--model", "--port"} <= short
    assert len(whole) > len(short) + 10


def test_what_the_short_help_shows_are_settings() -> None:
    known = {setting.name for cls in (ControlConfig, WorkerConfig) for setting in fields(cls)}
    assert set(MOST_USED) <= known


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


@pytest.mark.slow
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
        for piped in ("ab", "ab\n"):
            assert run("generate", *argument, *flags, stdin=piped).stdout == plain.stdout


@pytest.mark.slow
def test_generate_uses_the_chat_template_unless_it_is_told_not_to(simulated_planes: Planes) -> None:
    flags = ("--address", simulated_planes.address, "--max-tokens", "2", "--json")

    def prompt_tokens(*arguments: str, stdin: str = "") -> int:
        done = run("generate", *arguments, *flags, stdin=stdin)
        assert done.returncode == 0, done.stderr
        count: int = json.loads(done.stdout)["usage"]["prompt_tokens"]
        return count

    assert prompt_tokens("ab", "--raw") == 2
    assert prompt_tokens("--raw", stdin="ab\n") == 2, "the newline of a pipe is none of the prompt"
    assert prompt_tokens("--raw", stdin="ab\n\n") == 3, "only one is"
    rendered = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    special = rendered.count("<|im_start|>") * 11 + rendered.count("<|im_end|>") * 9
    assert prompt_tokens("ab") == len(rendered) - special


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[""], ["-"], [], ["--raw", ""]])
def test_an_empty_prompt_is_a_mistake_of_usage(arguments: list[str]) -> None:
    done = run("generate", *arguments, stdin="\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the prompt is empty" in done.stderr


def test_a_model_without_a_template_goes_on_from_the_text() -> None:
    service = ScriptedInference(
        scripts=deque([[started(), delta("a", 1), finished()]]), supports_chat=False
    )
    with serve(service) as address:
        assert main(["generate", "the prompt", f"--address={address}"]) == 0
    [request] = [r for r in service.requests if isinstance(r, pb.GenerateRequest)]
    assert request.text == "the prompt"


@pytest.mark.slow
def test_a_default_length_is_what_fits_and_an_asked_one_is_refused(
    simulated_planes: Planes,
) -> None:
    """The tiny model's length is 2,048 tokens, one for each byte."""
    flags = ("--address", simulated_planes.address, "--json", "--raw")
    done = run("generate", "x" * 2_000, *flags)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    # The simulated model may happen to end its answer before.
    assert answer["usage"]["completion_tokens"] == 48 or answer["finish_reason"] == "stop"
    refused = run("generate", "x" * 2_000, *flags, "--max-tokens", "49")
    assert refused.returncode == 1
    assert "48" in refused.stderr


@pytest.mark.slow
def test_generate_fails_in_one_line(simulated_planes: Planes) -> None:
    nobody = run("generate", "x", "--address", f"127.0.0.1:{free_port()}", "--wait", "0")
    assert nobody.returncode == 1
    assert nobody.stdout == ""
    assert len(nobody.stderr.splitlines()) == 1
    assert "is `twinplane up` running?" in nobody.stderr
    wrong = run("generate", "x", "--address", simulated_planes.address, "--top-p", "7")
    assert wrong.returncode == 1
    assert "top_p" in wrong.stderr
    assert len(wrong.stderr.splitlines()) == 1


@pytest.mark.slow
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


@pytest.mark.slow
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
             "--seed=9", "--stop=x", "--stop=y", "--ignore-eos", "--model=m")  # fmt: skip
    with serve(service) as address:
        assert main(["generate", "the prompt", f"--address={address}", *flags]) == 0
    [request] = [r for r in service.requests if isinstance(r, pb.GenerateRequest)]
    [message] = request.chat.messages
    assert (message.role, message.content, request.model) == ("user", "the prompt", "m")
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 4, 0.75)
    assert (sampling.min_p, sampling.seed) == (0.25, 9)
    assert request.stop.max_tokens == 5
    assert list(request.stop.strings) == ["x", "y"]
    assert request.stop.ignore_end_of_sequence


# model.


@pytest.mark.slow
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
