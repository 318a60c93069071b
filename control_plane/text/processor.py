"""Text work beside the event loop: tokenizing and chat templates on a few threads.

The libraries release the interpreter lock, so the loop goes on meanwhile. What waits is bounded,
and so is what each piece of work may cost.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from control_plane.text.assembler import TextAssembler
from control_plane.text.chat_template import ChatMessage, RenderLimits
from control_plane.text.errors import NoChatTemplate, TextBusy, TextTooLong
from control_plane.text.model_files import TextModel
from control_plane.text.stop_strings import StopMatcher, StopStrings

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Bounds of text work.

    `max_characters`: of one text or chat. `max_pending`: pieces of work that run or wait.
    `inline_characters`: texts up to this are tokenized on the loop, which takes less than handing
    them over. `render_seconds`: of one chat template.
    """

    max_characters: int = 1 << 20
    max_pending: int = 256
    thread_count: int = 2
    inline_characters: int = 256
    render_seconds: float = 1.0
    retry_after: float = 1.0


class TextProcessor:
    """The text side of one served model. Owns its threads: `close` when done."""

    def __init__(self, model: TextModel, limits: TextLimits) -> None:
        self._model = model
        self._limits = limits
        self._slots = threading.BoundedSemaphore(limits.max_pending)
        self._executor = ThreadPoolExecutor(limits.thread_count, thread_name_prefix="text")

    @property
    def supports_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._model.template is not None

    @property
    def end_of_sequence_ids(self) -> frozenset[int]:
        """The tokens with which the model ends a sequence."""
        return self._model.end_of_sequence_ids

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Raises TextTooLong, TextBusy."""
        self._check_length(len(text))
        encode = self._model.tokenizer.encode
        if len(text) <= self._limits.inline_characters:
            return encode(text, add_special_tokens=add_special_tokens)
        return await self._submit(lambda: encode(text, add_special_tokens=add_special_tokens))

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a rendered chat.

        Raises NoChatTemplate, TemplateFailed, TextTooLong, TextBusy.
        """
        template = self._model.template
        if template is None:
            raise NoChatTemplate("the model has no chat template")
        self._check_length(sum(len(turn.role) + len(turn.content) for turn in messages))
        limits = RenderLimits(self._limits.max_characters, self._limits.render_seconds)

        def work() -> list[int]:
            # The template writes the special tokens itself.
            rendered = template.render(messages, limits)
            return self._model.tokenizer.encode(rendered, add_special_tokens=False)

        return await self._submit(work)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids. Raises TextBusy."""
        decode = self._model.tokenizer.decode
        if len(token_ids) <= self._limits.inline_characters:
            return decode(token_ids, skip_special_tokens=skip_special_tokens)
        return await self._submit(
            lambda: decode(token_ids, skip_special_tokens=skip_special_tokens)
        )

    def assembler(self, stop_strings: Sequence[str]) -> TextAssembler:
        """A new request's way from tokens to text."""
        matcher = StopMatcher(StopStrings(stop_strings)) if stop_strings else None
        return TextAssembler(self._model.tokenizer.detokenizer(), matcher)

    def close(self) -> None:
        """Drops what waits and lets what runs end, which takes a second at most. Idempotent."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _check_length(self, length: int) -> None:
        if length > self._limits.max_characters:
            raise TextTooLong(self._limits.max_characters, length)

    async def _submit(self, work: Callable[[], _Result]) -> _Result:
        if not self._slots.acquire(blocking=False):
            raise TextBusy(self._limits.retry_after)
        future = self._executor.submit(work)
        # Not when the caller leaves: work that began goes on, and keeps its slot while it does.
        future.add_done_callback(self._release)
        return await asyncio.wrap_future(future)

    def _release(self, _: Future[_Result]) -> None:
        self._slots.release()
