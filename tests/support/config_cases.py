"""Random config.json files: keys left out, doubled, in another version's spelling, mistyped."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]

MODEL_TYPES = ("llama", "mistral", "qwen2")
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
WRONG: tuple[Any, ...] = (
    True,
    "32",
    32.5,
    None,
    float("nan"),
    float("inf"),
    float("-inf"),
    -1,
    0,
    [32],
    {"value": 32},
    10**12,
)
INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "max_window_layers",
    "eos_token_id",
)
NUMBERS = ("rms_norm_eps", "rope_theta")
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
SCALINGS: tuple[Config, ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
    {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.3, "beta_fast": 20.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
)


@dataclass
class Case:
    """A config.json, and the keys that are not as transformers would have written them."""

    config: Config
    touched: set[str] = field(default_factory=set)


def plain(model_type: str, draw: random.Random) -> Config:
    """A small model's config, its options drawn."""
    heads = draw.choice((2, 4, 8))
    layers = draw.randint(1, 3)
    config: Config = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": 64,
        "hidden_size": 8 * heads,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice((1, heads)),
        "max_position_embeddings": 64,
        "rms_norm_eps": draw.choice((1e-5, 1e-6)),
        "tie_word_embeddings": draw.random() < 0.5,
        "hidden_act": "silu",
        "rope_theta": draw.choice((10000.0, 500000.0, 20000)),
        "eos_token_id": draw.choice((None, 1, [1, 2])),
        "torch_dtype": draw.choice(("float32", "bfloat16")),
    }
    if draw.random() < 0.4:
        config["head_dim"] = 12
    match model_type:
        case "llama":
            config["attention_bias"] = draw.random() < 0.3
            config["mlp_bias"] = draw.random() < 0.3
        case "mistral":
            config["sliding_window"] = draw.choice((None, 5, 4096))
        case "qwen2":
            config["use_sliding_window"] = draw.random() < 0.6
            config["sliding_window"] = draw.choice((None, 5, 4096))
            config["max_window_layers"] = draw.randint(0, 3)
    return config


def random_case(model_type: str, seed: int) -> Case:
    """A plain config with one or two changes."""
    draw = random.Random(f"{model_type} {seed}")
    case = Case(plain(model_type, draw))
    for change in draw.sample(CHANGES, draw.randint(1, 2)):
        change(case, draw)
    return case


def _leave_out(case: Case, draw: random.Random) -> None:
    key = draw.choice(sorted(case.config))
    del case.config[key]
    case.touched.add(key)


def _mistype(case: Case, draw: random.Random) -> None:
    key = draw.choice(INTEGERS + NUMBERS + FLAGS)
    case.config[key] = draw.choice(WRONG)
    case.touched.add(key)


def _mistype_scaling(case: Case, draw: random.Random) -> None:
    holder = draw.choice(("rope_scaling", "rope_parameters"))
    scaling = dict(draw.choice(SCALINGS))
    key = draw.choice(sorted(scaling))
    scaling[key] = draw.choice(WRONG)
    case.config[holder] = scaling
    case.touched |= {key, holder}


def _leave_out_of_scaling(case: Case, draw: random.Random) -> None:
    holder = draw.choice(("rope_scaling", "rope_parameters"))
    scaling = dict(draw.choice(SCALINGS))
    key = draw.choice(sorted(scaling))
    del scaling[key]
    case.config[holder] = scaling
    case.touched |= {key, holder, "rope_type"}


def _scale_as_4(case: Case, draw: random.Random) -> None:
    scaling = dict(draw.choice(SCALINGS))
    if draw.random() < 0.5:
        scaling["type"] = scaling.pop("rope_type")
    case.config["rope_scaling"] = scaling
    case.touched.add("rope_scaling")


def _scale_as_5(case: Case, draw: random.Random) -> None:
    theta = case.config.pop("rope_theta", 10000.0)
    case.config["rope_parameters"] = {**draw.choice(SCALINGS), "rope_theta": theta}
    case.touched |= {"rope_parameters", "rope_theta"}


def _scale_as_both(case: Case, draw: random.Random) -> None:
    theta = case.config.get("rope_theta", 10000.0)
    scaling = draw.choice(SCALINGS)
    other = scaling if draw.random() < 0.6 else draw.choice(SCALINGS)
    case.config["rope_scaling"] = dict(scaling)
    case.config["rope_parameters"] = {**other, "rope_theta": theta}
    case.touched |= {"rope_parameters", "rope_scaling", "rope_theta"}


def _two_thetas(case: Case, draw: random.Random) -> None:
    theta = draw.choice((10000.0, 777.0))
    case.config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    case.touched |= {"rope_theta", "rope_parameters"}


def _two_types(case: Case, draw: random.Random) -> None:
    case.config["dtype"] = draw.choice(("float32", "bfloat16", None, "float64", "nonsense", 3))
    case.touched |= {"dtype", "torch_dtype"}


def _outer_length(case: Case, draw: random.Random) -> None:
    scaling = dict(draw.choice(SCALINGS[3:]))
    case.config["original_max_position_embeddings"] = draw.choice((16, 32))
    case.config["rope_scaling"] = scaling
    case.touched |= {"original_max_position_embeddings", "rope_scaling"}


def _layer_types(case: Case, draw: random.Random) -> None:
    count = case.config.get("num_hidden_layers")
    count = count if isinstance(count, int) and 0 < count < 9 else 2
    kinds = ("full_attention", "sliding_attention")
    case.config["layer_types"] = draw.choice(
        ([draw.choice(kinds) for _ in range(count)], [kinds[0]] * count, [kinds[0]] * (count + 1))
    )
    case.touched |= {"layer_types", "num_hidden_layers"}


def _partial(case: Case, draw: random.Random) -> None:
    case.config["partial_rotary_factor"] = draw.choice((1, 1.0, 0.5, None, True, "1"))
    case.touched.add("partial_rotary_factor")


def _contradict_the_type(case: Case, draw: random.Random) -> None:
    case.config["model_type"] = draw.choice((*MODEL_TYPES, "gpt2", None))
    case.touched |= {"model_type", "architecture"}


def _elsewhere(case: Case, draw: random.Random) -> None:
    key = draw.choice(("text_config", "per_layer_config"))
    case.config[key] = {"0": {"rms_norm_eps": 0.5}}
    case.touched.add(key)


Change = Callable[[Case, random.Random], None]
CHANGES: tuple[Change, ...] = (
    _leave_out,
    _leave_out,
    _mistype,
    _mistype,
    _mistype_scaling,
    _leave_out_of_scaling,
    _scale_as_4,
    _scale_as_5,
    _scale_as_both,
    _two_thetas,
    _two_types,
    _outer_length,
    _layer_types,
    _partial,
    _contradict_the_type,
    _elsewhere,
)
