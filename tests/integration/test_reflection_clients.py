"""Clients nobody here wrote: grpcurl, which knows only reflection, and Node's grpc-js."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.planes import (
    ROOT,
    START_SECONDS,
    Plane,
    Planes,
    free_port,
    is_serving,
)

pytestmark = pytest.mark.slow

INFERENCE = "twinplane.inference.v1.InferenceService"
RUNNER = "twinplane.worker.v1.ModelRunnerService"
NODE = ROOT / "tests" / "integration" / "node"
GREEDY = {
    "text": "Hello",
    "sampling": {"temperature": 0},
    "stop": {"max_tokens": 5, "ignore_end_of_sequence": True},
}


def json_documents(text: str) -> list[dict[str, Any]]:
    """The JSON values that stand one after another in a text."""
    decoder, documents, rest = json.JSONDecoder(), [], text.strip()
    while rest:
        document, end = decoder.raw_decode(rest)
        documents.append(document)
        rest = rest[end:].strip()
    return documents


# --- grpcurl ------------------------------------------------------------------------------------


def grpcurl(
    address: str, *arguments: str, request: object = None, protos: Sequence[str] = ()
) -> str:
    """Runs the grpcurl of the development extra. Raises CalledProcessError.

    `protos` are flags that name files; without them it knows only what reflection says.
    """
    flags = ["-plaintext", "-max-time", "60", *protos]
    if address.startswith("unix:"):
        flags.append("-unix")
        address = address.removeprefix("unix:")
    if request is not None:
        flags += ["-d", json.dumps(request)]
    done = subprocess.run(
        [Path(sys.executable).with_name("grpcurl"), *flags, address, *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    return done.stdout


def test_grpcurl_lists_the_services(simulated_planes: Planes) -> None:
    for address, service in (
        (simulated_planes.address, INFERENCE),
        (simulated_planes.worker_address, RUNNER),
    ):
        listed = grpcurl(address, "list").split()
        assert {service, "grpc.health.v1.Health"} <= set(listed)


@pytest.mark.parametrize(
    ("symbol", "part"),
    [
        (INFERENCE, "rpc Generate"),
        ("twinplane.inference.v1.GenerateRequest", "SamplingParameters sampling = 5"),
        ("twinplane.common.v1.Usage", "uint32 cached_prompt_token_count = 2"),
    ],
)
def test_grpcurl_describes(simulated_planes: Planes, symbol: str, part: str) -> None:
    assert part in grpcurl(simulated_planes.address, "describe", symbol)


def test_grpcurl_describes_the_step_contract(simulated_planes: Planes) -> None:
    description = grpcurl(simulated_planes.worker_address, "describe", RUNNER)
    for rpc in ("Attach", "GetWorkerInfo", "GetMemoryPool", "Forward", "Sample", "Execute"):
        assert f"rpc {rpc} " in description


def test_grpcurl_reads_the_worker(simulated_planes: Planes) -> None:
    (answer,) = json_documents(grpcurl(simulated_planes.worker_address, f"{RUNNER}/GetWorkerInfo"))
    assert answer["worker_info"]["device"]["kind"] == "DEVICE_KIND_SIMULATED"
    (answer,) = json_documents(grpcurl(simulated_planes.worker_address, f"{RUNNER}/GetMemoryPool"))
    assert answer["memory_pool"]["block_token_count"] > 0


def test_grpcurl_lists_models(simulated_planes: Planes) -> None:
    (answer,) = json_documents(grpcurl(simulated_planes.address, f"{INFERENCE}/ListModels"))
    (model,) = answer["models"]
    assert model["name"] == "tiny"
    assert model["supports_chat"] is True


def test_grpcurl_generates(simulated_planes: Planes) -> None:
    output = grpcurl(simulated_planes.address, f"{INFERENCE}/Generate", request=GREEDY)
    first, *deltas, last = json_documents(output)
    assert first["started"]["prompt_token_count"] == 5
    tokens = [token for each in deltas for token in each["delta"].get("token_ids", ())]
    assert len(tokens) == 5
    assert last["finished"]["reason"] == "FINISH_REASON_LENGTH"
    assert last["finished"]["usage"]["completion_token_count"] == 5


def test_grpcurl_completes_as_it_generates(simulated_planes: Planes) -> None:
    streamed = json_documents(
        grpcurl(simulated_planes.address, f"{INFERENCE}/Generate", request=GREEDY)
    )
    (whole,) = json_documents(
        grpcurl(simulated_planes.address, f"{INFERENCE}/Complete", request=GREEDY)
    )
    deltas = [each["delta"] for each in streamed[1:-1]]
    assert whole["text"] == "".join(delta.get("text", "") for delta in deltas)
    assert whole["token_ids"] == [token for each in deltas for token in each.get("token_ids", ())]
    assert whole["reason"] == "FINISH_REASON_LENGTH"
    assert whole["usage"]["completion_token_count"] == 5
    assert whole["model"] == "tiny"


def test_grpcurl_is_told_which_plane_it_asks(simulated_planes: Planes) -> None:
    for address, method, served in (
        (simulated_planes.worker_address, f"{INFERENCE}/ListModels", RUNNER),
        (simulated_planes.address, f"{RUNNER}/GetWorkerInfo", INFERENCE),
    ):
        protos = ["-import-path", str(ROOT / "protos")]
        folder = "inference/v1/inference" if served == RUNNER else "worker/v1/model_runner"
        with pytest.raises(subprocess.CalledProcessError) as caught:
            grpcurl(address, method, protos=[*protos, "-proto", f"twinplane/{folder}.proto"])
        assert "Unimplemented" in caught.value.stderr
        assert f"it serves {served}" in caught.value.stderr


def test_grpcurl_sees_which_field_is_wrong(simulated_planes: Planes) -> None:
    wrong = {**GREEDY, "sampling": {"top_p": 1.5}}
    with pytest.raises(subprocess.CalledProcessError) as caught:
        grpcurl(simulated_planes.address, f"{INFERENCE}/Generate", request=wrong)
    assert "InvalidArgument" in caught.value.stderr
    assert "sampling.top_p" in caught.value.stderr


# --- Node ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def node() -> str:
    """Node, with grpc-js installed as the lock file says."""
    program, npm = shutil.which("node"), shutil.which("npm")
    if program is None or npm is None:
        pytest.skip("Node and npm are not on this machine")
    installed = NODE / "node_modules" / ".package-lock.json"
    lock = NODE / "package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        subprocess.run(
            [npm, "ci", "--no-progress"], cwd=NODE, check=True, capture_output=True, timeout=240
        )
    return program


def run_node(
    node: str, address: str, method: str, request: object, *more: str
) -> list[dict[str, Any]]:
    done = subprocess.run(
        [node, NODE / "client.mjs", address, method, json.dumps(request), *more],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_node_generates_what_grpcurl_does(node: str, simulated_planes: Planes) -> None:
    request = {**GREEDY, "sampling": {"seed": "18446744073709551615"}}
    first, *deltas, last = run_node(node, simulated_planes.address, "generate", request)
    assert first["started"]["seed"] == "18446744073709551615"
    tokens = [token for each in deltas for token in each["delta"]["token_ids"]]
    assert last["finished"]["reason"] == "FINISH_REASON_LENGTH"
    by_grpcurl = json_documents(
        grpcurl(simulated_planes.address, f"{INFERENCE}/Generate", request=request)
    )
    assert tokens == [
        token for each in by_grpcurl[1:-1] for token in each["delta"].get("token_ids", ())
    ]
    assert len(tokens) == 5


def test_node_completes_in_one_answer(node: str, simulated_planes: Planes) -> None:
    (whole,) = run_node(node, simulated_planes.address, "complete", GREEDY)
    streamed = run_node(node, simulated_planes.address, "generate", GREEDY)
    assert whole["text"] == "".join(each["delta"]["text"] for each in streamed[1:-1])
    assert whole["reason"] == "FINISH_REASON_LENGTH"
    assert "matched" not in whole


def test_node_leaves_a_generation(node: str, simulated_planes: Planes) -> None:
    endless = {"text": "Hello", "stop": {"ignore_end_of_sequence": True}}
    answers = run_node(node, simulated_planes.address, "cancel", endless)
    assert answers[-1]["error"]["code"] == "CANCELLED"
    assert not any("finished" in answer for answer in answers)


def test_node_tokenizes_and_back(node: str, simulated_planes: Planes) -> None:
    text = "naïve 🙂 日本"
    (tokens,) = run_node(node, simulated_planes.address, "tokenize", {"text": text})
    request = {"token_ids": tokens["token_ids"]}
    assert run_node(node, simulated_planes.address, "detokenize", request) == [{"text": text}]


def test_node_gets_the_status_of_what_is_refused(node: str, simulated_planes: Planes) -> None:
    (answer,) = run_node(
        node, simulated_planes.address, "generate", {"text": "x", "model": "absent"}
    )
    assert answer["error"]["code"] == "NOT_FOUND"
    (answer,) = run_node(node, simulated_planes.address, "generate", {"stop": {"max_tokens": 1}})
    assert answer["error"]["code"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("method", ["generate", "complete"])
def test_node_waits_as_it_is_asked(
    node: str, tiny_model: Path, tmp_path: Path, method: str
) -> None:
    """Its own backoff would take minutes; the call has one, and the server asks for a second."""
    policy = {
        "maxAttempts": 3, "initialBackoff": "600s", "maxBackoff": "600s", "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }  # fmt: skip
    config = {"methodConfig": [{"name": [{"service": INFERENCE}], "retryPolicy": policy}]}
    address = f"127.0.0.1:{free_port()}"
    log = tmp_path / "control.log"
    plane = Plane(
        ["control", "--model", str(tiny_model), "--worker", f"unix:{tmp_path}/none.sock",
         "--port", address.rpartition(":")[2], "--metrics-port", str(free_port())],
        log,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + START_SECONDS
        while not is_serving(address, "liveness"):
            assert time.monotonic() < deadline, plane.log_end()
            time.sleep(0.05)
        (answer,) = run_node(node, address, method, GREEDY, json.dumps(config))
    finally:
        plane.stop()
    assert answer["error"]["code"] == "UNAVAILABLE"
    assert "no worker has come" in answer["error"]["message"]
    assert log.read_text().count('"NO_WORKER"') == policy["maxAttempts"]
