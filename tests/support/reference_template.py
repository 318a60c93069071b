"""What transformers renders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest


def reference_rendering(
    source: str, messages: Sequence[tuple[str, str]], special_tokens: Mapping[str, str]
) -> str | None:
    """A chat, each message its role and content, as a prompt. None: the template raises.

    Skips the test where transformers is not installed.
    """
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    try:
        [text], _ = reference.render_jinja_template(
            conversations=[[{"role": role, "content": content} for role, content in messages]],
            chat_template=source,
            add_generation_prompt=True,
            **special_tokens,
        )
    except Exception:
        return None
    assert isinstance(text, str)
    return text
