"""Small tokenizers of both kinds, built here so that no model is needed."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from control_plane.text.tokenizer import Tokenizer, byte_level_alphabet


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """One token per byte, some merges (two of them across characters), specials, added text."""
    letter = {byte: character for character, byte in byte_level_alphabet().items()}
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [b"th", b" the", b"\xe2\x82", b"\xf0\x9f", b"\xac ", b"\xbf\xbd", b"\xef\xbf\xbd"]
    vocabulary = {
        "".join(letter[byte] for byte in piece): index for index, piece in enumerate(pieces)
    }
    merges = [(letter[ord("t")], letter[ord("h")]), (letter[0xE2], letter[0x82])]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|start|>"])
    backend.add_tokens(["<think>", "größe", "two words"])
    return Tokenizer(backend)


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """SentencePiece style: ▁ for spaces, <0xNN> for what has no token, a leading space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "a", "b", "▁a", "▁the", "é", "日本", "\ufffd", "ab", "\n", "a▁", ""]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("▁", "a"), ("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend)
