"""The planted bugs of `make mutation` fit today's core: what they replace stands there once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.mutation.mutants import CORE, MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]


def test_there_are_enough_under_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_can_be_planted(mutant: Mutant, tmp_path: Path) -> None:
    (tmp_path / CORE).mkdir(parents=True)
    shutil.copy(ROOT / CORE / mutant.file, tmp_path / CORE)
    mutant.plant(tmp_path)
    compile((tmp_path / CORE / mutant.file).read_text(), mutant.file, "exec")
