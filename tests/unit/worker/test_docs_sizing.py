"""docs/sizing.md: every number of its worked examples is what the worker computes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest

from control_plane.core.config import SchedulerConfig
from control_plane.shell.limits import capacity_of
from tests.support.planes import ROOT
from worker_service.domain.capability import DataType, RankCoordinates
from worker_service.model.memory import parameter_count
from worker_service.model.registry import describe
from worker_service.model.share import all_shares
from worker_service.runner import device
from worker_service.runner.kv_cache import blocks_within, bytes_per_block, layer_groups

TEXT = (ROOT / "docs" / "sizing.md").read_text()
BLOCK_SIZE = 16
LENGTH = 8192
CHAT_TOKENS = 1300
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}


def table(title: str) -> dict[str, tuple[str, int]]:
    """How, and the number, by what, of the first table under a heading."""
    section = re.split(r"^## ", TEXT.split(f"## {title}\n")[1], maxsplit=1, flags=re.M)[0]
    rows = re.findall(r"^\| (.+?) \| (.*?) ?\| ([\d,]+)(?: bytes)? \|$", section, re.M)
    return {what: (how, int(number.replace(",", ""))) for what, how, number in rows}


@dataclass
class Sized:
    """A model by the worker's own arithmetic. `block_count` includes the null block."""

    parameter_count: int
    token_bytes: int
    block_bytes: int
    block_count: int

    def sequences_of(self, token_count: int) -> int:
        config = SchedulerConfig(10**6, 512, token_count, self.block_count, BLOCK_SIZE)
        return capacity_of(config).full_length_sequence_count


def sized(config: dict[str, Any], data_type: DataType, pool_bytes: int) -> Sized:
    spec = describe(config)
    groups = layer_groups(spec, data_type)
    block = bytes_per_block(groups, BLOCK_SIZE)
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors()}
    return Sized(
        parameter_count=sum(map(prod, shapes.values())),
        token_bytes=block // BLOCK_SIZE,
        block_bytes=block,
        block_count=blocks_within(pool_bytes, groups, BLOCK_SIZE),
    )


@pytest.mark.parametrize(
    ("title", "config", "data_type", "bytes_each"),
    [
        ("Example: the default model on a CPU", SMALL, DataType.FLOAT32, 4),
        ("Example: an 8B model on a GPU with 80 GB", LARGE, DataType.BFLOAT16, 2),
    ],
    ids=["CPU", "GPU"],
)
def test_the_numbers_are_the_workers(
    title: str, config: dict[str, Any], data_type: DataType, bytes_each: int
) -> None:
    told = table(title)
    numbers = {what: number for what, (_, number) in told.items()}
    pool = numbers.get("pool", device._CPU_KV_BYTES)
    made = sized(config, data_type, pool)
    assert numbers.pop("parameters") == made.parameter_count
    weights = numbers.pop("weights")
    assert weights == made.parameter_count * bytes_each
    if "pool" in numbers:
        assert numbers.pop("pool") == int((80 * 10**9 - weights) * device._CUDA_KV_FRACTION)
    assert numbers.pop("KV of a token") == made.token_bytes
    assert numbers.pop("tokens in the pool") == (made.block_count - 1) * BLOCK_SIZE
    assert numbers.pop(f"sequences of {LENGTH} tokens") == made.sequences_of(LENGTH)
    assert numbers.pop("chats of 1000 + 300 tokens") == made.sequences_of(CHAT_TOKENS)
    if "a block" in numbers:
        assert numbers.pop("a block") == made.block_bytes
        assert numbers.pop("blocks in 1 GiB") == made.block_count
        wanted = numbers.pop("pool for 64 such chats")
        assert sized(config, data_type, wanted).sequences_of(CHAT_TOKENS) == 64
        assert sized(config, data_type, wanted - 1).sequences_of(CHAT_TOKENS) == 63
        assert sized(config, data_type, int(3.7 * 2**30)).sequences_of(CHAT_TOKENS) >= 64
    assert not numbers, "a number that nobody checks"


@pytest.mark.parametrize("title", re.findall(r"^## (Example: .*)$", TEXT, re.M))
def test_what_is_multiplied_gives_what_is_told(title: str) -> None:
    told = table(title)
    for what, (how, number) in told.items():
        if re.fullmatch(r"[\d, ×]+", how):
            assert prod(int(part.replace(",", "")) for part in how.split("×")) == number, what
        elif match := re.fullmatch(r"([\d,]+) / (\d+)", how):
            assert int(match[1].replace(",", "")) // int(match[2]) == number, what


def test_what_ranks_take_is_what_their_shares_take() -> None:
    rows = re.findall(r"^\|(.*) \| (\d) × (\d) \| (.*) \| (.*) \| (.*) \|$", TEXT, re.M)
    assert len(rows) == 8
    for index, (_, tensor, pipeline, *told) in enumerate(rows):
        config, size, data_type = (LARGE, 2, DataType.BFLOAT16)
        if index >= 4:
            config, size, data_type = (SMALL, 4, DataType.FLOAT32)
        place = RankCoordinates((0, int(tensor)), (0, int(pipeline)))
        shares = list(all_shares(describe(config), place))
        weights = [parameter_count(share) * size for share in shares]
        groups = [layer_groups(share, data_type) for share in shares]
        widest = max(groups, key=lambda each: bytes_per_block(each, BLOCK_SIZE))
        pools = [int((80 * 10**9 - each) * device._CUDA_KV_FRACTION) for each in weights]
        pool = min(pools) if index < 4 else device._CPU_KV_BYTES
        tokens = (blocks_within(pool, widest, BLOCK_SIZE) - 1) * BLOCK_SIZE
        expected = [max(weights), bytes_per_block(widest, BLOCK_SIZE) // BLOCK_SIZE, tokens]
        assert [int(number.replace(",", "")) for number in told] == expected


def test_the_answers_arithmetic() -> None:
    assert "2 requests a second and 300 tokens each at 20\ntokens a second" in TEXT
    assert "takes 15 seconds, and 30 streams run" in TEXT
    assert (300 / 20, 2 * 300 / 20) == (15, 30)
