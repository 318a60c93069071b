"""What has gathered for a slow reader is sent in messages that any client takes."""

from __future__ import annotations

import pytest

from control_plane.core.tokens import Tokens
from control_plane.rpc.answers import deltas
from control_plane.shell.stream import Delta
from tests.support.quick import spread

CLIENT_LIMIT = 4 << 20
SIZES = [0, 1, 2**16 - 1, 2**16, 2**16 + 1, 2**18, 2**18 + 1, 1_000_000, 2_000_000]


@pytest.mark.parametrize("token_count", SIZES)
@pytest.mark.parametrize("character_count", spread(SIZES, 3))
def test_any_amount_fits(token_count: int, character_count: int) -> None:
    text = "\U0001f600" * character_count
    token_ids = [2**32 - 1] * token_count
    sent = [message.delta for message in deltas(Delta(text, Tokens(token_ids)))]
    assert all(delta.ByteSize() < CLIENT_LIMIT // 2 for delta in sent)
    assert all(delta.text or delta.token_ids for delta in sent)
    assert sum(len(delta.token_ids) for delta in sent) == token_count
    assert "".join(delta.text for delta in sent) == text
    if token_count < 2**16 and character_count < 2**18:
        assert len(sent) == bool(token_count or character_count)
