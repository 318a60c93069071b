"""What a replica's worker is, and what its tokens are made with: that of now, or the last one's."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from control_plane.core.config import SchedulerConfig
from control_plane.core.plan import WeightVersion
from control_plane.core.request import Origin, OutputKind, Request, SequenceId
from control_plane.core.succession import Traits
from control_plane.shell.engine import (
    AdapterUnavailable,
    EngineLost,
    ServedModel,
    VocabularyMismatch,
)
from control_plane.shell.limits import Capacity, capacity_of
from control_plane.shell.ports import HELD_SAMPLING, Attachment
from control_plane.shell.successor import model_of, traits_of


@dataclass(slots=True, eq=False)
class Serving:
    """Everything is None before the first claim.

    `kept` are those whose tokens come of KV that other weights have made; what these are made with
    is `kept_origin`. `traits` are those by which the sequences here have begun: while a worker
    waits for weights that may answer, not its own.
    """

    attachment: Attachment | None = None
    capacity: Capacity | None = None
    """What it can hold."""
    model: ServedModel | None = None
    traits: Traits | None = None
    origin: Origin | None = None
    kept_origin: Origin | None = None
    kept: Container[SequenceId] = ()

    def adopt(self, attachment: Attachment, config: SchedulerConfig, *, may_answer: bool) -> None:
        """A worker is there. `config` are the limits with it; `may_answer`: so may its weights."""
        before = self.traits
        self.attachment, self.capacity = attachment, capacity_of(config)
        self.model = model_of(config, attachment.info)
        self.traits = traits_of(config, attachment.info)
        if before is not None and not may_answer:
            self.traits = replace(self.traits, weight_digest=before.weight_digest)
        self._note_origin(attachment)

    def require_fit(self, request: Request) -> None:
        """Raises an EngineError for a request that the worker can't execute."""
        attachment, model = self.attachment, self.model
        assert attachment is not None and model is not None
        if max(request.prompt_token_ids) >= model.vocabulary_size:
            # The worker would refuse the whole step.
            raise VocabularyMismatch("the worker's model does not know all tokens of this prompt")
        if request.output is OutputKind.HOLD and HELD_SAMPLING not in attachment.info.features:
            raise EngineLost("the worker can't hold a row until its mask is known")
        if request.adapter is not None and not attachment.info.adapter_slot_count:
            raise AdapterUnavailable("no worker has slots for adapters: see its --max-loras")

    def exchange(self, version: WeightVersion) -> None:
        """The worker has other weights from now on."""
        attachment, traits, model = self.attachment, self.traits, self.model
        assert attachment is not None and traits is not None and model is not None
        info = replace(attachment.info, weight_version=version, prepared=None, weights_trouble="")
        self.attachment = replace(attachment, info=info)
        self.traits = replace(traits, weight_digest=version.digest)
        self.model = replace(model, weight_version=version)
        self._note_origin(self.attachment)

    def traits_now(self, *, takes_over: bool) -> Traits | None:
        """The traits, once it is decided who may go on here."""
        traits = self.traits
        if traits is not None and traits.takes_over is not takes_over:
            traits = self.traits = replace(traits, takes_over=takes_over)
        return traits

    def _note_origin(self, attachment: Attachment) -> None:
        version, arithmetic = attachment.info.weight_version, attachment.info.arithmetic
        self.origin = Origin(version.digest, arithmetic, weights_name=version.name)
        self.kept_origin = replace(self.origin, kv_of_other_weights=True)
