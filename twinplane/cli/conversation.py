"""The turns of a chat, and how they are kept within the model's context."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from twinplane.cli.served import fitting, longest
from twinplane.client.options import GenerateOptions
from twinplane.errors import TwinplaneError

if TYPE_CHECKING:
    from twinplane import Client, GenerationResult, Message, ServedModel


class ContextFull(TwinplaneError):
    """The conversation leaves no room for an answer; the message says what to do."""


class Conversation:
    """Questions and answers so far, `system` before them.

    `drop_oldest`: a conversation that no longer fits loses its oldest turns, a quarter of the
    context at a time.
    """

    def __init__(
        self,
        client: Client,
        model: ServedModel,
        options: GenerateOptions,
        *,
        system: str | None = None,
        drop_oldest: bool = False,
    ) -> None:
        self.model = model
        self.options = options
        self.system = system or None
        self.drop_oldest = drop_oldest
        self.turns: list[Message] = []
        self.token_count = 0
        """Of the conversation after the last whole answer."""
        self._client = client

    def reset(self) -> None:
        """Forgets all turns."""
        self.turns.clear()
        self.token_count = 0

    def ask(self, question: str, show: Callable[[str], object]) -> str | None:
        """Shows the answer's text as it comes. Returns what else is to be said of it, or None.

        Raises TwinplaneError when the turn fails, ContextFull among others; the conversation is
        then as before. What was said until a KeyboardInterrupt stays in the conversation.
        """
        from twinplane import Message

        turns = [*self.turns, Message("user", question)]
        turns, dropped = self._within_context(turns)
        options = fitting(self._client, self._prompt(turns), self.options, self.model)
        parts: list[str] = []
        try:
            with self._client.generate(self._prompt(turns), **options) as generation:
                for delta in generation:
                    parts.append(delta.text)
                    show(delta.text)
                result = generation.result()
        except KeyboardInterrupt:
            self._keep(turns, parts)
            raise
        self._keep(turns, parts)
        usage = result.usage
        self.token_count = usage.prompt_token_count + usage.completion_token_count
        return self._note(result, dropped)

    def _keep(self, turns: list[Message], parts: list[str]) -> None:
        from twinplane import Message

        if parts:
            self.turns = [*turns, Message("assistant", "".join(parts))]

    def _prompt(self, turns: list[Message]) -> list[Message]:
        from twinplane import Message

        return turns if self.system is None else [Message("system", self.system), *turns]

    def _within_context(self, turns: list[Message]) -> tuple[list[Message], int]:
        """The turns that fit with room for an answer, and how many were dropped."""
        length = self.model.max_sequence_token_count
        wanted = min(self.options.get("max_tokens") or length, length // 4)
        if longest(self._prompt(turns)) + wanted <= length:
            return turns, 0
        count = len(turns)
        used = self._count(turns)
        if self.drop_oldest and used + wanted > length:
            while used + length // 4 > length and len(turns) > 1:
                turns = turns[2:]  # a question and its answer
                used = self._count(turns)
        if used < length:
            return turns, count - len(turns)
        if len(turns) == 1:
            raise ContextFull(
                f"this has {used} tokens, and the model's context is {length}: ask for less at once"
            )
        raise ContextFull(
            f"the conversation has {used} tokens, and the model's context is {length}: /reset "
            "begins anew, /set drop_oldest on forgets the oldest turns whenever it is full"
        )

    def _count(self, turns: list[Message]) -> int:
        return len(self._client.tokenize(self._prompt(turns), model=self.model.name))

    def _note(self, result: GenerationResult, dropped: int) -> str | None:
        """What a reader should know about an answer besides its text."""
        notes = [f"{dropped} of the oldest turns were left out"] if dropped else []
        if result.finish_reason.value == "length":
            length = self.model.max_sequence_token_count
            if self.token_count >= length:
                notes.append(f"the context of {length} tokens is full")
                if len(self.turns) > 2 and not self.drop_oldest:
                    notes.append("/reset begins anew, /set drop_oldest on forgets the oldest turns")
            else:
                count = result.usage.completion_token_count
                notes.append(f"stopped after {count} tokens, a larger max_tokens allows more")
        return "; ".join(notes) or None
