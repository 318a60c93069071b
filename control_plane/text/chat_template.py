"""A model's chat template: what turns a conversation into the text the model continues.

A template comes with the model and is code by strangers; messages come from clients. Neither is
compiled or run in this process, see control_plane.text.template_pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that the tokenizer finds in a text by its name.

    `control`: it gives a chat its structure, so that no message may write it. `normalized`: it is
    looked for in the normalized text.
    """

    name: str
    control: bool
    normalized: bool


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template as the model's files have it, not compiled.

    `special_tokens` are the names the template may use (bos_token …). `file` is the name of the
    file that holds the source; messages about the template quote it. `fault` says why what the
    files hold is no template; then there is no chat. `added_tokens` are those of the tokenizer;
    with none, what a message writes is not looked at.
    """

    source: str
    special_tokens: Mapping[str, str]
    file: str
    fault: str | None = None
    added_tokens: tuple[AddedToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """A control token in a text: text[start:end] is the name of the template's token `index`."""

    start: int
    end: int
    index: int


@dataclass(frozen=True, slots=True)
class Written:
    """Where a message has a control token's text: in `field` of the message at `index`."""

    index: int
    field: str


@dataclass(frozen=True, slots=True)
class Rendering:
    """A chat as text.

    `own` are the control tokens that the template wrote, in order; None: all that the tokenizer
    finds. With `written`, the text has others', too.
    """

    text: str
    own: tuple[Found, ...] | None = None
    written: Written | None = None
