"""Weights are exchanged again and again while workers die, hang and lose their connections, and
clients read on: whatever happens, each token is that of the weights that its span names.

A small rollout, level-based, brings each replica to what is desired; the product's is another.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from control_plane.core import invariants
from control_plane.core.events import Finish, FinishReason
from control_plane.core.request import Origin
from control_plane.core.spans import Spans, WeightsSpan, extended
from control_plane.core.weights import DiskSource, InFlightPolicy, WeightsUpdate
from control_plane.shell.engine import EngineLost, WeightsChanged
from control_plane.shell.ports import RefusalReason, WorkerLost, WorkerRefused
from control_plane.shell.replica import Replica
from control_plane.shell.stream import TokenStream
from tests.simulation.fake_machine import WEIGHTS, Machine, digest_at, expected_tokens
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import Rig, request, running, settings, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual
from tests.support.quick import spread

CONTINUING = (InFlightPolicy.CONTINUE_ON_NEW, InFlightPolicy.KEEP_KV)
COUNT = 30


@dataclass(slots=True, eq=False)
class Client:
    """What one saw: its tokens, and the origin that was told for each."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    finish: Finish | None = None
    error: Exception | None = None

    async def read(self, stream: TokenStream) -> None:
        origin: Origin | None = None
        while self.finish is None:
            try:
                delta = await stream.take()
            except (EngineLost, WeightsChanged) as error:
                self.error = error
                return
            origin = delta.origin or origin
            seams = dict(delta.seams)
            for index, token in enumerate(delta.tokens.ids):
                origin = seams.get(index, origin)
                assert origin is not None
                self.tokens.append(token)
                self.origins.append(origin)
            self.finish = delta.finish

    def check(self, policy: InFlightPolicy) -> None:
        """Each token is right, and its origin is the one that the end tells."""
        spans: Spans = ()
        for origin in self.origins:
            kept = origin.kv_of_other_weights
            made = WeightsSpan(1, origin.weights_digest, origin.weights_name, kept)
            spans = extended(spans, made)
        if self.finish is not None:
            assert self.finish.spans == spans, "the deltas have told otherwise"
        at = 0
        for span in spans:
            if not span.kv_of_other_weights:
                before = [*self.prompt, *self.tokens[:at]]
                right = expected_tokens(before, span.token_count, digest=span.weights_digest)
                assert self.tokens[at : at + span.token_count] == right
            at += span.token_count
        assert len(spans) <= 1 or policy in CONTINUING, "tokens of two minds"
        assert policy is InFlightPolicy.KEEP_KV or not any(s.kv_of_other_weights for s in spans)


@dataclass(slots=True, eq=False)
class Rollout:
    """Brings all replicas to the desired weights, and knows nothing but what they are."""

    rig: Rig
    policy: InFlightPolicy
    desired: str = "start"
    ever: set[str] = field(default_factory=lambda: {WEIGHTS})
    counts: Counter[str] = field(default_factory=Counter)

    def want(self, path: str) -> None:
        self.desired = path
        self.ever.add(digest_at(path))
        continues = self.policy in CONTINUING
        self.rig.fleet.weights.served.serve(self.ever, continues=continues)

    async def run(self) -> None:
        while True:
            for replica in self.rig.fleet.replicas:
                try:
                    await self._bring(replica)
                except WorkerLost:
                    self.counts["lost"] += 1
                except WorkerRefused as error:
                    assert error.reason is RefusalReason.UPDATE_CONFLICT
                    self.counts["conflicts"] += 1
            if self.is_done and len(self.ever) > 1:
                self.ever = {digest_at(self.desired)}
                self.want(self.desired)
            await asyncio.sleep(0.05)

    async def _bring(self, replica: Replica) -> None:
        observed, path = replica.weights.observed(), self.desired
        digest = digest_at(path)
        if observed.version is None or observed.version.digest == digest:
            return
        if observed.prepared is not None and observed.prepared.digest != digest:
            await replica.weights.abort(observed.prepared.update_id)
        elif observed.prepared is None:
            await replica.weights.prepare(WeightsUpdate(f"to {path}", DiskSource(path)))
        await replica.weights.switch(f"to {path}", digest, self.policy)
        self.counts["exchanges"] += 1

    @property
    def is_done(self) -> bool:
        observed = [replica.weights.observed() for replica in self.rig.fleet.replicas]
        digest = digest_at(self.desired)
        return all(one.version is not None and one.version.digest == digest for one in observed)


