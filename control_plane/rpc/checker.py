"""Collects the rules that a message breaks, so that a refusal names several at once."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from control_plane.rpc.errors import InvalidRequest
from control_plane.shell.engine import ServedModel
from twinplane.errors import Violation

_MAX_REPORTED = 8
_MAX_LISTED_BYTES = 16 * 1024


class Checker:
    """Collects broken rules."""

    def __init__(self) -> None:
        self._violations: list[Violation] = []

    def require(self, holds: bool, field: str, rule: str) -> bool:
        """Notes that a field breaks a rule, unless the rule `holds`. Returns whether it does."""
        if not holds:
            self._violations.append(Violation(field, rule))
        return holds

    def known_fields(self, message: Message, path: str = "") -> None:
        """Refuses unknown fields: one of a newer contract asks for what we would not do."""
        size = message.ByteSize()
        if size > _MAX_LISTED_BYTES:
            # Listing them takes a microsecond each, and a large message may have a million.
            message.DiscardUnknownFields()
            name = path.rstrip(".") or message.DESCRIPTOR.name
            self.require(message.ByteSize() == size, name, "has fields that are not known here")
            return
        unknown = UnknownFieldSet(message)
        if len(unknown) > 0:
            number = unknown[0].field_number
            self.require(False, f"{path}{number}", "no field of this number is known here")

    def raise_if_any(self) -> None:
        """Raises InvalidRequest for the first eight rules that were broken, if any was."""
        if self._violations:
            raise InvalidRequest(self._violations[:_MAX_REPORTED])


def in_vocabulary(
    checker: Checker, token_ids: Sequence[int], field: str, model: ServedModel
) -> None:
    """Notes the largest token that the model lacks."""
    largest = max(token_ids, default=0)
    checker.require(
        largest < model.vocabulary_size,
        field,
        f"{largest} is not in the vocabulary of {model.vocabulary_size} tokens",
    )


def within_length(
    checker: Checker, token_ids: Sequence[int], field: str, model: ServedModel
) -> bool:
    """Notes more tokens than the model's length. Returns whether there are no more."""
    return checker.require(
        len(token_ids) <= model.max_sequence_token_count,
        field,
        f"has {len(token_ids)} tokens; the model's length is {model.max_sequence_token_count}",
    )
