"""The plans of docs/contract.md are plans, and a worker answers them as the page says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import json_format

from tests.support.worker_rig import MODEL, serving, simulated_runner
from twinplane.worker.v1 import model_runner_pb2, step_pb2

PAGE = Path(__file__).parents[2] / "docs" / "contract.md"
EPOCH = 7


@pytest.fixture(scope="module")
def example() -> str:
    """The section with the example."""
    text = PAGE.read_text(encoding="utf-8")
    return text.split("### Two steps, word for word\n", 1)[1].split("\n## ", 1)[0]


@pytest.fixture(scope="module")
def messages(example: str) -> list[str]:
    return re.findall(r"^```json\n(.*?)^```$", example, re.DOTALL | re.MULTILINE)


async def test_the_worker_of_the_page_answers_as_the_page_says(
    example: str, messages: list[str]
) -> None:
    assert "--simulate-vocabulary-size 1000 --block-size 4" in example
    assert len(messages) == 4, "two plans, each followed by its result"
    model = replace(MODEL, vocabulary_size=1000, block_size=4)
    async with serving(build=lambda: simulated_runner(model)) as rig:
        await rig.attach(EPOCH)
        for plan, result in zip(messages[::2], messages[1::2], strict=True):
            request = model_runner_pb2.ForwardRequest(
                plan=json_format.Parse(plan, step_pb2.StepPlan())
            )
            answered = (await rig.stub.Forward(request)).result
            answered.ClearField("timings")
            assert answered == json_format.Parse(result, step_pb2.StepResult())


def test_the_columns_that_are_only_mentioned_exist(example: str) -> None:
    fields = {*step_pb2.StepPlan.DESCRIPTOR.fields_by_name}
    fields |= {*step_pb2.ScheduledRows.DESCRIPTOR.fields_by_name}
    named = {*re.findall(r'`"(\w+)":', example), *re.findall(r', "(\w+)": \[4\]`', example)}
    assert named >= {"removed_rows", "appended_block_counts", "appended_blocks"}
    assert named <= fields
