"""`twinplane completion` prints a script with which a shell completes commands and flags.

The script is made by shtab, from the same flags that the commands parse.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from types import ModuleType
from typing import Any

from twinplane import __version__, cli
from twinplane.settings import resolution as settings
from twinplane.settings.command_parser import CommandParser
from twinplane.settings.control import ControlConfig
from twinplane.settings.hints import parse
from twinplane.settings.worker import WorkerConfig

_SHELLS = ("bash", "zsh")
_PLANES = {"control": ControlConfig, "worker": WorkerConfig}
_INSTALL = "pip install shtab"
_FILE = "config"


def command_line() -> argparse.ArgumentParser:
    """What can be typed."""
    parser = CommandParser(
        "twinplane completion",
        "Print a script with which a shell completes commands, flags and files.",
        usage="%(prog)s {bash,zsh}",
        examples=(
            "source <(twinplane completion bash)",
            'twinplane completion zsh > "${fpath[1]}/_twinplane"',
        ),
    )
    parser.add_argument("shell", choices=_SHELLS, help="write the script for this shell")
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 where shtab is not installed."""
    namespace = parse(command_line(), argv)
    try:
        import shtab
    except ModuleNotFoundError:
        print(f"twinplane completion: not installed: shtab; run: {_INSTALL}", file=sys.stderr)
        return 1
    print(shtab.complete(whole_command_line(_values(shtab)), namespace.shell))
    return 0


def whole_command_line(files: Mapping[str, str]) -> argparse.ArgumentParser:
    """All commands in one parser, for completion only. `files` is how shtab completes a path."""
    whole = argparse.ArgumentParser(prog="twinplane")
    whole.add_argument("-V", "--version", action="version", version=__version__)
    commands = whole.add_subparsers(dest="command")
    for name, (help_line, module) in cli.commands().items():
        flags = _of_plane(name) if name in _PLANES else import_module(module).command_line()
        _complete_values(flags, files)
        commands.add_parser(name, help=help_line, parents=[flags], add_help=False)
    return whole


def _of_plane(name: str) -> argparse.ArgumentParser:
    parser = CommandParser(name, "", has_settings=True)
    settings.add_arguments(parser, _PLANES[name])
    return parser


def _complete_values(parser: argparse.ArgumentParser, files: Mapping[str, str]) -> None:
    """Says which values a setting can have: settings check their own, so argparse does not know.

    Commands that take settings have --config. Other commands mark their paths.
    """
    for action in parser._actions:
        if getattr(action, "is_path", False):
            action.complete = files  # type: ignore[attr-defined]  # shtab looks for it
    if all(action.dest != _FILE for action in parser._actions):
        return
    known = {setting.name: setting.metadata for cls in _PLANES.values() for setting in fields(cls)}
    for action in parser._actions:
        setting: Mapping[str, Any] = known.get(action.dest, {})
        if choices := setting.get("choices"):
            action.choices = choices
        if setting.get("path") or action.dest == _FILE:
            action.complete = files  # type: ignore[attr-defined]  # shtab looks for it


def _values(shtab: ModuleType) -> Mapping[str, str]:
    files: Mapping[str, str] = shtab.FILE
    return files
