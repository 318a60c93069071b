"""The default model in a runner, without planes, against transformers on the same folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support import runner_rig
from twinplane import models

pytestmark = [pytest.mark.model, pytest.mark.slow]

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived",
    "Привет! Как дела",
    "🌍🚀 2 + 2 =",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "The quick brown fox jumps over the lazy dog. " * 30,
]
COUNT = 24
CLOSE = 1e-3  # two logits nearer than this may change places


@pytest.fixture(scope="module")
def folder() -> Path:
    return models.resolve("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Iterator[PreTrainedModel]:
    yield AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("executor", "attention", "texts"),
    [
        ("compiled", None, TEXTS),
        ("torch", "torch", TEXTS[3:]),
        ("torch", "reference", TEXTS[:2]),
    ],
)
def test_greedy_tokens_equal_transformers(
    executor: str,
    attention: str | None,
    texts: list[str],
    folder: Path,
    reference: PreTrainedModel,
) -> None:
    """Each way to compute; the slower ones with fewer prompts."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in texts]
    runner = runner_rig.build(
        folder,
        block_size=16,
        kv_cache_bytes=128 << 20,
        max_step_token_count=512,
        executor=executor,
        attention_backend=attention,
    )
    capability = runner.capability()
    assert (capability.executor, capability.attention_backend) == (executor, attention or executor)
    outputs = runner_rig.generate(runner, prompts, COUNT, chunk=64)
    for prompt, output in zip(prompts, outputs, strict=True):
        # The reference sees our own tokens: one near tie does not spoil what follows it.
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        best = logits.max(dim=-1).values
        chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        assert ((best - chosen) <= CLOSE).all()
