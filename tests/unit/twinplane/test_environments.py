"""Where models, kernels and sockets go under unusual users, variables and file systems."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

import pytest

from twinplane import TlsCredentials, models
from twinplane.cli import doctor_checks
from twinplane.cli.doctor_checks import State
from twinplane.cli.socket_folder import private_folder
from twinplane.models.cache import ModelCache, cache_root
from twinplane.models.errors import CacheUnusable, ModelError, ModelNotFound, PullFailed
from twinplane.models.hub import find_snapshot, has_hub_cache, pull_snapshot
from twinplane.paths import NoHomeFolder, expand, expand_address, home_folder
from twinplane.settings.resolution import SettingsError
from worker_service.kernels.cpu.compiler import default_cache

USER_HOME = "/home/in/the/database"


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with an entry in the user database, and no variables."""
    for name in ("HOME", "TWINPLANE_HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    entry = pwd.struct_passwd(("u", "x", 12345, 12345, "", USER_HOME, "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda number: entry)


@pytest.fixture
def nobody(user: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without an entry, as `docker run --user 12345` makes one."""

    def no_entry(_: object) -> pwd.struct_passwd:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(pwd, "getpwuid", no_entry)


ROOTS: dict[str, tuple[Mapping[str, str], str]] = {
    "nothing set": ({}, f"{USER_HOME}/.cache/twinplane"),
    "HOME": ({"HOME": "/h"}, "/h/.cache/twinplane"),
    "HOME with a slash": ({"HOME": "/h/"}, "/h/.cache/twinplane"),
    "HOME is /": ({"HOME": "/"}, "/.cache/twinplane"),
    "HOME with spaces": ({"HOME": "/a b/ü"}, "/a b/ü/.cache/twinplane"),
    "HOME without the right bytes": ({"HOME": "/h\udcff"}, "/h\udcff/.cache/twinplane"),
    "XDG": ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/twinplane"),
    "XDG empty": ({"HOME": "/h", "XDG_CACHE_HOME": ""}, "/h/.cache/twinplane"),
    "XDG relative": ({"HOME": "/h", "XDG_CACHE_HOME": "x/y"}, "/h/.cache/twinplane"),
    "XDG with ~": ({"HOME": "/h", "XDG_CACHE_HOME": "~/x"}, "/h/x/twinplane"),
    "TWINPLANE_HOME": ({"HOME": "/h", "XDG_CACHE_HOME": "/x", "TWINPLANE_HOME": "/t"}, "/t"),
    "TWINPLANE_HOME with ~": ({"HOME": "/h", "TWINPLANE_HOME": "~/t"}, "/h/t"),
    "TWINPLANE_HOME is ~": ({"HOME": "/h", "TWINPLANE_HOME": "~"}, "/h"),
    "TWINPLANE_HOME relative": ({"HOME": "/h", "TWINPLANE_HOME": "t"}, "t"),
    "TWINPLANE_HOME empty": ({"HOME": "/h", "TWINPLANE_HOME": ""}, "/h/.cache/twinplane"),
}


def set_all(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("case", ROOTS)
def test_where_the_cache_is(case: str, user: None, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, expected = ROOTS[case]
    set_all(monkeypatch, variables)
    assert cache_root() == Path(expected)
    assert default_cache(os.environ) == Path(expected) / "kernels"


@pytest.mark.parametrize("case", [case for case in ROOTS if "HOME" in ROOTS[case][0]])
def test_the_user_database_does_not_matter_where_home_is_set(
    case: str, nobody: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, expected = ROOTS[case]
    set_all(monkeypatch, variables)
    assert cache_root() == Path(expected)


NO_HOME: dict[str, Mapping[str, str]] = {
    "nothing": {},
    "a relative XDG_CACHE_HOME": {"XDG_CACHE_HOME": "x"},
    "~ in XDG_CACHE_HOME": {"XDG_CACHE_HOME": "~/x"},
    "~ in TWINPLANE_HOME": {"TWINPLANE_HOME": "~/x"},
}


@pytest.mark.parametrize("case", NO_HOME)
def test_without_a_home_the_variable_to_set_is_named(
    case: str, nobody: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, NO_HOME[case])
    with pytest.raises(CacheUnusable, match=r"set (TWINPLANE_)?HOME") as error:
        cache_root()
    assert "\n" not in str(error.value)
    assert default_cache(os.environ) is None
    (finding,) = doctor_checks.check_cache(cache_root)
    assert finding.state is State.WARN
    assert "TWINPLANE_HOME" in finding.fix


def test_without_a_home_a_folder_is_served(nobody: None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert models.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("name", "kind", "variable"),
    [
        (models.DEFAULT_MODEL, CacheUnusable, "TWINPLANE_HOME"),
        ("an/id", ModelNotFound, "HF_HOME"),
        ("~/m", ModelNotFound, "HOME"),
        ("~no-such-user/m", ModelNotFound, "HOME"),
    ],
)
def test_without_a_home_other_models_say_what_to_set(
    name: str, kind: type[ModelError], variable: str, nobody: None
) -> None:
    with pytest.raises(kind, match=f"set {variable}"):
        models.resolve(name)


def test_without_a_home_the_hub_has_no_place(nobody: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for look in (find_snapshot, pull_snapshot):
        with pytest.raises((ModelNotFound, PullFailed), match="set HF_HOME"):
            look("an/id")
    assert not has_hub_cache()
    monkeypatch.setenv("HF_HOME", "/x")
    assert has_hub_cache()


@pytest.mark.parametrize(
    "name", ["x" * 5000, "/" + "y" * 300, "a\0b", "/dev/null", "/etc/passwd/x", "\udcff", ""]
)
def test_any_text_is_a_model_or_a_line_that_says_why_not(name: str, user: None) -> None:
    with pytest.raises(ModelError) as error:
        models.resolve(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("what", ["a file", "below a file", "too long", "a loop"])
def test_a_cache_that_is_no_folder_is_named(what: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    match what:
        case "a file":
            root.write_text("")
        case "below a file":
            root.write_text("")
            root = root / "below"
        case "too long":
            root = root / ("x" * 300)
        case _:
            root.symlink_to(root)
    cache = ModelCache(root)
    try:
        assert cache.find("m") is None
    except CacheUnusable as error:
        assert "TWINPLANE_HOME" in str(error)
    with pytest.raises(CacheUnusable, match="TWINPLANE_HOME") as refused:
        cache.get_or_make("m", lambda folder: None)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("~", "/h"),
        ("~/a", "/h/a"),
        ("~/a b/ü", "/h/a b/ü"),
        ("a/~", "a/~"),
        ("./~", "./~"),
        ("", ""),
        ("/~", "/~"),
    ],
)
def test_a_tilde_is_expanded_where_it_leads(
    given: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/h")
    assert expand(given) == expected
    assert expand_address(f"unix:{given}") == f"unix:{expected}"
    assert expand_address(given) == given


def test_a_user_that_nobody_knows(nobody: None) -> None:
    assert home_folder() is None
    for given in ("~", "~/a", "~no-such-user"):
        with pytest.raises(NoHomeFolder, match="no home folder here: set HOME"):
            expand(given)


def test_credentials_take_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ca.pem").write_bytes(b"pem")
    assert TlsCredentials.from_files("~/ca.pem").root_certificates == b"pem"
    assert TlsCredentials.from_files(Path("~/ca.pem")).root_certificates == b"pem"


FOLDERS: dict[str, str] = {
    "good": "good",
    "missing": "nowhere",
    "a file": "file",
    "too long": "long" * 30,
    "with spaces": "a b ü",
    "a link": "link",
    "letters of a URI": "a#b%41",
}


@pytest.mark.parametrize("case", FOLDERS)
@pytest.mark.parametrize("variable", ["TMPDIR", "TEMP", "XDG_RUNTIME_DIR"])
def test_the_socket_has_a_folder_whatever_tmpdir_says(
    case: str, variable: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("t")
    for name in ("good", "long" * 30, "a b ü", "a#b%41"):
        (base / name).mkdir()
    (base / "file").write_text("")
    (base / "link").symlink_to("good")
    with private_folder({variable: str(base / FOLDERS[case])}) as folder:
        assert Path(folder).stat().st_mode & 0o777 == 0o700
        assert len(f"{folder}/worker.sock".encode()) < 108
        (Path(folder) / "worker.sock").touch()
    assert not Path(folder).exists()
    assert doctor_checks.check_socket_folder({variable: str(base)})[0].state is State.OK


def test_without_any_folder_the_variable_to_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinplane.cli.socket_folder._short_folders", lambda _: iter(["/proc"]))
    with pytest.raises(SettingsError, match=r"set TMPDIR .*tried /proc"), private_folder({}):
        pass
    (finding,) = doctor_checks.check_socket_folder({})
    assert (finding.state, finding.fix) == (State.FAIL, "set TMPDIR to a folder")
