"""A stop text that is accepted can be found; one that no tokens give is known beforehand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from control_plane.text.assembler import TextAssembler
from control_plane.text.decoders import decoder_kind
from control_plane.text.end_of_sequence import EndTokens
from control_plane.text.errors import ModelFilesInvalid
from control_plane.text.model_files import TextModel
from control_plane.text.processor import TextLimits, TextProcessor
from control_plane.text.stop_strings import StopMatcher, StopStrings
from control_plane.text.tokenizer import Tokenizer
from tests.support.quick import examples
from tests.support.toy_tokenizers import KINDS, bert, bytetoy, of_words, sptoy

Make = Callable[[tokenizers.Tokenizer], TextProcessor]


@pytest.fixture(scope="module")
def processor() -> Iterator[Make]:
    with ExitStack() as stack:

        def make(backend: tokenizers.Tokenizer) -> TextProcessor:
            model = TextModel(Tokenizer(backend), None, EndTokens())
            made = TextProcessor(model, TextLimits(thread_count=1), None)
            stack.callback(made.close)
            return made

        yield make


@pytest.mark.parametrize(
    ("make", "string", "expected"),
    [
        (bytetoy, "é\ufffd▁\n🙂", True),
        (sptoy, "é\ufffd▁\n🙂", True),
        (sptoy, " cd", True),
        (sptoy, "</s>", True),
        (lambda: sptoy(strip=False), "  \u2028", True),
        (bert, "hello", True),
        (bert, " hello", True),
        (bert, "hellos world.", True),
        (bert, "Hello", False),
        (bert, "hello .", False),
        (bert, "\n", False),
        (bert, "🙂", False),
        (bert, "[SEP]", True),
        (KINDS["Metaspace"], "▁", False),
        (lambda: of_words(["a", "b"], None), "ab", False),
        (lambda: of_words(["a", "b"], None), "a b", True),
        (lambda: of_words(["a", "b"], None), " b", True),
        (lambda: of_words(["a</w>", "b</w>"], decoders.BPEDecoder()), "</w>", False),
    ],
)
def test_what_can_be_written(
    processor: Make, make: Callable[[], tokenizers.Tokenizer], string: str, expected: bool
) -> None:
    text = processor(make())
    assert text.can_write(string, text.ends(chat=False, ignored=False)) is expected


@pytest.mark.parametrize("kind", [name for name in KINDS if name.startswith("byte")])
@settings(max_examples=examples(150), deadline=None)
@given(string=st.text(min_size=1, max_size=6), before=st.text(max_size=4), cut=st.integers(0, 50))
def test_every_text_can_be_a_stop_text_where_all_bytes_are_tokens(
    processor: Make, kind: str, string: str, before: str, cut: int
) -> None:
    backend = KINDS[kind]()
    text = processor(backend)
    ends = text.ends(chat=False, ignored=False)
    assert text.can_write(string, ends)
    written = (before + string).encode()
    if kind == "byte-level":
        tokens = backend.encode(before + string, add_special_tokens=False).ids
    else:
        tokens = [backend.token_to_id(f"<0x{byte:02X}>") for byte in written]
    prompt = backend.encode("ab", add_special_tokens=False).ids
    whole = text.assembler([string], prompt, ends)
    count = whole.push(tokens)
    assert count is not None
    assert whole.stop_string == string
    # Found at any split, after the same token.
    split = text.assembler([string], prompt, ends)
    first = min(cut, len(tokens))
    head = split.push(tokens[:first])
    tail = split.push(tokens[first:]) if head is None else None
    assert count == head or count == first + (tail or 0)
    assert split.stop_string == string
    split.finish()
    assert split.drain() + string == written[:count].decode()


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
def test_every_part_of_an_answer_is_found_where_it_completes(
    kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(kind)
    ids = st.integers(0, tokenizer.token_count)
    prompt = data.draw(st.lists(ids, max_size=4))
    tokens = data.draw(st.lists(ids, min_size=1, max_size=16))
    detokenizer = tokenizer.detokenizer(prompt)
    texts = list(itertools.accumulate(detokenizer.push([token]) for token in tokens))
    whole = texts[-1] + detokenizer.flush()
    assume(whole)
    start = data.draw(st.integers(0, len(whole) - 1))
    string = whole[start : data.draw(st.integers(start + 1, len(whole)))]
    assembler = TextAssembler(
        tokenizer.detokenizer(prompt), set(), tokenizer.text_of, StopMatcher(StopStrings([string]))
    )
    taken = 0
    for group in grouped(tokens, data.draw(st.lists(st.integers(0, 99), max_size=4))):
        count = assembler.push(group)
        taken += len(group) if count is None else count
        if count is not None:
            break
    assembler.finish()
    assert assembler.stop_string == string
    assert assembler.drain() == whole[: whole.index(string)]
    found = [number for number, text in enumerate(texts, 1) if string in text]
    assert taken == (found[0] if found else len(tokens))


def grouped(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    ends = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    return [tokens[start:end] for start, end in itertools.pairwise(ends)]


def test_stop_texts_are_found_at_any_split(processor: Make) -> None:
    text = processor(sptoy())
    ends = text.ends(chat=False, ignored=False)
    backend = sptoy()
    smile = [backend.token_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    [cd, ef] = [backend.token_to_id(piece) for piece in ("▁cd", "▁ef")]
    tokens = [cd, *smile, ef, *smile]
    for string, count in (("🙂", 5), (" ef", 6), ("d🙂 e", 6), ("f🙂", 10), (" cd", 1)):
        for cut in range(len(tokens) + 1):
            assembler = text.assembler([string], [ef], ends)
            head = assembler.push(tokens[:cut])
            found = head if head is not None else cut + (assembler.push(tokens[cut:]) or 99)
            assert found == count
            assembler.finish()
            assert " cd🙂 ef🙂".startswith(assembler.drain() + string)


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), "ByteLevel"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.ByteLevel()]), "ByteLevel"),
        (decoders.Strip(" ", 0, 1), "strips"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]), "strips"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]), "Replace"),
        (
            decoders.Sequence([decoders.Fuse(), decoders.Replace(tokenizers.Regex("a+"), "")]),
            "Replace",
        ),
        (decoders.Sequence([decoders.Fuse(), decoders.WordPiece()]), "WordPiece"),
        (
            decoders.Sequence([decoders.Sequence([decoders.Fuse()]), decoders.CTC()]),
            "CTC",
        ),
    ],
)
def test_decoders_that_can_not_be_streamed_are_refused(
    decoder: decoders.Decoder, reason: str
) -> None:
    with pytest.raises(ModelFilesInvalid, match=reason):
        decoder_kind(of_words(["a"], decoder))


def test_nested_chains_are_read() -> None:
    inner = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    kind = decoder_kind(of_words(["a"], decoders.Sequence([inner, decoders.Fuse()])))
    assert (kind.byte_level, kind.byte_fallback, kind.keeps_bytes) == (False, True, True)
    replaced = decoders.Sequence([inner, decoders.Fuse(), decoders.Replace("a", "b")])
    assert not decoder_kind(of_words(["a"], replaced)).keeps_bytes
