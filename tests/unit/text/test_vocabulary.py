"""Tokenizer and model that meet: who is told, and how often."""

from __future__ import annotations

import pytest

from control_plane.text.tokenizer import Tokenizer
from control_plane.text.vocabulary import VocabularyCheck
from tests.support.toy_tokenizers import KINDS, bytetoy


@pytest.mark.parametrize(
    ("token_count", "sizes", "warned"),
    [
        (300, [300], []),
        (300, [320], []),
        (300, [300 + 1024], []),
        (300, [300 + 1025], ["the worker's model has many tokens"]),
        (151_665, [151_936], []),
        (50_295, [51_200], []),
        (100_002, [102_400], []),
        (32_000, [128_256], ["the worker's model has many tokens"]),
        (301, [300], ["the tokenizer has tokens"]),
        (301, [300, 300, 300], ["the tokenizer has tokens"]),
        (301, [300, 301, 300], ["the tokenizer has tokens"]),
        (301, [300, 200], ["the tokenizer has tokens"] * 2),
    ],
)
def test_each_difference_is_told_once(
    caplog: pytest.LogCaptureFixture, token_count: int, sizes: list[int], warned: list[str]
) -> None:
    check = VocabularyCheck(token_count)
    for size in sizes:
        check.meet(size)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * len(warned)
    for record, beginning in zip(caplog.records, warned, strict=True):
        assert record.getMessage().startswith(beginning)
        assert vars(record)["fields"]["tokenizer_size"] == token_count


@pytest.mark.parametrize("kind", KINDS)
def test_all_ids_are_below_the_token_count(kind: str) -> None:
    backend = KINDS[kind]()
    count = Tokenizer(backend).token_count
    assert backend.id_to_token(count - 1) is not None
    assert all(backend.id_to_token(token) is None for token in range(count, count + 3))


def test_ids_that_the_tokenizer_lacks_have_no_text() -> None:
    tokenizer = Tokenizer(bytetoy())
    detokenizer = tokenizer.detokenizer()
    letter = tokenizer.id_of("a")
    assert letter is not None
    assert detokenizer.push([letter, 300, 2**32 - 1, letter]) == "aa"
    assert tokenizer.decode([letter, 300, 2**32 - 1], hidden=frozenset()) == "a"
