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
class ChatTemplate:
    """A template as the model's files have it, not compiled.

    `special_tokens` are the names the template may use (bos_token …). `file` is the name of the
    file that holds the source; messages about the template quote it. `fault` says why what the
    files hold is no template; then there is no chat.
    """

    source: str
    special_tokens: Mapping[str, str]
    file: str
    fault: str | None = None
