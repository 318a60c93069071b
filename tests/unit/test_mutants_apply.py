"""The planted bugs of `make mutation` fit today's core: what they replace stands there once. And
its verdicts mean something.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.mutation import __main__ as runner
from tests.mutation.fleet_mutants import FLEET_MUTANTS
from tests.mutation.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
EVERY = MUTANTS + FLEET_MUTANTS


def test_there_are_enough_under_names_of_their_own() -> None:
    assert len({mutant.name for mutant in EVERY}) == len(EVERY)
    assert len(MUTANTS) >= 30 and len(FLEET_MUTANTS) >= 30


@pytest.mark.parametrize("mutant", EVERY, ids=lambda mutant: mutant.name)
def test_it_can_be_planted(mutant: Mutant, tmp_path: Path) -> None:
    (tmp_path / mutant.path).parent.mkdir(parents=True)
    shutil.copy(ROOT / mutant.path, tmp_path / mutant.path)
    mutant.plant(tmp_path)
    compile((tmp_path / mutant.path).read_text(), mutant.file, "exec")


@pytest.mark.parametrize("kind", runner.SUITES)
@pytest.mark.parametrize("failing", range(2))
def test_nothing_is_judged_by_a_suite_that_fails_without_a_bug(
    kind: str, failing: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those before it, which pass, may judge."""

    def failure(suite: tuple[str, ...], tree: Path, limit: int | None) -> str | None:
        return "test_x.py::test_y" if suite is runner.SUITES[kind][failing] else None

    monkeypatch.setattr(runner, "failure", failure)
    monkeypatch.setattr(runner, "COPIED", ("control_plane",))
    monkeypatch.setattr("sys.argv", ["mutation", "--kind", kind, "--jobs", "1"])
    assert runner.main() == 2
    told = capsys.readouterr().out
    assert "test_x.py::test_y fails without any planted bug" in told
    assert "aught" not in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("assert True", None),
        ("assert False, 'a - b'", "test_it.py::test_it[a b]"),
        ("while True: pass", "test_it.py, which does not end"),
        ("1 +", RuntimeError),
    ],
    ids=["passes", "fails", "does not end", "can't be imported"],
)
def test_a_verdict_is_that_of_a_test(body: str, expected: object, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('_', ['x'], ids=['a b'])\n"
        f"def test_it(_):\n    {body}\n"
    )
    (tmp_path / "conftest.py").write_text(
        "from hypothesis import settings\nsettings.register_profile('unshrunk')\n"
    )
    suite = ("test_it.py",)
    limit = 3 if "while" in body else None
    if expected is RuntimeError:
        with pytest.raises(RuntimeError):
            runner.failure(suite, tmp_path, limit)
    else:
        assert runner.failure(suite, tmp_path, limit) == expected
