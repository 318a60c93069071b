"""The control plane's core over stages that are processes: several steps in flight, same tokens."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.core import invariants
from control_plane.core.config import SchedulerConfig
from control_plane.core.events import SequenceOutput
from control_plane.core.plan import Message, Row, StepPlan, WeightVersion
from control_plane.core.request import (
    OutputKind,
    Request,
    RequestId,
    SamplingParams,
    SequenceId,
    StopConditions,
)
from control_plane.core.scheduler import Scheduler
from control_plane.rpc import convert as control_convert
from tests.ranks.test_rank_goldens import CASES, assert_near
from tests.support import runner_rig, tiny_llama
from tests.support.rank_processes import Rank, Replica
from worker_service.domain.plan import SamplePlan as WorkerSamplePlan
from worker_service.domain.plan import StepPlan as WorkerStepPlan
from worker_service.domain.sampling import SamplingParameters
from worker_service.rpc import convert as worker_convert

pytestmark = pytest.mark.slow

COUNT = 16
SEEDED = [SamplingParameters(0.9, 20 * (row % 2), 0.95, 0.0, row) for row in range(6)]
MANY = tiny_llama.PROMPTS + [[number, 3, number] for number in range(6)]


def core_of(replica: Replica, stage_count: int, inflight: int) -> Scheduler:
    """A core for a replica that has joined. Chunks have 16 tokens."""
    pools = replica.memory_pools()
    config = SchedulerConfig(
        max_sequence_count=8,
        max_step_token_count=16,
        max_sequence_token_count=128,
        block_count=min(pool.block_count for pool in pools),
        block_size=pools[0].block_token_count,
        max_inflight_step_count=inflight,
        pipeline_stage_count=stage_count,
    )
    weights = replica.capability().weight_version
    return Scheduler(config, 1, WeightVersion(weights.generation, weights.digest))


def add(
    core: Scheduler,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParameters] | None = None,
    count: int = COUNT,
) -> None:
    """Every third of the sequences is sampled by a message of its own."""
    for number, prompt in enumerate(prompts):
        chosen = runner_rig.GREEDY if sampling is None else sampling[number]
        core.add(
            SequenceId(number),
            Request(
                request_id=RequestId(str(number)),
                prompt_token_ids=array("I", prompt),
                sampling=SamplingParams(
                    chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p
                ),
                seed=chosen.seed,
                stop=StopConditions(count),
                arrival=float(number),
                output=OutputKind.HOLD if number % 3 == 2 else OutputKind.SAMPLE,
            ),
        )
        if number % 3 == 2:
            core.sample(SequenceId(number), None)


def crossed(message: Message) -> WorkerStepPlan | WorkerSamplePlan:
    """A message as a worker gets it."""
    sent = control_convert.message_to_pb(message)
    if sent.HasField("sample"):
        return worker_convert.sample_from_pb(sent.sample, tiny_llama.VOCABULARY)
    return replace(worker_convert.forward_from_pb(sent.forward), fingerprint=bytes)


class Flight:
    """Messages on their way through the ranks of a replica, each sent to all of them at once."""

    def __init__(self, replica: Replica, core: Scheduler) -> None:
        self._replica = replica
        self._core = core
        self._unread = [0] * len(replica.ranks)
        self.sent: deque[Message] = deque()
        self.most = 0
        self.outputs: dict[SequenceId, list[int]] = {}

    def send(self) -> None:
        """All that the core has to send."""
        while (message := self._core.next_message(0.0)) is not None:
            plan = crossed(message)
            for index, rank in enumerate(self._replica.ranks):
                rank.begin("launch", plan)
                self._unread[index] += 1
            self.sent.append(message)
            self.most = max(self.most, sum(isinstance(one, StepPlan) for one in self.sent))

    def receive(self) -> None:
        """The results of the oldest message, which are the same."""
        for rank in self._replica.ranks:
            rank.begin("collect")
        results = []
        for index, rank in enumerate(self._replica.ranks):
            for _ in range(self._unread[index]):
                rank.end()
            self._unread[index] = 0
            results.append(rank.end())
        assert len({result.digest for result in results}) == 1, "the ranks have drifted apart"
        answer = worker_convert.result_to_pb(results[self._replica.answering])
        self.sent.popleft()
        for output in self._core.update(control_convert.result_from_pb(answer)):
            self._take(output)
        invariants.check(self._core)

    def _take(self, output: SequenceOutput) -> None:
        self.outputs.setdefault(output.sequence_id, []).extend(output.tokens.ids)
        if output.finish is None and output.sequence_id % 3 == 2:
            self._core.sample(output.sequence_id, None)


def driven(
    replica: Replica,
    stage_count: int,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParameters] | None = None,
) -> list[list[int]]:
    """What the core lets the replica generate, with a step more in flight than it has stages."""
    replica.join()
    core = core_of(replica, stage_count, stage_count + 1)
    add(core, prompts, sampling)
    flight = Flight(replica, core)
    while core.has_work:
        flight.send()
        if flight.sent:
            flight.receive()
    assert flight.most == stage_count + 1
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.kv_active_tokens) == (0, 0, 0)
    return [flight.outputs[SequenceId(number)] for number in range(len(prompts))]


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_steps_in_flight_change_no_token(name: str, rank_pool: list[Rank], tmp_path: Path) -> None:
    """Chunks, decoding and held rows in parts; more requests than rows. Stages alone change no
    bit, so seeded draws are the same, too."""
    model = CASES[name].make(**CASES[name].changes)
    folder = tiny_llama.save(model, tmp_path)
    one = runner_rig.build(folder, executor="torch", thread_count=1)
    expected = runner_rig.generate(one, MANY, COUNT, chunk=16)
    drawn = runner_rig.generate(one, tiny_llama.PROMPTS, COUNT, SEEDED, chunk=16)
    for tensor, pipeline in ((1, 2), (1, 3), (2, 2)):
        replica = Replica.load(rank_pool, folder, tensor, pipeline)
        outputs = driven(replica, pipeline, MANY)
        assert_near(model, MANY, outputs)
        if tensor == 1:
            assert outputs == expected
            assert driven(replica, pipeline, tiny_llama.PROMPTS, SEEDED) == drawn


def test_the_first_stage_has_every_part_before_the_last_one_has_any(
    rank_pool: list[Rank], tmp_path: Path
) -> None:
    """Rows that decode, in as many steps as there are stages: the first stage computes all of them
    while the last one has not been given the first."""
    folder = tiny_llama.save(tiny_llama.llama(), tmp_path)
    replica = Replica.load(rank_pool, folder, 1, 2)
    replica.join()
    core = core_of(replica, 2, 2)
    add(core, [[1, 2], [3, 4]])
    first, last = replica.ranks
    parts: list[list[Row]] = []
    while core.has_work:
        plans: list[WorkerStepPlan | WorkerSamplePlan] = []
        most = 2 if parts else 1  # nobody can go on from a prompt that nobody has seen the end of
        while len(plans) < most and (message := core.next_message(0.0)) is not None:
            assert isinstance(message, StepPlan)
            plans.append(crossed(message))
            parts.append(message.scheduled.rows)
            is_over = first.call("launch", plans[-1])
            assert is_over is (not parts[-1]), "a step is over when its tokens are there"
        for plan in plans:
            result = last.call("step", plan)
            assert first.call("collect").digest == result.digest
            core.update(control_convert.result_from_pb(worker_convert.result_to_pb(result)))
    assert parts[:-1] == [[0, 1]] + [[0], [1]] * (COUNT - 1)
