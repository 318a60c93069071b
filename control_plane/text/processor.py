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
from itertools import islice
from typing import Protocol, TypeVar

from control_plane.core.ends import End, first_end
from control_plane.core.request import StopConditions
from control_plane.text.assembler import TextAssembler
from control_plane.text.chat_template import ChatMessage, Rendering
from control_plane.text.control_tokens import ChatEncoder
from control_plane.text.errors import NoChatTemplate, TemplateFailed, TextBusy, TextTooLong
from control_plane.text.model_files import TextModel
from control_plane.text.stop_strings import StopMatcher, StopStrings
from control_plane.text.template_process import RenderLimits
from control_plane.text.turn_end import SAMPLE_CHAT, find_turn_end

_Result = TypeVar("_Result")

_PROMPT_END = 64
"""Tokens of a prompt's end that decide how the text behind it begins; a few always do."""


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


@dataclass(frozen=True, slots=True)
class Ends:
    """`ids` are the tokens that end a request's sequences. `hidden` ones have no text."""

    ids: frozenset[int]
    hidden: frozenset[int]


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
        self._text_ends = _ends(model, turn_end=None)
        self._chat_ends: tuple[Ends, Ends] | None = None
        """Once the template was asked how it ends an answer."""
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

    def ends(self, *, chat: bool, ignored: bool) -> Ends:
        """How an answer to a text or a chat ends; `ignored`: it goes on past the model's ends.

        That of a chat is known once one was encoded.
        """
        ends = (self._chat_ends if chat else None) or self._text_ends
        return ends[ignored]

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
            if self._chat_ends is None:
                self._chat_ends = self._ask_for_turn_end(renderer)
            if self._chat is not None:
                return self._chat.encode(rendering)
            # The template writes the special tokens itself.
            return self._model.tokenizer.encode(rendering.text, add_special_tokens=False)

        return await self._submit(work)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids, the model's end-of-sequence tokens being special, too.

        Raises TextBusy.
        """
        hidden = self._text_ends[True].hidden if skip_special_tokens else frozenset[int]()
        decode = self._model.tokenizer.decode
        if len(token_ids) <= self._limits.inline_characters:
            return decode(token_ids, hidden=hidden)
        return await self._submit(lambda: decode(token_ids, hidden=hidden))

    def assembler(
        self, stop_strings: Sequence[str], prompt: Sequence[int], ends: Ends
    ) -> TextAssembler:
        """What turns the tokens behind a prompt into text."""
        tokenizer = self._model.tokenizer
        return TextAssembler(
            tokenizer.detokenizer(_shown_end(prompt, ends.hidden)),
            ends.hidden,
            tokenizer.text_of,
            StopMatcher(StopStrings(stop_strings)) if stop_strings else None,
        )

    async def first_end(
        self, assembler: TextAssembler, token_ids: list[int], stop: StopConditions
    ) -> End | None:
        """Shows an assembler all tokens of an output so far, up to their first end.

        Raises TextBusy.
        """

        def work() -> End | None:
            end = first_end(
                token_ids, stop.max_tokens, stop, assembler if assembler.searches else None
            )
            if not assembler.searches:
                assembler.push(token_ids if end is None else token_ids[: end.count])
            if end is not None:
                assembler.finish()
            return end

        if len(token_ids) <= self._limits.inline_characters:
            return work()
        return await self._submit(work)

    def can_write(self, stop_string: str, ends: Ends) -> bool:
        """Whether there are tokens at which a request with this stop string ends.

        Where the vocabulary can't write all texts, those are tried that the tokenizer makes of it:
        at the beginning of a text, and within one.
        """
        tokenizer = self._model.tokenizer
        if tokenizer.writes_every_text:
            return True
        token_ids = tokenizer.encode(stop_string, add_special_tokens=False)
        return any(
            self.assembler([stop_string], prompt, ends).push(token_ids) is not None
            for prompt in (token_ids, [])
        )

    def close(self) -> None:
        """Drops what waits, ends renderings, and lets tokenizing end. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._renderer is not None:
            self._renderer.close()
        self._executor.shutdown(wait=True)

    def _ask_for_turn_end(self, renderer: ChatRenderer) -> tuple[Ends, Ends] | None:
        """The ends of chats; None when the template does not render the chat that tells them."""
        try:
            rendered = renderer.render(SAMPLE_CHAT).text
        except TemplateFailed:
            return None
        return _ends(self._model, find_turn_end(rendered, self._model.tokenizer.added_tokens))

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


def _ends(model: TextModel, turn_end: str | None) -> tuple[Ends, Ends]:
    """Those that end an answer, and those for one that goes on past them.

    Both hide special tokens, and what the model's files name as an end or match in raw text as one.
    An end that is an ordinary piece, say a line break, has no text only where it ends.
    """
    tokenizer = model.tokenizer
    ids = model.ends.ids
    if turn_end is not None:
        ids |= {tokenizer.added_tokens[turn_end]}
    special = (
        tokenizer.special_ids | model.ends.named | ids.intersection(tokenizer.added_tokens.values())
    )
    return Ends(ids, special | ids), Ends(frozenset(), special)


def _shown_end(prompt: Sequence[int], hidden: frozenset[int]) -> list[int]:
    """The last of a prompt's tokens that are not hidden, as many as matter for what follows."""
    shown = (token_id for token_id in reversed(prompt) if token_id not in hidden)
    return list(islice(shown, _PROMPT_END))[::-1]
