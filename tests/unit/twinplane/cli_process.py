"""Runs `twinplane …` as a process, without this environment's own settings."""

from __future__ import annotations

import subprocess
import sys

from tests.support.planes import ROOT, plane_environment

PATIENCE = 60.0
"""Seconds after which a test that waits has failed."""


def run(*arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs to the end; `variables` are added to the environment."""
    return subprocess.run(
        [sys.executable, "-m", "twinplane.cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=ROOT,
        env=plane_environment(**variables),
    )


def start(*arguments: str) -> subprocess.Popen[str]:
    """Starts it without input; whoever calls waits for its end."""
    return subprocess.Popen(
        [sys.executable, "-m", "twinplane.cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=plane_environment(),
    )
