"""The sampler against one written for a single row, and its promises about neighbours."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.quick import examples
from worker_service.domain.sampling import SamplingColumns, SamplingParameters
from worker_service.sampling.drawing import _Rows as Rows
from worker_service.sampling.masks import MaskBatch
from worker_service.sampling.rng import Purpose, uniforms
from worker_service.sampling.sampler import Sampled, sample
from worker_service.sampling.state import SamplingBatch

Parameters = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p
POSITION = 11


def batch(
    rows: list[Parameters], seeds: list[int] | None = None, masks: MaskBatch | None = None
) -> SamplingBatch:
    columns = SamplingColumns.empty(len(rows))
    for index, (own, seed) in enumerate(zip(rows, seeds or range(len(rows)), strict=True)):
        columns.put(index, SamplingParameters(*own, seed))
    return SamplingBatch(columns, np.full(len(rows), POSITION, dtype=np.int32), masks)


def draw(
    logits: torch.Tensor,
    rows: list[Parameters],
    seeds: list[int] | None = None,
    masks: MaskBatch | None = None,
) -> Sampled:
    return sample(logits.clone(), batch(rows, seeds, masks))


def mask(indices: list[int], allowed: list[set[int]], vocabulary: int) -> MaskBatch:
    words = np.zeros((len(indices), -(-vocabulary // 32)), dtype=np.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            words[row, token // 32] |= np.uint32(1 << token % 32)
    return MaskBatch(np.array(indices, dtype=np.int64), words)


def naive(logits: list[float], parameters: Parameters, seed: int) -> int:
    """One row, token by token."""
    temperature, top_k, top_p, min_p = (float(np.float32(value)) for value in parameters)
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if temperature == 0:
        return ranked[0]
    highest = logits[ranked[0]]
    weight = {token: math.exp((logits[token] - highest) / temperature) for token in ranked}
    kept = [token for token in ranked if weight[token] >= min_p]
    if top_k:
        kept = kept[: int(top_k)]
    if top_p < 1:
        total, before, nucleus = math.fsum(weight[token] for token in kept), 0.0, []
        for token in kept:
            if before < top_p * total:
                nucleus.append(token)
            before += weight[token]
        kept = nucleus
    kept.sort()
    uniform = uniforms(
        np.array([seed], dtype=np.uint64), np.array([POSITION], dtype=np.int32), Purpose.TOKEN
    )[0]
    target, running = uniform * math.fsum(weight[token] for token in kept), 0.0
    for token in kept:
        running += weight[token]
        if running > target:
            return token
    return kept[-1]


parameter_rows = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 2, 5, 39, 1000]),
    st.sampled_from([1.0, 0.97, 0.61, 0.2, 0.01]),
    st.sampled_from([0.0, 0.013, 0.27, 1.0]),
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(parameter_rows, min_size=1, max_size=6), st.data())
def test_equals_a_row_by_row_sampler(rows: list[Parameters], data: st.DataObject) -> None:
    width = data.draw(st.integers(2, 40))
    # Quarters tie often; the range makes some tokens all but impossible.
    fixed = st.lists(
        st.integers(-40, 40).map(lambda quarters: quarters / 4), min_size=width, max_size=width
    )
    logits = [data.draw(fixed) for _ in rows]
    seeds = [data.draw(st.integers(0, 2**64 - 1)) for _ in rows]
    sampled = draw(torch.tensor(logits), rows, seeds)
    assert not sampled.invalid_logits.any()
    expected = [naive(*row) for row in zip(logits, rows, seeds, strict=True)]
    assert sampled.tokens.tolist() == expected


VARIETY: list[Parameters] = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.8, 0, 0.9, 0.0),
    (1.3, 0, 0.9999, 0.0),
    (0.7, 40, 1.0, 0.0),
    (1.0, 50, 0.8, 0.02),
    (1.0, 2000, 1.0, 0.0),
    (1.5, 2000, 0.7, 0.001),
    (1.0, 0, 1.0, 0.1),
]


def weights(logits: torch.Tensor, parameters: list[Parameters]) -> torch.Tensor:
    """The sampler's float64 weights [rows, vocabulary] before top-k and top-p."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).unsqueeze(1)

    nothing = column([0.0] * len(parameters))
    rows = Rows(
        logits,
        logits.amax(dim=-1, keepdim=True).double(),
        column([each[0] or 1.0 for each in parameters]),
        nothing,
        nothing,
        column([each[3] for each in parameters]),
        nothing,
        uses_min_p=True,
    )
    return rows.weights(logits)


