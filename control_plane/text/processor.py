"""Text work beside the event loop: tokenizing and chat templates on a few threads.

The tokenizer's library releases the interpreter lock, and chat templates render in processes of
their own, so the loop goes on meanwhile. The amount of work that waits is bounded, and so is what
each piece of work may cost.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from control_plane.text.assembler import TextAssembler
from control_plane.text.chat_template import ChatMessage, Rendering
from control_plane.text.control_tokens import ChatEncoder
from control_plane.text.errors import NoChatTemplate, TextBusy, TextTooLong
from control_plane.text.model_files import TextModel
from control_plane.text.stop_strings import StopMatcher, StopStrings
from control_plane.text.template_process import RenderLimits

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Bounds of text work.

    `max_characters`: of one text or chat, also when rendered. `max_pending`: pieces of work that
    run or wait. `inline_characters`: texts up to this length are tokenized on the loop, because
    handing them to a thread takes longer. `render_cpu_seconds`: processor time of one rendering,
    which does not pass while the machine is busy elsewhere. `render_memory_bytes`: address space of
    one render process, of which there are up to `thread_count`.
    """

    max_characters: int = 1 << 20
    max_pending: int = 256
    thread_count: int = 2
    inline_characters: int = 256
    render_cpu_seconds: float = 1.0
    render_memory_bytes: int = 512 << 20
    retry_after: float = 1.0

    @property
    def rendering(self) -> RenderLimits:
        """Those of one chat template's rendering."""
        return RenderLimits(self.max_characters, self.render_cpu_seconds, self.render_memory_bytes)


class ChatRenderer(Protocol):
    """Renders conversations by a model's template. Called by several threads at once."""

    def usable(self) -> bool:
        """Whether the template compiles; may block."""
        ...

    def render(self, messages: Sequence[ChatMessage]) -> Rendering:
        """The prompt; blocks. Raises NoChatTemplate, TemplateFailed, ControlTokenWritten."""
        ...

    def close(self) -> None:
        """Ends what runs. Idempotent."""
        ...


class TextProcessor:
    """The text side of one served model. Owns its threads and `renderer`: `close` when done.

    `renderer` is None for models without chat.
    """

    def __init__(self, model: TextModel, limits: TextLimits, renderer: ChatRenderer | None) -> None:
        self._model = model
        self._limits = limits
        self._renderer = renderer
        self._chat: ChatEncoder | None = None
        if model.template is not None and model.template.added_tokens:
            self._chat = ChatEncoder(model.tokenizer.backend, model.template.added_tokens)
        self._usable: Future[bool] | None = None
        self._slots = threading.BoundedSemaphore(limits.max_pending)
        self._executor = ThreadPoolExecutor(limits.thread_count, thread_name_prefix="text")

    def prepare_chat(self) -> None:
        """Compiles the chat template in the background, so that the first chat need not wait."""
        if self._renderer is not None and self._usable is None:
            self._usable = self._executor.submit(self._renderer.usable)

    async def supports_chat(self) -> bool:
        """Whether the model has a chat template that compiles."""
        self.prepare_chat()
        if self._usable is None:
            return False
        # Shielded: a caller that leaves must not cancel what others wait for.
        return await asyncio.shield(asyncio.wrap_future(self._usable))

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

        Raises NoChatTemplate, TemplateFailed, ControlTokenWritten, TextTooLong, TextBusy.
        """
        renderer = self._renderer
        if renderer is None:
            raise NoChatTemplate("the model has no chat template")
        self._check_length(sum(len(turn.role) + len(turn.content) for turn in messages))

        def work() -> list[int]:
            rendering = renderer.render(messages)
            if self._chat is not None:
                return self._chat.encode(rendering)
            # The template writes the special tokens itself.
            return self._model.tokenizer.encode(rendering.text, add_special_tokens=False)

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
        """What turns a new request's tokens into text."""
        matcher = StopMatcher(StopStrings(stop_strings)) if stop_strings else None
        return TextAssembler(self._model.tokenizer.detokenizer(), matcher)

    def close(self) -> None:
        """Drops what waits, ends renderings, and lets tokenizing end. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._renderer is not None:
            self._renderer.close()
        self._executor.shutdown(wait=True)

    def _check_length(self, length: int) -> None:
        if length > self._limits.max_characters:
            raise TextTooLong(self._limits.max_characters, length)

    async def _submit(self, work: Callable[[], _Result]) -> _Result:
        if not self._slots.acquire(blocking=False):
            raise TextBusy(self._limits.retry_after)
        future = self._executor.submit(work)
        # Not when the caller leaves: work that has begun goes on, and keeps its slot meanwhile.
        future.add_done_callback(self._release)
        return await asyncio.wrap_future(future)

    def _release(self, _: Future[_Result]) -> None:
        self._slots.release()
