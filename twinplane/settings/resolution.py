"""Settings as frozen dataclasses, resolved once: flag > environment > TOML file > default.

A setting is a dataclass field made by `option`; its name in lower_snake_case gives the flag
(--max-num-seqs), the environment variable (TWINPLANE_MAX_NUM_SEQS) and the TOML key. In the file
a key stands at the top for both planes, or under [control] or [worker] for one.

This module knows no plane: the classes and the names that exist are handed in.
"""

from __future__ import annotations

import argparse
import tomllib
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from twinplane.paths import NoHomeFolder, expand, expand_address
from twinplane.settings.command_parser import CommandParser
from twinplane.settings.hints import hint, nearest, parse
from twinplane.settings.parsing import joined, parse_as, plain_type
from twinplane.settings.ranges import NumberRange
from twinplane.settings.service_links import is_service_link

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")

_PREFIX = "TWINPLANE_"
# The package itself reads these; they are not settings of a plane.
_OTHER_VARIABLES = frozenset({"TWINPLANE_HOME", "TWINPLANE_CONFIG", "TWINPLANE_ADDRESS"})


class SettingsError(ValueError):
    """A setting can't be used; the message names where it came from and which it is."""


def option(
    default: Any,
    help: str,  # noqa: A002
    *,
    group: str,
    choices: tuple[str, ...] = (),
    path: bool = False,
    repeated: bool = False,
    range: NumberRange | None = None,  # noqa: A002
) -> Any:
    """A setting: its default, one line of help, the group it is listed under, allowed values.

    `path`: the text may be a path or `unix:PATH`, in which `~` is a home folder. `repeated`: the
    flag may be given several times, the file may have a list; elsewhere, spaces are between the
    values. Every number has a `range`; the settings' class asks `require_ranges`.
    """
    metadata = {
        "help": help,
        "group": group,
        "choices": choices,
        "path": path,
        "repeated": repeated,
        "range": range,
    }
    return field(default=default, metadata=metadata)


def setting_names(cls: type[DataclassInstance]) -> frozenset[str]:
    """The names of a settings class's fields."""
    return frozenset(setting.name for setting in fields(cls))


def flag(name: str) -> str:
    """`max_num_seqs` as it is typed: `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """`max_num_seqs` in the environment: `TWINPLANE_MAX_NUM_SEQS`."""
    return _PREFIX + name.upper()


# Flags.


def add_arguments(
    parser: argparse.ArgumentParser,
    *classes: type[DataclassInstance],
    without: Collection[str] = (),
) -> None:
    """Adds --config and one flag per setting, by group; a name two classes share is added once.

    A flag that isn't given leaves no trace in the namespace. Values stay text until `resolve`.
    """
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="TOML file with settings (TWINPLANE_CONFIG)",
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    added: set[str] = set()
    for cls in classes:
        hints = get_type_hints(cls)
        for setting in fields(cls):
            if setting.name in added or setting.name in without:
                continue
            added.add(setting.name)
            title = str(setting.metadata.get("group", "settings"))
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            _add_flag(groups[title], setting, hints[setting.name])


def _add_flag(group: argparse._ArgumentGroup, setting: Field[Any], annotation: Any) -> None:
    text = str(setting.metadata.get("help", "")).replace("%", "%%")
    if plain_type(annotation) is bool:
        state = "on" if setting.default else "off"
        group.add_argument(
            flag(setting.name),
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=f"{text} (default: {state})",
        )
        return
    choices = setting.metadata.get("choices", ())
    kind = plain_type(annotation)
    metavar = "{" + ",".join(choices) + "}" if choices else _METAVARS.get(kind, "TEXT")
    if setting.default not in (None, MISSING, ""):
        text += f" (default: {str(setting.default).replace('%', '%%')})"
    group.add_argument(
        flag(setting.name),
        metavar=metavar,
        action=_Repeated if setting.metadata.get("repeated") else "store",
        default=argparse.SUPPRESS,
        help=text,
    )


class _Repeated(argparse.Action):
    """Keeps every value of a flag, with a space between."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, values if before is None else f"{before} {values}")


_METAVARS: Mapping[Any, str] = types.MappingProxyType({int: "N", float: "X", Path: "PATH"})


def to_arguments(cls: type[DataclassInstance], namespace: argparse.Namespace) -> list[str]:
    """The flags of `cls` that were given, and --config, to be handed to another process."""
    given = getattr(namespace, "config", None)
    arguments = [] if given is None else [f"--config={given}"]
    for setting in fields(cls):
        match getattr(namespace, setting.name, None):
            case None:
                pass
            case True:
                arguments.append(flag(setting.name))
            case False:
                arguments.append("--no-" + setting.name.replace("_", "-"))
            case value:
                arguments.append(f"{flag(setting.name)}={value}")
    return arguments


def config_file(namespace: argparse.Namespace, environ: Mapping[str, str]) -> Path | None:
    """The settings file that was named by --config or TWINPLANE_CONFIG. Raises SettingsError."""
    flag_value = getattr(namespace, "config", None)
    given = flag_value or environ.get("TWINPLANE_CONFIG")
    try:
        return Path(expand(str(given))) if given else None
    except NoHomeFolder as error:
        source = "--config" if flag_value else "TWINPLANE_CONFIG"
        raise SettingsError(f"{source}: {error}") from error


