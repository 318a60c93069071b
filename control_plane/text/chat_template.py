"""A model's chat template: from a conversation to the text the model was trained to go on from.

Templates come with models and are code by strangers, and messages come from clients: both are
bounded, see control_plane.text.sandbox.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import jinja2

from control_plane.text.errors import ModelFilesInvalid, TemplateFailed
from control_plane.text.sandbox import BoundedEnvironment, Budget

_MAX_SOURCE_CHARACTERS = 1 << 20
_MAX_MESSAGE_CHARACTERS = 256
_MAX_DATE_FORMAT_CHARACTERS = 64
_BASE_UNITS = 4_000_000
_UNITS_PER_CHARACTER = 64


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Bounds of one rendering: characters of its output, seconds on the clock."""

    max_characters: int
    seconds: float


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class ChatTemplate:
    """A compiled template; rendering is thread-safe.

    `special_tokens` are the names the template may use (bos_token …). `now` gives the local time
    for strftime_now, `clock` the seconds that rendering is bounded by. Raises ModelFilesInvalid
    when the source is no template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime],
        clock: Callable[[], float],
    ) -> None:
        if len(source) > _MAX_SOURCE_CHARACTERS:
            raise ModelFilesInvalid("the chat template is too long")
        self._clock = clock
        self._now = now
        self._special_tokens = dict(special_tokens)
        self._environment = BoundedEnvironment()
        self._environment.globals["raise_exception"] = _refuse
        self._environment.globals["strftime_now"] = self._strftime_now
        try:
            self._template = self._environment.template(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelFilesInvalid(f"the chat template does not compile: {error}") from error

    def render(self, messages: Sequence[ChatMessage], limits: RenderLimits) -> str:
        """The prompt, ending where the assistant begins to speak.

        Raises TemplateFailed; its message never holds what the messages say, unless the template
        put it into its own refusal.
        """
        given = sum(len(message.role) + len(message.content) for message in messages)
        units = _BASE_UNITS + _UNITS_PER_CHARACTER * given
        budget = Budget(units, self._clock, self._clock() + limits.seconds)
        variables = {
            **self._special_tokens,
            "messages": [{"role": turn.role, "content": turn.content} for turn in messages],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }
        parts: list[str] = []
        length = 0
        try:
            with self._environment.spending(budget):
                for part in self._template.generate(variables):
                    length += len(part)
                    if length > limits.max_characters:
                        raise TemplateFailed(
                            f"the chat renders to more than {limits.max_characters} characters"
                        )
                    parts.append(part)
        except TemplateFailed:
            raise
        except _Refused as error:
            reason = str(error)[:_MAX_MESSAGE_CHARACTERS]
            raise TemplateFailed(f"the chat template refuses the messages: {reason}") from None
        except Exception as error:
            # The template is foreign code: whatever it raises is its answer to these messages.
            # The text of such an error may quote them, so only its kind goes on.
            kind = type(error).__name__
            raise TemplateFailed(f"the chat template fails on the messages ({kind})") from None
        return "".join(parts)

    def _strftime_now(self, date_format: str) -> str:
        if len(date_format) > _MAX_DATE_FORMAT_CHARACTERS:
            raise TemplateFailed("the chat template's date format is too long")
        return self._now().strftime(date_format)


def _refuse(message: object) -> None:
    raise _Refused(str(message)[:_MAX_MESSAGE_CHARACTERS])
