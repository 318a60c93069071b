"""The worked pages of docs/how-to: each patch applies, touches few places, and passes its tests.

Each page `add-a-….md` has its example, `add-a-….patch`. Here the patch is applied to a copy of the
tree, and the tests it adds run there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.planes import ROOT, plane_environment

pytestmark = pytest.mark.slow

FOLDER = ROOT / "docs" / "how-to"
PRODUCT = ("protos/", "twinplane/", "control_plane/", "worker_service/")
FAMILIES = "worker_service/model/families"


@dataclass(frozen=True)
class Example:
    """A page's patch: `tests`, what pytest is to run of it; `most`, how many files of the product
    it may touch."""

    page: str
    tests: tuple[str, ...]
    most: int

    @property
    def patch(self) -> Path:
        return FOLDER / f"{self.page}.patch"

    def __str__(self) -> str:
        return self.page


FAMILY = Example(
    "add-a-model-family",
    (
        "tests/unit/worker/test_decoders.py",
        "tests/unit/worker/test_compiled_runner.py",
        "-k=qwen3 or all_executors",
    ),
    most=2,
)
RPC = Example(
    "add-an-rpc",
    ("tests/unit/control_rpc/test_server_info.py", "tests/contract/test_services.py"),
    most=2,
)
PARAMETER = Example(
    "add-a-sampling-parameter",
    (
        "tests/unit/worker/test_epsilon_cutoff.py",
        "tests/unit/worker/test_sampling_state.py",
        "tests/unit/control_rpc/test_worker_convert.py",
        "tests/unit/twinplane/test_client_options.py",
        "tests/contract/test_wire_samples.py",
    ),
    most=7,
)
EXAMPLES = (FAMILY, RPC, PARAMETER)
every_example = pytest.mark.parametrize("example", EXAMPLES, ids=str)


@dataclass(frozen=True)
class Change:
    """What a patch does to one file, in lines."""

    path: str
    added: int
    removed: int

    @property
    def is_product(self) -> bool:
        return self.path.startswith(PRODUCT)


def changes(example: Example) -> list[Change]:
    listed = run(["git", "apply", "--numstat", str(example.patch)], ROOT).splitlines()
    columns = [line.split("\t") for line in listed]
    return [Change(path, int(added), int(removed)) for added, removed, path in columns]


def product_changes(example: Example) -> list[Change]:
    return [change for change in changes(example) if change.is_product]


def run(command: Sequence[str], folder: Path, **variables: str) -> str:
    """Runs it there and returns what it prints. What a failed command prints is the failure."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    if done.returncode:
        pytest.fail(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def copy_tree(target: Path) -> None:
    """The tree as it is: what git ignores is not there, stubs least of all."""
    listed = run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], ROOT)
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def apply(patch: Path, tree: Path) -> None:
    done = subprocess.run(
        ["git", "apply", str(patch)],
        cwd=tree,
        # A temporary folder within some repository is no part of it.
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode:
        name = patch.relative_to(ROOT)
        pytest.fail(f"refresh {name} as docs/how-to/README.md says:\n{done.stderr}")


@every_example
def test_the_patch_applies_and_its_tests_pass(example: Example, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    copy_tree(tree)
    apply(example.patch, tree)
    run([sys.executable, "hatch_build.py"], tree)
    touched = [change.path for change in changes(example)]
    sources = [path for path in touched if path.endswith(".py")]
    tool = Path(sys.executable).with_name
    run([str(tool("ruff")), "format", "--check", *sources], tree)
    run([str(tool("ruff")), "check", *sources], tree)
    if any(path.endswith(".proto") for path in touched):
        run([str(tool("buf")), "lint"], tree)
    environment = plane_environment(PYTHONPATH=str(tree))
    pytest_there = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run([*pytest_there, *example.tests], tree, **environment)


@every_example
def test_the_patch_touches_few_places(example: Example) -> None:
    places = [change.path for change in product_changes(example)]
    assert len(places) <= example.most, places


def test_a_family_is_one_file_and_its_place_in_the_list() -> None:
    own, listed = sorted(product_changes(FAMILY), key=lambda change: -change.added)
    assert (Path(own.path).parent.as_posix(), own.removed) == (FAMILIES, 0)
    # Its import is added, and the line of FAMILIES changes.
    assert listed == Change(f"{FAMILIES}/__init__.py", added=2, removed=1)


def test_an_rpc_is_its_proto_its_servicer_and_its_test() -> None:
    assert len(changes(RPC)) == 3


@every_example
def test_the_page_names_every_place(example: Example) -> None:
    page = (FOLDER / f"{example.page}.md").read_text()
    missing = [change.path for change in changes(example) if f"`{change.path}`" not in page]
    assert not missing


def test_every_page_has_an_example() -> None:
    pages = {path.stem for path in FOLDER.glob("*.md")} - {"README"}
    assert pages == {example.page for example in EXAMPLES}
    assert {path.stem for path in FOLDER.glob("*.patch")} == pages
