"""`python -m worker_service` as its users start it: signals, exit codes, and no torch."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.worker_rig import attach_request, first
from twinplane.extras import Extra, install_command
from twinplane.worker.v1 import model_runner_pb2, model_runner_pb2_grpc

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 60.0
SIMULATED = ("--simulate", "--simulate-vocabulary-size", "101", "--simulate-step-ms", "0")

# Importing any of these ends the process: the base install has none of them.
BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "safetensors", "gguf", "triton"}:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Block())
"""
MAIN = """
from worker_service.__main__ import main
sys.exit(main())
"""


class Process:
    """A worker process, and the log lines it has written."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.lines: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for(self, message: str) -> dict[str, Any]:
        """The first line with this message."""

        def found() -> dict[str, Any] | None:
            return next((line for line in self.lines if line["message"] == message), None)

        with self._changed:
            assert self._changed.wait_for(found, PATIENCE), self.lines
            line = found()
        assert line is not None
        return line

    def wait_for_text(self, text: str) -> None:
        """A line that holds this text."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: any(text in line["message"] for line in self.lines), PATIENCE
            ), self.lines

    def exit_code(self) -> int:
        return self.popen.wait(PATIENCE)

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for text in self.popen.stderr:
            line = json.loads(text) if text.startswith("{") else {"message": text.strip()}
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()


@contextmanager
def worker(
    *arguments: str, code: str = "import sys" + MAIN, **environment: str
) -> Iterator[Process]:
    popen = subprocess.Popen(
        [sys.executable, "-c", code, "--port", "0", "--log-format", "json", *arguments],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("TWINPLANE_")} | environment,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with popen:
        try:
            yield Process(popen)
        finally:
            popen.kill()


async def test_a_simulated_worker_serves_without_torch() -> None:
    with worker(*SIMULATED, code=BLOCKED + MAIN) as process:
        address = process.wait_for("listening")["address"]
        process.wait_for("ready")
        async with grpc.aio.insecure_channel(address) as channel:
            stub = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
            info = (await stub.Attach(attach_request(1))).worker_info
            assert info.model.vocabulary_size == 101
            assert info.device.name == "simulated"
            request = first(digest=info.weight_version.digest)
            assert len((await stub.Forward(request)).result.tokens) == 1
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0
        assert process.wait_for("stopped")["broken"] is False


def test_the_rpc_side_imports_without_torch() -> None:
    code = BLOCKED + (
        "import worker_service.app, worker_service.facade, worker_service.rpc.server\n"
        "import worker_service.simulated.runner, worker_service.startup\n"
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=PATIENCE)


def test_without_torch_a_model_worker_says_what_to_install() -> None:
    with worker("--model", "/nowhere", code=BLOCKED + MAIN) as process:
        reason = process.wait_for("cannot load")["reason"]
        assert "torch" in reason
        assert install_command(Extra.WORKER) in reason
        assert "--simulate" in reason
        assert process.exit_code() == 1


