"""Two trees take turns fairly, each with code of its own, and the verdict follows the error."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench import against
from bench.contests import ScriptContest, medians
from bench.trees import ROOT, Tree, TreeFailed, checked_out
from bench.turns import MIN_ROUNDS, Answers, Question, Side, is_settled, order

TIME = Question("a case", "time", "ms")
RATE = Question("a case", "rate", "tok/s", larger_is_better=True)

# What bench.control_cost of 0.1.0 prints.
PRINTED = """\
{"benchmark": "control_cost", "kind": "machine", "cpu": "a cpu"}
{"benchmark": "control_cost", "kind": "measurement", "case": "16 rows", "program": "whole step", \
"unit": "ms", "samples": [0.09, 0.1, 0.2], "detail": {"p99": 0.2}, "median": 0.1}
{"benchmark": "control_cost", "kind": "measurement", "case": "16 rows", "program": "plan", \
"unit": "bytes", "samples": [197.0], "detail": {}, "median": 197.0}
{"benchmark": "control_cost", "kind": "note", "text": "x"}

control_cost: medians
case     program     median  unit   samples
"""


def answers(*rounds: tuple[float, float]) -> Answers:
    made = Answers()
    for old, new in rounds:
        made.add({Side.OLD: [old, old], Side.NEW: [new, new]})
    return made


def test_steady_drift_favours_neither_side() -> None:
    made = Answers()
    speed = 100.0
    for number in range(2):
        taken: dict[Side, list[float]] = {side: [] for side in Side}
        for side in order(number):
            taken[side].append(speed * (1.02 if side is Side.NEW else 1.0))
            speed *= 1.1
        made.add(taken)
    assert made.ratio == pytest.approx(1.02)
    assert made.error == pytest.approx(0.0, abs=1e-12)


def test_each_side_is_first_in_every_other_round() -> None:
    assert [order(number)[0] for number in range(4)] == [Side.OLD, Side.NEW] * 2


def test_the_error_is_the_spread_of_the_rounds() -> None:
    made = answers((1, 1), (1, 1.02), (1, 1), (1, 1.02))
    half = math.log(1.02) / 2
    assert made.ratio == pytest.approx(math.exp(half))
    # Deviations of ±half: the variance is 4/3 half², of the mean a quarter of that.
    assert made.error == pytest.approx(half / math.sqrt(3))


def test_one_round_has_no_verdict() -> None:
    compared = answers((1, 2)).compare(TIME, "old", "new", 0.03)
    assert (compared.ratio, compared.error, compared.verdict) == (2.0, None, "")


@pytest.mark.parametrize(
    ("question", "new", "verdict"),
    [(TIME, 1.1, "MISSED"), (TIME, 0.9, "kept"), (RATE, 0.9, "MISSED"), (RATE, 1.1, "kept")],
)
def test_only_what_is_worse_misses(question: Question, new: float, verdict: str) -> None:
    made = answers(*[(1.0, new)] * MIN_ROUNDS)
    assert made.compare(question, "old", "new", 0.03).verdict == verdict
    assert is_settled(question, made, 0.03)


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param([(1.0, 1.0)] * (MIN_ROUNDS - 1), id="few"),
        pytest.param([(1.0, 1.025), (1.0, 1.035)] * MIN_ROUNDS, id="at the bound"),
        pytest.param([(1.0, 1.3), (1.0, 1.7)] * (MIN_ROUNDS // 2), id="noise"),
    ],
)
def test_more_rounds_are_needed(rounds: list[tuple[float, float]]) -> None:
    assert not is_settled(TIME, answers(*rounds), 0.03)


def test_medians_are_found_among_what_a_script_prints() -> None:
    assert medians(PRINTED) == {("16 rows", "whole step"): 0.1, ("16 rows", "plan"): 197.0}


def scripted(folder: Path, name: str, median: float) -> Tree:
    """A tree whose bench.some_cost says which sizes it was asked for, and its own median."""
    (folder / "bench").mkdir(parents=True)
    (folder / "bench" / "__init__.py").touch()
    (folder / "bench" / "some_cost.py").write_text(
        "import json, sys\n"
        "for size in sys.argv[sys.argv.index('--rows') + 1 :]:\n"
        "    print(json.dumps({'kind': 'measurement', 'case': f'{size} rows',\n"
        f"                      'program': 'step', 'median': {median} * int(size)}}))\n"
    )
    return Tree(name, "0", folder)


def contest(program: str = "step") -> ScriptContest:
    return ScriptContest.over("some_cost", "--rows", [1, 8], "{} rows", {program: ("time", "ms")})


def test_each_tree_runs_its_own_script_for_what_is_asked(tmp_path: Path) -> None:
    both = {
        Side.OLD: scripted(tmp_path / "old", "v1", 2.0),
        Side.NEW: scripted(tmp_path / "new", "working tree", 3.0),
    }
    asked = Question("8 rows", "time", "ms")
    assert contest().play(both, 0, [asked]) == {
        asked: {Side.OLD: [16.0, 16.0], Side.NEW: [24.0, 24.0]}
    }
    with pytest.raises(TreeFailed, match="some_cost of v1 measured no 'other' of '8 rows'"):
        contest("other").play(both, 0, [asked])


def test_a_failing_script_is_named_with_what_it_said(tmp_path: Path) -> None:
    tree = Tree("v1", "0", tmp_path)
    with pytest.raises(TreeFailed, match=r"(?s)failed in v1:.*ZeroDivisionError"):
        tree.run("-c", "1 / 0", timeout=30)


def test_code_from_another_tree_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(TreeFailed, match="twinplane of v1 would come from"):
        Tree("v1", "0", tmp_path).check_imports()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git checkout")
def test_a_revision_is_checked_out_with_its_stubs_and_goes_again() -> None:
    with pytest.raises(KeyboardInterrupt), checked_out("HEAD") as tree:
        assert (tree.folder / "twinplane" / "inference" / "v1" / "inference_pb2.py").exists()
        tree.check_imports()
        raise KeyboardInterrupt
    assert not tree.folder.exists()
    with pytest.raises(TreeFailed, match="git rev-parse"), checked_out("no-such-revision"):
        pass


def test_without_a_tag_the_revision_must_be_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(against, "last_release", lambda: None)
    assert against.main([]) == 2
    assert "name a REVISION" in capsys.readouterr().err


def test_quick_is_small_and_what_is_given_goes_first() -> None:
    options = against.parse(["v1", "--quick", "--rows", "5"])
    assert (options.rows, options.running, options.max_rounds) == ([5], [1, 64], 2)
    assert len(against.chosen(options)) == 3
    full = against.parse(["v1"])
    assert [each.name for each in against.chosen(full)] == [
        "scheduler_cost", "control_cost", "throughput float32", "throughput int8",
    ]  # fmt: skip
