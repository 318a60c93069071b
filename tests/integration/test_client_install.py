"""The base install in a fresh environment: the client calls, and what needs more says what."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.planes import ROOT, Planes

pytestmark = pytest.mark.slow

BASE = ("googleapis-common-protos", "grpcio", "protobuf")
CALL = """
import asyncio, sys
import twinplane
from twinplane import AsyncClient, Client, InvalidRequest, Unavailable
address = sys.argv[1]
with Client(address) as client:
    result = client.generate("Hello", max_tokens=6, ignore_eos=True, seed=1).result()
    assert len(result.token_ids) == 6, result
    assert client.list_models()[0].name == "tiny"
    try:
        client.generate("Hello", max_tokens=-1).result()
    except InvalidRequest as error:
        assert error.violations, error
    else:
        raise AssertionError("accepted")
async def main():
    async with AsyncClient(address) as client:
        again = await client.generate("Hello", max_tokens=6, ignore_eos=True, seed=1).result()
        assert again.token_ids == result.token_ids
asyncio.run(main())
try:
    Client("127.0.0.1:1", timeout=1.0).list_models()
except Unavailable:
    pass
print(twinplane.__file__)
"""


def with_their_needs(names: Iterator[str] | tuple[str, ...]) -> set[str]:
    """The distributions, and all that these need here."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for line in distribution(name).requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and the base's distributions, which links stand for.

    Its folder of commands. Nothing is downloaded.
    """
    folder = tmp_path_factory.mktemp("client")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT, check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    for name in with_their_needs(BASE):
        for file in distribution(name).files or ():
            if ".." in file.parts or file.suffix == ".pyc":
                continue
            link = packages / file
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.locate())
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return python.parent


def run(fresh: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """One of the environment's commands, far from this tree."""
    return subprocess.run(
        [fresh / command[0], *command[1:]],
        cwd=fresh, env={"HOME": str(fresh)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_nothing_but_the_base_is_there(fresh: Path) -> None:
    listed = "import importlib.metadata as m; print(*sorted(d.name for d in m.distributions()))"
    done = run(fresh, "python", "-c", listed)
    assert set(done.stdout.split()) == {*BASE, "twinplane", "typing_extensions"}, done.stderr


def test_the_client_calls_with_the_base_alone(fresh: Path, simulated_planes: Planes) -> None:
    done = run(fresh, "python", "-W", "error", "-c", CALL, simulated_planes.address)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(fresh.parent)


def test_the_command_line_calls_with_the_base_alone(fresh: Path, simulated_planes: Planes) -> None:
    done = run(
        fresh, "twinplane", "generate", "--address", simulated_planes.address,
        "--max-tokens", "4", "Hello",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
    done = run(fresh, "twinplane", "status", "--address", simulated_planes.address)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tiny" in done.stdout


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--version",), ("generate", "--help"), ("chat", "--help")]
)
def test_help_needs_nothing(fresh: Path, arguments: tuple[str, ...]) -> None:
    done = run(fresh, "twinplane", *arguments)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("up",),
        ("up", "--simulate"),
        ("up", "--help"),
        ("control",),
        ("control", "--port", "0"),
        ("worker",),
        ("worker", "--simulate"),
        ("model", "list"),
        ("model", "pull", "nobody/nothing"),
    ],
    ids=" ".join,
)
def test_what_needs_more_says_in_one_line_what_to_install(
    fresh: Path, arguments: tuple[str, ...]
) -> None:
    done = run(fresh, "twinplane", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"twinplane {arguments[0]}: not installed: ")
    command = line.partition("; run: ")[2]
    assert command.startswith(f"{fresh / 'python'} -m pip install ")
    with_model = arguments in (("up",), ("up", "--help"), ("worker",))
    assert f".whl[{'worker' if with_model else 'control'}]'" in command


def test_the_doctor_says_what_is_missing(fresh: Path) -> None:
    done = run(fresh, "twinplane", "doctor")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "missing: tokenizers, " in done.stdout
    assert "-m pip install " in done.stdout
