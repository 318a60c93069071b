"""How commands reach a control plane: flags, the environment, and what they say when they can't."""

from __future__ import annotations

import argparse
import subprocess
from collections import deque
from pathlib import Path

import grpc
import pytest

from tests.support.planes import Planes, free_port
from tests.support.scripted_inference import (
    Fail,
    ScriptedInference,
    delta,
    finished,
    serve,
    started,
)
from tests.unit.twinplane.cli_process import run
from twinplane import (
    GenerateOptions,
    InvalidAddress,
    InvalidRequest,
    PartialGeneration,
    TlsCredentials,
    TwinplaneError,
    Unavailable,
    Violation,
    WrongServer,
)
from twinplane.cli import main
from twinplane.cli.connection import Connection, add_connection_flags, connection
from twinplane.cli.failures import one_line
from twinplane.cli.request_flags import add_request_flags
from twinplane.common.v1 import types_pb2
from twinplane.inference.v1 import inference_pb2 as pb
from twinplane.settings import resolution
from twinplane.settings.control import ControlConfig
from twinplane.settings.known import known_settings
from twinplane.settings.worker import WorkerConfig

COMMANDS = pytest.mark.parametrize("command", ["generate", "chat"])


def parsed(*arguments: str) -> Connection:
    parser = argparse.ArgumentParser()
    add_connection_flags(parser)
    return connection(parser.parse_args(arguments))


# --- where --------------------------------------------------------------------------------------


def test_flag_before_variable_before_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWINPLANE_ADDRESS", raising=False)
    assert parsed() == Connection("127.0.0.1:50051")
    monkeypatch.setenv("TWINPLANE_ADDRESS", "")
    assert parsed() == Connection("127.0.0.1:50051")
    monkeypatch.setenv("TWINPLANE_ADDRESS", "gpu:1")
    assert parsed() == Connection("gpu:1")
    assert parsed("--address", "other:2") == Connection("other:2")


@pytest.mark.slow
@COMMANDS
def test_commands_go_where_the_variable_says(command: str) -> None:
    whole = finished(reason=pb.FINISH_REASON_STOP)
    service = ScriptedInference(scripts=deque([[started(), delta("hi", 1), whole]]))
    with serve(service) as address:
        done = run(command, stdin="question\n", TWINPLANE_ADDRESS=address)
    assert (done.returncode, done.stderr) == (0, "")
    assert "hi" in done.stdout


@pytest.mark.parametrize(("cls", "table"), [(ControlConfig, "control"), (WorkerConfig, "worker")])
def test_the_variable_is_none_of_a_planes(
    cls: type[ControlConfig] | type[WorkerConfig], table: str
) -> None:
    def resolved(**environ: str) -> object:
        return resolution.resolve(
            cls, argparse.Namespace(), environ, None, table, known=known_settings()
        )

    assert resolved(TWINPLANE_ADDRESS="gpu:1") == resolved()
    with pytest.raises(resolution.SettingsError, match="did you mean TWINPLANE_ADDRESS"):
        resolved(TWINPLANE_ADRESS="gpu:1")


