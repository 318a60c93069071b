"""A Jinja environment in which a template can cost only so much.

Jinja's sandbox keeps a template away from Python's internals, but not from running for ever or from
eating the memory. Here every operation is charged to a budget of the rendering that runs in this
thread, in units of about one character or one list element: operations that can multiply data
(repetition, joining, replacing, indenting, nesting literals) before they happen, the rest by what
they gave. Every loop iteration, call, filter result and operator is charged, so the deadline is
looked at no further apart than one operation on data the budget has already paid for.

What can't be charged is not offered: %-formatting and str.format (widths), recursive structures of
batches and groups, and attributes of types that chat templates have no use for.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import jinja2
from jinja2.ext import loopcontrols
from jinja2.filters import FILTERS, do_indent, do_round
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from control_plane.text.errors import TemplateFailed
from control_plane.text.template_rules import (
    CONCAT,
    DEEP,
    FILTER_NAMES,
    LOOP_ATTRIBUTES,
    METHODS,
    RESULT,
    SLICE,
    TICK,
    GenerationTag,
    Metering,
)

_OPERATION = 8
"""Units of any operation, whatever it is about: small objects cost memory too."""
_MAX_INTEGER_BITS = 1024
_MAX_INDENT = 16
_MAX_PRECISION = 16
_CONTAINERS = (dict, list, tuple)


class Budget:
    """What one rendering may still cost. `clock` gives seconds; `deadline` is on it."""

    def __init__(self, units: int, clock: Callable[[], float], deadline: float) -> None:
        self._left = units
        self._clock = clock
        self._deadline = deadline

    def charge(self, units: int) -> None:
        """Raises TemplateFailed when the budget or the time is spent."""
        self._left -= units + _OPERATION
        if self._left < 0:
            raise TemplateFailed("the chat template does more work than is allowed")
        if self._clock() > self._deadline:
            raise TemplateFailed("the chat template takes longer than is allowed")

    def charge_deep(self, value: object) -> None:
        """Charges everything that writing `value` out would visit, shared parts each time."""
        waiting = [value]
        while waiting:
            item = waiting.pop()
            self.charge(len(item) if isinstance(item, str) else 0)
            if isinstance(item, Mapping):
                waiting.extend(item.keys())
                waiting.extend(item.values())
            elif isinstance(item, (list, tuple, set, frozenset)):
                waiting.extend(item)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs templates whose cost is charged to the budget set by `spending`."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))
    intercepted_unops = frozenset(("+", "-"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, GenerationTag],
            # Nothing is computed while compiling, where no budget is charged.
            optimized=False,
            cache_size=0,
        )
        self._running = threading.local()
        self.filters = {name: FILTERS[name] for name in FILTER_NAMES}
        self.filters |= {
            "indent": self._indent,
            "join": self._join,
            "replace": self._replace,
            "round": _round,
            "string": self._string,
            "tojson": self._tojson,
            TICK: self._tick,
            DEEP: self._deep,
            RESULT: self._result,
            CONCAT: self._concat,
            SLICE: self._slice,
        }
        safe_range = self.globals["range"]
        self.globals = {"range": safe_range, "namespace": Namespace, "dict": self._dict}
        self.finalize = self._output
        self.concat = self._buffer  # type: ignore[method-assign]  # joins what a block gathered

    def template(self, source: str) -> jinja2.Template:
        """Raises jinja2.TemplateSyntaxError."""
        tree = Metering().visit(self.parse(source))
        tree.set_environment(self)
        code = self.compile(tree, filename="chat_template")
        return self.template_class.from_code(self, code, self.make_globals(None))

    @contextmanager
    def spending(self, budget: Budget) -> Iterator[None]:
        """Charges what this thread renders inside to `budget`."""
        self._running.budget = budget
        try:
            yield
        finally:
            del self._running.budget

    @property
    def _budget(self) -> Budget:
        budget: Budget = self._running.budget
        return budget

    # --- what Jinja asks ----------------------------------------------------------------------

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr.startswith("_"):
            return False
        if isinstance(obj, LoopContext):
            return attr in LOOP_ATTRIBUTES
        if isinstance(obj, (Macro, Namespace)):
            return super().is_safe_attribute(obj, attr, value)
        return any(isinstance(obj, owner) and attr in names for owner, names in METHODS)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        return None  # so that format is judged like any other attribute, and refused

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, tuple) or isinstance(right, tuple):
            # A key is hashed through all that is in it, which sharing could make any amount.
            raise TemplateFailed("the chat template computes with tuples, which is not supported")
        units = _size(left) + _size(right)
        match operator:
            case "*" if isinstance(left, int) and isinstance(right, int):
                pass  # twice as long as what _size allows
            case "*":
                units = _repeated_size(left, right)
            case "**" if isinstance(left, int) and isinstance(right, int):
                _check_integer(left.bit_length() * abs(right))
            case "%" if isinstance(left, str):
                raise TemplateFailed("the chat template formats with %, which is not supported")
        self._budget.charge(units)
        return super().call_binop(context, operator, left, right)

    def call_unop(self, context: Context, operator: str, arg: Any) -> Any:
        self._budget.charge(_size(arg))
        return super().call_unop(context, operator, arg)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            if __obj.__name__ == "replace":
                return __self._replace(owner, *args, **kwargs)
            if __obj.__name__ == "join" and len(args) == 1:
                return __self._join(args[0], owner)
        __self._budget.charge(0)
        result = super().call(__context, __obj, *args, **kwargs)
        __self._budget.charge(_size(result))
        return result

    def call_filter(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        self._deep(value)
        return self._result(super().call_filter(name, value, *args, **kwargs))

    def call_test(self, name: str, value: Any, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        self._deep(value)
        self._deep(args)
        return super().call_test(name, value, args, *rest, **kwargs)

    # --- what it compiles to -------------------------------------------------------------------

    @pass_context
    def _output(self, context: Context, value: Any) -> Any:
        self._budget.charge_deep(value)
        return value

    def _buffer(self, parts: Iterable[str]) -> str:
        gathered = list(parts)
        self._budget.charge(sum(map(len, gathered)))
        return "".join(gathered)

    def _tick(self, value: Any) -> Any:
        self._budget.charge(0)
        return value

    def _deep(self, value: Any) -> Any:
        # What is nested, compared, hashed or printed costs as much as all that is in it.
        if isinstance(value, _CONTAINERS):
            self._budget.charge_deep(value)
        return value

    def _result(self, value: Any) -> Any:
        self._budget.charge(_size(value))
        return value

    def _concat(self, parts: Sequence[Any]) -> str:
        self._budget.charge_deep(parts)
        return "".join(map(str, parts))

    def _slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        result = value[start:stop:step]
        self._budget.charge(_size(result))
        return result

    # --- what replaces Jinja's own --------------------------------------------------------------

    def _dict(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        result: dict[Any, Any] = dict(*args, **kwargs)
        self._budget.charge_deep(result)
        return result

    def _string(self, value: Any) -> str:
        self._budget.charge_deep(value)
        return str(value)

    def _replace(self, value: Any, old: str, new: str, count: int | None = None) -> str:
        text = self._string(value)
        found = text.count(old) if count is None or count < 0 else min(count, text.count(old))
        self._budget.charge(len(text) + found * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _join(self, values: Iterable[Any], separator: str = "", attribute: Any = None) -> str:
        items = list(values)
        self._budget.charge(len(items) * (1 + len(separator)))
        if attribute is not None:
            items = [self.getitem(item, attribute) for item in items]
        self._budget.charge_deep(items)
        return str(separator).join(map(str, items))

    def _indent(
        self, text: str, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        step = len(width) if isinstance(width, str) else width
        if not 0 <= step <= _MAX_INDENT:
            raise TemplateFailed("the chat template indents too far")
        self._budget.charge(len(text) + (text.count("\n") + 1) * step)
        return str(do_indent(text, width, first, blank))

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As Hugging Face templates expect it: no HTML escapes, and these options."""
        if indent is not None and not 0 <= indent <= _MAX_INDENT:
            raise TemplateFailed("the chat template indents too far")
        if separators is not None and sum(map(len, separators)) > _MAX_INDENT:
            raise TemplateFailed("the chat template's separators are too long")
        self._budget.charge_deep(value)
        text = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        self._budget.charge(len(text))
        return text


def _size(value: object) -> int:
    """Units of a value itself, not of what it refers to. Raises TemplateFailed for huge numbers."""
    if isinstance(value, int):
        _check_integer(value.bit_length())
    return len(value) if isinstance(value, (str, list, tuple, dict)) else 0


def _repeated_size(left: object, right: object) -> int:
    if isinstance(right, int):
        return _size(left) * max(right, 0)
    if isinstance(left, int):
        return _size(right) * max(left, 0)
    return 0


def _round(
    value: float, precision: int = 0, method: Literal["common", "ceil", "floor"] = "common"
) -> float:
    if abs(precision) > _MAX_PRECISION:
        raise TemplateFailed("the chat template rounds too finely")
    return do_round(value, precision, method)


def _check_integer(bits: int) -> None:
    if bits > _MAX_INTEGER_BITS:
        raise TemplateFailed("the chat template computes too large a number")
