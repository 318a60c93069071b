"""A refusal says which step it refuses, and which rows are to blame."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.worker_rig import (
    PROMPT,
    SAMPLE,
    Device,
    added,
    execute,
    first,
    following,
    forward,
    refusal,
    serving,
    wanted,
)
from tests.unit.worker_facade.test_worker_plans import DRIFTED, INVALID, Change
from twinplane.worker.v1 import model_runner_pb2
from worker_service.domain.errors import PlanMismatch
from worker_service.rpc.errors import status_of

NOBODY = {
    "no weight version",
    "removed row over int32",
    "scheduled row over int32",
    "start position over int32",
    "token count over int32",
    "literal token over int32",
    "more tokens than a step takes",
}
"""What no row is to blame for, or what is not worth finding out: no controller of ours sends it."""


@pytest.mark.parametrize(("name", "change"), [(n, c) for n, (_, c) in INVALID.items()])
async def test_an_invalid_plan_names_step_and_row(name: str, change: Change) -> None:
    async with serving() as rig:
        await rig.attach()
        await rig.stub.Forward(first())
        request = following(2)
        change(request.plan)
        refused = await refusal(rig.stub.Forward(request))
    plan = request.plan
    assert refused.metadata.get("step_id", "0") == str(plan.step_id)
    rows = [int(row) for row in refused.metadata.get("rows", "").split(",") if row]
    known = {*(sequence.row for sequence in plan.added), *plan.scheduled.rows, *plan.removed_rows}
    assert set(rows) <= known
    shape = {"long", "short", "omitted", "missing", "uncounted", "without", "zero", "other"}
    if name not in NOBODY and not shape & set(name.split()):
        assert rows, "nobody was named"
    if refused.field.startswith("plan.added[0]"):
        assert rows == [plan.added[0].row]


@pytest.mark.parametrize("change", DRIFTED.values(), ids=DRIFTED)
async def test_a_drifted_plan_names_step_and_row(change: Change) -> None:
    async with serving() as rig:
        await rig.attach()
        await rig.stub.Forward(first())
        request = following(2)
        change(request.plan)
        refused = await refusal(rig.stub.Forward(request))
        assert refused.metadata["step_id"] == "2"
        assert refused.metadata["rows"] in ("0", "1")


WRONG_ROWS: dict[str, dict[str, Any]] = {
    "start_positions": {"start_positions": [6, 0, 9]},
    "literal_tokens": {"literal_tokens": [3, 3, 5, 101, 7], "literal_token_counts": [1, 3, 1]},
    "appended_blocks": {"appended_blocks": [20, 21, 0], "appended_block_counts": [0, 2, 1]},
    "token_counts": {"token_counts": [1, 3, 0]},
}


@pytest.mark.parametrize("column", WRONG_ROWS)
async def test_only_the_rows_that_are_wrong_are_named(column: str) -> None:
    """Three rows, of which one is wrong, deep in a column that is flat or parallel."""
    columns: dict[str, Any] = {
        "rows": [0, 3, 5],
        "start_positions": [len(PROMPT), 0, 0],
        "token_counts": [1, 3, 1],
        "source_step_distances": [0 if "literal" in column else 1, 0, 0],
    }
    columns |= WRONG_ROWS[column]
    add = [added(3, [1, 2, 3], [20]), added(5, [4], [24])]
    async with serving() as rig:
        await rig.attach()
        await rig.stub.Forward(first())
        refused = await refusal(rig.stub.Forward(forward(2, add=add, **columns)))
        assert refused.metadata["rows"] == ("3" if column == "literal_tokens" else "5")


async def test_a_failed_step_is_named_and_a_held_row_is() -> None:
    async with serving(Device(failing=[2])) as rig:
        await rig.attach()
        await rig.stub.Forward(first(output=SAMPLE))
        sample = model_runner_pb2.SampleRequest(epoch=1, step_id=1, rows=[0, 4])
        refused = await refusal(rig.stub.Sample(sample))
        assert refused.metadata == {"step_id": "1", "rows": "0,4"}
        refused = await refusal(rig.stub.Forward(following(2)))
        assert refused.metadata == {"step_id": "2"}


async def test_the_stream_ends_with_what_was_refused_first() -> None:
    async with serving() as rig:
        await rig.attach()
        bad = forward(2, add=[added(1, [101], [20])])
        call = rig.stub.Execute()
        for message in (first(), bad, following(3)):
            await call.write(execute(message))
        assert list((await call.read()).forward.result.tokens) == wanted(1)
        refused = await refusal(call.read())
        assert refused.metadata == {"step_id": "2", "rows": "1"}


def test_the_names_of_many_rows_fit_a_status() -> None:
    status = status_of(PlanMismatch("all have drifted", range(4096)))
    assert status is not None
    named = status.metadata["rows"].split(",")
    assert named == [str(row) for row in range(256)]
    assert status.to_pb().ByteSize() < 4096
