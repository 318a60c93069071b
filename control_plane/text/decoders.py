"""What a tokenizer's decoder does, and whether its text can be told while tokens still come.

That holds when the text of some tokens stays what it is, whatever tokens follow them. A decoder is
a chain of steps. Those before `Fuse` see one token at a time; those behind it see the whole text,
and must not turn a part of it into something else because of what comes later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers

from control_plane.text.errors import ModelFilesInvalid

_BESIDE_BYTE_LEVEL = frozenset({"ByteLevel", "Fuse"})
_BEHIND_FUSE = frozenset({"Fuse", "Strip", "Metaspace"})
_BEHIND_BYTES = frozenset({"Fuse", "Strip"})


@dataclass(frozen=True, slots=True)
class DecoderKind:
    """`byte_level`: a token is the same bytes everywhere. `byte_fallback`: some tokens are bytes.

    `keeps_bytes`: what is written with byte tokens comes out as it is.
    """

    byte_level: bool
    byte_fallback: bool
    keeps_bytes: bool


def decoder_kind(backend: tokenizers.Tokenizer) -> DecoderKind:
    """Raises ModelFilesInvalid for a decoder that can't be streamed."""
    if backend.decoder is None:
        return DecoderKind(byte_level=False, byte_fallback=False, keeps_bytes=False)
    # The part of tokenizer.json that describes the decoder, as JSON.
    steps = list(_steps(json.loads(backend.decoder.__getstate__())))
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        if not _BESIDE_BYTE_LEVEL.issuperset(kinds):
            raise ModelFilesInvalid(
                f"the tokenizer's decoder mixes ByteLevel with {sorted(set(kinds))}"
            )
        return DecoderKind(byte_level=True, byte_fallback=False, keeps_bytes=True)
    if any(step["type"] == "Strip" and step["stop"] > 0 for step in steps):
        # `tokenizers` panics when there is nothing to strip.
        raise ModelFilesInvalid("the tokenizer's decoder can't be used: it strips the text's end")
    for step in _behind(steps, kinds, "Fuse"):
        if step["type"] not in _BEHIND_FUSE and not _replaces_one_character(step):
            raise ModelFilesInvalid(
                f"the tokenizer's decoder can't be streamed: {step['type']} comes behind Fuse"
            )
    fallback = "ByteFallback" in kinds
    last = {step["type"] for step in _behind(steps, kinds, "ByteFallback")}
    return DecoderKind(
        byte_level=False, byte_fallback=fallback, keeps_bytes=fallback and last <= _BEHIND_BYTES
    )


def _steps(description: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chain's steps; chains may be nested."""
    if description["type"] != "Sequence":
        yield description
        return
    for member in description["decoders"]:
        yield from _steps(member)


def _behind(steps: list[dict[str, Any]], kinds: list[str], kind: str) -> list[dict[str, Any]]:
    return steps[kinds.index(kind) + 1 :] if kind in kinds else []


def _replaces_one_character(step: dict[str, Any]) -> bool:
    return step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1
