"""What a GGUF file says about its tokenizer, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from twinplane.models.errors import ConversionUnsupported, ModelInvalid
from twinplane.models.gguf.file import GgufFile


class TokenType(IntEnum):
    """llama.cpp's token types (gguf.TokenType)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class TokenizerMetadata:
    """`tokens`, `types` and (for SentencePiece) `scores` are indexed by token id."""

    source: str
    model: str
    pre_tokenizer: str | None
    tokens: list[str]
    types: list[TokenType]
    merges: list[tuple[str, str]]
    scores: list[float]
    bos: int | None
    eos: list[int]
    unknown: int | None
    padding: int | None
    add_bos: bool | None
    add_eos: bool
    add_space_prefix: bool
    chat_template: str | None

    def text(self, token: int | None) -> str | None:
        """The token's text, or None for None."""
        return None if token is None else self.tokens[token]


def read_tokenizer_metadata(file: GgufFile) -> TokenizerMetadata:
    """Reads and checks the metadata. Raises ModelInvalid."""
    source = str(file.path)
    tokens = file.find_list("tokenizer.ggml.tokens", str)
    if not tokens:
        raise ModelInvalid(f"{source}: tokenizer.ggml.tokens is missing")
    if len(set(tokens)) != len(tokens):
        raise ModelInvalid(f"{source}: tokenizer.ggml.tokens has a token twice")
    raw_types = file.find_list("tokenizer.ggml.token_type", int) or [1] * len(tokens)
    scores = file.find_list("tokenizer.ggml.scores", float) or []
    for key, values in (("token_type", raw_types), ("scores", scores)):
        if values and len(values) != len(tokens):
            raise ModelInvalid(f"{source}: tokenizer.ggml.{key} has another length than tokens")
    try:
        types = [TokenType(value) for value in raw_types]
    except ValueError as error:
        raise ModelInvalid(f"{source}: tokenizer.ggml.token_type: {error}") from error
    return TokenizerMetadata(
        source=source,
        model=file.find_text("tokenizer.ggml.model") or "",
        pre_tokenizer=file.find_text("tokenizer.ggml.pre"),
        tokens=tokens,
        types=types,
        merges=_merges(file),
        scores=scores,
        bos=_token(file, "bos", len(tokens)),
        eos=_end_tokens(file, len(tokens)),
        unknown=_token(file, "unknown", len(tokens)),
        padding=_token(file, "padding", len(tokens)),
        add_bos=file.find_bool("tokenizer.ggml.add_bos_token"),
        add_eos=file.find_bool("tokenizer.ggml.add_eos_token") or False,
        add_space_prefix=file.find_bool("tokenizer.ggml.add_space_prefix") is not False,
        chat_template=file.find_text("tokenizer.chat_template"),
    )


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    merges = []
    for line in file.find_list("tokenizer.ggml.merges", str) or []:
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            raise ModelInvalid(f"{file.path}: tokenizer.ggml.merges has the line {line!r}")
        merges.append((left, right))
    return merges


def _token(file: GgufFile, name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = file.find_int(key)
    if value is not None and not 0 <= value < count:
        raise ModelInvalid(f"{file.path}: {key} is {value}, and there are {count} tokens")
    return value


def _end_tokens(file: GgufFile, count: int) -> list[int]:
    """The file's tokens for the end of a text, of a turn and of a message, each once."""
    found = [_token(file, name, count) for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(token for token in found if token is not None))


def unsupported(metadata: TokenizerMetadata, what: str) -> ConversionUnsupported:
    """The error that names the feature which the conversion lacks."""
    return ConversionUnsupported(f"{metadata.source}: {what} can't be converted")
