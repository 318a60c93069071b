"""What past releases sent still parses, and still means the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import symbol_database

from tests.contract.make_wire_samples import DATA, PLAN, RESULT, SAMPLES, meaning
from twinplane.worker.v1 import model_runner_pb2
from worker_service.domain.plan import OutputKind
from worker_service.domain.sampling import SamplingParameters
from worker_service.rpc import convert

FILES = sorted(DATA.glob("*/*.binpb"))


def parse(path: Path):
    stored = json.loads(path.with_suffix(".json").read_text())
    message_type = symbol_database.Default().GetSymbol(stored["type"])
    return message_type.FromString(path.read_bytes()), stored["value"]


def test_every_kind_of_message_is_stored() -> None:
    assert {path.stem for path in FILES} == set(SAMPLES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_stored_bytes_parse_and_mean_the_same(path: Path) -> None:
    message, value = parse(path)
    assert meaning(message) == value
    size = message.ByteSize()
    message.DiscardUnknownFields()
    assert message.ByteSize() == size, "a field of a past release is unknown now"


@pytest.mark.parametrize("path", [p for p in FILES if p.stem == "forward_request"], ids=str)
def test_a_stored_plan_is_the_same_plan_to_the_worker(path: Path) -> None:
    message, _ = parse(path)
    plan = convert.forward_from_pb(message)
    assert (plan.epoch, plan.step_id) == (3, 300)
    assert (plan.weight_version.generation, plan.weight_version.digest) == (1, "ab" * 32)
    assert plan.removed_rows.tolist() == [4, 7]
    (sequence,) = plan.added
    assert (sequence.row, sequence.computed_token_count) == (4, 2)
    assert (sequence.prompt_token_count, sequence.output) == (2, OutputKind.HOLD)
    assert sequence.token_ids.tolist() == [1, 49_151, 128]
    assert sequence.block_ids.tolist() == [9, 300]
    assert sequence.sampling == SamplingParameters(0.5, 40, 0.75, 0.25, 2**64 - 1)
    scheduled = plan.scheduled
    assert scheduled.rows.tolist() == [4, 0, 2]
    assert scheduled.start_positions.tolist() == [2, 1000, 16]
    assert scheduled.token_counts.tolist() == [1, 1, 2]
    assert scheduled.source_step_distances.tolist() == [0, 1, 0]
    assert scheduled.literal_token_counts.tolist() == [0, 0, 1]
    assert scheduled.literal_tokens.tolist() == [5]
    assert scheduled.appended_block_counts.tolist() == [0, 1, 2]
    assert scheduled.appended_blocks.tolist() == [11, 12, 13]
    assert scheduled.draft_counts.tolist() == [0, 0, 1]
    assert scheduled.literal_draft_counts.tolist() == [0, 0, 1]
    assert scheduled.literal_drafts.tolist() == [6]
    assert scheduled.open_step_distances.tolist() == [0, 2, 0]


@pytest.mark.parametrize("path", [p for p in FILES if p.stem == "sample_request"], ids=str)
def test_stored_masks_are_the_same_masks_to_the_worker(path: Path) -> None:
    message, _ = parse(path)
    plan = convert.sample_from_pb(message, vocabulary_size=50)
    assert (plan.epoch, plan.step_id, plan.rows.tolist()) == (3, 300, [4, 0, 1])
    masks = plan.masks
    assert masks is not None
    assert masks.rows.tolist() == [4, 0]
    words = [[0x03020100, 0x07060504], [0x0B0A0908, 0x0F0E0D0C]]
    assert np.array_equal(masks.bitmasks, np.array(words, dtype=np.uint32))


def test_samples_hold_every_field_of_a_step() -> None:
    """A field that is added to a plan or a result is added to the samples."""
    request = model_runner_pb2.ForwardRequest(plan=PLAN)
    for message in (PLAN, PLAN.added[0], PLAN.added[0].sampling, PLAN.scheduled, RESULT, request):
        assert {f.name for f, _ in message.ListFields()} == {
            f.name for f in message.DESCRIPTOR.fields
        }