def fetch(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_metrics_and_probes_are_served_where_they_are_wanted() -> None:
    with worker(*SIMULATED, "--metrics-port", "0", code=BLOCKED + MAIN) as process:
        port = process.wait_for("listening")["metrics_port"]
        ready = process.wait_for("ready")
        assert fetch(port, "/livez")[0] == fetch(port, "/readyz")[0] == 200
        status, text = fetch(port, "/metrics")
        assert status == 200
        [kv_bytes] = re.findall(r'^twinplane_worker_memory_bytes\{kind="kv"\} (.*)$', text, re.M)
        assert float(kv_bytes) == ready["kv_bytes"]
        assert 'twinplane_worker_state{state="active"} 1.0' in text
        with worker(*SIMULATED, "--metrics-port", str(port)) as other:
            assert "another --metrics-port may do" in other.wait_for("stopped")["reason"]
            assert other.exit_code() == 1
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0


def test_without_a_metrics_port_there_is_none() -> None:
    with worker(*SIMULATED) as process:
        assert process.wait_for("listening")["metrics_port"] is None


def test_the_ready_line_says_what_the_memory_holds() -> None:
    flags = ("--simulate-block-count", "1001", "--block-size", "8", "--max-num-seqs", "3")
    with worker(*SIMULATED, *flags, "--max-model-len", "1000") as process:
        ready = process.wait_for("ready")
    assert ready["kv_token_count"] == 8000
    assert ready["full_length_sequence_count"] == 3, "no more than rows"
    assert ready["kv_bytes_per_token"] * 8008 == ready["kv_bytes"]
    assert {"weights_bytes", "workspace_bytes", "free_bytes"} <= ready.keys()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_exits_well(number: signal.Signals) -> None:
    with worker(*SIMULATED) as process:
        process.wait_for("ready")
        process.popen.send_signal(number)
        assert process.exit_code() == 0
        process.wait_for("draining")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]
)
async def test_a_second_signal_does_not_wait_for_the_drain(
    number: signal.Signals, code: int
) -> None:
    slow = ("--simulate-step-ms", "600000", "--drain-seconds", "600")
    with worker(*SIMULATED, *slow) as process:
        address = process.wait_for("listening")["address"]
        process.wait_for("ready")
        async with grpc.aio.insecure_channel(address) as channel:
            stub = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
            info = (await stub.Attach(attach_request(1))).worker_info
            stream = stub.Execute()
            forward = first(digest=info.weight_version.digest)
            await stream.write(model_runner_pb2.ExecuteRequest(forward=forward))
            # Answered behind it: the worker has the stream then, and with it a controller.
            await stub.GetWorkerInfo(model_runner_pb2.GetWorkerInfoRequest())
            process.popen.send_signal(number)
            await asyncio.to_thread(process.wait_for, "draining")
            process.popen.send_signal(number)
            assert await asyncio.to_thread(process.exit_code) == code


def test_it_exits_with_its_parent() -> None:
    with worker(*SIMULATED, "--exit-with-parent") as process:
        process.wait_for("ready")
        assert process.popen.stdin is not None
        process.popen.stdin.close()
        assert process.exit_code() == 0


def test_standard_input_is_ignored_otherwise() -> None:
    with worker(*SIMULATED) as process:
        assert process.popen.stdin is not None
        process.popen.stdin.close()
        process.wait_for("ready")
        with pytest.raises(subprocess.TimeoutExpired):
            process.popen.wait(0.3)


def test_a_simulated_worker_takes_its_shape_from_a_model_folder(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 777,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("--model", str(tmp_path), "--served-model-name", "small")
    with worker("--simulate", *arguments, TWINPLANE_MAX_NUM_SEQS="3") as process:
        ready = process.wait_for("ready")
    assert (ready["model"], ready["max_sequence_token_count"]) == ("small", 512)
    assert ready["max_sequence_count"] == 3


@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        (("--block-size", "0"), {}, "block_size must be at least 1"),
        (("--simulate-step-ms", "nan"), {}, "simulate_step_ms must be at least 0"),
        (("--port", "70000"), {}, "port must be at most 65535"),
        (("--metrics-port", "70000"), {}, "metrics_port must be at most 65535"),
        (("--dtype", "int4"), {}, "--dtype"),
        ((), {"TWINPLANE_BLOCK_SIZ": "4"}, "TWINPLANE_BLOCK_SIZ"),
        (("--no-such-flag",), {}, "--no-such-flag"),
    ],
)
def test_settings_that_can_not_be_are_a_usage_error(
    arguments: tuple[str, ...], environment: dict[str, str], complaint: str
) -> None:
    with worker("--simulate", *arguments, **environment) as process:
        assert process.exit_code() == 2
        process.wait_for_text(complaint)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--model", "nobody/has-this"), "nobody/has-this"),
        (("--max-model-len", "100", "--simulate-block-count", "4"), "--simulate-block-count"),
    ],
)
def test_a_simulation_that_can_not_be_says_why(arguments: tuple[str, ...], complaint: str) -> None:
    with worker("--simulate", *arguments) as process:
        assert complaint in process.wait_for("cannot load")["reason"]
        assert process.exit_code() == 1
