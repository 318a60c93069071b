"""docs/upgrades.md has a row for each entry of the changelog that changes or removes something."""

from __future__ import annotations

import re

import pytest

from tests.support.planes import ROOT
from twinplane.settings.known import known_settings
from twinplane.settings.resolution import variable

PAGE = (ROOT / "docs" / "upgrades.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
SECTIONS = {"Unreleased": "From 0.2.0 to the next release", "0.2.0": "From 0.1.0 to 0.2.0"}


def entries(release: str) -> list[str]:
    """The entries under Changed and Removed of a release, each in one line, without bold marks."""
    text = CHANGELOG.split(f"\n## [{release}]", 1)[1].split("\n## [", 1)[0]
    parts = re.findall(r"^### (?:Changed|Removed)\n(.*?)(?=^### |\Z)", text, re.S | re.M)
    found = [entry for part in parts for entry in re.split(r"^- ", part, flags=re.M)[1:]]
    return [" ".join(entry.replace("**", "").split()) for entry in found]


def rows(title: str) -> list[list[str]]:
    """A section's table: what changed, and what to do."""
    section = PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_release_but_the_first_has_a_section() -> None:
    releases = re.findall(r"^## \[([^\]]+)\]", CHANGELOG, re.M)
    assert releases[-1] == "0.1.0"
    assert list(SECTIONS) == releases[:-1]


@pytest.mark.parametrize("release", SECTIONS)
def test_what_changed_is_told_in_the_changelog_s_words(release: str) -> None:
    told = rows(SECTIONS[release])
    assert told
    for changed, what_to_do in told:
        assert len(changed.split()) >= 2 and what_to_do, changed
    missing = [
        entry
        for entry in entries(release)
        if sum(entry.startswith(changed) for changed, _ in told) != 1
    ]
    assert not missing, (
        f"docs/upgrades.md needs one row for each, with their first words: {missing}"
    )
    changes = entries(release)
    invented = [
        changed for changed, _ in told if not any(entry.startswith(changed) for entry in changes)
    ]
    assert not invented, invented


def test_flags_and_variables_of_the_page_exist() -> None:
    settings = frozenset().union(*known_settings().values())
    flags = {name.replace("_", "-") for name in settings} | {"raw", "max-tokens", "wait"}
    assert set(re.findall(r"`--([a-z-]+)", PAGE)) <= flags
    named = set(re.findall(r"`(TWINPLANE_\w+)`", PAGE))
    assert named
    assert named <= {variable(name) for name in settings}


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", PAGE)
    assert targets
    assert [target for target in targets if not (ROOT / "docs" / target).exists()] == []
