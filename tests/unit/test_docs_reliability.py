"""Every command that docs/reliability.md gives for a figure is there to be run."""

from __future__ import annotations

import re

import pytest

from tests.support.planes import ROOT

PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make ([a-z]+)", PAGE))))
def test_targets(target: str) -> None:
    assert target in TARGETS


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`pytest ([\w/.]+)", PAGE))))
def test_paths(path: str) -> None:
    assert (ROOT / path).exists()


def test_the_trials_are_named_as_they_are() -> None:
    from tests.chaos.__main__ import TRIALS

    named = set(re.findall(r"make chaos ARGS='([a-z]+)", PAGE))
    assert named == set(TRIALS)


def test_each_kind_of_command_is_there() -> None:
    for command in ("`make simulate", "`make mutation", "`make chaos", "`pytest "):
        assert command in PAGE