def strike(worker: FakeWorker, chance: random.Random, loop: VirtualLoop) -> None:
    """Something goes wrong, and is well again after a while."""
    seconds = chance.choice((0.1, 1.0, 5.0))
    match chance.randrange(5):
        case 0:
            worker.break_connection(chance.randrange(3))
        case 1:
            worker.kill()
            loop.call_later(seconds, setattr, worker, "reachable", True)
        case 2:
            worker.freeze()
            loop.call_later(seconds, worker.thaw)
        case 3:
            worker.loses_commits = True
            loop.call_later(seconds, setattr, worker, "loses_commits", False)
        case _:
            worker.commit_seconds = worker.prepare_seconds = chance.choice((0.0, 0.02, 0.5))


def play(seed: int) -> Counter[str]:
    counts: Counter[str] = Counter()

    async def main(loop: VirtualLoop) -> None:
        chance = random.Random(seed)
        policy = chance.choice(list(InFlightPolicy))
        workers = [
            FakeWorker(
                Machine(block_count=chance.choice((40, 80)), max_step_token_count=24),
                lambda: 0.02,
            )
            for _ in range(chance.choice((1, 2, 3)))
        ]
        chosen = settings(synchronous=chance.random() < 0.3, max_failed_claims=10**6)
        async with running(loop, workers, chosen, seed) as rig:
            rollout = Rollout(rig, policy)
            rollout.want("start")
            task = rig.group.create_task(rollout.run())
            clients: list[Client] = []
            for number in range(chance.randrange(8, 30)):
                event = chance.random()
                if event < 0.2:
                    rollout.want(chance.choice(("start", "one", "two", "three")))
                elif event < 0.4:
                    strike(chance.choice(workers), chance, loop)
                else:
                    client = Client([2 + number, *range(2, chance.randrange(3, 20))])
                    stream = TokenStream()
                    arrival = loop.time()
                    asked = request(f"r{number}", client.prompt, COUNT, arrival=arrival)
                    try:
                        rig.fleet.submit(asked, stream)
                    except EngineLost:
                        counts["refused"] += 1
                    else:
                        clients.append(client)
                        rig.group.create_task(client.read(stream))
                await asyncio.sleep(chance.choice((0.0, 0.05, 0.3)))
                for index in range(len(workers)):
                    invariants.check(rig.core(index))
            for worker in workers:
                worker.thaw()
                worker.reachable, worker.loses_commits = True, False
                worker.commit_seconds = worker.prepare_seconds = 0.0
            async with asyncio.timeout(300.0):
                await until(lambda: all(c.finish or c.error for c in clients))
                await until(lambda: rollout.is_done)
            for client in clients:
                client.check(policy)
                if client.error is not None:
                    assert policy not in CONTINUING and isinstance(client.error, WeightsChanged)
                elif client.finish is not None:
                    whole = client.finish.reason is FinishReason.LENGTH
                    assert whole == (len(client.tokens) == COUNT)
                    assert whole or policy not in CONTINUING
                    counts["several"] += len(client.finish.spans) > 1
                    counts["kept"] += any(s.kv_of_other_weights for s in client.finish.spans)
                    counts["aborted"] += client.finish.reason is FinishReason.WEIGHTS_CHANGED
            for index, worker in enumerate(workers):
                stats = rig.stats(index)
                assert not (stats.running or stats.waiting or stats.kv_active_tokens)
                named = {plan.weight_version for plan in worker.machine.executed_plans}
                counts["versions"] += len(named)
            late = Client([2, 3, 4])
            stream = TokenStream()
            rig.fleet.submit(request("late", late.prompt, COUNT, arrival=loop.time()), stream)
            await late.read(stream)
            late.check(policy)
            assert {origin.weights_digest for origin in late.origins} == {
                digest_at(rollout.desired)
            }
            task.cancel()
            counts.update(rollout.counts)

    run_virtual(main)
    return counts


@pytest.mark.parametrize("seed", spread(range(120), 40))
def test_each_token_is_of_the_weights_that_its_span_names(seed: int) -> None:
    play(seed)


def test_the_runs_come_to_what_they_should() -> None:
    counts: Counter[str] = Counter()
    for seed in range(40):
        counts += play(1000 + seed)
    for what in ("several", "kept", "aborted", "exchanges", "lost", "versions"):
        assert counts[what] > 3, (what, counts)
