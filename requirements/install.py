"""Installs this clone into the environment of the Python that runs it, for `make setup`.

The question is which build of torch. On Linux, pip's default index has the CUDA build: gigabytes
that a machine without an NVIDIA GPU can't use. There the CPU build is asked for by its version's
label, `+cpu`: pip takes it from wherever pip's own configuration says that there is one, or finds
none, and then nothing is installed and a sentence says what to do.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "requirements" / "ci.txt"
# The extras that bring torch.
WITH_TORCH = frozenset({"worker"})
# What pip says when no index or folder that it knows has the build; the second where constraints of
# pip's own configuration name torch.
NOT_FOUND = ("No matching distribution found for torch", "Cannot install torch==")

# Runs pip with these arguments: its exit code, and what it wrote to standard error.
Pip = Callable[[Sequence[str]], tuple[int, str]]


class Build(Enum):
    """Which build of torch is wanted. AUTO: CPU on a Linux machine without an NVIDIA GPU, else ANY.

    ANY is whatever pip finds.
    """

    AUTO = "auto"
    CPU = "cpu"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Machine:
    """What the choice depends on. `torch` is the version in the environment, with its label."""

    system: str
    has_gpu: bool
    torch: str | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked for. `constraints` is a file for pip, or None."""

    extras: tuple[str, ...]
    constraints: Path | None
    build: Build = Build.AUTO


@dataclass(frozen=True, slots=True)
class Torch:
    """A requirement that only one build meets, and why it is that one."""

    requirement: str
    why: str


def this_machine() -> Machine:
    """Looks at the machine, without torch."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = None
    return Machine(platform.system(), has_nvidia_gpu(), torch)


def has_nvidia_gpu(command: str = "nvidia-smi") -> bool:
    """Whether the driver's own tool lists a GPU."""
    if shutil.which(command) is None:
        return False
    try:
        done = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU " in done.stdout


def pinned_torch(constraints: Path | None) -> str:
    """The version of torch in the constraints, or else in those that CI installs."""
    for file in (constraints, PINS):
        found = file and re.search(r"^torch==([\w.]+)", file.read_text(), re.MULTILINE)
        if found:
            return found[1]
    raise SystemExit(f"set-up: {PINS} pins no torch")


def choose_torch(wish: Wish, machine: Machine) -> Torch | None:
    """The one build of torch that pip may install. None: pip may choose.

    It may where torch isn't asked for, where a GPU can use CUDA, where the user said so, and
    outside Linux, for which an index has one build only. A torch that is there and fits stays.
    """
    if not WITH_TORCH & set(wish.extras) or wish.build is Build.ANY or machine.system != "Linux":
        return None
    pin = pinned_torch(wish.constraints)
    there = machine.torch
    fits = there is not None and (wish.constraints is None or there.partition("+")[0] == pin)
    if fits and (wish.build is Build.AUTO or str(there).endswith("+cpu")):
        # With its label, so that pip replaces it by no other build.
        return Torch(f"torch=={there}", "it is installed and stays")
    if wish.build is Build.CPU:
        return Torch(f"torch=={pin}+cpu", "the CPU build, as asked for")
    if machine.has_gpu:
        return None
    return Torch(f"torch=={pin}+cpu", "the CPU build, since this machine has no NVIDIA GPU")


def install(wish: Wish, machine: Machine, pip: Pip) -> int:
    """Installs the clone with its extras. Returns the exit code."""
    constraints = [] if wish.constraints is None else ["-c", str(wish.constraints)]
    torch = choose_torch(wish, machine)
    if torch is not None:
        say(f"{torch.requirement}: {torch.why}")
        # Alone: what it needs comes with the rest, at the versions of the constraints.
        code, errors = pip(["install", "--no-deps", torch.requirement])
        if code != 0:
            if any(words in errors for words in NOT_FOUND):
                say(no_cpu_build(torch.requirement, machine))
            return code
    say(f"twinplane with the extras {', '.join(wish.extras)}, from this folder")
    only = [] if torch is None else [torch.requirement]
    code, _ = pip(["install", *constraints, *only, "-e", f".[{','.join(wish.extras)}]"])
    return code


def no_cpu_build(requirement: str, machine: Machine) -> str:
    """The sentence for somebody whose pip knows no CPU build."""
    why = "" if machine.has_gpu else "this machine has no NVIDIA GPU, and "
    return f"""\
{why}pip knows no index with torch's CPU build ({requirement}).
Its default index has the CUDA build, several gigabytes, so nothing was installed. Either
  make setup PIP_EXTRA_INDEX_URL=URL    URL: the CPU index that torch's install page names
  make setup TORCH=any                  take whatever build pip finds, CUDA included
  make setup EXTRAS=control,dev         do without torch: client, control plane, simulated worker"""


def say(text: str) -> None:
    """One of set-up's own lines, among pip's."""
    print(f"set-up: {text}", file=sys.stderr, flush=True)


def run_pip(arguments: Sequence[str]) -> tuple[int, str]:
    """Runs this environment's pip in the clone. Its progress is seen while it works."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            sys.stderr.write(line)
            lines.append(line)
    return process.returncode, "".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="install.py", allow_abbrev=False)
    parser.add_argument("--extras", required=True, help="names, with commas between them")
    parser.add_argument("--constraints", type=Path, help="a constraints file for pip")
    parser.add_argument("--torch", choices=[build.value for build in Build], default="auto")
    namespace = parser.parse_args(argv)
    extras = tuple(name for name in namespace.extras.replace(" ", "").split(",") if name)
    wish = Wish(extras, namespace.constraints, Build(namespace.torch))
    return install(wish, this_machine(), run_pip)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
