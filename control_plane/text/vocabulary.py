"""Tells the operator when the tokenizer and the worker's model do not belong together."""

from __future__ import annotations

import logging

from twinplane.process.logs import fields

_logger = logging.getLogger(__name__)

_USUAL_PADDING = 1024


class VocabularyCheck:
    """Compares the tokenizer with each model that it meets, and warns once of each difference.

    Models have some more ids than their tokenizer, because a tensor's size is rounded up. Many more
    are another model's.
    """

    def __init__(self, token_count: int) -> None:
        self._token_count = token_count
        self._met: set[int] = set()

    def meet(self, vocabulary_size: int) -> None:
        """A worker is there whose model has ids below `vocabulary_size`."""
        if vocabulary_size in self._met:
            return
        self._met.add(vocabulary_size)
        sizes = fields(tokenizer_size=self._token_count, vocabulary_size=vocabulary_size)
        unknown_count = vocabulary_size - self._token_count
        if unknown_count < 0:
            _logger.warning(
                "the tokenizer has tokens that the worker's model lacks; prompts with them are"
                " refused",
                extra=sizes,
            )
        elif unknown_count > max(_USUAL_PADDING, vocabulary_size // 8):
            _logger.warning(
                "the worker's model has many tokens that the tokenizer lacks; they have no text",
                extra=sizes,
            )
