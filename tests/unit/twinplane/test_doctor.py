"""The doctor: each finding names its fix, and only what stops `twinplane up` fails."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.planes import ROOT, plane_environment
from tests.support.tiny_spec import TINY_CONFIG, save_random, tiny_spec
from tests.unit.twinplane.tiny_gguf import TinyGguf
from twinplane import models
from twinplane.cli import doctor, doctor_checks
from twinplane.cli.doctor_checks import (
    Finding,
    State,
    WorkerProbe,
    check_cache,
    check_event_loop,
    check_models,
    check_packages,
    check_ports,
    check_worker,
    judge_worker,
)
from twinplane.extras import Extra, install_command
from twinplane.models import DEFAULT_MODEL
from twinplane.settings.control import ControlConfig

PROBE = WorkerProbe(2, "the cores", "g++ 12", "", "2.6", "", ("cpu",), {})


def states(findings: list[Finding]) -> list[State]:
    return [finding.state for finding in findings]


def without_packages(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    real = doctor_checks._version
    monkeypatch.setattr(
        doctor_checks, "_version", lambda name: None if name in missing else real(name)
    )


def test_every_problem_has_a_fix_and_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_packages(monkeypatch, "grpcio", "uvloop")
    findings = [
        *check_packages(),
        *check_event_loop(),
        *judge_worker(replace(PROBE, compiler="", compiler_error="no C++ compiler")),
        *judge_worker(replace(PROBE, torch="", torch_error="no torch")),
        *judge_worker(replace(PROBE, start_error="no such device")),
        *check_worker(command=(sys.executable, "-c", "exit(1)")),
        *check_cache(tmp_path / "nowhere"),
        *check_models(("nowhere",)),
    ]
    assert {State.FAIL, State.WARN, State.OK} >= {finding.state for finding in findings}
    for finding in findings:
        assert bool(finding.fix) == (finding.state is not State.OK), finding


def test_missing_packages_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(check_packages()) == [State.OK]
    without_packages(monkeypatch, "gguf")
    missing = check_packages()[1]
    assert (missing.state, missing.detail) == (State.FAIL, "missing: gguf")
    assert install_command(Extra.CONTROL) in missing.fix


def test_no_uvloop_only_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(check_event_loop()) == [State.OK]
    without_packages(monkeypatch, "uvloop")
    assert states(check_event_loop()) == [State.WARN]


@pytest.mark.slow
def test_the_worker_is_asked_in_another_process() -> None:
    found = {finding.subject: finding for finding in check_worker(["--threads=3"])}
    assert "fail" not in {finding.state.value for finding in found.values()}
    assert found["threads"].detail.startswith("3, from the setting")
    assert found["torch"].detail
    assert found["devices"].detail.startswith("cpu")
    assert found["executor torch with reference attention"].state is State.OK


@pytest.mark.slow
def test_a_model_that_a_worker_would_refuse_is_told(tmp_path: Path) -> None:
    good = save_random(tiny_spec(), tmp_path / "good")
    (good / "config.json").write_text(json.dumps(TINY_CONFIG))
    options = [f"--model={good}", "--executor=torch", "--kv-cache-memory-bytes=1MiB"]
    found = {finding.subject: finding for finding in check_worker(options)}
    assert found["worker"].state is State.OK
    start, memory = found["worker"].detail.rsplit("; ", 1)
    assert start == (
        "would start: LlamaForCausalLM, 2 layers, float32, by torch with torch attention on cpu; "
        "8,176 KV tokens, sequences of up to 64 tokens"
    )
    assert memory.startswith("weights 21.8 kB + KV 1.05 MB + workspace ")
    (good / "config.json").write_text(json.dumps({**TINY_CONFIG, "num_hidden_layers": 1}))
    found = {finding.subject: finding for finding in check_worker(options)}
    assert found["worker"].state is State.FAIL
    assert "model.layers.1.input_layernorm.weight" in found["worker"].detail


def test_a_probe_that_fails_is_reported() -> None:
    (died,) = check_worker(command=(sys.executable, "-c", "import no_such_module"))
    assert died.state is State.FAIL
    assert "no_such_module" in died.detail
    sleeping = (sys.executable, "-c", "import time; time.sleep(60)")
    (hung,) = check_worker(command=sleeping, timeout_seconds=0.2)
    assert hung.state is State.FAIL
    assert "no answer" in hung.detail


def test_without_torch_the_rest_is_still_said() -> None:
    findings = judge_worker(replace(PROBE, torch="", torch_error="No module named 'torch'"))
    assert [finding.subject for finding in findings] == ["threads", "compiler", "torch"]
    assert states(findings) == [State.OK, State.OK, State.FAIL]
    assert install_command(Extra.WORKER) in findings[-1].fix


@pytest.mark.slow
def test_a_wrong_compiler_is_refused_as_by_a_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another compiler on the path serves neither the doctor nor a build in place of CXX."""
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    monkeypatch.setenv("TWINPLANE_HOME", str(tmp_path / "home"))
    found = {finding.subject: finding for finding in check_worker()}
    for subject in ("compiler", "executor compiled"):
        assert found[subject].state is State.WARN
        assert "does not run" in found[subject].detail
    assert "CXX" in found["compiler"].fix


def test_each_executors_answer_is_a_line() -> None:
    findings = judge_worker(replace(PROBE, refusals={"fast": "no AVX2", "slow": None}))[2:]
    assert states(findings) == [State.OK, State.OK, State.WARN, State.OK]
    assert findings[2].subject == "executor fast"
    assert findings[2].detail == "no AVX2"


