"""Builds tokenizer.json and tokenizer_config.json from a GGUF file's tokenizer metadata.

Byte-level BPE (`gpt2`) is the same algorithm in llama.cpp and `tokenizers`; the file names only the
way in which text is split beforehand. SentencePiece BPE (`llama`) becomes ranked merges with byte
fallback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinplane.models.gguf.tokenizer_metadata import TokenizerMetadata, TokenType, unsupported

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_SPACE = "▁"  # what SentencePiece writes for a space

# How Llama 3 and Qwen 2 split text into words. They differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(metadata: TokenizerMetadata) -> Tokenizer:
    """The tokenizer. Raises ConversionUnsupported for a kind it can't reproduce exactly."""
    match metadata.model:
        case "gpt2":
            tokenizer = _byte_level(metadata)
        case "llama":
            tokenizer = _sentence_piece(metadata)
        case other:
            raise unsupported(metadata, f"tokenizer model {other!r}")
    _add_tokens(tokenizer, metadata)
    _add_template(tokenizer, metadata)
    return tokenizer


def tokenizer_config(metadata: TokenizerMetadata, context_length: int) -> dict[str, object]:
    """The content of tokenizer_config.json."""
    eos = metadata.eos[0] if metadata.eos else None
    config: dict[str, object] = {
        "add_prefix_space": False,
        "bos_token": metadata.text(metadata.bos),
        "chat_template": metadata.chat_template,
        "clean_up_tokenization_spaces": False,
        "eos_token": metadata.text(eos),
        "model_max_length": context_length,
        "pad_token": metadata.text(metadata.padding),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": metadata.text(metadata.unknown),
    }
    return {key: value for key, value in config.items() if value is not None}


def _byte_level(metadata: TokenizerMetadata) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pre = _pre_tokenizer(metadata)
    vocabulary = {text: token for token, text in enumerate(metadata.tokens)}
    for left, right in metadata.merges:
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise unsupported(metadata, f"a merge of unknown tokens ({left!r}, {right!r})")
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=metadata.merges, ignore_merges=_is_llama3(metadata))
    )
    if metadata.pre_tokenizer == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _is_llama3(metadata: TokenizerMetadata) -> bool:
    return metadata.model == "gpt2" and metadata.pre_tokenizer in ("llama-bpe", "llama3")


def _pre_tokenizer(metadata: TokenizerMetadata) -> PreTokenizer:
    """The pre-tokenizer for llama.cpp's name of a way to split text (llama-vocab.cpp)."""
    from tokenizers import Regex, pre_tokenizers

    def by_words(digits: str) -> PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    match metadata.pre_tokenizer:
        case "gpt-2":
            return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        case "smollm":
            return pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            )
        case "llama-bpe" | "llama3":
            return by_words(r"\p{N}{1,3}")
        case "qwen2":
            return by_words(r"\p{N}")
        case other:
            raise unsupported(metadata, f"pre-tokenizer {other!r}")


def _sentence_piece(metadata: TokenizerMetadata) -> Tokenizer:
    """The same as transformers makes of Llama's tokenizer.model: merges by score, spaces as U+2581.

    With `add_space_prefix` a space is put before each stretch of text between added tokens, as
    llama.cpp does.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    if not metadata.scores:
        raise unsupported(metadata, "a SentencePiece tokenizer without scores")
    if not {f"<0x{byte:02X}>" for byte in range(256)} <= set(metadata.tokens):
        raise unsupported(metadata, "a SentencePiece tokenizer without byte tokens")
    if any(
        kind is TokenType.USER_DEFINED and _SPACE in text
        for text, kind in zip(metadata.tokens, metadata.types, strict=True)
    ):
        raise unsupported(metadata, "a user-defined token with a space")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: token for token, text in enumerate(metadata.tokens)},
            merges=_merges_by_score(metadata),
            unk_token=metadata.text(metadata.unknown),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    parts: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if metadata.add_space_prefix:
        spaces.insert(0, normalizers.Prepend(_SPACE))
        parts.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _merges_by_score(metadata: TokenizerMetadata) -> list[tuple[str, str]]:
    """Every split of a piece into two pieces, those of the best piece first.

    SentencePiece joins the neighbours whose joint piece scores highest; the rank of a merge has the
    same effect. The ways to split one piece are in the order of their parts' ids.
    """
    pieces = {
        text: token
        for token, (text, kind) in enumerate(zip(metadata.tokens, metadata.types, strict=True))
        if kind in (TokenType.NORMAL, TokenType.UNUSED)
    }
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for text, token in pieces.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in pieces and right in pieces:
                score = metadata.scores[token]
                ranked.append((-score, pieces[left], pieces[right], (left, right)))
    ranked.sort()
    return [merge for *_, merge in ranked]


def _add_tokens(tokenizer: Tokenizer, metadata: TokenizerMetadata) -> None:
    """Adds the tokens that are matched in raw text. Control tokens are special, others are not.

    They are added in the order of their ids. Each is in the vocabulary already, so it keeps its id.
    """
    from tokenizers import AddedToken

    special, plain = [], []
    for text, kind in zip(metadata.tokens, metadata.types, strict=True):
        match kind:
            case TokenType.CONTROL | TokenType.UNKNOWN:
                special.append(AddedToken(text, special=True, normalized=False))
            case TokenType.USER_DEFINED:
                plain.append(AddedToken(text, special=False, normalized=False))
            case TokenType.NORMAL | TokenType.UNUSED | TokenType.BYTE:
                pass
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_template(tokenizer: Tokenizer, metadata: TokenizerMetadata) -> None:
    """Adds the tokens that are put around every text.

    Where the file doesn't say, llama.cpp begins with `bos` for SentencePiece and Llama 3.
    """
    from tokenizers import processors

    add_bos = metadata.add_bos
    if add_bos is None:
        add_bos = metadata.model == "llama" or _is_llama3(metadata)
    before = [metadata.bos] if add_bos and metadata.bos is not None else []
    after = metadata.eos[:1] if metadata.add_eos else []
    if not before and not after:
        return

    # Lists, not a template string, because a token's own text may hold spaces, colons or dollars.
    named = {metadata.tokens[token]: token for token in (*before, *after)}
    begin = [metadata.tokens[token] for token in before]
    end = [metadata.tokens[token] for token in after]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, *begin, "$B", *end],
        special_tokens=list(named.items()),
    )
