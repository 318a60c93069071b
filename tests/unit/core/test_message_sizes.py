"""Every message to a worker fits the largest one that gRPC lets through."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.core import invariants
from control_plane.core.config import SchedulerConfig
from control_plane.core.plan import SamplePlan, StepPlan
from control_plane.core.request import OutputKind, Request, SequenceId
from control_plane.core.scheduler import Scheduler
from control_plane.rpc.convert import message_to_pb
from control_plane.shell.limits import SchedulingSettings, scheduler_config
from control_plane.shell.ports import MemoryPool
from tests.simulation.fake_machine import Machine
from tests.support.core_requests import WEIGHTS, config, held_result, request, result, scheduler_of
from tests.support.quick import examples
from twinplane.bounds import WORKER_MESSAGE_BYTES

LARGEST_TOKEN = 151_935


def answer(scheduler: Scheduler, plan: StepPlan) -> None:
    """A token for each row that the plan samples."""
    message = scheduler.ledger.inflight[-1]
    scheduler.update(result(plan, dict.fromkeys(message.rows, LARGEST_TOKEN)))


def add(scheduler: Scheduler, number: int, prompt: array[int], max_tokens: int) -> Request:
    asked = request(f"r{number}", [], max_tokens=max_tokens, arrival=float(number))
    asked = replace(asked, prompt_token_ids=prompt)
    scheduler.add(SequenceId(number), asked)
    return asked


def test_many_long_streams_come_back_after_a_restart() -> None:
    """All share their prompt, so once it is computed the others need no more than a token each."""
    count, length = 60, 61_500
    limits = SchedulerConfig(
        max_sequence_count=256,
        max_step_token_count=8192,
        max_sequence_token_count=65_536,
        block_count=65_536,
        block_size=16,
        max_waiting_count=1024,
    )
    scheduler = Scheduler(limits, 1, WEIGHTS)
    prompt = array("I", [LARGEST_TOKEN - index % 1000 for index in range(length)])
    for number in range(count):
        add(scheduler, number, prompt, 4000)
    largest = 0
    for epoch in (1, 2):
        if epoch == 2:
            scheduler.resync(limits, epoch, WEIGHTS)
        while scheduler.stats().running < count or scheduler.inflight_count:
            plan = scheduler.schedule(0.0)
            assert plan is not None
            assert sum(len(added.token_ids) for added in plan.added) <= limits.max_added_token_count
            if plan.added:
                largest = max(largest, message_to_pb(plan).ByteSize())
            answer(scheduler, plan)
        invariants.check(scheduler)
    assert 100_000 < largest < 2_000_000


@settings(max_examples=examples(60), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    most=st.integers(1, 40),
    rows=st.integers(1, 12),
    shares=st.booleans(),
)
def test_a_plan_adds_so_many_tokens_or_one_longer_sequence(
    lengths: list[int], most: int, rows: int, shares: bool
) -> None:
    limits = replace(config(rows=rows, budget=200, blocks=200), max_added_token_count=most)
    scheduler = scheduler_of(limits)
    rng = random.Random(1)
    for number, length in enumerate(lengths):
        tokens = [1] * length if shares else [rng.randrange(99) for _ in range(length)]
        add(scheduler, number, array("I", tokens), 1)
    started = 0
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        added = [len(sequence.token_ids) for sequence in plan.added]
        assert sum(added) <= most or len(added) == 1
        started += len(added)
        answer(scheduler, plan)
        invariants.check(scheduler)
    assert started == len(lengths)


def test_the_longest_sequence_fits_one_message() -> None:
    machine = Machine(
        max_sequence_token_count=2**31 - 1,
        block_count=2**31 - 1,
        block_size=1,
        vocabulary_size=2**28 + 1,
    )
    pool = MemoryPool(machine.block_count, machine.block_size)
    limits = scheduler_config(SchedulingSettings(), machine.claim(1).info, pool)
    assert limits.max_sequence_token_count * 10 <= WORKER_MESSAGE_BYTES - (4 << 20)
    pool = MemoryPool(2**20, 16)
    machine = Machine(max_sequence_token_count=10_000_000, vocabulary_size=202_048)
    limits = scheduler_config(SchedulingSettings(), machine.claim(1).info, pool)
    assert limits.max_sequence_token_count == 10_000_000, "ten million tokens of a large vocabulary"


@pytest.mark.parametrize("mask_bytes", [19_000, 3_000_000, 5_000_000])
def test_the_masks_of_many_rows_are_cut_into_messages(mask_bytes: int) -> None:
    count = 8
    scheduler = scheduler_of(config(rows=count, budget=99, blocks=99))
    for number in range(count):
        asked = request(f"h{number}", [1, 2], output=OutputKind.HOLD, arrival=float(number))
        scheduler.add(SequenceId(number), asked)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.update(held_result(plan, {}, list(range(count))))
    for number in range(count):
        scheduler.sample(SequenceId(number), b"\xff" * mask_bytes)
    sampled: list[int] = []
    while len(sampled) < count:
        message = scheduler.next_message(0.0)
        assert isinstance(message, SamplePlan) and message.masks is not None
        size = len(message.masks.bitmasks)
        assert size <= 4 << 20 or len(message.rows) == 1
        sampled += message.rows
        scheduler.update(result(message, dict.fromkeys(message.rows, 3)))
        invariants.check(scheduler)
    assert sorted(sampled) == list(range(count))
