"""Adapters that don't fit: refused with the reason, before anything is kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_adapters import PLAIN, PREFIX, load, save_adapter, tensors_of
from tests.support.tiny_spec import tiny_spec
from worker_service.domain.adapters import Adapter, AdapterLimits
from worker_service.domain.errors import UpdateInvalid
from worker_service.model.adapters import adaptable_modules
from worker_service.runner.adapters import AdapterSlots
from worker_service.weights.adapter_config import MAX_CONFIG_BYTES
from worker_service.weights.adapter_reader import CONFIG_NAME, TENSORS_NAME, read_adapter
from worker_service.weights.paths import allowed_path

MODULES = adaptable_modules(tiny_spec())
LIMITS = AdapterLimits(2, 8)
Tensors = dict[str, torch.Tensor]
Q0 = "model.layers.0.self_attn.q_proj"
A0, B0 = f"{PREFIX}{Q0}.lora_A.weight", f"{PREFIX}{Q0}.lora_B.weight"

# The change of a config that is fine otherwise, and what the refusal says.
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "config_json.peft_type: 'IA3' is refused: only LORA"),
    ({"peft_type": None}, "config_json.peft_type: None"),
    ({"peft_type": "lora"}, "config_json.peft_type"),
    ({"use_dora": True}, "config_json.use_dora: True is refused: DoRA scales"),
    ({"bias": "all"}, "config_json.bias: 'all'"),
    ({"bias": "lora_only"}, "config_json.bias"),
    ({"bias": None}, "config_json.bias"),
    ({"modules_to_save": ["lm_head"]}, "config_json.modules_to_save"),
    ({"fan_in_fan_out": True}, "config_json.fan_in_fan_out"),
    ({"trainable_token_indices": [1]}, "config_json.trainable_token_indices"),
    ({"layer_replication": [[0, 1]]}, "config_json.layer_replication"),
    ({"target_parameters": ["x"]}, "config_json.target_parameters"),
    ({"lora_bias": True}, "config_json.lora_bias"),
    ({"alora_invocation_tokens": [1]}, "config_json.alora_invocation_tokens"),
    ({"use_qalora": True}, "config_json.use_qalora"),
    ({"use_bdlora": {"nblocks": 2}}, "config_json.use_bdlora"),
    ({"kasa_config": {"beta": 1}}, "config_json.kasa_config.*does not know what it changes"),
    ({"arrow_config": {"top_k": 1}}, "config_json.arrow_config"),
    ({"monteclora_config": {"rho": 1}}, "config_json.monteclora_config"),
    ({"megatron_config": {"a": 1}}, "config_json.megatron_config"),
    ({"invented_tomorrow": 1}, "config_json.invented_tomorrow.*does not know"),
    ({"init_lora_weights": "pissa"}, "config_json.init_lora_weights: 'pissa'"),
    ({"init_lora_weights": "pissa_niter_4"}, "config_json.init_lora_weights"),
    ({"init_lora_weights": "olora"}, "config_json.init_lora_weights"),
    ({"init_lora_weights": "corda"}, "config_json.init_lora_weights"),
    ({"init_lora_weights": "loftq"}, "config_json.init_lora_weights"),
    ({"init_lora_weights": "lora_ga"}, "config_json.init_lora_weights"),
    ({"init_lora_weights": ["x"]}, "config_json.init_lora_weights"),
    ({"r": 0}, "config_json.r: 0"),
    ({"r": -4}, "config_json.r"),
    ({"r": 4.0}, "config_json.r: 4.0"),
    ({"r": True}, "config_json.r: True"),
    ({"r": "4"}, "config_json.r: '4'"),
    ({"r": 10**9}, "config_json.r"),
    ({"r": 3}, f"{Q0.split('.')[-1]}|has shape"),
    ({"lora_alpha": "8"}, "config_json.lora_alpha"),
    ({"lora_alpha": None}, "config_json.lora_alpha"),
    ({"lora_alpha": True}, "config_json.lora_alpha"),
    ({"lora_alpha": math.inf}, "config_json.lora_alpha"),
    ({"lora_alpha": math.nan}, "config_json.lora_alpha"),
    ({"lora_alpha": 1e38}, "config_json.lora_alpha"),
    ({"use_rslora": 1}, "config_json.use_rslora"),
    ({"target_modules": None}, "config_json.target_modules: None is refused: it names no"),
    ({"target_modules": []}, "config_json.target_modules"),
    ({"target_modules": ""}, "config_json.target_modules"),
    ({"target_modules": ["c_attn"]}, "config_json.target_modules: names no projection"),
    ({"target_modules": ["q_proj", "c_attn"]}, "target_modules: 'c_attn' is no projection"),
    ({"target_modules": [1]}, "config_json.target_modules"),
    ({"target_modules": {"q_proj": 1}}, "config_json.target_modules"),
    ({"target_modules": ["q_proj", "(a+)+$"]}, "config_json.target_modules.*no regular"),
    ({"target_modules": ["q_proj", "lm_head"]}, "target_modules: lm_head is refused"),
    ({"target_modules": ["embed_tokens"]}, "target_modules: embed_tokens is refused"),
    ({"target_modules": ["q_proj"]}, "is no tensor of a projection that target_modules names"),
    ({"exclude_modules": ["q_proj"]}, "is no tensor of a projection"),
    ({"exclude_modules": [3]}, "config_json.exclude_modules"),
    ({"layers_to_transform": [0]}, "layers_to_transform.*needs target_modules as a list"),
    ({"layers_to_transform": "0", "target_modules": ["q_proj"]}, "layers_to_transform"),
    ({"layers_to_transform": [True], "target_modules": ["q_proj"]}, "layers_to_transform"),
    ({"layers_pattern": "(h)+", "target_modules": ["q_proj"]}, "config_json.layers_pattern"),
    ({"layers_to_transform": 7, "target_modules": ["q_proj"]}, "names no projection"),
    ({"rank_pattern": ["x"]}, "config_json.rank_pattern"),
    ({"rank_pattern": {"q_proj": 0}}, "config_json.rank_pattern.q_proj: 0"),
    ({"rank_pattern": {"q_.*": 4}}, "config_json.rank_pattern: 'q_..' is refused: only names"),
    ({"rank_pattern": {"q_proj": 2}}, "has shape"),
    ({"rank_pattern": {"q_proj": 9}}, "has rank 9; a slot holds 8 at most.*--max-lora-rank"),
    ({"alpha_pattern": {"(q|v)_proj": 4}}, "config_json.alpha_pattern"),
    ({"alpha_pattern": {"q_proj": "4"}}, "config_json.alpha_pattern.q_proj"),
]
TEXTS = [
    ("", "config_json: is no JSON"),
    ("{", "config_json: is no JSON"),
    ("[1]", "config_json: is no JSON object"),
    ("null", "config_json: is no JSON object"),
    ("[" * 100_000, "config_json: is no JSON"),
    (" " * (MAX_CONFIG_BYTES + 1), "config_json: longer than"),
    ("{}", "config_json.peft_type"),
]


def with_tensor(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Tensors]:
    return lambda tensors: {**tensors, name: make(tensors[name])}


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {each: value for each, value in tensors.items() if each != name}


def also(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: torch.zeros(shape)}


def poisoned(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def poison(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed[-1, -1] = value
        return changed

    return poison


# What is done to tensors that are fine otherwise, and what the refusal says.
TENSORS: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (without(A0), "lora_A.weight': is missing"),
    (without(B0), "lora_B.weight': is missing"),
    (with_tensor(A0, lambda t: t.mT.contiguous()), "lora_A.weight': has shape"),
    (with_tensor(B0, lambda t: t.mT.contiguous()), "lora_B.weight': has shape"),
    (with_tensor(A0, lambda t: t[:, 1:].contiguous()), "has shape .4, 15.; the model"),
    (with_tensor(B0, lambda t: t[1:].contiguous()), "lora_B.weight': has shape"),
    (with_tensor(A0, lambda t: t.flatten()), "has shape .64."),
    (with_tensor(A0, lambda t: t[None]), "has shape .1, 4, 16."),
    (with_tensor(A0, lambda t: t[:0]), "has shape .0, 16."),
    (with_tensor(A0, lambda t: t.sum()), "has shape .."),
    (with_tensor(A0, lambda t: t.double()), "is stored as F64; only F32, BF16, F16"),
    (with_tensor(A0, lambda t: t.to(torch.int8)), "is stored as I8"),
    (with_tensor(A0, lambda t: t.to(torch.float8_e4m3fn)), "is stored as F8_E4M3"),
    (with_tensor(A0, poisoned(math.nan)), "numbers that are not finite"),
    (with_tensor(B0, poisoned(math.inf)), "numbers that are not finite"),
    (with_tensor(B0, poisoned(-math.inf)), "numbers that are not finite"),
    (with_tensor(B0, lambda t: poisoned(math.nan)(t.bfloat16())), "not finite"),
    (with_tensor(B0, lambda t: poisoned(math.inf)(t.half())), "not finite"),
    (also(f"{PREFIX}model.layers.0.self_attn.q_proj.lora_magnitude_vector", 16), "is no tensor"),
    (also(f"{PREFIX}model.layers.9.self_attn.q_proj.lora_A.weight", 4, 16), "is no tensor"),
    (also(f"{PREFIX}lm_head.weight", 32, 16), "is no tensor"),
    (also(f"{PREFIX}lm_head.lora_A.weight", 4, 16), "lm_head is refused"),
    (also(f"{PREFIX}model.embed_tokens.lora_embedding_A", 4, 32), "is no tensor"),
    (also(f"{Q0}.lora_A.weight", 4, 16), "is no tensor"),
    (lambda tensors: {f"x.{name}": each for name, each in tensors.items()}, "is missing"),
    (lambda tensors: {"nothing": torch.zeros(1)}, "is missing"),
]


class Recorder:
    """A slot memory that must not be asked."""

    byte_count = 1

    def prepare(self, adapter: Adapter) -> None:
        raise AssertionError("prepared")

    def put(self, slot: int) -> int:
        raise AssertionError("put")

    def clear(self, slot: int) -> None:
        raise AssertionError("cleared")


def refuse(folder: Path, message: str) -> None:
    slots = AdapterSlots(LIMITS, MODULES, Recorder())
    with pytest.raises(UpdateInvalid, match=message):
        load(slots, 1, folder)
    assert slots.held() == ()


@pytest.mark.parametrize(("change", "message"), CONFIGS)
def test_a_config_that_is_not_served(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    refuse(save_adapter(tmp_path, tensors_of(MODULES), {**PLAIN, **change}), message)


@pytest.mark.parametrize(("text", "message"), TEXTS, ids=range(len(TEXTS)))
def test_a_config_that_is_none(text: str, message: str, tmp_path: Path) -> None:
    save_adapter(tmp_path, tensors_of(MODULES))
    (tmp_path / CONFIG_NAME).write_text(text)
    refuse(tmp_path, message)


@pytest.mark.parametrize(("change", "message"), TENSORS, ids=range(len(TENSORS)))
def test_tensors_that_do_not_fit(
    change: Callable[[Tensors], Tensors], message: str, tmp_path: Path
) -> None:
    refuse(save_adapter(tmp_path, change(tensors_of(MODULES))), message)


def test_what_is_said_of_training_is_not_refused(tmp_path: Path) -> None:
    harmless = {
        "auto_mapping": {"base_model_class": "X"},
        "base_model_name_or_path": "somewhere",
        "eva_config": {"rho": 2.0},
        "init_lora_weights": "gaussian",
        "lora_dropout": 0.1,
        "megatron_core": "megatron.core",
        "peft_version": "1.0",
        "qalora_group_size": 16,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "modules_to_save": None,
        "exclude_modules": ["lm_head"],
        "target_modules": r"model\.layers\.\d+\.(self_attn|mlp)\.\w+",
    }
    folder = save_adapter(tmp_path, tensors_of(MODULES), {**PLAIN, **harmless})
    assert read_adapter(folder, MODULES, LIMITS).modules.keys() == MODULES.keys()


@pytest.mark.parametrize("cut", range(0, 2000, 211))
def test_a_truncated_file(cut: int, tmp_path: Path) -> None:
    path = save_adapter(tmp_path, tensors_of(MODULES)) / TENSORS_NAME
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    refuse(tmp_path, "is no sound safetensors file")
    path.write_bytes(whole[: len(whole) - 1 - cut])
    refuse(tmp_path, "is no sound safetensors file")


@pytest.mark.parametrize("name", [CONFIG_NAME, TENSORS_NAME])
def test_a_folder_without_a_file(name: str, tmp_path: Path) -> None:
    save_adapter(tmp_path, tensors_of(MODULES))
    (tmp_path / name).unlink()
    refuse(tmp_path, f"the folder has no {name}")


def test_paths_stay_below_the_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    save_adapter(root / "inside", tensors_of(MODULES))
    save_adapter(outside, tensors_of(MODULES))
    (root / "out").symlink_to(outside)
    (root / "in").symlink_to(root / "inside")
    (root / "loop").symlink_to(root / "loop")
    expected = (root / "inside").resolve()
    for path in ("inside", "in", "./inside", str(root / "inside"), "in/../inside"):
        assert allowed_path(path, root) == expected
    for path in ("out", "..", "../outside", str(outside), "/", "/etc", "in/../../outside"):
        with pytest.raises(UpdateInvalid, match="is not below"):
            allowed_path(path, root)
    for path in ("", "a\0b", "missing", "loop", "inside/x"):
        with pytest.raises(UpdateInvalid, match=r"update\.disk\.path"):
            allowed_path(path, root)
    with pytest.raises(UpdateInvalid, match="--weights-root"):
        allowed_path("inside", None)


def test_a_file_of_the_folder_may_not_lead_out(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    save_adapter(root / "a", tensors_of(MODULES))
    save_adapter(outside, tensors_of(MODULES))
    (root / "a" / TENSORS_NAME).unlink()
    (root / "a" / TENSORS_NAME).symlink_to(outside / TENSORS_NAME)
    with pytest.raises(UpdateInvalid, match="is not below"):
        allowed_path("a", root)