def wide_logits(seed: int, scale: float = 2.0, steps: int = 0) -> torch.Tensor:
    """[rows of VARIETY, 5000]; with `steps` rounded, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(len(VARIETY), 5000, generator=generator)
    return (logits * steps).round() / steps if steps else logits


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("scale", "steps"), [(2.0, 0), (2.0, 8), (0.05, 0), (1.0, 1)])
def test_wide_vocabularies_take_every_path_alike(seed: int, scale: float, steps: int) -> None:
    """Peaked and flat rows, with and without ties: candidates, fallback and full sort agree."""
    logits = wide_logits(seed, scale, steps)
    seeds = [seed * 100 + row for row in range(len(VARIETY))]
    sampled = draw(logits, VARIETY, seeds)
    expected = [naive(*row) for row in zip(logits.tolist(), VARIETY, seeds, strict=True)]
    assert sampled.tokens.tolist() == expected


def test_a_row_alone_draws_what_it_draws_in_a_batch() -> None:
    for seed in range(5):
        logits = wide_logits(seed)
        seeds = list(range(seed, seed + len(VARIETY)))
        together = draw(logits, VARIETY, seeds).tokens.tolist()
        alone = [
            int(draw(logits[row : row + 1], [VARIETY[row]], [seeds[row]]).tokens[0])
            for row in range(len(VARIETY))
        ]
        assert together == alone


@pytest.mark.parametrize("vocabulary", [1, 7, 131, 4096, 49_157])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_probabilities_keep_their_bits_in_any_company(vocabulary: int, threads: int) -> None:
    """Alone, among 32, permuted: vector loops and their tails must agree on every element."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(vocabulary)
        logits = 3 * torch.randn(32, vocabulary, generator=generator)
        parameters = [VARIETY[row % len(VARIETY)] for row in range(32)]
        whole = weights(logits, parameters)
        order = torch.randperm(32, generator=generator)
        permuted = weights(logits[order], [parameters[row] for row in order.tolist()])
        assert torch.equal(permuted, whole[order])
        for row in range(32):
            assert torch.equal(
                weights(logits[row : row + 1], parameters[row : row + 1])[0], whole[row]
            )
        assert torch.equal(whole.cumsum(dim=-1)[9], whole[9:10].cumsum(dim=-1)[0])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("vocabulary", [131, 49_157])
