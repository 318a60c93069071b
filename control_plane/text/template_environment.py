"""The Jinja environment that chat templates are written for: what `transformers` gives them.

Runs in the render process only. Jinja's sandbox keeps a template away from Python's internals and
from changing what it was given; what a template may cost is the process's limits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class Refused(jinja2.TemplateError):
    """The template called raise_exception."""


def compile_template(source: str, now: Callable[[], datetime]) -> jinja2.Template:
    """`now` gives strftime_now its local time. Raises what Jinja raises for what is no template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda date_format: now().strftime(date_format)
    environment.globals["dict"] = _DictMaker()
    environment.globals["namespace"] = _Namespace
    return environment.from_string(source)


class _GenerationTag(Extension):
    """{% generation %}: marks the assistant's words for training. Rendering shows them as is.

    The block is called, as in `transformers`, so that names set inside do not leave it.
    """

    tags = {"generation"}  # noqa: RUF012  # Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_show"), [], [], body, lineno=lineno)

    def _show(self, caller: Macro) -> str:
        return caller()


class _DictMaker:
    """`dict` in templates: makes dictionaries and has no other attribute of Python's type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """`namespace` in templates: Jinja's, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name in kwargs
        self, *positional = args
        attributes = dict(*positional, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace has no names that begin with an underscore")


def _refuse(message: object) -> None:
    raise Refused(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, and with Python's options."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
