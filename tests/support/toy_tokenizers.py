"""Small tokenizers of every kind of decoder that models have, and toys whose ids one can read.

SPTOY and BYTETOY are those that scripted models speak, see tests.support.chain_model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
PIECES = ["▁", "▁▁", "▁ab", "▁cd", "▁ef", "▁gh", "ab", "cd", "é", "日本", "\ufffd", "\n", "."]
SPECIAL = ["<unk>", "<s>", "</s>"]


def sptoy(*, strip: bool = True, more: Sequence[AddedToken] = ()) -> Tokenizer:
    """SentencePiece's way: U+2581 for a space, byte tokens for what has no piece.

    Ids: unk, bos, eos, 256 bytes, the letters, the pieces, then `more`.
    """
    vocabulary = [*SPECIAL, *BYTE_TOKENS, *LETTERS, *PIECES]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary)},
            merges=[("a", "b"), ("▁", "ab"), ("c", "d"), ("▁", "cd")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    spaces = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    ends = [decoders.Strip(" ", 1, 0)] if strip else []
    tokenizer.decoder = decoders.Sequence([*steps, *ends])
    tokenizer.add_special_tokens(SPECIAL)
    add(tokenizer, more)
    return tokenizer


def bytetoy(more: Sequence[AddedToken] = ()) -> Tokenizer:
    """Byte-level BPE: ids 0 to 255 are the bytes, in the order of their characters; then `more`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    add(tokenizer, more)
    return tokenizer


def add(tokenizer: Tokenizer, tokens: Sequence[AddedToken]) -> None:
    """Adds tokens in order, special or not, as tokenizer.json has them."""
    for token in tokens:
        if token.special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])


def of_words(words: Sequence[str], decoder: decoders.Decoder | None) -> Tokenizer:
    """A vocabulary of just these words; what is decoded is all that matters."""
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def bert() -> Tokenizer:
    """WordPiece that lowers case, and cleans up spaces."""
    words = ["[UNK]", "[SEP]", "hello", "world", "##s", ".", "a"]
    backend = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]", "[SEP]"])
    return backend


def decoding(tokenizer: Tokenizer, *steps: decoders.Decoder) -> Tokenizer:
    """The same with another decoder."""
    tokenizer.decoder = decoders.Sequence(list(steps))
    return tokenizer


_SPACED = ["a", "▁", "▁▁", "▁b", "c▁", "▁d▁e", "日", "", " "]
_WORDPIECES = ["a", "##b", ".", "n't", "?", "##", "日", "' ", "'m", "", " ,"]

KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": bytetoy,
    "byte fallback, stripped": sptoy,
    "byte fallback, not stripped": lambda: sptoy(strip=False),
    "byte fallback behind Metaspace": lambda: decoding(
        sptoy(), decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()
    ),
    "Metaspace": lambda: of_words(_SPACED, decoders.Metaspace()),
    "Metaspace, first": lambda: of_words(_SPACED, decoders.Metaspace(prepend_scheme="first")),
    "Metaspace, never": lambda: of_words(_SPACED, decoders.Metaspace(prepend_scheme="never")),
    "WordPiece": lambda: of_words(_WORDPIECES, decoders.WordPiece()),
    "WordPiece, not cleaned": lambda: of_words(_WORDPIECES, decoders.WordPiece(cleanup=False)),
    "BPEDecoder": lambda: of_words(["a", "b</w>", "</w>", "c d</w>", ""], decoders.BPEDecoder()),
    "CTC": lambda: of_words(["a", "b", "|", "<pad>", "ab"], decoders.CTC()),
    "none": lambda: of_words(["a", "b", "", " ", "日"], None),
    "Fuse, then Replace": lambda: of_words(
        _SPACED, decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")])
    ),
    "two spaces stripped": lambda: of_words(
        _SPACED,
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2)]),
    ),
    "each token stripped": lambda: of_words(
        _SPACED,
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1), decoders.Fuse()]),
    ),
}
