"""A worker without a model whose tokens depend on every token and every block it is given.

The KV slot of a position holds a hash of all tokens up to it, computed from the slot of the
position before. So a wrong block, a wrong position, a lost or doubled token anywhere changes what
is sampled, and `expected_tokens` says what is right. Plans are checked as a real worker checks
them; a plan that does not fit is refused with PLAN_MISMATCH.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from control_plane.core.plan import Row, StepPlan, StepResult, WeightVersion
from control_plane.core.spans import WeightsSpan
from control_plane.core.tokens import Tokens
from control_plane.core.weights import DiskSource, Placement, PreparedWeights, WeightsUpdate
from control_plane.shell.ports import (
    Attachment,
    MemoryPool,
    PreparedUpdate,
    RankCoordinates,
    RefusalReason,
    WorkerInfo,
    WorkerRefused,
)
from tests.support.plan_interpreter import PlanInterpreter, PlanRefused, WorkerRow

VOCABULARY = 97
WEIGHTS = "a" * 64
"""The digest of the weights that a machine starts with."""
_MODULUS = 1_000_003


def advance(state: int, token: int) -> int:
    """The hash of a prefix with one token more."""
    return (state * 31 + token * 17 + 7) % _MODULUS


def sample(state: int, seed: int = 0, digest: str = WEIGHTS) -> int:
    """The token after a prefix. Never below 2: 0 and 1 are free for stop tokens of tests."""
    return 2 + (state ^ seed ^ first_state(digest)) % (VOCABULARY - 2)


def first_state(digest: str) -> int:
    """The hash of an empty prefix, with these weights."""
    return 0 if digest == WEIGHTS else int(digest[:8], 16) % _MODULUS


def digest_at(path: str) -> str:
    """That of the weights in a folder: no file is read."""
    return WEIGHTS if path == "start" else sha256(path.encode()).hexdigest()


def expected_tokens(
    prompt: Sequence[int], count: int, seed: int = 0, digest: str = WEIGHTS
) -> list[int]:
    """What any right scheduling generates."""
    return expected_over(prompt, [WeightsSpan(count, digest)], seed)


def expected_over(prompt: Sequence[int], spans: Sequence[WeightsSpan], seed: int = 0) -> list[int]:
    """The same where weights were exchanged: each span's tokens come of KV that its weights have
    made of all before, or, where that was kept, of the KV that was there."""
    tokens: list[int] = []
    state = first_state(WEIGHTS)
    for token in prompt:
        state = advance(state, token)
    for span in spans:
        if not span.kv_of_other_weights:
            state = first_state(span.weights_digest)
            for token in [*prompt, *tokens]:
                state = advance(state, token)
        for _ in range(span.token_count):
            tokens.append(sample(state, seed, span.weights_digest))
            state = advance(state, tokens[-1])
    return tokens


@dataclass(slots=True, eq=False)
class Machine:
    """The worker's process: survives a lost connection, KV and all; `restart` is its death and a
    new life.

    `digest` stands for its weights: other weights give other tokens. `restart` brings those back
    that it started with.
    """

    name: str = "fake"
    max_sequence_count: int = 4
    max_step_token_count: int = 16
    max_sequence_token_count: int = 64
    block_count: int = 33
    block_size: int = 4
    digest: str = WEIGHTS
    prepared: PreparedUpdate | None = None
    committed: PreparedUpdate | None = None
    commit_count: int = 0
    vocabulary_size: int = VOCABULARY
    generation: int = 1
    features: frozenset[str] = frozenset()
    arithmetic: str = ""
    stages: int = 1
    incarnation: int = 1
    epoch: int = 0
    last_step: int = 0
    kv: dict[tuple[int, int], int] = field(default_factory=dict)
    executed_plans: list[StepPlan] = field(default_factory=list)
    _plans: PlanInterpreter = field(init=False)
    _first_digest: str = field(init=False)

    def __post_init__(self) -> None:
        self._plans = PlanInterpreter(self.block_size)
        self._first_digest = self.digest

    @property
    def rows(self) -> dict[Row, WorkerRow]:
        return self._plans.rows

    def restart(self) -> None:
        """A new life: the claim, the rows and the KV are gone."""
        self.incarnation += 1
        self.epoch = 0
        self.last_step = 0
        self._plans = PlanInterpreter(self.block_size)
        self.kv.clear()
        self.prepared = None
        if self.committed is not None:
            self.generation, self.digest, self.committed = 1, self._first_digest, None

    def prepare(self, update: WeightsUpdate) -> PreparedWeights:
        """PrepareWeights. A folder whose name begins with "bad" has weights that don't fit."""
        assert isinstance(update.source, DiskSource)
        if self.prepared is not None and self.prepared.update_id != update.update_id:
            raise WorkerRefused(RefusalReason.UPDATE_CONFLICT, f"{self.prepared} waits")
        if update.source.path.startswith("bad"):
            raise WorkerRefused(RefusalReason.INVALID_UPDATE, "the tensors don't fit")
        digest = digest_at(update.source.path)
        self.prepared = PreparedUpdate(update.update_id, digest)
        return PreparedWeights(update.update_id, digest, Placement.BESIDE, 100, 0)

    def commit(self, update_id: str, digest: str) -> WeightVersion:
        """CommitWeights. Rows and KV stay."""
        named = PreparedUpdate(update_id, digest)
        if named != self.committed:
            if named != self.prepared:
                raise WorkerRefused(RefusalReason.UPDATE_CONFLICT, f"{self.prepared} waits")
            self.digest, self.prepared, self.committed = digest, None, named
            self.generation += 1
            self.commit_count += 1
        return WeightVersion(self.generation, self.digest)

    def abort(self, update_id: str) -> None:
        """AbortWeights."""
        if self.prepared is not None and self.prepared.update_id == update_id:
            self.prepared = None

    def claim(self, epoch: int) -> Attachment:
        """Attach. The KV stays as it is."""
        if epoch <= self.epoch:
            raise WorkerRefused(
                RefusalReason.STALE_EPOCH, f"epoch {epoch} is not above {self.epoch}"
            )
        previous_epoch, self.epoch = self.epoch, epoch
        self.last_step = 0
        self._plans.rows.clear()
        pool = MemoryPool(self.block_count, self.block_size)
        return Attachment(self.info(), pool, previous_epoch)

    def info(self) -> WorkerInfo:
        """GetWorkerInfo."""
        return WorkerInfo(
            worker_id=self.name,
            incarnation_id=f"{self.name}.{self.incarnation}",
            epoch=self.epoch,
            model_name="fake",
            vocabulary_size=self.vocabulary_size,
            weight_version=WeightVersion(self.generation, self.digest),
            max_sequence_count=self.max_sequence_count,
            max_step_token_count=self.max_step_token_count,
            max_sequence_token_count=self.max_sequence_token_count,
            max_prompt_token_count=self.max_sequence_token_count,
            max_inflight_step_count=4,
            features=self.features,
            rank_count=1,
            device="simulated:0",
            arithmetic=self.arithmetic,
            ranks=RankCoordinates(pipeline=(0, self.stages)),
            prepared=self.prepared,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Forward with inline sampling."""
        if plan.epoch != self.epoch:
            raise WorkerRefused(
                RefusalReason.STALE_EPOCH, f"epoch {plan.epoch}, claimed by {self.epoch}"
            )
        if plan.step_id != self.last_step + 1:
            raise WorkerRefused(
                RefusalReason.STEP_GAP, f"step {plan.step_id} after {self.last_step}"
            )
        if plan.weight_version != WeightVersion(self.generation, self.digest):
            raise WorkerRefused(
                RefusalReason.WEIGHT_VERSION_MISMATCH, f"{plan.weight_version} is not here"
            )
        self.last_step = plan.step_id
        self.executed_plans.append(plan)
        _require(sum(plan.scheduled.token_counts) <= self.max_step_token_count, "step budget")
        for added in plan.added:
            _require(0 <= added.row < self.max_sequence_count, "row in range")
        try:
            runs = self._plans.apply(plan)
        except PlanRefused as refused:
            raise WorkerRefused(RefusalReason.PLAN_MISMATCH, str(refused)) from None
        result = StepResult(plan.epoch, plan.step_id, [], [], Tokens([]))
        for run in runs:
            _require(run.end <= self.max_sequence_token_count, "sequence length")
            for position in range(run.start, run.end):
                self._write(run.row, position)
            self._plans.computed(run)
            if run.reaches_end:
                tokens = self._plans.sample(plan.step_id, run, self._sample)
                result.rows.append(run.delta.number)
                result.token_counts.append(len(tokens))
                result.tokens.ids.extend(tokens)
        return result

    def _sample(self, row: WorkerRow) -> int:
        return sample(self._read(row, len(row.tokens) - 1), row.seed, self.digest)

    def _write(self, row: WorkerRow, position: int) -> None:
        state = self._read(row, position - 1) if position else first_state(self.digest)
        self.kv[self._slot(row, position)] = advance(state, row.tokens[position])

    def _read(self, row: WorkerRow, position: int) -> int:
        return self.kv.get(self._slot(row, position), -1)

    def _slot(self, row: WorkerRow, position: int) -> tuple[int, int]:
        block = row.blocks[position // self.block_size]
        _require(0 < block < self.block_count, f"block {block} in range")
        return block, position % self.block_size


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise WorkerRefused(RefusalReason.PLAN_MISMATCH, message)
