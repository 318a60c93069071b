"""A sample of the matrix in which any two values of it meet; `make exactness` runs all of it.

Most of it on a cut of the default model, which has all its shapes, a little with other arithmetic
and on the whole model. Each keeps to its own canonical answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.exactness.cases import Case, make_cases, some_of
from tests.exactness.matrix import CANONICAL, Configuration, covering, every_configuration
from tests.exactness.models import cut_model, default_model
from tests.exactness.serving import Outcome, Service, serving
from worker_service.domain.capability import DataType
from worker_service.runner.options import Quantization

pytestmark = [pytest.mark.model, pytest.mark.slow]

CUT_CASES = 48
FEW_CASES = 8
SAMPLE = covering(every_configuration())
CROWDED = [
    Configuration(threads=2, streams=8, shuffled=True, chunk=16, cached=True, asynchronous=True),
    Configuration(threads=1, streams=2, shuffled=True, chunk=64),
]
ARITHMETIC: dict[str, dict[str, object]] = {
    "int8": {"quantization": Quantization.INT8},
    "bfloat16-kv": {"kv_data_type": DataType.BFLOAT16},
}


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut_model(tmp_path_factory.mktemp("cut"))


@pytest.fixture(scope="module")
def cut_cases_and_answers(cut: Path) -> tuple[list[Case], Outcome]:
    return canonical(cut, CUT_CASES, SAMPLE)


@pytest.fixture(scope="module")
def cut_service(
    request: pytest.FixtureRequest,
    cut: Path,
    cut_cases_and_answers: tuple[list[Case], Outcome],
) -> Iterator[Service]:
    """For each number of threads in turn, loaded once."""
    del cut_cases_and_answers  # made before: only one model is loaded at a time
    with serving(cut, request.param) as service:
        yield service


def canonical(
    folder: Path, count: int, ways: Sequence[Configuration], **changes: object
) -> tuple[list[Case], Outcome]:
    """Some cases, and what is right for them in all of these ways."""
    with serving(folder, CANONICAL.threads, **changes) as service:
        cases = some_of(make_cases(service.vocabulary_size), count)
        return cases, service.serve_alone(cases, ways)


def check(
    service: Service, configuration: Configuration, cases: list[Case], expected: Outcome
) -> None:
    suitable = [case for case in cases if configuration.suits(case)]
    outcome = service.serve(configuration, suitable, configuration.token_count)
    assert not outcome.differences(expected)
    assert len(outcome.logits) == len(suitable) * configuration.token_count
    assert (outcome.preemptions > 0) == configuration.preempted
    assert (outcome.cached_prompt_tokens > 0) == configuration.cached


@pytest.mark.parametrize(
    ("cut_service", "configuration"),
    [pytest.param(c.threads, c, id=str(c)) for c in SAMPLE],
    indirect=["cut_service"],
)
def test_whatever_happens_around_a_request_its_logits_are_equal_to_the_bit(
    cut_service: Service,
    configuration: Configuration,
    cut_cases_and_answers: tuple[list[Case], Outcome],
) -> None:
    check(cut_service, configuration, *cut_cases_and_answers)


@pytest.mark.parametrize("changes", ARITHMETIC.values(), ids=ARITHMETIC.keys())
def test_other_arithmetic_is_as_exact(cut: Path, changes: dict[str, object]) -> None:
    check_crowded(cut, changes)


def test_the_whole_model_is_as_exact() -> None:
    check_crowded(default_model(), {})


def check_crowded(folder: Path, changes: dict[str, object]) -> None:
    cases, expected = canonical(folder, FEW_CASES, CROWDED, **changes)
    for configuration in CROWDED:
        with serving(folder, configuration.threads, **changes) as service:
            check(service, configuration, cases, expected)


def test_the_sample_holds_every_pair_and_the_product_no_configuration_twice() -> None:
    every = every_configuration()
    assert len(set(every)) == len(every)
    assert len(SAMPLE) < len(every) / 10
    for streams in (2, 8, 32):
        assert any(c.streams == streams and c.preempted for c in SAMPLE)


def test_a_difference_is_seen() -> None:
    right = Outcome(tokens={3: (1, 2)}, logits={(4, 9): b"a", (4, 10): b"b"})
    assert not Outcome(tokens={3: (1,)}, logits={(4, 9): b"a"}).differences(right)
    assert Outcome(tokens={3: (2,)}, logits={(4, 9): b"a"}).differences(right)
    assert Outcome(tokens={3: (1,)}, logits={(4, 9): b"c"}).differences(right)
    assert Outcome(torn=[(4, 9)]).differences(right)
