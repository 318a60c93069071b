"""How a process of ours runs a module of ours in another process."""

from __future__ import annotations

from pathlib import Path

_PACKAGES = Path(__file__).resolve().parents[2]


def module_arguments(module: str) -> tuple[str, ...]:
    """Arguments for this process's Python that run `module`.

    By itself Python looks for modules in the current folder first, where a file of any name may
    lie. It should look there only if that is where our own packages are.
    """
    try:
        is_here = Path.cwd() == _PACKAGES
    except FileNotFoundError:  # the current folder was removed
        is_here = False
    return ("-m", module) if is_here else ("-P", "-m", module)