# --- how ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_metadata_and_tls_are_flags(tmp_path: Path) -> None:
    ca, key, chain = (tmp_path / name for name in ("ca.pem", "key.pem", "chain.pem"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", chain, "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    ca.write_bytes(chain.read_bytes())
    pair = [(key.read_bytes(), chain.read_bytes())]
    server = grpc.ssl_server_credentials(pair, ca.read_bytes(), require_client_auth=True)
    service = ScriptedInference(scripts=deque([[started(), delta("hi", 1), finished()]]))
    flags = (
        f"--tls-ca={ca}", f"--tls-cert={chain}", f"--tls-key={key}",
        "--metadata", "Authorization=Bearer a=b", "--metadata", "tenant=",
    )  # fmt: skip
    with serve(service, server) as address:
        done = run("generate", "x", "--address", address, *flags)
        assert (done.stdout, done.stderr) == ("hi\n", "")
        plain = run("generate", "x", "--address", address)
        untrusted = run("generate", "x", "--address", address, "--tls")
    assert len(service.metadata) > 1, "also of the call that asks for the model"
    for seen in service.metadata:
        assert (seen["authorization"], seen["tenant"]) == ("Bearer a=b", "")
    assert "does it want TLS?" in plain.stderr
    assert "its TLS certificate is not trusted" in untrusted.stderr


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--metadata", "token"], 2, "it is NAME=TEXT"),
        (["--metadata", "a b=x"], 2, "a name has letters"),
        (["--metadata", "grpc-x=x"], 2, "does not begin with grpc-"),
        (["--metadata", "x-bin=x"], 2, "must be bytes"),
        (["--metadata", "a=é"], 2, "printable ASCII"),
        (["--tls-cert", "c.pem"], 1, "--tls-cert and --tls-key go together"),
        (["--tls-key", "k.pem"], 1, "--tls-cert and --tls-key go together"),
        (["--address", "http://127.0.0.1:1"], 1, "is a URL: give 127.0.0.1:1 (--address"),
        (["--address", "localhost"], 1, "has no port: give localhost:50051"),
    ],
)
def test_wrong_flags_end_in_one_line(
    flags: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main(["generate", "x", *flags]) == code
    except SystemExit as error:
        assert error.code == code
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_file_that_is_not_there_is_named() -> None:
    done = run("generate", "x", "--tls-ca", "/nonexistent/ca.pem")
    assert done.stderr == "twinplane generate: No such file or directory: /nonexistent/ca.pem\n"


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"root_certificates": "ca.pem"}, TypeError, "root_certificates must be bytes, not str"),
        ({"private_key": Path("k")}, TypeError, "private_key must be bytes, not PosixPath"),
        ({"private_key": b"k"}, ValueError, "private_key and certificate_chain go together"),
        ({"certificate_chain": b"c"}, ValueError, "private_key and certificate_chain go together"),
    ],
)
def test_credentials_are_checked(
    settings: dict[str, object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        TlsCredentials(**settings)  # type: ignore[arg-type]


# --- what they say ------------------------------------------------------------------------------


@pytest.mark.slow
@COMMANDS
def test_nobody_there(command: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    done = run(command, "--address", address, "--wait=0.1", stdin="hi\n")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert f"no server answers at {address}: connection refused" in line
    assert "is `twinplane up` running? --address or TWINPLANE_ADDRESS names another" in line


@pytest.mark.slow
@COMMANDS
def test_a_worker_there(simulated_planes: Planes, command: str) -> None:
    done = run(command, "--address", simulated_planes.worker_address, stdin="hi\n")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"a worker listens at {simulated_planes.worker_address}, not a control plane" in line


@pytest.mark.slow
@COMMANDS
@pytest.mark.parametrize("end", [Fail(grpc.StatusCode.INTERNAL, "a bug"), None], ids=str)
def test_an_error_behind_text_has_its_own_line(command: str, end: Fail | None) -> None:
    script = [started(), delta("half an", 1), delta(" answer", 2)]
    service = ScriptedInference(scripts=deque([script if end is None else [*script, end]]))
    with serve(service) as address:
        done = run(command, "--address", address, stdin="hi\n")
    assert done.returncode == 1
    assert done.stdout == "half an answer\n"
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"twinplane {command}: ")


@pytest.mark.slow
def test_an_error_before_any_text_leaves_no_empty_line() -> None:
    service = ScriptedInference(scripts=deque([[started(), Fail(grpc.StatusCode.INTERNAL)]]))
    with serve(service) as address:
        assert run("generate", "x", "--address", address).stdout == ""


def request_flags_by_field() -> list[tuple[str, str]]:
    sampling = [field.name for field in types_pb2.SamplingParameters.DESCRIPTOR.fields]
    return [
        ("model", "--model"),
        ("adapter", "--adapter"),
        ("stop.max_tokens", "--max-tokens"),
        ("stop.strings", "--stop"),
        ("stop.strings[3]", "--stop"),
        ("stop.ignore_end_of_sequence", "--ignore-eos"),
        *((f"sampling.{name}", "--" + name.replace("_", "-")) for name in sampling),
    ]


@pytest.mark.parametrize(("field", "flag"), request_flags_by_field())
def test_a_refused_field_is_named_with_its_flag(field: str, flag: str) -> None:
    error = InvalidRequest("bad", violations=(Violation(field, "is 2"), Violation("chat", "no")))
    assert one_line(error) == f"{field} ({flag}): is 2; chat: no"
    parser = argparse.ArgumentParser()
    add_request_flags(parser, max_tokens=1)
    assert flag in parser.format_help()


def test_every_flag_of_a_request_is_named_beside_its_field() -> None:
    parser = argparse.ArgumentParser()
    add_request_flags(parser, max_tokens=1)
    named = {flag for _, flag in request_flags_by_field()}
    for name in vars(parser.parse_args([])).keys() & GenerateOptions.__optional_keys__:
        assert "--" + name.replace("_", "-") in named


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            Unavailable("no server answers at a:1: connection refused"),
            "no server answers at a:1: connection refused (is `twinplane up` running?"
            " --address or TWINPLANE_ADDRESS names another)",
        ),
        (
            WrongServer("a worker listens at a:1"),
            "a worker listens at a:1 (--address or TWINPLANE_ADDRESS)",
        ),
        (
            InvalidAddress("the address 'a' has no port"),
            "the address 'a' has no port (--address or TWINPLANE_ADDRESS)",
        ),
        (Unavailable("no model is served yet", reason="NO_WORKER"), "no model is served yet"),
    ],
)
def test_lines(error: TwinplaneError, line: str) -> None:
    assert one_line(error) == line


def test_a_break_needs_no_other_address() -> None:
    error = Unavailable("the connection to a:1 broke: it was closed")
    error.partial = PartialGeneration("x", (1,), 1, "r", "m")
    assert one_line(error) == "the connection to a:1 broke: it was closed"
