"""One table of bounds: what the client edge accepts no worker refuses, number by number."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.rpc import convert as control_convert
from control_plane.rpc import validation
from control_plane.rpc.errors import InvalidRequest
from control_plane.rpc.validation import GenerateCall, check_generate
from tests.support.edge_rig import MODEL, generate_request
from tests.support.quick import examples
from tests.support.worker_rig import added, simulated_runner
from twinplane import bounds
from twinplane.bounds import SAMPLING_RANGES
from twinplane.common.v1 import types_pb2
from twinplane.worker.v1 import model_runner_pb2
from worker_service.domain.errors import PlanInvalid
from worker_service.rpc import convert as worker_convert
from worker_service.sampling import state as worker_state

INTEGERS = [0, 1, 2, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 2**53 + 1, 2**63 - 1,
            2**63, 2**64 - 2, 2**64 - 1]  # fmt: skip
LEAST_FLOAT32 = struct.unpack("<f", b"\x01\0\0\0")[0]
FLOATS = [
    *(sign * value
      for sign in (1.0, -1.0)
      for value in (0.0, 1e-300, LEAST_FLOAT32, 1e-39, 1.1754944e-38, 1e-30, 0.5, 1 - 2**-24,
                    1.0, 1.0000001, 99.99999, 100.0, 100.00001, 3.4028235e38, math.inf)),
    math.nan,
]  # fmt: skip
EXTREMES = {"top_k": INTEGERS[:9], "seed": INTEGERS} | dict.fromkeys(
    ("temperature", "top_p", "min_p"), FLOATS
)
CASES = [(name, value) for name, values in EXTREMES.items() for value in values]


def at_the_edge(**sampling: Any) -> GenerateCall | None:
    """What the client edge makes of a request; None: it refuses it, and names the fields."""
    message = types_pb2.SamplingParameters.FromString(
        types_pb2.SamplingParameters(**sampling).SerializeToString()
    )
    try:
        return check_generate(generate_request(sampling=message), MODEL)
    except InvalidRequest as refused:
        assert {v.field for v in refused.violations} <= {f"sampling.{name}" for name in sampling}
        return None


def at_the_worker(message: types_pb2.SamplingParameters) -> bool:
    """Whether a worker takes a plan with these parameters."""
    runner = simulated_runner()
    request = model_runner_pb2.ForwardRequest()
    request.plan.epoch = request.plan.step_id = 1
    version = runner.capability().weight_version
    request.plan.weight_version.generation = version.generation
    request.plan.weight_version.digest = version.digest
    sequence = added(0, [1, 2, 3], [1])
    sequence.sampling.CopyFrom(message)
    request.plan.added.add().CopyFrom(sequence)
    try:
        runner.launch(worker_convert.forward_from_pb(request))
    except PlanInvalid as refused:
        assert refused.field_path.startswith("plan.added[0].sampling.")
        return False
    return True


def towards_a_worker(call: GenerateCall) -> types_pb2.SamplingParameters:
    return control_convert.sampling_to_pb(call.sampling, 7 if call.seed is None else call.seed)


def test_the_table_has_every_field_and_both_planes_read_it() -> None:
    names = set(types_pb2.SamplingParameters.DESCRIPTOR.fields_by_name)
    assert SAMPLING_RANGES.keys() == names
    assert validation.SAMPLING_RANGES is worker_state.SAMPLING_RANGES is bounds.SAMPLING_RANGES
    assert CASES and EXTREMES.keys() == SAMPLING_RANGES.keys()


@pytest.mark.parametrize(("name", "value"), CASES)
def test_the_planes_agree_at_the_extremes(name: str, value: float) -> None:
    call = at_the_edge(**{name: value})
    if call is not None:
        sent = towards_a_worker(call)
        assert at_the_worker(sent)
        arrived = getattr(sent, name)
        assert arrived == getattr(types_pb2.SamplingParameters(**{name: value}), name)
    raw = types_pb2.SamplingParameters(**{"seed": 7, name: value})
    assert at_the_worker(raw) is (call is not None), "one plane takes what the other refuses"


@settings(max_examples=examples(150), deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(width=32),
            "top_p": st.floats(width=32),
            "min_p": st.floats(width=32),
            "top_k": st.integers(0, 2**31 - 1),
            "seed": st.integers(0, 2**64 - 1),
        },
    )
)
def test_the_planes_agree_everywhere(sampling: dict[str, float]) -> None:
    call = at_the_edge(**sampling)
    raw = types_pb2.SamplingParameters(**({"seed": 7} | sampling))
    assert at_the_worker(raw) is (call is not None)
    if call is not None:
        assert at_the_worker(towards_a_worker(call))
