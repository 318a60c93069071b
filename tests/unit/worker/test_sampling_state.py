"""Sampling's own rows: ranges, what is gathered, and that no field of the proto is forgotten."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from tests.support.runner_rig import column
from twinplane.common.v1 import types_pb2
from worker_service.domain.errors import PlanInvalid
from worker_service.domain.plan import (
    AddedSequence,
    OutputKind,
    ScheduledRows,
    StepPlan,
    WeightVersion,
)
from worker_service.domain.sampling import SamplingColumns, SamplingParameters
from worker_service.sampling.state import SamplingState


def added(row: int, **parameters: Any) -> AddedSequence:
    sampling = SamplingParameters(**parameters)
    return AddedSequence(row, column([1]), 1, sampling, OutputKind.SAMPLE, column([1]), 0)


def plan(*sequences: AddedSequence) -> StepPlan:
    return StepPlan(1, 1, WeightVersion(1, ""), column([]), sequences, ScheduledRows(), bytes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", 100.5),
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", 1.5),
        ("min_p", math.inf),
    ],
)
def test_a_parameter_out_of_its_range_is_refused_by_name(name: str, value: float) -> None:
    state = SamplingState(4)
    with pytest.raises(PlanInvalid) as raised:
        state.check(plan(added(0), added(2, **{name: value})))
    assert raised.value.field_path == f"plan.added[1].sampling.{name}"


def test_the_ends_of_the_ranges_are_allowed() -> None:
    whole: dict[str, Any] = {"temperature": 100.0, "top_k": 2**31 - 1, "top_p": 1.0, "min_p": 1.0}
    SamplingState(4).check(plan(added(0, **whole, seed=2**64 - 1), added(1, temperature=0.0)))


def test_any_number_of_a_rows_tokens_is_gathered() -> None:
    state = SamplingState(4)
    state.add(added(1, temperature=0.5, top_k=2**31 - 1, seed=2**64 - 1))
    state.add(added(3, temperature=2.0))
    batch = state.gather(column([3, 1, 1]), column([7, 4, 5]))
    assert batch.parameters.temperature.tolist() == [2.0, 0.5, 0.5]
    assert batch.parameters.top_k.tolist() == [0, 2**31 - 1, 2**31 - 1]
    assert batch.parameters.seed.tolist() == [0, 2**64 - 1, 2**64 - 1]
    assert batch.positions.tolist() == [7, 4, 5]
    state.add(added(1))
    assert state.gather(column([1]), column([0])).parameters.top_k.tolist() == [0]


def test_every_field_of_the_proto_is_a_parameter_and_a_column() -> None:
    names = [field.name for field in types_pb2.SamplingParameters.DESCRIPTOR.fields]
    assert names == [field.name for field in fields(SamplingParameters)]
    assert names == [field.name for field in fields(SamplingColumns)]
    columns = SamplingColumns.empty(2)
    assert all(getattr(columns, name).shape == (2,) for name in names)
    assert isinstance(columns.temperature, np.ndarray)
