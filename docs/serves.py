"""Writes README's table of what is served: `python -m docs.serves`, or `make docs`.

What is served today is read from the code that decides it. What is not served yet is written here,
and tests/unit/test_docs_serves.py shows that it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType

from twinplane.settings.worker import WorkerConfig
from worker_service.model.accounting import STORED_FORMATS
from worker_service.model.families import FAMILIES
from worker_service.model.rope_config import ROPE_TYPES
from worker_service.runner.selection import EXECUTORS
from worker_service.startup import DEFAULT_ROWS

README = Path(__file__).parents[1] / "README.md"
_PLACE = re.compile(r"(?<=<!-- serves -->\n).*?(?=<!-- /serves -->)", re.DOTALL)

REFUSED_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "Qwen3": "Qwen3ForCausalLM",
        "Gemma": "Gemma3ForCausalLM",
        "Phi": "Phi3ForCausalLM",
        "mixtures of experts": "MixtralForCausalLM",
        "images": "LlavaForConditionalGeneration",
        "embeddings": "LlamaModel",
    }
)
"""An architecture of each kind that is not served yet."""
REFUSED_QUANTIZATION = ("AWQ", "GPTQ", "FP8")


def table() -> str:
    """The table, in Markdown."""
    executors = _code(dict.fromkeys(kind.name for kind in EXECUTORS))
    rows = (
        ("", "today", "not yet"),
        ("---", "---", "---"),
        (
            "models",
            f"{_code(family.architecture for family in FAMILIES)}; attention windows; rotary "
            f"scaling {_words(kind for kind in ROPE_TYPES if kind != 'default')}; LoRA adapters as "
            "PEFT writes them",
            _words(REFUSED_ARCHITECTURES),
        ),
        (
            "files",
            f"folders with safetensors in {_words(STORED_FORMATS)}; `.gguf` files of Llamas; "
            "hub ids",
            f"weights that are quantized already ({_words(REFUSED_QUANTIZATION)}), pickled weights",
        ),
        (
            "devices",
            f"one for each worker: {_code(_choices('device'))}; executors {executors}; a model "
            "over several workers by tensor and pipeline parallelism, in the torch executor",
            "GPU kernels of our own",
        ),
        (
            "numbers",
            f"{_code(_choices('dtype'))}; on a CPU also `--quantization "
            f"{_words(each for each in _choices('quantization') if each != 'none')}` "
            "and KV in bfloat16",
            "FP8, 4 bits",
        ),
        (
            "limits",
            "a sequence: what the model takes and the KV pool holds; at once, unless set: "
            f"{DEFAULT_ROWS['cpu']} sequences on a CPU, {DEFAULT_ROWS['cuda']} on a GPU",
            "workers that join and leave while it serves",
        ),
        (
            "doors",
            "gRPC with reflection and health; Prometheus metrics",
            "OpenAI's HTTP; TLS and authentication",
        ),
    )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_table(text: str) -> str:
    """The text of README.md with the table of now."""
    changed, count = _PLACE.subn(lambda _: table(), text)
    assert count == 1, "README.md has lost the table's place"
    return changed


def main() -> None:
    """Writes the table into README.md."""
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")


def _choices(setting: str) -> list[str]:
    """The values of one of the worker's settings, without `auto`."""
    (field,) = (each for each in fields(WorkerConfig) if each.name == setting)
    return [choice for choice in field.metadata["choices"] if choice != "auto"]


def _words(names: Iterable[str]) -> str:
    return ", ".join(names)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    main()
