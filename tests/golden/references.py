"""The stored references, and what it means to agree with one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TIE = 1e-3
"""Where the reference's two highest logits are closer than this, additions' order decides."""


@dataclass(frozen=True, slots=True)
class Reference:
    """One prompt's greedy continuation by `transformers`, and the top-two gap at each token."""

    kind: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]

    def disagreement(self, tokens: Sequence[int]) -> str | None:
        """Where `tokens` differ although the reference is sure; None when they agree.

        After a difference at a tie the two texts go their own ways: the rest says nothing.
        """
        if len(tokens) != len(self.tokens):
            return f"{len(tokens)} tokens instead of {len(self.tokens)}"
        for index, (ours, theirs, gap) in enumerate(
            zip(tokens, self.tokens, self.gaps, strict=True)
        ):
            if ours != theirs:
                return None if gap < TIE else f"token {index}: {ours}, not {theirs} (gap {gap})"
        return None


def load_references() -> list[Reference]:
    """All of them, in the order of tests.golden.prompts."""
    text = (Path(__file__).parent / "data" / "references.json").read_text()
    return [
        Reference(r["kind"], tuple(r["prompt"]), tuple(r["tokens"]), tuple(r["gaps"]))
        for r in json.loads(text)
    ]
