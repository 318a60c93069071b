"""adapter_config.json as PEFT writes it: what an adapter changes, and by how much.

Whatever would change the results and is not understood is refused with the reason. Patterns are
never run as regular expressions: a config may come from anybody, and one that never ends would stop
the worker. A `target_modules` that is one is taken to mean the modules that have tensors.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from worker_service.domain.errors import UpdateInvalid

CONFIG_FIELD = "config_json"
MAX_CONFIG_BYTES = 1 << 20
ALL_LINEAR = "all-linear"
_LARGEST_RANK = 1 << 16
_SHOWN_LENGTH = 80

# Said about a training run, or about what this worker reads from the tensors: never of the results.
_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
        "velora_config",
    }
)
_READ = frozenset(
    {
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_rslora",
    }
)
# Why a key may not be set, in words that follow it.
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "use_dora": "DoRA scales whole columns of the model's weights; merge it into the model",
        "modules_to_save": "modules that were trained whole are weights of their own; merge them",
        "fan_in_fan_out": "no served model keeps its weights transposed",
        "trainable_token_indices": "rows of the embedding can't be changed by an adapter",
        "layer_replication": "it makes another model of more layers",
        "target_parameters": "only projections can be adapted, no single parameters",
        "lora_bias": "biases of the low-rank matrices are not applied",
        "alora_invocation_tokens": "an adapter is applied to every token of a sequence",
        "use_qalora": "its inputs are pooled in groups, which no executor does",
        "use_bdlora": "block-diagonal matrices are not applied",
    }
)
# Initialisations that leave the base model's weights as they were.
_INITIALISATIONS = ("gaussian", "eva", "orthogonal")
_PLAIN = re.compile(r"[\w.\-]+\Z")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What a config asks for.

    `targets`: the ends of modules' names, none: all projections of all layers, less `excluded`.
    `is_by_pattern`: of those, the modules that have tensors. `layers`: the layers that are changed,
    None: all; `layer_lists`: what their list is called, none: any.
    """

    rank: int
    alpha: float
    is_rank_stabilized: bool
    targets: tuple[str, ...]
    excluded: tuple[str, ...]
    is_by_pattern: bool
    layers: frozenset[int] | None
    layer_lists: tuple[str, ...]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def wants(self, module: str) -> bool:
        """Whether the module, one of a layer's, is changed, or where `is_by_pattern` may be."""
        if any(_ends_in(module, each) for each in self.excluded):
            return False
        named = any(_ends_in(module, each) for each in self.targets) and self._in_layers(module)
        return named or not self.targets

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices."""
        return int(_of_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What the product of a module's matrices is scaled by."""
        alpha = _of_pattern(self.alpha_pattern, module, self.alpha)
        return _scale(alpha, self.rank_of(module), self.is_rank_stabilized)

    @property
    def scale(self) -> float:
        """That of a module that no pattern is about."""
        return _scale(self.alpha, self.rank, self.is_rank_stabilized)

    def _in_layers(self, module: str) -> bool:
        if self.layers is None:
            return True
        segments = module.split(".")
        for name, index in itertools.pairwise(segments[1:]):
            if index.isdecimal() and (not self.layer_lists or name in self.layer_lists):
                return int(index) in self.layers
        return False


def read_adapter_config(text: str) -> AdapterConfig:
    """The config in a JSON text. Raises UpdateInvalid, which names the key and says why."""
    values = _parse(text)
    for key, value in sorted(values.items()):
        if key in _READ or key in _HARMLESS or not value:
            continue
        reason = _REFUSED.get(key, "this worker does not know what it changes")
        raise _refused(key, value, reason)
    if values.get("peft_type") != "LORA":
        raise _refused("peft_type", values.get("peft_type"), "only LORA can be served")
    if values.get("bias", "none") != "none":
        raise _refused(
            "bias", values["bias"], "trained biases are weights of the model; merge them"
        )
    _check_initialisation(values.get("init_lora_weights", True))
    targets, excluded = values.get("target_modules"), values.get("exclude_modules")
    excludes_by_pattern = isinstance(excluded, str) and bool(excluded)
    layers = _layers(values.get("layers_to_transform"))
    lists = _names("layers_pattern", values.get("layers_pattern"))
    if layers is not None and isinstance(targets, str):
        raise _refused(
            "layers_to_transform", sorted(layers), "it needs target_modules as a list of names"
        )
    return AdapterConfig(
        rank=_rank("r", values.get("r", 8)),
        alpha=_number("lora_alpha", values.get("lora_alpha", 8)),
        is_rank_stabilized=_flag("use_rslora", values.get("use_rslora", False)),
        targets=_targets(targets),
        excluded=() if excludes_by_pattern else _names("exclude_modules", excluded),
        is_by_pattern=excludes_by_pattern or _is_pattern(targets),
        layers=layers,
        layer_lists=lists,
        rank_pattern={
            name: _rank(f"rank_pattern.{name}", value)
            for name, value in _pattern("rank_pattern", values.get("rank_pattern")).items()
        },
        alpha_pattern={
            name: _number(f"alpha_pattern.{name}", value)
            for name, value in _pattern("alpha_pattern", values.get("alpha_pattern")).items()
        },
    )


