"""`twinplane model` pulls models to this machine and lists those that are there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from twinplane import models


def command_line() -> argparse.ArgumentParser:
    """What can be typed."""
    parser = argparse.ArgumentParser(
        prog="twinplane model", description="Pull and list models.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="pull|list")
    pull = commands.add_parser("pull", help="fetch a model into the cache")
    names = ", ".join(f"{model.name} ({model.summary})" for model in models.CATALOGUE)
    pull.add_argument(
        "name", help=f"a hub id (org/name) or one of: {names}", nargs="?",
        default=models.DEFAULT_MODEL,
    )  # fmt: skip
    listing = commands.add_parser("list", help="models on this machine")
    listing.add_argument("--json", action="store_true", help="one JSON array")
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns 0. Raises ModelError."""
    parser = command_line()
    namespace = parser.parse_args(argv)
    if namespace.command == "pull":
        return _pull(namespace.name)
    return _list(as_json=namespace.json)


def _pull(name: str) -> int:
    from twinplane.cli import progress

    with progress.shown() as shown:
        folder = models.pull(name, shown)
    print(f"{name} is in {folder}")
    return 0


def _list(*, as_json: bool) -> int:
    installed = models.installed()
    if as_json:
        print(
            json.dumps(
                [
                    {
                        "name": model.name,
                        "architecture": model.architecture,
                        "bytes": model.byte_count,
                        "folder": str(model.folder),
                    }
                    for model in installed
                ],
                indent=2,
            )
        )
        return 0
    if not installed:
        print(f"no models yet; run: twinplane model pull {models.DEFAULT_MODEL}")
        return 0
    width = max(len(model.name) for model in installed)
    for model in installed:
        size = f"{model.byte_count / 1e6:9,.0f} MB"
        print(f"{model.name:{width}}  {size}  {model.architecture}  {model.folder}")
    return 0