def from_command_line(
    cls: type[Settings],
    argv: Sequence[str] | None,
    environ: Mapping[str, str],
    *,
    prog: str,
    description: str,
    examples: Sequence[str] = (),
    table: str,
    known: Mapping[str, Collection[str]],
) -> Settings:
    """Parses and resolves the settings of a process that has one settings class. On a mistake it
    prints one line and exits with code 2, as argparse does."""
    parser = CommandParser(prog, description, examples=examples, has_settings=True)
    add_arguments(parser, cls)
    others = {
        name: f"is a setting of `twinplane {plane}`"
        for plane, names in known.items()
        if plane != table
        for name in names
    }
    namespace = parse(parser, argv, elsewhere=others)
    try:
        return resolve(cls, namespace, environ, config_file(namespace, environ), table, known=known)
    except SettingsError as error:
        parser.exit(2, f"{prog}: {error}\n")


# Resolution.


@dataclass(frozen=True, slots=True)
class _Given:
    """A value, not yet parsed, and where it was found."""

    value: object
    source: str


def resolve(
    cls: type[Settings],
    namespace: argparse.Namespace,
    environ: Mapping[str, str],
    config_file: Path | None,
    table: str,
    *,
    known: Mapping[str, Collection[str]],
    defaults: Mapping[str, object] = MappingProxyType({}),
) -> Settings:
    """The settings of one plane.

    `table` is the plane's table in the file. `known` holds, by table, every name that exists (see
    `twinplane.settings.known`): another name in the file or in a TWINPLANE_ variable is an error,
    a name of the other plane is not, and neither is a service link of Kubernetes. `defaults` are
    values of settings that are given nowhere. Raises SettingsError.
    """
    assert table in known
    # The class is authoritative for its own plane.
    tables = {**known, table: {*known[table], *setting_names(cls)}}
    every_name = frozenset().union(*tables.values())
    _check_environment(environ, every_name)
    in_file = _read_file(config_file, table, tables) if config_file else {}

    hints = get_type_hints(cls)
    values = dict(defaults)
    for setting in fields(cls):
        given = _find(setting.name, namespace, environ, in_file)
        if given is not None:
            values[setting.name] = _parse(given, setting, hints[setting.name])
    try:
        return cls(**values)
    except SettingsError:
        raise
    except (ValueError, TypeError) as error:  # a settings class checks itself in __post_init__
        raise SettingsError(str(error)) from error


def _find(
    name: str,
    namespace: argparse.Namespace,
    environ: Mapping[str, str],
    in_file: Mapping[str, _Given],
) -> _Given | None:
    if hasattr(namespace, name):
        return _Given(getattr(namespace, name), flag(name))
    given = environ.get(variable(name))
    # TWINPLANE_PORT is also what Kubernetes sets for a service called twinplane.
    if given is not None and not is_service_link(variable(name), given):
        return _Given(given, variable(name))
    return in_file.get(name)


def _check_environment(environ: Mapping[str, str], names: Collection[str]) -> None:
    known = {variable(name) for name in names} | _OTHER_VARIABLES
    for name in sorted(environ):
        if not name.startswith(_PREFIX) or name in known:
            continue
        if not is_service_link(name, environ[name]):
            about = hint(name, known, name.removeprefix(_PREFIX).lower())
            raise SettingsError(f"environment: unknown variable {name}{about}")


def _read_file(path: Path, table: str, tables: Mapping[str, Collection[str]]) -> dict[str, _Given]:
    """The file's values for `table`: its own keys over those at the top."""
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from error

    every_name = frozenset().union(*tables.values())
    shared: dict[str, _Given] = {}
    own: dict[str, _Given] = {}
    for key, value in content.items():
        if key in tables and isinstance(value, dict):
            for inner, inner_value in value.items():
                if inner not in tables[key]:
                    raise SettingsError(
                        f"{path}: unknown key [{key}] {inner}{hint(inner, tables[key])}"
                    )
                if key == table:
                    own[inner] = _Given(inner_value, f"{path}: [{key}] {inner}")
        elif key in every_name:
            shared[key] = _Given(value, f"{path}: {key}")
        else:
            raise SettingsError(f"{path}: unknown key {key}{hint(key, {*every_name, *tables})}")
    return shared | own


# Values.


def _parse(given: _Given, setting: Field[Any], annotation: Any) -> object:
    """The value in the setting's type. Flags and the environment give text, the file gives TOML's
    types. An integer is also a float; no other type is converted. For a number that may be None,
    the text `none` is None."""
    kind = plain_type(annotation)
    if setting.metadata.get("repeated"):
        given = _Given(joined(given.value), given.source)
    if given.value == "none" and kind is not annotation and kind not in (str, Path):
        return None
    try:
        value = parse_as(kind, given.value, sized=setting.name.endswith("_bytes"))
        if setting.metadata.get("path") and isinstance(value, str):
            value = expand(expand_address(value))
    except ValueError as error:
        raise SettingsError(f"{given.source}: {given.value!r} {error}") from error
    choices: Sequence[str] = setting.metadata.get("choices", ())
    if choices and value not in choices:
        near = nearest(str(value), choices)
        raise SettingsError(f"{given.source}: {value!r} is not one of {', '.join(choices)}{near}")
    return value
