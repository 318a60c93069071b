"""`twinplane model` pulls models to this machine, lists, shows and removes them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial

from twinplane import models
from twinplane.models import InstalledModel
from twinplane.models.hub import has_revision, is_hub_id
from twinplane.settings.command_parser import CommandParser
from twinplane.settings.hints import parse

_NAME = "a name of `twinplane model list`"


def command_line() -> argparse.ArgumentParser:
    """What can be typed."""
    parser = CommandParser(
        "twinplane model",
        "Pull models to this machine, list, show and remove them.",
        usage="%(prog)s {pull,list,show,rm} [options]",
        examples=(
            "twinplane model pull",
            "twinplane model pull org/name --revision main",
            "twinplane model show ~/models/mine",
        ),
    )
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="COMMAND",
        title="commands",
        parser_class=argparse.ArgumentParser,
        prog="twinplane model",
    )
    pull = commands.add_parser("pull", help="fetch a model into the cache")
    names = ", ".join(f"{model.name} ({model.summary})" for model in models.CATALOGUE)
    pull.add_argument(
        "name", help=f"a hub id (org/name) or one of: {names}", nargs="?",
        default=models.DEFAULT_MODEL,
    )  # fmt: skip
    pull.add_argument(
        "--revision",
        metavar="REV",
        help="branch, tag or commit of a hub id; serve it as org/name@REV",
    )
    pull.add_argument(
        "--tokenizer-only",
        action="store_true",
        help="leave the weights out: enough for a control plane or a simulated worker",
    )
    listing = commands.add_parser("list", help="list the models on this machine")
    listing.add_argument("--json", action="store_true", help="print one JSON array, for scripts")
    show = commands.add_parser("show", help="say what a model is, by its files")
    show.add_argument("name", help=f"{_NAME}, or a folder", nargs="?", default=models.DEFAULT_MODEL)
    show.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    remove = commands.add_parser("rm", help="remove a model from this machine")
    remove.add_argument("name", help=_NAME)
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns 0. Raises ModelError. Exits with 2 for wrong usage."""
    parser = command_line()
    namespace = parse(parser, argv)
    match namespace.command:
        case "pull":
            name = _with_revision(parser, namespace.name, namespace.revision)
            return _pull(name, weights=not namespace.tokenizer_only)
        case "list":
            return _list(as_json=namespace.json)
        case "show":
            return _show(namespace.name, as_json=namespace.json)
        case _:
            return _remove(namespace.name)


def _with_revision(parser: argparse.ArgumentParser, name: str, revision: str | None) -> str:
    """The name under which a revision is pulled and served. Exits with 2 where there is none."""
    if revision is None:
        return name
    whole = f"{name}@{revision}"
    if not is_hub_id(name) or has_revision(name) or not is_hub_id(whole):
        parser.error("--revision: only a hub id (org/name) has revisions, and one at a time")
    return whole


def _pull(name: str, *, weights: bool) -> int:
    from twinplane.cli import progress
    from twinplane.cli.served_models import check_model

    with progress.shown() as shown:
        folder = models.pull(name, shown, partial(check_model, name), weights=weights)
    print(f"{name} is in {folder}")
    return 0


def _list(*, as_json: bool) -> int:
    installed = models.installed()
    if as_json:
        print(json.dumps([_as_json(model) for model in installed], indent=2))
        return 0
    if not installed:
        print(f"no models yet; run: twinplane model pull {models.DEFAULT_MODEL}")
        return 0
    width = max(len(model.name) for model in installed)
    for model in installed:
        note = "" if model.has_weights else "  (tokenizer only)"
        print(f"{model.name:{width}}  {_size(model)}  {model.architecture}  {model.folder}{note}")
    return 0


def _show(name: str, *, as_json: bool) -> int:
    facts = models.facts(name)
    if as_json:
        print(json.dumps({**_as_json(facts.model), **facts.values}, indent=2))
        return 0
    model = facts.model
    weights = "there" if model.has_weights else "not there: tokenizer only"
    lines = [
        ("name", model.name),
        ("folder", str(model.folder)),
        ("size", _size(model).strip()),
        ("architecture", model.architecture),
        ("weights", weights),
        *((key.replace("_", " "), _text(value)) for key, value in facts.values.items()),
    ]
    width = max(len(subject) for subject, _ in lines)
    for subject, text in lines:
        print(f"{subject:{width}}  {text}")
    return 0


def _remove(name: str) -> int:
    removed = models.remove(name)
    print(f"removed {removed.name} ({_size(removed).strip()})")
    return 0


def _as_json(model: InstalledModel) -> dict[str, object]:
    return {
        "name": model.name,
        "architecture": model.architecture,
        "bytes": model.byte_count,
        "folder": str(model.folder),
        "has_weights": model.has_weights,
    }


def _size(model: InstalledModel) -> str:
    return f"{model.byte_count / 1e6:9,.0f} MB"


def _text(value: object) -> str:
    """A value for people."""
    match value:
        case None:
            return "not said"
        case bool():
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{key} {one}" for key, one in value.items()) or "none"
        case _:
            return str(value)