def test_a_token_is_the_same_alone_among_32_and_permuted(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(32, vocabulary, generator=generator)
    parameters = [VARIETY[row % len(VARIETY)] for row in range(32)]
    together = draw(logits, parameters).tokens
    order = np.random.default_rng(0).permutation(32)
    permuted = draw(logits[order], [parameters[row] for row in order], order.tolist()).tokens
    assert permuted.tolist() == together[order].tolist()
    for row in range(32):
        alone = draw(logits[row : row + 1], parameters[row : row + 1], [row]).tokens
        assert alone.tolist() == [together[row]]


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.zeros(3, 100)
    logits[1, [70, 31, 99]] = 2.0
    assert draw(logits, [(0.0, 0, 1.0, 0.0)] * 3).tokens.tolist() == [0, 31, 0]


def test_a_tiny_temperature_is_greedy_without_overflow() -> None:
    logits = torch.tensor([[1e30, 3.0, -1e30], [0.0, 2.0, 1.0]])
    rows: list[Parameters] = [(1e-38, 0, 1.0, 0.0), (1e-38, 3, 0.5, 0.0)]
    sampled = draw(logits, rows)
    assert sampled.tokens.tolist() == [0, 1]
    assert not sampled.invalid_logits.any()


def test_frequencies_follow_the_distribution() -> None:
    count = 20000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(count, 4)
    parameters: Parameters = (1.5, 0, 1.0, 0.0)
    tokens = draw(logits, [parameters] * count, list(range(count))).tokens
    expected = torch.softmax(logits[0].double() / 1.5, 0).numpy() * count
    seen: npt.NDArray[np.int64] = np.bincount(tokens, minlength=4)
    assert ((seen - expected) ** 2 / expected).sum() < 16.3  # the 0.1% point, 3 degrees of freedom


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "poison",
    [
        {3: math.nan},
        {0: math.nan, 7: math.inf},
        dict.fromkeys(range(10), -math.inf),
        {5: math.inf},
    ],
    ids=["nan", "nan-and-inf", "all-minus-inf", "plus-inf"],
)
def test_invalid_logits_fault_their_row_only(temperature: float, poison: dict[int, float]) -> None:
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(1))
    rows: list[Parameters] = [(temperature, 0, 1.0, 0.0)] * 3
    clean = draw(logits, rows).tokens.tolist()
    for token, value in poison.items():
        logits[1, token] = value
    sampled = draw(logits, rows)
    assert sampled.invalid_logits.tolist() == [False, True, False]
    assert not sampled.empty_mask.any()
    assert [sampled.tokens[0], sampled.tokens[2]] == [clean[0], clean[2]]


@pytest.mark.parametrize("vocabulary", [31, 32, 33, 70])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_restricts_its_row_only(vocabulary: int, temperature: float) -> None:
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    rows: list[Parameters] = [(temperature, 0, 1.0, 0.0)] * 3
    free = draw(logits, rows).tokens.tolist()
    allowed = {vocabulary - 1, 2}
    sampled = draw(logits, rows, masks=mask([1], [allowed], vocabulary))
    restricted = logits.clone()
    restricted[1] = -math.inf
    restricted[1, list(allowed)] = logits[1, list(allowed)]
    assert sampled.tokens.tolist() == draw(restricted, rows).tokens.tolist()
    assert int(sampled.tokens[1]) in allowed
    assert [sampled.tokens[0], sampled.tokens[2]] == [free[0], free[2]]


def test_masks_may_come_in_any_order() -> None:
    logits = torch.zeros(3, 40)
    sampled = draw(logits, [(0.0, 0, 1.0, 0.0)] * 3, masks=mask([2, 0], [{39}, {17}], 40))
    assert sampled.tokens.tolist() == [17, 0, 39]


def test_a_mask_of_bits_past_the_vocabulary_is_empty() -> None:
    masks = MaskBatch(np.array([0]), np.array([[0, 0xFFFFFF00]], dtype=np.uint32))
    sampled = draw(torch.zeros(2, 40), [(1.0, 0, 1.0, 0.0)] * 2, masks=masks)
    assert sampled.empty_mask.tolist() == [True, False]
    assert not sampled.invalid_logits.any()


def test_nan_under_a_mask_is_still_invalid() -> None:
    logits = torch.zeros(2, 40)
    logits[0, 9] = math.nan
    sampled = draw(logits, [(0.0, 0, 1.0, 0.0)] * 2, masks=mask([0], [{3}], 40))
    assert sampled.invalid_logits.tolist() == [True, False]


def test_half_precision_logits_keep_their_ties() -> None:
    logits = torch.tensor([[1.0, 1.001, 0.5, 1.0]], dtype=torch.bfloat16)
    sampled = draw(logits, [(1.0, 2, 1.0, 0.0)], [4])
    assert int(sampled.tokens[0]) in {0, 1}
