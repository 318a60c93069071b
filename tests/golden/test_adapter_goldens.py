"""Adapters that PEFT makes and saves, in a runner, against PEFT on transformers.

`make test` installs PEFT (requirements/goldens.txt)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support import runner_rig, tiny_llama
from tests.support.tiny_adapters import load
from twinplane import models
from worker_service.domain.adapters import AdapterLimits
from worker_service.runner.model_runner import ModelRunner

peft = pytest.importorskip("peft")

# peft asks transformers for a name that it is about to change.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

COUNT = 16
CLOSE = 1e-3  # two logits nearer than this may change places
LIMITS = AdapterLimits(6, 32)
CONFIGS: dict[str, dict[str, Any]] = {
    "attention": {"r": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "all": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
    "stabilized": {"r": 9, "use_rslora": True, "target_modules": "all-linear"},
    "pattern": {"r": 4, "target_modules": r".*layers\.[12]\.(mlp|self_attn)\.(up|down|v)_proj"},
    "ranks": {
        "r": 8,
        "target_modules": "all-linear",
        "rank_pattern": {"down_proj": 32, "layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"layers.0.mlp.gate_proj": 40, "q_proj": 3},
    },
    "layers": {"r": 8, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2]},
    "less": {
        "r": 8,
        "target_modules": "all-linear",
        "exclude_modules": ["k_proj", "0.mlp.up_proj"],
    },
}


def make_adapter(base: PreTrainedModel, folder: Path, seed: int, **config: Any) -> Any:
    """A random adapter on the model, saved as PEFT saves one. Returns PEFT's model."""
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **config))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.1)
    adapted.save_pretrained(folder)
    return adapted.eval()


def require_agreement(reference: Any, prompt: list[int], output: list[int]) -> None:
    """Each token is the reference's best, or as good as that. The reference sees our own tokens:
    one near tie does not spoil what follows it."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    best = logits.max(dim=-1).values
    chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    assert ((best - chosen) <= CLOSE).all()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tiny_llama.llama(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def runners(tiny: Path) -> dict[str, ModelRunner]:
    return {
        executor: runner_rig.build(tiny, executor=executor, adapter_limits=LIMITS)
        for executor in ("torch", "compiled")  # the last one sets torch's threads: one
    }


@pytest.mark.parametrize("executor", ["compiled", "torch"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_config_means_what_it_means_to_peft(
    name: str, executor: str, runners: dict[str, ModelRunner], tmp_path: Path
) -> None:
    reference = make_adapter(tiny_llama.llama(), tmp_path, 3, **CONFIGS[name])
    runner, prompts = runners[executor], tiny_llama.PROMPTS
    runner.reset()
    load(runner.adapters, 2, tmp_path)
    outputs = runner_rig.generate(runner, prompts, COUNT, slots=[2] * len(prompts))
    plain = runner_rig.generate(runner, prompts, COUNT)
    assert outputs != plain
    for prompt, output in zip(prompts, outputs, strict=True):
        require_agreement(reference, prompt, output)


TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "The quick brown fox jumps over the lazy dog. " * 20,
]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    yield models.resolve("smollm2-135m-instruct")


@pytest.mark.model
def test_the_default_model_with_several_adapters_in_one_batch(folder: Path, tmp_path: Path) -> None:
    """Each row has another adapter, or none; each prompt is asked with each of them."""
    chosen = ["attention", "all", "stabilized"]
    runner = runner_rig.build(
        folder,
        block_size=16,
        kv_cache_bytes=128 << 20,
        max_step_token_count=512,
        adapter_limits=LIMITS,
    )
    assert runner.capability().executor == "compiled"
    references: list[Any] = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)]
    for slot, name in enumerate(chosen, start=1):
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        references.append(make_adapter(base, tmp_path / name, slot, **CONFIGS[name]))
        load(runner.adapters, slot, tmp_path / name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    asked = [(tokenizer.encode(text).ids, slot) for text in TEXTS for slot in range(4)]
    prompts, slots = [prompt for prompt, _ in asked], [slot for _, slot in asked]
    outputs = runner_rig.generate(runner, prompts, COUNT, chunk=64, slots=slots)
    for (prompt, slot), output in zip(asked, outputs, strict=True):
        require_agreement(references[slot], prompt, output)
