"""What a caller can ask of one generation, besides its prompt: named and documented here, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import cleandoc
from typing import TypedDict, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., object])


class GenerateOptions(TypedDict, total=False):
    """Options of a generation. The server chooses what is left out or None. For temperature, top_k,
    top_p and min_p it takes the model's own values, which `list_models` tells.

    model           The model's name. It may be left out where one model is served.
    max_tokens      The most tokens to generate. Default: as many as fit.
    temperature     1 draws as the model predicts, 0 takes the likeliest token.
    top_k           Only this many of the likeliest tokens are eligible. 0: all.
    top_p           Only the likeliest tokens that together have this probability are eligible.
    min_p           Only tokens at least this fraction as likely as the likeliest are eligible.
    seed            The same request with the same seed gives the same tokens. Default: random;
                    the generation tells it.
    stop            Texts that end the output. The output ends before them.
    stop_token_ids  Tokens that end the output. The output ends after them.
    ignore_eos      Whether to go on past the model's own end of sequence.
    priority        Requests of a smaller priority run earlier. Default: 0.
    adapter         The name of a LoRA adapter of the model; list_models() has them.
    cache_salt      Requests share cached prefixes only with requests of the same salt.
    request_id      The request's name in the server's logs. Default: the server makes one.
    """

    model: str | None
    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    stop: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    priority: int | None
    adapter: str | None
    cache_salt: str | None
    request_id: str | None


def with_options_documented(method: _Method) -> _Method:
    """Decorates a method that takes GenerateOptions: `help` of it lists them as well."""
    if method.__doc__ and GenerateOptions.__doc__:  # both are absent under `python -OO`
        method.__doc__ = f"{cleandoc(method.__doc__)}\n\n{cleandoc(GenerateOptions.__doc__)}"
    return method
