"""The planted bugs of `make mutation` fit today's core: what they replace stands there once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

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
