"""Workers on their way from the engine through ListModels to the client: every value survives."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

import twinplane
from control_plane.core.fleet import MemberState
from control_plane.rpc.convert import serving_worker_to_pb
from control_plane.shell import workers
from control_plane.shell.workers import ServingWorker, WorkerState
from tests.support.edge_rig import Edge
from twinplane.client.responses import serving_workers
from twinplane.inference.v1 import inference_pb2 as pb

KV = st.integers(0, 2**64 - 1)
COUNT = st.integers(0, 2**32 - 1)
NAME = st.text(max_size=30)
SECONDS = st.floats(0, 1e9)


WORKERS = st.builds(
    ServingWorker,
    *(st.sampled_from(WorkerState), NAME, NAME, SECONDS, KV, KV, COUNT, COUNT, COUNT),
    *(COUNT, NAME, st.sampled_from(MemberState), NAME),
)


@given(WORKERS)
def test_a_worker_means_the_same_to_a_client(sent: ServingWorker) -> None:
    message = pb.ListModelsResponse(workers=[serving_worker_to_pb(sent)])
    [got] = serving_workers(pb.ListModelsResponse.FromString(message.SerializeToString()))
    expected = asdict(sent) | {"state": sent.state.value, "away_seconds": got.away_seconds}
    expected["replica_state"] = sent.replica_state.value
    states = {"state": got.state.value, "replica_state": got.replica_state.value}
    assert asdict(got) | states == expected
    if sent.state is WorkerState.AWAY:
        assert got.away_seconds == pytest.approx(sent.away_seconds, abs=1e-6)
    else:
        assert got.away_seconds is None


def test_both_sides_know_the_contract_s_states_and_fields() -> None:
    wire = {name.removeprefix("WORKER_STATE_") for name, _ in pb.WorkerState.items()}
    assert {state.name for state in workers.WorkerState} == wire - {"UNSPECIFIED"}
    assert {state.name for state in twinplane.WorkerState} == (wire - {"UNSPECIFIED"}) | {"UNKNOWN"}
    wire = {name.removeprefix("REPLICA_STATE_") for name, _ in pb.ReplicaState.items()}
    assert {state.name for state in MemberState} == wire - {"UNSPECIFIED"}
    known = {state.name for state in twinplane.ReplicaState}
    assert known == (wire - {"UNSPECIFIED"}) | {"UNKNOWN"}
    names = {field.name.replace("away_seconds", "away") for field in fields(ServingWorker)}
    assert names == set(pb.ServingWorker.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("state", [0, 4, 99])
@pytest.mark.parametrize("seconds", [-(2**63), 0, 2**63 - 1])
def test_what_a_client_is_too_old_for_or_no_server_sends(state: int, seconds: int) -> None:
    message = pb.ServingWorker(state=state)  # type: ignore[arg-type]
    message.away.seconds = seconds
    [worker] = serving_workers(pb.ListModelsResponse(workers=[message]))
    assert worker.state is twinplane.WorkerState.UNKNOWN
    assert worker.away_seconds == float(seconds)


async def test_they_are_told_without_a_model(edge: Edge) -> None:
    edge.engine.model = None
    edge.workers[:] = [
        ServingWorker(WorkerState.AWAITED),
        ServingWorker(WorkerState.AWAY, "w1", "cpu", 12.5),
    ]
    answer = await edge.stub.ListModels(pb.ListModelsRequest())
    assert not answer.models
    first, second = answer.workers
    assert first == pb.ServingWorker(
        state=pb.WORKER_STATE_AWAITED, replica_state=pb.REPLICA_STATE_JOINING
    )
    assert second.away.ToMilliseconds() == 12_500
    assert not first.HasField("away")
