"""A mistyped or borrowed name is answered with the one that was probably meant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields

import pytest

from twinplane.cli import _ALIASES, _find, main
from twinplane.settings.control import ControlConfig
from twinplane.settings.hints import OTHER_SERVERS
from twinplane.settings.known import known_settings
from twinplane.settings.resolution import flag, from_command_line
from twinplane.settings.worker import WorkerConfig

CONTROL, WORKER = ({field.name for field in fields(cls)} for cls in (ControlConfig, WorkerConfig))


PLANES = {"control": ControlConfig, "worker": WorkerConfig}


def read_settings(plane: str, arguments: Sequence[str]) -> None:
    from_command_line(
        PLANES[plane],
        arguments,
        {},
        prog=f"twinplane {plane}",
        description="",
        table=plane,
        known=known_settings(),
    )


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command says of wrong arguments, in one line behind its usage."""
    command, *others = arguments
    try:
        if command in PLANES:  # their own entry points are for processes
            read_settings(command, others)
        else:
            assert main(arguments) == 2
    except SystemExit as ended:
        assert ended.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 2
    return lines[-1]


@pytest.mark.parametrize("name", OTHER_SERVERS)
def test_another_servers_flag_is_answered(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    advice = OTHER_SERVERS[name]
    assert name not in CONTROL | WORKER, "it is ours now"
    for mentioned in re.findall(r"--[a-z-]+", advice):
        ours = mentioned.removeprefix("--").removeprefix("no-").replace("-", "_")
        assert ours in CONTROL | WORKER, mentioned
    said = refusal(capsys, "up", flag(name), "1")
    assert said.endswith(f"{flag(name)}: {advice}")


def test_the_file_and_the_environment_answer_alike(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    file = tmp_path_factory.mktemp("settings") / "settings.toml"
    file.write_text("gpu_memory_utilization = 0.9\n")
    assert "--kv-cache-memory-bytes sets" in refusal(capsys, "doctor", f"--config={file}")
    monkeypatch.setenv("TWINPLANE_ENABLE_EXPERT_PARALLEL", "1")
    assert "mixtures of experts" in refusal(capsys, "doctor")


@pytest.mark.parametrize("name", sorted(CONTROL | WORKER))
def test_a_slip_in_our_own_flags_is_answered(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = "control" if name in CONTROL else "worker"
    slip = flag(name)[:-1] if len(name) > 4 else flag(name) + "s"
    assert f"{slip}: did you mean --" in refusal(capsys, command, f"{slip}=1")


def test_several_mistakes_are_answered_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "up", "--tp=2", "--max-num-seq", "3", "--zzzz", "4")
    assert "unrecognized arguments: --tp=2 --max-num-seq 3 --zzzz 4; --tp: --tensor-" in said
    assert said.endswith("--max-num-seq: did you mean --max-num-seqs?")


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("control", "--dtype", "float16"), "--dtype is a setting of `twinplane worker`"),
        (("worker", "--ageing-seconds=1"), "--ageing-seconds is a setting of `twinplane control`"),
        (("up", "--worker=a:1"), "--worker is set by `twinplane up` itself"),
        (("doctor", "--exit-with-parent"), "--exit-with-parent is set by `twinplane up` itself"),
        (("up", "some-model"), "a model is named by --model some-model"),
        (("generate", "hi", "--temprature=0"), "--temprature: did you mean --temperature?"),
        (("chat", "--sytem=x"), "--sytem: did you mean --system?"),
        (("model", "list", "--jsn"), "--jsn: did you mean --json?"),
        (("doctor", "--jsn"), "--jsn: did you mean --json?"),
        (("serve", "some-model"), "did you mean `twinplane up`?"),
        (("pull", "some-model"), "did you mean `twinplane model pull`?"),
        (("genrate", "hi"), "did you mean `twinplane generate`?"),
        (("run", "some-model"), "did you mean `twinplane chat`?"),
        (("qqq",), "see twinplane --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_was_meant(
    arguments: tuple[str, ...], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, *arguments).endswith(advice)


def test_aliases_lead_to_commands_and_hide_none() -> None:
    for alias, meant in _ALIASES.items():
        assert _find(alias) is None, f"{alias} is a command now"
        assert _find(meant.split()[0]) is not None