def _parse(text: str) -> dict[str, Any]:
    if len(text) > MAX_CONFIG_BYTES:
        raise UpdateInvalid(CONFIG_FIELD, f"longer than {MAX_CONFIG_BYTES} characters")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UpdateInvalid(CONFIG_FIELD, f"is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise UpdateInvalid(CONFIG_FIELD, "is no JSON object")
    return values


def _check_initialisation(value: Any) -> None:
    if isinstance(value, bool) or value in _INITIALISATIONS:
        return
    raise _refused(
        "init_lora_weights",
        value,
        "it changes the base model's weights, or may; save the adapter converted to plain LoRA "
        f"(known to leave them: true, false, {', '.join(_INITIALISATIONS)})",
    )


def _targets(value: Any) -> tuple[str, ...]:
    """The names; none for a pattern, and for all linear modules."""
    if isinstance(value, str) and value:
        return ()
    names = _names("target_modules", value)
    if not names:
        raise _refused("target_modules", value, "it names no module")
    return names


def _is_pattern(value: Any) -> bool:
    return isinstance(value, str) and value.lower() != ALL_LINEAR


def _names(key: str, value: Any) -> tuple[str, ...]:
    """Names of modules or lists, without anything that would make them a pattern."""
    given = [value] if isinstance(value, str) else value or []
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise _refused(key, value, "a list of names is wanted")
    for each in given:
        if not _PLAIN.match(each):
            raise _refused(key, each, "only names are read, no regular expressions")
    return tuple(dict.fromkeys(given))


def _layers(value: Any) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    given = value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in given):
        raise _refused("layers_to_transform", value, "a list of layers' numbers is wanted")
    return frozenset(given)


def _pattern(key: str, value: Any) -> dict[str, Any]:
    """What is said of single modules, by the ends of their names; a name that begins with ^ is
    whole."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _refused(key, value, "an object is wanted")
    named = {}
    for name, each in value.items():
        plain = name.replace(r"\.", ".").removesuffix("$")
        if not _PLAIN.match(plain.removeprefix("^")):
            raise _refused(key, name, "only names are read, no regular expressions")
        named[plain] = each
    return named


def _of_pattern(pattern: Mapping[str, float], module: str, default: float) -> float:
    for name, value in pattern.items():
        if module == name[1:] if name.startswith("^") else _ends_in(module, name):
            return value
    return default


def _ends_in(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _rank(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST_RANK:
        raise _refused(key, value, f"a whole number from 1 to {_LARGEST_RANK} is wanted")
    return value


def _number(key: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or abs(value) > 1e30:
        raise _refused(key, value, "a number is wanted")
    return float(value)


def _flag(key: str, value: Any) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _refused(key, value, "true or false is wanted")
    return value


def _scale(alpha: float, rank: int, is_rank_stabilized: bool) -> float:
    return alpha / math.sqrt(rank) if is_rank_stabilized else alpha / rank


def shown(value: object) -> str:
    """A value in a message, shortened."""
    text = repr(value)
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}…"


def _refused(key: str, value: object, reason: str) -> UpdateInvalid:
    return UpdateInvalid(f"{CONFIG_FIELD}.{key}", f"{shown(value)} is refused: {reason}")


def last_names(modules: Iterable[str]) -> tuple[str, ...]:
    """The last parts of modules' names, each once, sorted."""
    return tuple(sorted({module.rpartition(".")[2] for module in modules}))
