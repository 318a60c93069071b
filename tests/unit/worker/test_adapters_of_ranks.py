"""Adapters over several ranks: each takes the part that belongs to its part of a projection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.loaded_decoder import Loaded
from tests.support.quick import spread
from tests.support.threaded_ranks import Exchange, ThreadedPeers
from tests.support.tiny_adapters import tensors_of
from tests.support.tiny_spec import save_random, tiny_spec
from worker_service.domain.adapters import AdapterLimits
from worker_service.kernels.low_rank import LowRank
from worker_service.load_errors import RanksUnfit
from worker_service.model.adapters import adaptable_modules
from worker_service.model.share import share_of
from worker_service.model.spec import DecoderSpec
from worker_service.runner.executor import AdapterMemory
from worker_service.runner.selection import EXECUTORS

COMPILED = EXECUTORS[0]
LIMITS = AdapterLimits(2, 4)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
SHAPES: list[dict[str, Any]] = [
    {},
    {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32},
    {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
    {"intermediate_size": 25, "num_hidden_layers": 3},
    {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 33},
]
LAYOUTS = [(2, 1), (1, 2), (2, 2), (3, 1), (4, 1)]


def fill(memory: AdapterMemory | None, spec: DecoderSpec, seed: int) -> None:
    """Puts a random adapter into slot 2."""
    assert memory is not None
    modules = adaptable_modules(spec)
    tensors = tensors_of(modules, 3, seed)
    prefix = "base_model.model."
    memory.prepare(
        {
            name: LowRank(
                tensors[f"{prefix}{name}.lora_A.weight"],
                tensors[f"{prefix}{name}.lora_B.weight"],
                0.7,
            )
            for name in modules
            if not (seed % 2 and name.endswith("k_proj"))
        }
    )
    memory.put(2)


def run(loaded: Loaded, slot: int) -> torch.Tensor:
    wanted = list(range(4))
    return torch.cat(
        [loaded.run(TOKENS[:7], 0, wanted, slot), loaded.run(TOKENS[7:], 7, wanted, slot)]
    )


@pytest.mark.parametrize(
    ("layout", "shape"),
    spread([(layout, shape) for layout in LAYOUTS for shape in range(len(SHAPES))], 8),
)
def test_ranks_compute_what_one_does(layout: tuple[int, int], shape: int, tmp_path: Path) -> None:
    spec = tiny_spec(**SHAPES[shape])
    exchange = Exchange(*layout)
    try:
        for place in exchange.ranks:
            share_of(spec, place)
    except RanksUnfit:
        pytest.skip("the model has too few of something for so many ranks")
    folder = save_random(spec, tmp_path / "model")
    whole = Loaded(folder, spec=spec, adapter_limits=LIMITS)
    compiled = Loaded(folder, COMPILED, spec=spec, adapter_limits=LIMITS)
    ranks = [
        Loaded(
            folder,
            spec=spec,
            peers=ThreadedPeers(exchange, index),
            adapter_limits=LIMITS,
        )
        for index in range(len(exchange.ranks))
    ]
    for each in (whole, compiled, *ranks):
        fill(each.adapters, spec, shape)
    expected, base = run(whole, 2), run(whole, 0)
    assert not torch.allclose(expected, base, atol=1e-2)
    torch.testing.assert_close(run(compiled, 2), expected, rtol=1e-4, atol=1e-4)
    answers = exchange.run(lambda index: run(ranks[index], 2))
    (found,) = (answer for answer in answers if answer.shape[0])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