def test_a_taken_port_fails() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for config, flag in (
            (ControlConfig(port=port, metrics_port=None), "--port"),
            (ControlConfig(port=0, metrics_port=port), "--metrics-port"),
            (ControlConfig(host="192.0.2.1", port=0, metrics_port=0), "--host"),
            (ControlConfig(port=9, metrics_port=9, metrics_host="0.0.0.0"), "--metrics-port"),
            (ControlConfig(uds="/no/such/folder/a.sock", metrics_port=None), "/no/such/folder"),
        ):
            (finding,) = check_ports(config)
            assert finding.state is State.FAIL
            assert flag in finding.detail
        with_socket = ControlConfig(uds="a.sock", port=port, metrics_port=0)
        assert states(check_ports(with_socket)) == [State.OK]
    assert states(check_ports(ControlConfig(port=port, metrics_port=None))) == [State.OK]


def test_the_model_has_to_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TWINPLANE_HOME", str(tmp_path))
    (missing,) = check_models((DEFAULT_MODEL, DEFAULT_MODEL), DEFAULT_MODEL)
    assert missing.state is State.FAIL
    assert missing.fix == f"twinplane model pull {DEFAULT_MODEL}"
    folder = tmp_path / "models" / DEFAULT_MODEL
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    assert states(check_models((DEFAULT_MODEL,), DEFAULT_MODEL)) == [State.OK]
    assert DEFAULT_MODEL in check_cache(tmp_path)[0].detail
    # What can't be pulled by its name is no reason to say so.
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", str(tmp_path / "empty")):
        (wrong,) = check_models((name,))
        assert (wrong.state, wrong.fix) == (State.FAIL, "another --model")
        assert name in wrong.detail


@pytest.mark.slow
def test_a_gguf_file_is_not_converted_by_looking(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TWINPLANE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    file = tmp_path / "model.gguf"
    TinyGguf().write(file)
    (sound,) = check_models((str(file),))
    assert (sound.state, "converted on first use" in sound.detail) == (State.OK, True)
    worker = check_worker([f"--model={file}"])[-1]
    assert (worker.state, "would start" in worker.detail) == (State.OK, True)
    file.write_bytes(b"GGUF")
    assert states(check_models((str(file),))) == [State.FAIL]
    assert check_worker([f"--model={file}"])[-1].state is State.FAIL
    assert not (tmp_path / "home").exists()


def test_a_gguf_file_needs_a_cache_that_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    TinyGguf().write(file)
    (tmp_path / "home").write_text("no folder")
    monkeypatch.setenv("TWINPLANE_HOME", str(tmp_path / "home" / "below"))
    (finding,) = check_models((str(file),))
    assert finding.state is State.FAIL
    assert "TWINPLANE_HOME" in finding.fix
    with pytest.raises(models.CacheUnusable):
        models.resolve(str(file))


def test_the_settings_of_up_decide_what_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Sequence[str]] = []

    def check(options: Sequence[str]) -> list[Finding]:
        asked.append(options)
        return []

    monkeypatch.setattr(doctor_checks, "check_worker", check)
    monkeypatch.setenv("TWINPLANE_MODEL", "of-the-environment")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        arguments = ["--json", f"--port={port}", "--metrics-port=none", "--threads=3"]
        assert doctor.main(arguments) == 1
    ((*options,),) = asked
    assert "--threads=3" in options
    assert f"--port={port}" not in options, "that is the control plane's"
    findings = json.loads(capsys.readouterr().out)
    failures = {entry["subject"]: entry for entry in findings if entry["state"] == "fail"}
    assert failures.keys() == {"addresses", "model"}
    assert str(port) in failures["addresses"]["detail"]
    assert "of-the-environment" in failures["model"]["detail"]
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--port=x"])
    assert ended.value.code == 2
    assert "--port" in capsys.readouterr().err


def test_little_disk_warns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_checks, "_DEFAULT_MODEL_BYTES", 1 << 62)
    disk = check_cache(tmp_path)[-1]
    assert (disk.state, disk.subject) == (State.WARN, "disk")
    assert "TWINPLANE_HOME" in disk.fix


def test_the_exit_code_is_1_only_for_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warning = Finding(State.WARN, "subject", "detail", "do this")
    monkeypatch.setattr(doctor, "_checks", lambda *_: (lambda: [warning],))
    assert doctor.main([]) == 0
    assert capsys.readouterr().out == "warn  subject  detail; fix: do this\n"
    failure = Finding(State.FAIL, "subject", "detail", "do that")
    monkeypatch.setattr(doctor, "_checks", lambda *_: (lambda: [warning, failure],))
    assert doctor.main(["--json"]) == 1
    assert [entry["state"] for entry in json.loads(capsys.readouterr().out)] == ["warn", "fail"]


def test_every_detail_starts_in_one_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [Finding(State.OK, "a", "one"), Finding(State.OK, "a longer subject", "two")]
    monkeypatch.setattr(doctor, "_checks", lambda *_: (lambda: findings,))
    assert doctor.main([]) == 0
    short, long = capsys.readouterr().out.splitlines()
    assert short.index("one") == long.index("two")


@pytest.mark.slow
def test_the_doctor_itself_imports_no_torch() -> None:
    script = (
        "import sys; from twinplane.cli import main; main(['doctor', '--json'])\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=plane_environment(),
    )
    assert done.stdout.splitlines()[-1] == "False"
    assert '"subject": "torch"' in done.stdout
