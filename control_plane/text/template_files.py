"""Reads a model's chat template and the special tokens it may name from the model's folder.

The files, and which of them counts, are those of `transformers`' tokenizers: tokenizer_config.json,
special_tokens_map.json, chat_template.jinja and additional_chat_templates/*.jinja. A template that
can't be used costs chat, not the model: it is returned with its fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane.text.chat_template import ChatTemplate

_STANDARD = frozenset(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_DEFAULT = "default"
_CLASS_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
}
"""What `transformers`' classes call the tokens that the files leave out."""
_CLASS_OF_TYPE = {"mistral": None, "qwen2": "Qwen2Tokenizer"}
"""The class that a kind of model always has, whatever its files say; None: one without defaults."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens that a model's files name.

    `named` are those with a name, which templates may use (bos_token, image_token …); `extra` are
    others.
    """

    named: Mapping[str, str]
    extra: frozenset[str]

    @property
    def texts(self) -> frozenset[str]:
        """All of them, as they are written."""
        return self.extra.union(self.named.values())


def class_defaults(
    tokenizer_config: Mapping[str, Any], config: Mapping[str, Any], *, byte_level: bool
) -> Mapping[str, str]:
    """The special tokens that the tokenizer's class names, if the files do not.

    From tokenizer_config.json and config.json. `byte_level`: the tokenizer splits text into bytes,
    so it is none of Llama's first one, though files may say so.
    """
    declared = tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class")
    name = declared.removesuffix("Fast") if isinstance(declared, str) else None
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in _CLASS_OF_TYPE:
        name = _CLASS_OF_TYPE[kind]
    if name is None or (name == "LlamaTokenizer" and byte_level):
        return {}
    return _CLASS_DEFAULTS.get(name, {})


def read_special_tokens(
    tokenizer_config: Mapping[str, Any],
    special_tokens_map: Mapping[str, Any],
    defaults: Mapping[str, str],
) -> SpecialTokens:
    """From the contents of the two files of that name; an empty mapping for one that is absent.

    `defaults` are what a name that is in neither means.
    """
    config = dict(tokenizer_config)
    if not config.get("extra_special_tokens"):
        config["extra_special_tokens"] = config.pop("additional_special_tokens", None)
    # What has a list of its added tokens is read without the older file.
    if "added_tokens_decoder" not in config:
        config |= _of_older_file(config, special_tokens_map)
    named: dict[str, Any] = dict(defaults)
    named |= {
        name: value
        for name, value in config.items()
        if name.endswith("_token") and (name in _STANDARD or _is_token(value))
    }
    declared = config.get("added_tokens_decoder")
    extra: list[Any] = [
        token
        for token in (declared.values() if isinstance(declared, dict) else ())
        if isinstance(token, dict) and token.get("special") is True
    ]
    for more in (config.get("model_specific_special_tokens"), config["extra_special_tokens"]):
        match more:
            case dict():
                named |= more
            case list():
                extra += more
            case _:
                pass
    texts = {name: _text(value) for name, value in named.items()}
    return SpecialTokens(
        {name: text for name, text in texts.items() if text is not None},
        frozenset(text for text in map(_text, extra) if text is not None),
    )


def _of_older_file(
    config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]
) -> dict[str, Any]:
    """What special_tokens_map.json says instead: its standard names win, a list is added."""
    older: dict[str, Any] = {
        name: _text(value) if name.endswith("_token") else value
        for name, value in special_tokens_map.items()
        # A name that only this model has is taken from the newer file, where that has it.
        if name in _STANDARD or not isinstance(config.get(name), str)
    }
    extra = older.pop("extra_special_tokens", None) or older.pop("additional_special_tokens", None)
    known = config["extra_special_tokens"]
    if isinstance(extra, dict):
        older["model_specific_special_tokens"] = {
            **(config.get("model_specific_special_tokens") or {}),
            **extra,
        }
    elif isinstance(extra, list):
        if isinstance(known, dict):
            older["model_specific_special_tokens"] = known
            known = None
        older["extra_special_tokens"] = [*(known or []), *extra]
    return older


def _is_token(value: object) -> bool:
    """A name that only this model has is that of a token when its value says that it is one."""
    return isinstance(value, str) or (
        isinstance(value, dict) and value.get("__type") == "AddedToken"
    )


def _text(token: object) -> str | None:
    """A token is written as a string or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def read_template(
    folder: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The template for conversations without tools; None when the files have none at all."""

    def made(file: str, source: str, fault: str | None = None) -> ChatTemplate:
        return ChatTemplate(source, special_tokens, file, fault)

    files = [folder / "chat_template.jinja"]
    # Read last, so that a file of the same name wins.
    files += sorted((folder / "additional_chat_templates").glob("*.jinja"))
    there = [path for path in files if path.is_file()]
    if there:
        chosen = [path for path in there if path == files[0] or path.stem == _DEFAULT]
        if not chosen:
            return made("additional_chat_templates", "", f"has none that is named {_DEFAULT}")
        file = str(chosen[-1].relative_to(folder))
        try:
            return made(file, chosen[-1].read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            return made(file, "", f"can't be read: {_reason(error)}")
    if tokenizer_config.get("chat_template") is not None:
        file = "tokenizer_config.json"
        return made(file, *_configured(tokenizer_config["chat_template"]))
    return _of_processor(folder / "chat_template.json", made)


def _of_processor(path: Path, made: Callable[..., ChatTemplate]) -> ChatTemplate | None:
    """From the file in which `transformers` keeps a processor's template beside a tokenizer."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return made(path.name, "", f"can't be read: {_reason(error)}")
    return made(
        path.name, *_configured(value.get("chat_template") if isinstance(value, dict) else None)
    )


def _configured(value: object) -> tuple[str, str | None]:
    """The source and the fault of what a JSON file has under `chat_template`."""
    if isinstance(value, list):
        value = {
            one["name"]: one.get("template")
            for one in value
            if isinstance(one, dict) and isinstance(one.get("name"), str)
        }
    if isinstance(value, dict):
        if _DEFAULT not in value:
            return "", f"has none that is named {_DEFAULT}"
        value = value[_DEFAULT]
    return (value, None) if isinstance(value, str) else ("", "is not a text")


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return f"it is not JSON: {error}"
