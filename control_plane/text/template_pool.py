"""Renders one chat template in processes of their own, as many at a time as threads ask."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

from control_plane.text.chat_template import (
    ChatMessage,
    ChatTemplate,
    Found,
    Rendering,
    Written,
)
from control_plane.text.errors import ControlTokenWritten, NoChatTemplate, TemplateFailed
from control_plane.text.template_process import ProcessEnded, RenderLimits, TemplateProcess
from twinplane.process.logs import fields

_logger = logging.getLogger(__name__)

_MAX_SOURCE_CHARACTERS = 1 << 20
_BATCH_MESSAGES = 1024


class TemplatePool:
    """The render processes of one template. Thread-safe; `close` when done.

    A thread that renders takes an idle process or starts one, so there are never more processes
    than threads that have rendered at once. A process that ends takes one rendering with it; the
    next rendering starts another. `now` gives the local time for strftime_now.
    """

    def __init__(
        self, template: ChatTemplate, limits: RenderLimits, *, now: Callable[[], datetime]
    ) -> None:
        self._template = template
        self._limits = limits
        self._now = now
        self._lock = threading.Lock()
        self._processes: set[TemplateProcess] = set()
        self._idle: list[TemplateProcess] = []
        self._compiled = False
        self._unusable: str | None = None
        """Why the template can't be used, once that is known."""
        self._closed = False
        if template.fault is not None:
            self._set_unusable(template.fault)
        elif len(template.source) > _MAX_SOURCE_CHARACTERS:
            self._set_unusable("is too long")

    def usable(self) -> bool:
        """Whether the template compiles. Blocks until a process has tried, the first time."""
        if self._unusable is None and not self._compiled:
            try:
                self._give_back(self._take())
            except NoChatTemplate:
                return False
            except (TemplateFailed, OSError) as error:
                # The process failed, not the template: a later rendering tries again.
                _logger.warning("chat can't be tried", extra=fields(error=str(error)))
        return self._unusable is None

    def render(self, messages: Sequence[ChatMessage]) -> Rendering:
        """The prompt, ending where the assistant begins to speak. Blocks while a process renders.

        Raises TemplateFailed; its message never holds what the messages say, unless the template
        put it into its own refusal. Raises ControlTokenWritten when nobody can tell which control
        tokens are the template's, NoChatTemplate when the template does not compile, and OSError
        when the machine can't start a process.
        """
        process = self._take()
        try:
            answer = process.ask(_request(messages, self._now()))
        except ProcessEnded as ended:
            raise TemplateFailed(f"the chat template ({self._template.file}) {ended}") from None
        finally:
            self._give_back(process)
        return rendering_of(answer)

    def close(self) -> None:
        """Ends all processes; renderings that run fail, and later ones. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self._processes.difference_update(idle)
            for process in self._processes:
                # Its own thread takes its exit code.
                process.kill()
        for process in idle:
            process.end()

    def _take(self) -> TemplateProcess:
        """A process that has compiled the template."""
        while True:
            with self._lock:
                self._check_open()
                if not self._idle:
                    break
                process = self._idle.pop()
            if process.alive:
                return process
            self._drop(process)
        process = TemplateProcess(self._limits)
        with self._lock:
            self._processes.add(process)
            if self._closed:
                process.kill()
        try:
            self._compile(process)
        except BaseException:
            self._drop(process)
            raise
        return process

    def _give_back(self, process: TemplateProcess) -> None:
        with self._lock:
            if process.alive and not self._closed:
                self._idle.append(process)
                return
        self._drop(process)

    def _drop(self, process: TemplateProcess) -> None:
        process.end()
        with self._lock:
            self._processes.discard(process)

    def _check_open(self) -> None:
        if self._unusable is not None:
            raise NoChatTemplate(self._unusable)
        if self._closed:
            raise TemplateFailed("the server is shutting down")

    def _compile(self, process: TemplateProcess) -> None:
        request = {
            "source": self._template.source,
            "special_tokens": dict(self._template.special_tokens),
            "file": self._template.file,
            "tokens": [(t.name, t.control, t.normalized) for t in self._template.added_tokens],
        }
        try:
            error = process.ask(json.dumps(request).encode()).get("error")
        except ProcessEnded as ended:
            if not ended.at_limit:
                message = f"the chat template ({self._template.file}) {ended}"
                raise TemplateFailed(message) from None
            error = f"it {ended}"
        if error is not None:
            raise self._set_unusable(f"does not compile: {error}")
        self._compiled = True

    def _set_unusable(self, reason: str) -> NoChatTemplate:
        with self._lock:
            if self._unusable is None:
                self._unusable = f"the model's chat template ({self._template.file}) {reason}"
                _logger.warning("chat is unavailable", extra=fields(error=self._unusable))
            return NoChatTemplate(self._unusable)


def _request(messages: Sequence[ChatMessage], now: datetime) -> bytes:
    batches = ",".join(_batches(messages))
    return f'{{"now":{json.dumps(now.isoformat())},"messages":[{batches}]}}'.encode()


def _batches(messages: Sequence[ChatMessage]) -> Iterator[str]:
    """The messages as JSON pairs, a batch at a time.

    The encoder holds the interpreter lock while it works; between batches the event loop can have
    it, so that many messages do not delay the streams.
    """
    for start in range(0, len(messages), _BATCH_MESSAGES):
        batch = messages[start : start + _BATCH_MESSAGES]
        pairs = [(turn.role, turn.content) for turn in batch]
        yield json.dumps(pairs, ensure_ascii=False)[1:-1]


def rendering_of(answer: dict[str, Any]) -> Rendering:
    """A render process's reply to a conversation. Raises TemplateFailed, ControlTokenWritten."""
    written = own = None
    if "written" in answer:
        written = Written(*answer["written"])
    if "own" in answer:
        own = tuple(Found(*position) for position in answer["own"])
    match answer:
        case {"unclear": True}:
            raise ControlTokenWritten(written)
        case {"text": str(text)}:
            return Rendering(text, own, written)
        case {"error": str(error)}:
            raise TemplateFailed(error)
        case _:
            raise TemplateFailed("the chat template's process gave no answer")
