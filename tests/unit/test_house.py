"""The sizes that keep the house readable: a file fits a sitting, a class one thought."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLANES = ("twinplane", "control_plane", "worker_service")
GENERATED = ("twinplane/common/", "twinplane/worker/", "twinplane/inference/", "twinplane/control/")
SOURCES = [
    path
    for plane in PLANES
    for path in sorted((ROOT / plane).rglob("*"))
    if path.suffix in (".py", ".cpp", ".h")
    and not path.relative_to(ROOT).as_posix().startswith(GENERATED)
]
MODULES = [path for path in SOURCES if path.suffix == ".py"]
MAX_LINES = 400
MAX_METHODS = 20
MAX_PROTOCOL_METHODS = 5


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def classes(path: Path) -> list[ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def methods(node: ast.ClassDef) -> list[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [child.name for child in node.body if isinstance(child, functions)]


def test_there_is_something_to_measure() -> None:
    assert len(MODULES) > 100


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_file_is_short(path: Path) -> None:
    count = len(path.read_text(encoding="utf-8").splitlines())
    assert count <= MAX_LINES, f"{count} lines: split it by responsibility"


def test_a_class_has_few_methods() -> None:
    large = {
        f"{name(path)}: {node.name}": len(methods(node))
        for path in MODULES
        for node in classes(path)
        if len(methods(node)) > MAX_METHODS
    }
    assert not large, "a collaborator is missing"


def test_a_protocol_asks_for_little() -> None:
    large = {
        f"{name(path)}: {node.name}": methods(node)
        for path in MODULES
        for node in classes(path)
        if any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
        and len([m for m in methods(node) if not m.startswith("__")]) > MAX_PROTOCOL_METHODS
    }
    assert not large, "an interface of more than five methods is two"
