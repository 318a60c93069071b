"""A real model in pipeline stages, as `twinplane up` starts it: the references' greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden.references import load_references
from tests.support.up_ranks import Ranks, Streams, running

pytestmark = [pytest.mark.slow, pytest.mark.model]

STAGES = 2
STREAMS = 12


def told(planes: Ranks, message: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in planes.log.read_text().splitlines() if line[:1] == "{"]
    return [line for line in lines if line["message"] == message]


def test_stages_in_turns_generate_what_one_rank_does(tmp_path: Path) -> None:
    """A step more than there are stages is in flight, with a part of the rows each."""
    references = load_references()[::5][:STREAMS]
    sizes = ("--pipeline-parallel-size", str(STAGES), "--dtype=float32", "--log-level=debug")
    with running(tmp_path, STAGES, *sizes) as planes:
        prompts = [reference.prompt for reference in references]
        token_count = len(references[0].tokens)
        answers = Streams(planes.address, prompts, token_count, seeded=False).result()
        for reference, tokens in zip(references, answers, strict=True):
            assert reference.disagreement(tokens) is None
        assert len(planes.attachments()) == 1, "nothing was lost on the way"
        planned = {line["step_id"]: line for line in told(planes, "step planned")}
        finished = [line["step_id"] for line in told(planes, "step finished")]
    whole = [line for line in planned.values() if line["running"] == STREAMS]
    parts = [line["row_count"] for line in whole if line["token_count"] == line["row_count"]]
    assert parts and max(parts) <= STREAMS // STAGES
    order = [line["step_id"] for line in planned.values()]
    assert order == sorted(order) and set(order) <= set(finished)
    assert most_in_flight(planes) == STAGES + 1


def most_in_flight(planes: Ranks) -> int:
    """By the order of the log's lines."""
    open_steps, most = set[int](), 0
    for text in planes.log.read_text().splitlines():
        line = json.loads(text) if text[:1] == "{" else {"message": ""}
        if line["message"] == "step planned":
            open_steps.add(line["step_id"])
        elif line["message"] == "step finished":
            open_steps.discard(line["step_id"])
        most = max(most, len(open_steps))
    return most
