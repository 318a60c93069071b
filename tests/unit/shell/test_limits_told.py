"""Limits that hold less than was asked for, and names that differ, are said once."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.app import NameCheck, served_name
from control_plane.core.config import SchedulerConfig
from control_plane.shell.limits import Clamp, SchedulingSettings, clamps
from tests.simulation.fake_machine import Machine
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import running, settings
from tests.simulation.virtual_time import VirtualLoop, run_virtual

LOWERED = "a limit is lowered to what the worker can do"


def config(sequences: int, step: int, length: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_sequence_count=sequences,
        max_step_token_count=step,
        max_sequence_token_count=length,
        block_count=100_000,
        block_size=16,
    )


ASKED = st.none() | st.integers(2, 10**6)


@given(ASKED, ASKED, ASKED, *[st.integers(2, 10**6)] * 3)
def test_a_clamp_is_where_more_was_asked_for(
    sequences: int | None,
    step: int | None,
    length: int | None,
    most_sequences: int,
    most_step: int,
    most_length: int,
) -> None:
    asked = SchedulingSettings(
        max_sequence_count=sequences, max_step_token_count=step, max_sequence_token_count=length
    )
    used = config(
        min(sequences or most_sequences, most_sequences),
        min(step or most_step, most_step),
        min(length or most_length, most_length),
    )
    expected = [
        Clamp(name, wanted, most)
        for name, wanted, most in (
            ("--max-num-seqs", sequences, most_sequences),
            ("--max-num-batched-tokens", step, most_step),
            ("--max-model-len", length, most_length),
        )
        if wanted is not None and wanted > most
    ]
    assert clamps(asked, used) == expected


def test_each_lowered_limit_is_one_warning_with_both_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine())
        chosen = settings()
        chosen = replace(
            chosen,
            scheduling=replace(
                chosen.scheduling, max_sequence_token_count=999_999, max_sequence_count=1
            ),
        )
        async with running(loop, worker, chosen) as rig:
            length = rig.fleet.served_model().max_sequence_token_count
            worker.break_connection()
            await asyncio.sleep(3.0)
            assert worker.attach_count == 2
            told = [r.fields for r in caplog.records if r.message == LOWERED]
            assert told == [
                {"replica": 0, "setting": "--max-model-len", "asked": 999_999, "used": length}
            ]

    caplog.set_level(logging.INFO)
    run_virtual(main)


@pytest.mark.parametrize(
    ("served", "model", "worker", "is_told"),
    [
        ("tiny", "tiny", "tiny", False),
        ("tiny", "tiny", "/data/tiny.gguf", False),
        ("mine", "smollm2-135m-instruct", "smollm2-135m-instruct", False),
        ("mine", "smollm2-135m-instruct", "mine", False),
        ("mine", "smollm2-135m-instruct", "theirs", True),
        ("llama", "/tokenizers/llama", "/weights/on/another/machine/llama", False),
        ("tiny", "tiny", "other", True),
    ],
)
def test_another_name_is_told_once(
    caplog: pytest.LogCaptureFixture, served: str, model: str, worker: str, is_told: bool
) -> None:
    check = NameCheck(served, served_name(model))
    for _ in range(3):
        check.meet(worker)
    assert len(caplog.records) == is_told
    if is_told:
        assert caplog.records[0].fields == {"worker_model": worker, "served_model_name": served}
