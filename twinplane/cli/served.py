"""Which model answers, and what fits behind a prompt: what a command asks before it begins."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from twinplane.client.options import GenerateOptions
from twinplane.errors import ModelNotFound, Unavailable

if TYPE_CHECKING:
    from twinplane import Client, Message, ServedModel

_POLL_SECONDS = 0.25
_MAY_START = ("connection refused", "there is no such socket")
"""Words of twinplane.client.endpoint for an address at which nobody listens, or not yet."""
_LOOK_SECONDS = 5.0
"""A server has so long to answer a look, also where less is left to wait."""
_TEMPLATE_TOKENS = 512
"""More than a chat template adds to a conversation of a few turns."""


def served_model(
    client: Client, name: str, *, seconds: float, on_wait: Callable[[str], None]
) -> ServedModel:
    """The model called `name`, or the first one for an empty name.

    A server that is starting is waited for, up to so many seconds; `on_wait` is told once why.
    Raises ModelNotFound, Unavailable when the time is over or the server drains, and
    DeadlineExceeded for a server that never says anything.
    """
    deadline = time.monotonic() + seconds
    told = False
    while True:
        nobody: Unavailable | None = None
        try:
            models = client.list_models(timeout=max(deadline - time.monotonic(), _LOOK_SECONDS))
        except Unavailable as error:
            if not str(error).endswith(_MAY_START):  # waiting does not help
                raise
            models, nobody = (), error
        if models:
            return _named(models, name)
        if time.monotonic() >= deadline:
            if nobody is not None:
                raise nobody
            client.tokenize("a", model=name)  # the server itself says why there is no model
            raise Unavailable("the server serves no model yet", reason="NO_WORKER")
        if not told:
            on_wait("the server's model" if nobody is None else "a server")
            told = True
        time.sleep(_POLL_SECONDS)


def tell_waiting(address: str) -> Callable[[str], None]:
    """An `on_wait` that tells who looks at a terminal; a script's standard error stays as it is."""

    def tell(what: str) -> None:
        if sys.stderr.isatty():
            print(f"waiting for {what} at {address} … (Ctrl-C gives up)", file=sys.stderr)

    return tell


def fitting(
    client: Client, prompt: str | list[Message], options: GenerateOptions, model: ServedModel
) -> GenerateOptions:
    """The options, with `max_tokens` no larger than what fits behind the prompt, and at least 1.

    The prompt is counted on the server if it may be too long.
    """
    most = options.get("max_tokens")
    if most is None or longest(prompt) + most <= model.max_sequence_token_count:
        return options
    used = len(client.tokenize(prompt, model=model.name))
    room = max(model.max_sequence_token_count - used, 1)
    return {**options, "max_tokens": min(most, room)}


def longest(prompt: str | list[Message]) -> int:
    """How many tokens a prompt has at most, as good as always: one for each byte."""
    if isinstance(prompt, str):
        return _bytes(prompt) + _TEMPLATE_TOKENS
    return sum(_bytes(turn.content) for turn in prompt) + _TEMPLATE_TOKENS * (1 + len(prompt) // 8)


def _bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _named(models: tuple[ServedModel, ...], name: str) -> ServedModel:
    for model in models:
        if name in ("", model.name):
            return model
    served = ", ".join(model.name for model in models)
    raise ModelNotFound(f"no model {name!r} is served; there is {served}")
