"""The control plane as a process beside a simulated worker: start, serve, stop, and its price."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import psutil
import pytest
import tokenizers

from tests.support.planes import ROOT, is_serving
from twinplane.inference.v1 import inference_pb2, inference_pb2_grpc

pytestmark = pytest.mark.slow

OPERATIONS = ROOT / "docs" / "operations.md"
LIMIT_RESIDENT_BYTES = 200 * 1000 * 1000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer of 256 tokens and no weights."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    folder.mkdir()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: index for index, token in enumerate(alphabet)}, [])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


class Process:
    """A child that logs JSON lines on stderr, read until a message appears."""

    def __init__(self, module: str, *arguments: str) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TWINPLANE_")}
        self.popen = subprocess.Popen(
            [sys.executable, "-m", module, "--log-format=json", *arguments],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.lines: list[str] = []

    def wait_for(self, message: str) -> dict[str, object]:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append(line)
            record: dict[str, object] = json.loads(line) if line.startswith("{") else {}
            if record.get("message") == message:
                return record
        raise AssertionError(f"{message!r} never came:\n{''.join(self.lines)}")

    def end(self, timeout: float = 20.0) -> int:
        """Waits for the end; the exit code. Reads what is left, so that a full pipe is no wait."""
        _, rest = self.popen.communicate(timeout=timeout)
        self.lines.append(rest)
        return self.popen.returncode

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.communicate()


@pytest.fixture
def spawn() -> Iterator[Callable[..., Process]]:
    with ExitStack() as stack:

        def start(module: str, *arguments: str) -> Process:
            process = Process(module, *arguments)
            stack.callback(process.close)
            return process

        yield start


@pytest.fixture
def worker(spawn: Callable[..., Process]) -> str:
    process = spawn(
        "worker_service", "--simulate", "--simulate-vocabulary-size=256", "--port=0",
        "--max-num-seqs=16", "--max-model-len=512", "--simulate-step-ms=2",
    )  # fmt: skip
    return str(process.wait_for("listening")["address"])


def control(spawn: Callable[..., Process], model: Path, worker: str, *extra: str) -> Process:
    listen = ("--port=0", "--metrics-port=0")
    return spawn("control_plane", f"--model={model}", f"--worker={worker}", *listen, *extra)


def generate(stub: inference_pb2_grpc.InferenceServiceStub, count: int) -> list[int]:
    tokens: list[int] = []
    request = inference_pb2.GenerateRequest(
        text="Hello", stop=inference_pb2.StopConditions(max_tokens=count)
    )
    request.sampling.seed = 1
    for response in stub.Generate(request, timeout=30):
        tokens += response.delta.token_ids
    return tokens


def test_serves_within_its_memory_and_stops_when_asked(
    spawn: Callable[..., Process], model: Path, worker: str
) -> None:
    process = control(spawn, model, worker)
    listening = process.wait_for("listening")
    assert listening["model"] == "tiny"
    process.wait_for("worker attached")
    with grpc.insecure_channel(str(listening["address"])) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        first = generate(stub, 100)
        assert len(first) == 100
        assert generate(stub, 100) == first
    resident = psutil.Process(process.popen.pid).memory_info().rss
    assert resident <= LIMIT_RESIDENT_BYTES, f"{resident / 1e6:.0f} MB"

    connection = http.client.HTTPConnection("127.0.0.1", int(str(listening["metrics_port"])))
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert re.search(r'^twinplane_tokens_total\{kind="generated",replica="0"\} 200\.0$', text, re.M)
    assert re.search(r'^twinplane_rpcs_total\{code="OK",method=".*Generate"\} 2\.0$', text, re.M)
    assert re.search(r"^twinplane_time_to_first_token_seconds_count 2\.0$", text, re.M)

    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == 0, "".join(process.lines)
    assert "Traceback" not in "".join(process.lines)


def test_a_drain_lets_a_stream_finish(
    spawn: Callable[..., Process], model: Path, worker: str
) -> None:
    process = control(spawn, model, worker)
    address = str(process.wait_for("listening")["address"])
    process.wait_for("worker attached")
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(
            text="Hello", stop=inference_pb2.StopConditions(max_tokens=300)
        )
        tokens: list[int] = []
        signalled = False
        for response in stub.Generate(request, timeout=30):
            tokens += response.delta.token_ids
            if tokens and not signalled:
                process.popen.send_signal(signal.SIGINT)
                signalled = True
        assert len(tokens) == 300
    assert process.end() == 0


def test_a_tokenizer_of_another_model_is_told_of_when_they_meet(
    spawn: Callable[..., Process], model: Path
) -> None:
    small = spawn(
        "worker_service", "--simulate", "--simulate-vocabulary-size=90", "--port=0",
    )  # fmt: skip
    address = str(small.wait_for("listening")["address"])
    process = control(spawn, model, address)
    listening = str(process.wait_for("listening")["address"])
    told = process.wait_for(
        "the tokenizer has tokens that the worker's model lacks; prompts with them are refused"
    )
    assert (told["level"], told["tokenizer_size"], told["vocabulary_size"]) == ("warning", 256, 90)
    with grpc.insecure_channel(listening) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for text, refused in (("A", False), ("A\u00e9", True)):
            request = inference_pb2.GenerateRequest(
                text=text, stop=inference_pb2.StopConditions(max_tokens=3)
            )
            try:
                list(stub.Generate(request, timeout=30))
            except grpc.RpcError as error:
                assert refused
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert error.details().startswith("text: ")
            else:
                assert not refused
    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == 0
    assert "the tokenizer has tokens" not in process.lines[-1], "told twice"


def test_two_signals_cut_the_drain_short(spawn: Callable[..., Process], model: Path) -> None:
    slow = spawn(
        "worker_service", "--simulate", "--simulate-vocabulary-size=256", "--port=0",
        "--max-model-len=512", "--simulate-step-ms=200",
    )  # fmt: skip
    address = str(slow.wait_for("listening")["address"])
    process = control(spawn, model, address, "--drain-grace-seconds=600")
    listening = str(process.wait_for("listening")["address"])
    process.wait_for("worker attached")
    with grpc.insecure_channel(listening) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(text="Hello"), timeout=60)
        next(call)
        process.popen.send_signal(signal.SIGINT)
        process.wait_for("draining")
        process.popen.send_signal(signal.SIGINT)
        assert process.end() == 0
        with pytest.raises(grpc.RpcError) as error:
            list(call)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_the_end_of_the_parent_is_a_signal(spawn: Callable[..., Process], model: Path) -> None:
    """With no worker to be found, too."""
    process = control(spawn, model, "127.0.0.1:1", "--exit-with-parent")
    process.wait_for("listening")
    assert process.popen.stdin is not None
    process.popen.stdin.close()
    process.popen.stdin = None
    assert process.end() == 0


def test_without_a_worker_it_is_alive_and_every_series_is_there(
    spawn: Callable[..., Process], model: Path
) -> None:
    process = control(spawn, model, "127.0.0.1:1")
    listening = process.wait_for("listening")
    address, metrics_port = str(listening["address"]), int(str(listening["metrics_port"]))
    assert is_serving(address, "liveness")
    assert not any(is_serving(address, service) for service in ("", "readiness"))
    answers = {}
    for path in ("/livez", "/readyz", "/healthz", "/metrics"):
        connection = http.client.HTTPConnection("127.0.0.1", metrics_port)
        connection.request("GET", path)
        answer = connection.getresponse()
        answers[path] = answer.status
        text = answer.read().decode()
        connection.close()
    assert answers == {"/livez": 200, "/readyz": 503, "/healthz": 503, "/metrics": 200}
    own = OPERATIONS.read_text().split("### The control plane's\n")[1].split("\n### ")[0]
    documented = re.findall(r"^\| `(twinplane_\w+)", own, re.MULTILINE)
    missing = [name for name in documented if not re.search(rf"^{name}[_{{ ]", text, re.MULTILINE)]
    assert len(documented) >= 18
    assert not missing
    rpc_counts = re.findall(r"^twinplane_rpcs_total\{.*\} (\S+)$", text, re.MULTILINE)
    assert rpc_counts
    assert set(rpc_counts) == {"0.0"}


def test_a_taken_port_ends_it_at_once(spawn: Callable[..., Process], model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flag in (f"--port={port}", f"--metrics-port={port}"):
            process = control(spawn, model, "127.0.0.1:1", flag)
            assert process.end() == 1
            last = json.loads("".join(process.lines).strip().splitlines()[-1])
            assert (last["level"], last["message"]) == ("error", "stopped")
            assert f"can't listen on 127.0.0.1:{port}: " in last["reason"]


def test_a_missing_tokenizer_ends_it_at_once(spawn: Callable[..., Process], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    process = control(spawn, tmp_path, "127.0.0.1:1")
    assert process.end() == 1
    assert "tokenizer.json is missing" in "".join(process.lines)


def test_it_imports_no_heavy_library() -> None:
    code = (
        "import sys, control_plane.app; "
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    started = time.monotonic()
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert output.strip() == "[]", f"after {time.monotonic() - started:.1f} s"
