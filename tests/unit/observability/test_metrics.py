"""Metrics as Prometheus reads them, and the endpoint that serves them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from control_plane.core.account import Account
from control_plane.core.config import SchedulerConfig
from control_plane.core.events import FinishReason, Usage
from control_plane.core.plan import WeightVersion
from control_plane.core.request import (
    Request,
    RequestId,
    SamplingParams,
    SequenceId,
    StopConditions,
)
from control_plane.core.scheduler import Scheduler
from control_plane.observability.metrics import ReplicaTelemetry, Telemetry
from control_plane.rpc.errors import CODES, REASONS
from control_plane.rpc.server import INFERENCE_METHODS
from twinplane.metrics.families import REQUEST_SECONDS, STEP_SECONDS, TOKEN_COUNTS, Histogram
from twinplane.metrics.server import CannotServeMetrics, MetricsServer

REPLICA = (("replica", "0"),)


def samples(telemetry: Telemetry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels) to value of everything that is exposed, by Prometheus' own parser."""
    families = text_string_to_metric_families(telemetry.render().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_histogram_counts_inclusive_buckets() -> None:
    histogram = Histogram((0.1, 1.0))
    histogram.observe(0.1)
    histogram.observe(0.5, 3)
    histogram.observe(7.0)
    assert histogram.cumulative() == [("0.1", 1.0), ("1.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == pytest.approx(8.6)


def test_without_a_core_there_is_still_something_to_see() -> None:
    found = samples(Telemetry("1.2.3"))
    assert found["twinplane_build_info", (("version", "1.2.3"),)] == 1.0
    assert not any(name == "twinplane_worker_up" for name, _ in found)
    telemetry = Telemetry("1.2.3")
    telemetry.replica(0, lambda: None)
    found = samples(telemetry)
    assert found["twinplane_worker_up", REPLICA] == 0.0
    assert found["twinplane_requests_running", REPLICA] == 0.0
    no_worker = (("device", ""), ("model", ""), *REPLICA, ("worker_id", ""))
    assert found["twinplane_worker_info", no_worker] == 0.0
    for state in ("active", "cached", "free"):
        assert found["twinplane_kv_tokens", (*REPLICA, ("state", state))] == 0.0


def test_every_rpc_and_every_way_it_ends_is_there_before_the_first() -> None:
    telemetry = Telemetry("0", methods=INFERENCE_METHODS, codes=CODES, reasons=REASONS)
    found = samples(telemetry)
    for reason in REASONS:
        assert found["twinplane_rpc_errors_total", (("reason", reason),)] == 0.0
    for method in INFERENCE_METHODS:
        for code in CODES:
            assert found["twinplane_rpcs_total", (("code", code), ("method", method))] == 0.0
    assert {method.rpartition("/")[2] for method in INFERENCE_METHODS} == {
        "Generate", "Complete", "Tokenize", "Detokenize", "ListModels",
    }  # fmt: skip


def test_the_cores_counts_are_exposed() -> None:
    telemetry = Telemetry("0")
    config = SchedulerConfig(2, 64, 64, 9, 8)
    core = Scheduler(config, 1, WeightVersion(1, "a" * 64))
    telemetry.replica(0, core.stats)
    for name in "abc":
        core.add(
            SequenceId(ord(name)),
            Request(RequestId(name), tuple(range(20)), SamplingParams(), 0, StopConditions(5), 0.0),
        )
    core.schedule(0.0)
    found = samples(telemetry)
    assert found["twinplane_requests_running", REPLICA] == 2.0
    assert found["twinplane_requests_waiting", REPLICA] == 1.0
    assert found["twinplane_requests_submitted_total", REPLICA] == 3.0
    kv_states = [
        found["twinplane_kv_tokens", (*REPLICA, ("state", s))] for s in ("active", "cached", "free")
    ]
    assert kv_states == [48.0, 0.0, 16.0]
    assert found["twinplane_tokens_total", (("kind", "prompt_computed"), *REPLICA)] == 40.0
    assert found["twinplane_requests_finished_total", (("reason", "stop"), *REPLICA)] == 0.0


def attach(replica: ReplicaTelemetry, *, resumed: bool = False, kv_kept: bool = False) -> None:
    replica.worker_attached(
        worker_id="w", model="m", device="cpu", resumed=resumed, kv_kept=kv_kept
    )


def test_events_become_counts() -> None:
    telemetry = Telemetry("0")
    replica = telemetry.replica(0, lambda: None)
    attach(replica)
    assert samples(telemetry)["twinplane_worker_up", REPLICA] == 1.0
    replica.worker_lost("silent")
    replica.worker_lost("silent")
    attach(replica, resumed=True)
    replica.step_finished(0.02, 0.0002)
    telemetry.first_token(0.3)
    telemetry.token_gap(0.04, 5)
    telemetry.rpc_finished("Generate", "OK", "", 0.5)
    telemetry.rpc_finished("Generate", "OK", "", 7.0)
    found = samples(telemetry)
    assert found["twinplane_worker_losses_total", (("cause", "silent"), *REPLICA)] == 1.0
    assert found["twinplane_step_duration_seconds_count", REPLICA] == 1.0
    assert found["twinplane_step_duration_seconds_sum", REPLICA] == pytest.approx(0.02)
    assert found["twinplane_step_control_seconds_sum", REPLICA] == pytest.approx(0.0002)
    assert found["twinplane_inter_token_latency_seconds_count", ()] == 5.0
    assert found["twinplane_inter_token_latency_seconds_sum", ()] == pytest.approx(0.2)
    assert found["twinplane_time_to_first_token_seconds_bucket", (("le", "0.5"),)] == 1.0
    assert found["twinplane_time_to_first_token_seconds_bucket", (("le", "0.25"),)] == 0.0
    assert found["twinplane_rpcs_total", (("code", "OK"), ("method", "Generate"))] == 2.0


def test_what_a_request_has_cost_is_counted_at_its_end() -> None:
    telemetry = Telemetry("0")
    for reason in FinishReason:
        usage = Usage(prompt_tokens=100, cached_prompt_tokens=64, completion_tokens=3)
        telemetry.sequence_ended(Account(reason, usage, 0.02, 0.3, 40.0))
    found = samples(telemetry)
    count = len(FinishReason)
    assert found["twinplane_request_queue_seconds_count", ()] == count
    assert found["twinplane_request_queue_seconds_sum", ()] == pytest.approx(count * 0.02)
    assert found["twinplane_request_prompt_tokens_sum", ()] == count * 100
    assert found["twinplane_request_output_tokens_bucket", (("le", "4.0"),)] == count
    assert found["twinplane_request_output_tokens_bucket", (("le", "2.0"),)] == 0
    assert found["twinplane_request_duration_seconds_count", ()] == 2, "whole answers only"


def test_an_rpcs_error_is_counted_by_its_reason() -> None:
    telemetry = Telemetry("0", methods=["Generate"], reasons=["QUEUE_FULL"])
    telemetry.rpc_finished("Generate", "RESOURCE_EXHAUSTED", "QUEUE_FULL", 0.001)
    telemetry.rpc_finished("Generate", "CANCELLED", "", 3.0)
    found = samples(telemetry)
    assert found["twinplane_rpc_errors_total", (("reason", "QUEUE_FULL"),)] == 1.0
    method = ("method", "Generate")
    assert found["twinplane_rpc_duration_seconds_count", (method,)] == 2.0
    assert found["twinplane_rpc_duration_seconds_bucket", (("le", "0.001"), method)] == 1.0


@pytest.mark.parametrize(
    ("bounds", "least", "most"),
    [(STEP_SECONDS, 0.0005, 60.0), (REQUEST_SECONDS, 0.001, 1800.0), (TOKEN_COUNTS, 1, 131072)],
)
def test_buckets_ascend_and_fit_fast_and_slow(
    bounds: tuple[float, ...], least: float, most: float
) -> None:
    assert list(bounds) == sorted(set(bounds))
    assert bounds[0] <= least and bounds[-1] >= most


def test_resyncs_are_counted_by_what_became_of_the_kv() -> None:
    telemetry = Telemetry("0")
    replica = telemetry.replica(0, lambda: None)
    attach(replica)
    attach(replica, resumed=True, kv_kept=True)
    attach(replica, resumed=True, kv_kept=True)
    attach(replica, resumed=True)
    found = samples(telemetry)
    assert found["twinplane_worker_resyncs_total", (("kv", "kept"), *REPLICA)] == 2.0
    assert found["twinplane_worker_resyncs_total", (("kv", "discarded"), *REPLICA)] == 1.0


def test_replicas_are_told_apart() -> None:
    telemetry = Telemetry("0")
    first, second = (telemetry.replica(number, lambda: None) for number in (0, 1))
    attach(first)
    second.step_finished(0.02, 0.0002)
    found = samples(telemetry)
    other = (("replica", "1"),)
    assert [found["twinplane_worker_up", labels] for labels in (REPLICA, other)] == [1.0, 0.0]
    counts = [found["twinplane_step_duration_seconds_count", one] for one in (REPLICA, other)]
    assert counts == [0.0, 1.0]


def test_two_of_them_do_not_mix() -> None:
    first, second = Telemetry("1"), Telemetry("2")
    first.rpc_finished("Generate", "OK", "", 0.1)
    assert b"Generate" not in second.render()


@asynccontextmanager
async def serving(telemetry: Telemetry, *, ready: bool = True) -> AsyncIterator[int]:
    server = MetricsServer(telemetry.render, lambda: ready)
    port = await server.start("127.0.0.1", 0)
    try:
        yield port
    finally:
        await server.close()


async def ask(port: int, message: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(message)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text; version=1.0.0"])
async def test_metrics_are_always_text_0_0_4(accept: str) -> None:
    async with serving(Telemetry("0")) as port:
        request = f"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\n\r\n"
        head, body = await ask(port, request.encode())
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8" in head
    assert b"# TYPE twinplane_worker_up gauge" in body
    assert f"Content-Length: {len(body)}".encode() in head


@pytest.mark.parametrize("path", [b"/healthz", b"/readyz"])
@pytest.mark.parametrize(("ready", "status"), [(True, b"200"), (False, b"503")])
async def test_readyz_follows_readiness(path: bytes, ready: bool, status: bytes) -> None:
    async with serving(Telemetry("0"), ready=ready) as port:
        head, _ = await ask(port, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert head.split(b" ")[1] == status


@pytest.mark.parametrize("ready", [True, False])
async def test_livez_does_not_care_for_readiness(ready: bool) -> None:
    async with serving(Telemetry("0"), ready=ready) as port:
        head, _ = await ask(port, b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    assert head.split(b" ")[1] == b"200"


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (b"GET /other HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\x16\x03\x01nonsense\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 10_000 + b"\r\n\r\n", b"431"),
    ],
)
async def test_odd_requests_get_an_answer(message: bytes, status: bytes) -> None:
    async with serving(Telemetry("0")) as port:
        head, _ = await ask(port, message)
    assert head.split(b" ")[1] == status


async def test_head_has_no_body() -> None:
    async with serving(Telemetry("0")) as port:
        head, body = await ask(port, b"HEAD /metrics HTTP/1.1\r\n\r\n")
    assert b"Content-Length: " in head
    assert body == b""


async def test_close_ends_connections_that_say_nothing() -> None:
    async with serving(Telemetry("0")) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0.05)
    assert await reader.read() == b""
    writer.close()


async def test_a_taken_port_is_an_error() -> None:
    async with serving(Telemetry("0")) as port:
        with pytest.raises(CannotServeMetrics, match="in use"):
            await MetricsServer(Telemetry("0").render, lambda: True).start("127.0.0.1", port)
