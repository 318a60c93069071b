"""Set-up never downloads torch's CUDA build to a machine without a GPU, and says what it does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import ModuleType

import pip
import pytest

from tests.support.planes import ROOT


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "requirements" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["install"] = module
    spec.loader.exec_module(module)
    return module


setup = load()
PIN = setup.pinned_torch(None)
CPU, ANY, AUTO = setup.Build.CPU, setup.Build.ANY, setup.Build.AUTO
EXTRAS = (("worker", "dev"), ("worker",), ("dev", "worker", "gpu"), ("control", "dev"), ())
THERE = (None, f"{PIN}+cpu", PIN, f"{PIN}+cu130", "2.4.0", "2.99.0+cu140", "2.99.0+cpu")
CASES = list(
    product(EXTRAS, (AUTO, CPU, ANY), ("Linux", "Darwin"), (True, False), THERE, (True, False))
)


class Pip:
    """Records what it is asked, and answers as pip does."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> tuple[int, str]:
        self.asked.append(list(arguments))
        return self.answers.pop(0) if self.answers else (0, "")


def test_without_a_gpu_every_pip_is_told_a_build() -> None:
    """Over all cases: pip may choose the build only where CUDA is of use or was asked for."""
    assert len(CASES) > 400
    for extras, build, system, has_gpu, there, pinned in CASES:
        wish = setup.Wish(extras, setup.PINS if pinned else None, build)
        machine = setup.Machine(system, has_gpu, there)
        asker = Pip()
        assert setup.install(wish, machine, asker) == 0
        named = [[word for word in asked if word.startswith("torch==")] for asked in asker.asked]
        free = "worker" not in extras or build is ANY or system != "Linux"
        if free or (build is AUTO and has_gpu and there is None):
            assert named == [[]]
        elif build is CPU:
            assert all(words and words[0].endswith("+cpu") for words in named)
        elif not has_gpu:
            fits = there is not None and (not pinned or there.partition("+")[0] == PIN)
            assert named == [[f"torch=={there if fits else f'{PIN}+cpu'}"]] * 2
        assert asker.asked[-1][-2:] == ["-e", f".[{','.join(extras)}]"]
        for asked in asker.asked:
            assert ("-c" in asked) == (pinned and "-e" in asked)
            assert "--quiet" not in asked


WISH = setup.Wish(("worker", "dev"), setup.PINS)
NO_GPU = setup.Machine("Linux", has_gpu=False)


def test_no_cpu_build_at_hand_is_a_sentence_and_nothing_is_installed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    refusal = f"ERROR: No matching distribution found for torch=={PIN}+cpu"
    asker = Pip((1, refusal))
    assert setup.install(WISH, NO_GPU, asker) == 1
    assert asker.asked == [["install", "--no-deps", f"torch=={PIN}+cpu"]]
    said = capfd.readouterr().err
    assert "this machine has no NVIDIA GPU, and pip knows no index with torch's CPU build" in said
    for remedy in ("PIP_EXTRA_INDEX_URL=", "TORCH=any", "EXTRAS=control,dev"):
        assert f"make setup {remedy}" in said
    assert "://" not in said, "an index is the user's to name"


@pytest.mark.parametrize("answers", [[(1, "ERROR: no network")], [(0, ""), (2, "ERROR: disk")]])
def test_other_failures_are_pips_own(
    capfd: pytest.CaptureFixture[str], answers: list[tuple[int, str]]
) -> None:
    assert setup.install(WISH, NO_GPU, Pip(*answers)) == answers[-1][0]
    assert "knows no index" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'GPU 0: NVIDIA (UUID: GPU-1)'", True),
        ("echo 'No devices were found'; exit 6", False),
        ("echo 'NVIDIA-SMI has failed'; exit 9", False),
        ("true", False),
    ],
)
def test_a_gpu_is_one_that_the_driver_lists(tmp_path: Path, script: str, expected: bool) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    assert setup.has_nvidia_gpu(str(tool)) is expected
    assert not setup.has_nvidia_gpu(str(tmp_path / "absent"))


def write_torch(folder: Path, label: str) -> None:
    """A wheel by torch's name, a few hundred bytes long."""
    version = PIN + label
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch/__init__.py", "")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
@pytest.mark.parametrize("constraint", ["", "torch<=99"])
@pytest.mark.parametrize("labels", [("",), ("", "+cpu")], ids=["CUDA alone", "both"])
def test_pip_itself_takes_the_cpu_build_or_none(
    tmp_path: Path, labels: tuple[str, ...], constraint: str
) -> None:
    """The whole script, in a fresh environment whose pip knows one folder and no index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for label in labels:
        write_torch(wheels, label)
    (tmp_path / "constraints.txt").write_text(constraint)
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "pip").symlink_to(Path(pip.__file__).parent)
    python = tmp_path / "venv" / "bin" / "python"
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.defpath}",
        "HOME": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_CONSTRAINT": str(tmp_path / "constraints.txt"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
    }
    script = ROOT / "requirements" / "install.py"
    done = subprocess.run(
        [python, script, "--constraints", setup.PINS, "--extras", "worker,dev", "--torch", "cpu"],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    # Without an index, the clone's own build can't go on.
    assert done.returncode == 1
    shown = subprocess.run(
        [python, "-c", "from importlib.metadata import version; print(version('torch'))"],
        capture_output=True, text=True,
    )  # fmt: skip
    if "+cpu" in labels:
        assert shown.stdout.strip() == f"{PIN}+cpu"
        assert "knows no index" not in done.stderr
        assert f"Successfully installed torch-{PIN}+cpu" in done.stdout
    else:
        assert shown.returncode != 0
        assert f"pip knows no index with torch's CPU build (torch=={PIN}+cpu)" in done.stderr
