"""The extras hold what is imported and no more, and each error names a command that works."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement

from tests.support.planes import ROOT
from twinplane import extras
from twinplane.cli import doctor, main
from twinplane.extras import Extra, extra_of, how_to_get, install_command, missing_modules

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL: dict[str, list[str]] = PROJECT["optional-dependencies"]
OURS = {"twinplane", "control_plane", "worker_service"}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {normalized(Requirement(line).name) for line in requirements} - OURS


def distributions_imported_by(*folders: str) -> set[str]:
    """Of every import statement of the product, wherever in a file it stands."""
    homes = packages_distributions()
    # One namespace of several distributions.
    in_google = {"google.protobuf": "protobuf", "google.rpc": "googleapis-common-protos"}
    found = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import():
                    modules = [alias.name for alias in node.names]
                case ast.ImportFrom(module=str(module), level=0):
                    modules = [module]
                case _:
                    continue
            for module in modules:
                top = module.partition(".")[0]
                if top == "google":
                    found.add(next(in_google[key] for key in in_google if module.startswith(key)))
                elif top not in sys.stdlib_module_names | OURS | {"_typeshed"}:
                    found.add(normalized(homes[top][0]))
    return found


def test_the_base_is_what_the_client_imports() -> None:
    base = names(PROJECT["dependencies"])
    assert base == {"googleapis-common-protos", "grpcio", "protobuf"}
    assert distributions_imported_by("twinplane/client") <= base


def test_the_extras_hold_what_is_imported_and_nothing_else() -> None:
    asked = names(PROJECT["dependencies"])
    assert OPTIONAL.keys() >= {"control", "worker", "gpu"}
    for extra in OPTIONAL.keys() - {"bench", "dev"}:
        asked |= names(OPTIONAL[extra])
    assert distributions_imported_by("twinplane", "control_plane", "worker_service") == asked
    assert "twinplane[control]" in OPTIONAL["worker"]


def test_the_control_plane_needs_no_more_than_its_extra() -> None:
    given = names(PROJECT["dependencies"]) | names(OPTIONAL["control"])
    assert distributions_imported_by("control_plane") <= given


@pytest.mark.parametrize("extra", Extra)
def test_a_command_looks_for_what_its_extra_installs(extra: Extra) -> None:
    homes = packages_distributions()
    looked_for = {normalized(homes[module][0]) for module in extras._MODULES[extra]}
    # Without it, streams are slower.
    assert looked_for == names(OPTIONAL[extra.value]) - {"uvloop"}
    assert missing_modules(extra) == ()


@pytest.mark.parametrize("extra", Extra)
def test_a_module_belongs_to_one_extra(extra: Extra) -> None:
    for module in extras._MODULES[extra]:
        assert extra_of(f"{module}.part") is extra_of(module) is extra
    assert extra_of("grpc") is extra_of("nothing") is None


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras._MODULES, Extra.WORKER, ("json", "no_such_module_one", "no.such"))
    assert missing_modules(Extra.WORKER) == ("no_such_module_one", "no.such")


def installed_from(record: object) -> SimpleNamespace:
    """A stand-in for the installed distribution, with the installer's record."""
    text = record if isinstance(record, str | None) else json.dumps(record)
    return SimpleNamespace(read_text=lambda name: text)


def arguments(monkeypatch: pytest.MonkeyPatch, record: object, extra: Extra) -> list[str]:
    monkeypatch.setattr(extras, "distribution", lambda name: installed_from(record))
    words = shlex.split(install_command(extra))
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    assert install_command(extra) in how_to_get(extra)
    return words[4:]


@pytest.mark.parametrize("extra", Extra)
@pytest.mark.parametrize("record", [None, "", "{", "[]", "3", '{"url": 3}', "{}"])
def test_from_an_index_the_name_will_do(
    monkeypatch: pytest.MonkeyPatch, record: str | None, extra: Extra
) -> None:
    assert arguments(monkeypatch, record, extra) == [f"twinplane[{extra.value}]"]


@pytest.mark.parametrize("extra", Extra)
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ({"dir_info": {"editable": True}}, ["-e", "{path}[{extra}]"]),
        ({"dir_info": {}}, ["{path}[{extra}]"]),
        ({"archive_info": {"hashes": {}}}, ["{path}[{extra}]"]),
    ],
)
@settings(max_examples=20, deadline=None)
@given(name=st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=9))
def test_a_folder_or_file_is_installed_from_again(
    kind: dict[str, object], expected: list[str], extra: Extra, name: str
) -> None:
    """Whatever its name is: the shell reads the path back as it was."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Path, "exists", lambda path: True)
        path = Path("/somewhere") / f"x{name}"
        record = {"url": path.as_uri(), **kind}
        wanted = [part.format(path=path, extra=extra.value) for part in expected]
        assert arguments(monkeypatch, record, extra) == wanted


def test_a_file_that_is_gone_and_what_came_over_the_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = {"url": (tmp_path / "twinplane.whl").as_uri(), "archive_info": {}}
    assert arguments(monkeypatch, gone, Extra.WORKER) == ["twinplane[worker]"]
    wheel = {"url": "https://example.org/twinplane-1-py3-none-any.whl", "archive_info": {}}
    (line,) = arguments(monkeypatch, wheel, Extra.WORKER)
    assert Requirement(line).url == wheel["url"]
    cloned = {
        "url": "https://example.org/twinplane.git",
        "vcs_info": {"vcs": "git", "commit_id": "abc"},
    }
    (line,) = arguments(monkeypatch, cloned, Extra.CONTROL)
    assert Requirement(line).extras == {"control"}
    assert Requirement(line).url == "git+https://example.org/twinplane.git@abc"


def test_a_command_that_stumbles_over_a_missing_module_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stumble(argv: object) -> int:
        raise ModuleNotFoundError("No module named 'rich'", name="rich.console")

    monkeypatch.setattr(doctor, "main", stumble)
    assert main(["doctor"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("twinplane doctor: not installed: rich.console; run: ")
    assert install_command(Extra.CONTROL) in line


def test_a_module_of_ours_that_is_not_there_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: object) -> int:
        raise ModuleNotFoundError("No module named 'twinplane.x'", name="twinplane.x")

    monkeypatch.setattr(doctor, "main", fail)
    with pytest.raises(ModuleNotFoundError):
        main(["doctor"])
