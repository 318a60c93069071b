"""Real processes: a worker that is restarted smaller, and one that a rival claims for ever."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from tests.support.planes import Plane, free_port
from twinplane import Client, GenerationResult, InvalidRequest, TwinplaneError, Unavailable
from twinplane.bounds import MAX_EPOCH
from twinplane.worker.v1 import info_pb2, model_runner_pb2, model_runner_pb2_grpc

pytestmark = pytest.mark.slow

SECONDS = 60.0
LONG, SHORT = [7] * 100, [7] * 10


class Asked:
    """A generation in a thread of its own, and what came of it."""

    def __init__(self, address: str, prompt: list[int], max_tokens: int) -> None:
        self.result: GenerationResult | None = None
        self.error: TwinplaneError | None = None
        self.token_count = 0
        self._thread = threading.Thread(
            target=self._run, args=(address, prompt, max_tokens), daemon=True
        )
        self._thread.start()

    def _run(self, address: str, prompt: list[int], max_tokens: int) -> None:
        with Client(address) as client:
            try:
                generation = client.generate(prompt, max_tokens=max_tokens, ignore_eos=True)
                for delta in generation:
                    self.token_count += len(delta.token_ids)
                self.result = generation.result()
            except TwinplaneError as error:
                self.error = error

    def settled(self) -> None:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "neither answered nor refused"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class Pair:
    """A control plane, and a worker that may come back with other flags."""

    def __init__(self, folder: Path, model: Path, sockets: Path) -> None:
        self._folder, self._model = folder, model
        self.uds = sockets / "worker.sock"
        self.address = f"127.0.0.1:{free_port()}"
        self._planes: list[Plane] = []
        self.control = self._start(
            "control", "--worker", f"unix:{self.uds}", "--port", self.address.partition(":")[2],
            "--metrics-port", "none", "--worker-loss-patience", "30",
        )  # fmt: skip

    def _start(self, plane: str, *flags: str) -> Plane:
        log = self._folder / f"{plane}-{len(self._planes)}.log"
        made = Plane([plane, "--model", str(self._model), *flags], log)
        self._planes.append(made)
        return made

    def worker(self, *flags: str) -> Plane:
        made = self._start(
            "worker", "--uds", str(self.uds), "--simulate", "--simulate-step-ms", "20", *flags
        )
        made.wait_until_serving(f"unix:{self.uds}")
        self.control.wait_until_serving(self.address)
        return made

    def stop(self) -> None:
        for plane in reversed(self._planes):
            plane.stop()


@contextmanager
def pair(folder: Path, model: Path) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="twinplane-") as sockets:
        made = Pair(folder, model, Path(sockets))
        try:
            yield made
        finally:
            made.stop()


def test_a_shorter_worker_ends_what_no_longer_fits_and_runs_the_rest(
    tiny_model: Path, tmp_path: Path
) -> None:
    with pair(tmp_path, tiny_model) as planes:
        first = planes.worker("--max-model-len", "512", "--max-num-seqs", "1")
        begun = Asked(planes.address, SHORT, 400)
        until(lambda: begun.token_count >= 80)
        too_long, fits = Asked(planes.address, LONG, 20), Asked(planes.address, SHORT, 20)
        time.sleep(0.5)  # they shall wait; should one come later, it is refused all the same
        first.process.kill()
        first.process.wait()
        planes.worker("--max-model-len", "64", "--max-num-seqs", "1")
        for asked in (begun, too_long, fits):
            asked.settled()
        assert isinstance(begun.error, Unavailable) and begun.error.reason == "NO_WORKER"
        assert isinstance(too_long.error, InvalidRequest), "OK with no token at all"
        assert too_long.token_count == 0
        assert fits.result is not None and len(fits.result.token_ids) == 20
        with Client(planes.address) as client:
            assert (
                len(client.generate(SHORT, max_tokens=5, ignore_eos=True).result().token_ids) == 5
            )


def test_the_control_plane_outlives_a_claim_of_the_last_epoch(
    tiny_model: Path, tmp_path: Path
) -> None:
    with pair(tmp_path, tiny_model) as planes:
        first = planes.worker()
        with grpc.insecure_channel(f"unix:{planes.uds}") as channel:
            stub = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
            versions = info_pb2.ContractVersionRange(minimum=1, maximum=1)
            for epoch, code in ((2**64 - 1, "INVALID_ARGUMENT"), (MAX_EPOCH, None)):
                request = model_runner_pb2.AttachRequest(
                    epoch=epoch, controller_id="rival", contract_versions=versions
                )
                if code is None:
                    stub.Attach(request)
                    continue
                with pytest.raises(grpc.RpcError) as refused:
                    stub.Attach(request)
                assert refused.value.code().name == code
        asked = Asked(planes.address, SHORT, 5)
        first.stop()
        planes.worker()
        asked.settled()
        assert asked.result is not None and len(asked.result.token_ids) == 5
        assert planes.control.process.poll() is None
        assert "Traceback" not in planes.control.log.read_text()
