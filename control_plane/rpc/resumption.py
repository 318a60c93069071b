"""Requests that go on from tokens they got before their stream broke: inference.proto's Resumption.

`check_resume` judges what the message says, `take_up` what the tokens mean: the text behind them,
and whether they are at an end already.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from control_plane.core.ends import End
from control_plane.core.request import Origin, Request, Resumed
from control_plane.core.spans import Spans, WeightsSpan, extended, token_count
from control_plane.rpc.checker import Checker, in_vocabulary, within_length
from control_plane.shell.engine import CannotResume, ServedModel
from control_plane.text.assembler import TextAssembler
from control_plane.text.processor import TextProcessor
from twinplane.common.v1 import types_pb2
from twinplane.inference.v1 import inference_pb2

_DIGEST_BYTES = 16
_MAX_NAME_CHARACTERS = 1024
"""Of a digest or an arithmetic; those there are have less than a tenth."""


@dataclass(frozen=True, slots=True)
class Resume:
    """A checked Resumption. `prompt_digest` is empty, and `origin` None, where it has none."""

    token_ids: array[int]
    origin: Origin | None
    prompt_digest: bytes
    text_byte_count: int | None
    spans: Spans = ()
    adapter_digest: str = ""

    @property
    def resumed(self) -> Resumed:
        """What the engine is told of it."""
        return Resumed(self.token_ids, self.origin, self.spans)

    def check_prompt(self, digest: bytes) -> None:
        """Raises CannotResume where the prompt's tokens are others than they were."""
        if self.prompt_digest not in (b"", digest):
            raise CannotResume("prompt")

    def check_adapter(self, digest: str) -> None:
        """Raises CannotResume where another adapter has made the tokens, or none, or one has."""
        if self.origin is not None and self.adapter_digest != digest:
            raise CannotResume("adapter")


def check_resume(
    checker: Checker,
    message: inference_pb2.Resumption,
    sampling: types_pb2.SamplingParameters,
    max_tokens: int | None,
    model: ServedModel,
) -> Resume:
    """Notes the rules that the message breaks in itself, or with the rest of its request."""
    checker.known_fields(message, "resume.")
    checker.known_fields(message.origin, "resume.origin.")
    count = len(message.token_ids)
    token_ids = array("I")
    if within_length(checker, message.token_ids, "resume.token_ids", model):
        # A message may have millions: they are not looked at.
        token_ids.extend(message.token_ids)
        in_vocabulary(checker, token_ids, "resume.token_ids", model)
    checker.require(
        max_tokens is None or count <= max_tokens,
        "resume.token_ids",
        f"has {count} tokens, more than max_tokens allows: {max_tokens}",
    )
    checker.require(
        count == 0 or sampling.HasField("seed"),
        "sampling.seed",
        "is needed to go on behind tokens: GenerationStarted has told it",
    )
    origin = message.origin
    for name in ("weights_digest", "arithmetic", "prompt_digest", "weights_name", "adapter_digest"):
        length = len(getattr(origin, name))
        checker.require(
            length <= _MAX_NAME_CHARACTERS,
            f"resume.origin.{name}",
            f"has a length of {length}, at most {_MAX_NAME_CHARACTERS} are allowed",
        )
    return Resume(
        token_ids,
        Origin(
            origin.weights_digest,
            origin.arithmetic,
            origin.arithmetic_changed,
            origin.weights_name,
            origin.kv_of_other_weights,
        )
        if message.HasField("origin")
        else None,
        origin.prompt_digest,
        message.text_byte_count if message.HasField("text_byte_count") else None,
        _spans(checker, message),
        origin.adapter_digest,
    )


def _spans(checker: Checker, message: inference_pb2.Resumption) -> Spans:
    """Which weights made which tokens, where the message says that."""
    told, field = message.weights_spans, "resume.weights_spans"
    if not told or not checker.require(
        len(told) <= len(message.token_ids), field, "has more spans than there are tokens"
    ):
        return ()
    spans: Spans = ()
    for index, span in enumerate(told):
        path = f"{field}[{index}]"
        checker.known_fields(span, f"{path}.")
        longest = max(len(span.weights_digest), len(span.weights_name))
        is_right = checker.require(span.token_count > 0, f"{path}.token_count", "is 0")
        is_right &= checker.require(
            longest <= _MAX_NAME_CHARACTERS,
            path,
            f"has a text of {longest} characters, at most {_MAX_NAME_CHARACTERS} are allowed",
        )
        if not is_right:
            return ()  # one violation is enough: there may be thousands
        made = WeightsSpan(
            span.token_count, span.weights_digest, span.weights_name, span.kv_of_other_weights
        )
        spans = extended(spans, made)
    count = token_count(spans)
    checker.require(
        count == len(message.token_ids),
        field,
        f"have {count} tokens together, token_ids has {len(message.token_ids)}",
    )
    return spans


async def take_up(
    resume: Resume,
    request: Request,
    model: ServedModel,
    text: TextProcessor,
    assembler: TextAssembler,
) -> End | None:
    """Brings the assembler behind what the client has; returns the end that the tokens reach.

    Raises InvalidRequest, or TextBusy.
    """
    checker = Checker()
    count, prompt_count = len(resume.token_ids), len(request.prompt_token_ids)
    room = model.max_sequence_token_count - prompt_count
    checker.require(
        count <= room,
        "resume.token_ids",
        f"has {count} tokens; the model's length is {model.max_sequence_token_count} tokens, the"
        f" prompt has {prompt_count}, which leaves {room}",
    )
    checker.raise_if_any()
    end = await text.first_end(assembler, list(resume.token_ids), request.stop)
    checker.require(
        end is None or end.count == count,
        "resume.token_ids",
        f"the output ends with token {0 if end is None else end.count} of {count}",
    )
    checker.raise_if_any()
    byte_count = assembler.skip(resume.text_byte_count)
    checker.require(
        byte_count is None,
        "resume.text_byte_count",
        f"{resume.text_byte_count} is not where a character ends in the text of these tokens, which"
        f" has {byte_count} bytes",
    )
    checker.raise_if_any()
    return end


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """Stands for a prompt's tokens."""
    return blake2b(array("I", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()
