"""How a chat template is compiled so that what it does is charged, and what it may name at all.

The charges themselves are filters of the environment, see control_plane.text.sandbox: every loop
body, filter, comparison, concatenation, slice and literal is wrapped in one.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

FILTER_NAMES = [
    "abs",
    "capitalize",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "forceescape",
    "int",
    "items",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "reverse",
    "safe",
    "select",
    "selectattr",
    "sort",
    "title",
    "trim",
    "truncate",
    "unique",
    "upper",
    "wordcount",
]
_SHALLOW_FILTERS = frozenset(
    [
        "count",
        "d",
        "default",
        "first",
        "items",
        "last",
        "length",
        "list",
        "map",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
    ]
)
"""They look at their operand's elements, not into them."""
_STR_METHODS = frozenset(
    [
        "capitalize",
        "casefold",
        "count",
        "endswith",
        "find",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "islower",
        "isnumeric",
        "isspace",
        "istitle",
        "isupper",
        "join",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rindex",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "upper",
    ]
)
METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, _STR_METHODS),
    (dict, frozenset(("copy", "get", "items", "keys", "values"))),
)
LOOP_ATTRIBUTES = frozenset(
    [
        "cycle",
        "depth",
        "depth0",
        "first",
        "index",
        "index0",
        "last",
        "length",
        "nextitem",
        "previtem",
        "revindex",
        "revindex0",
    ]
)

# Names with a space: no template can write them as a filter.
TICK = "each iteration"
DEEP = "each value looked through"
RESULT = "each result"
CONCAT = "each concatenation"
SLICE = "each slice"


class Metering(NodeTransformer):
    """Puts the charging filters into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        tick = _filter(nodes.Const(None), TICK)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        # A filter block's innermost filter has no operand: its text is charged when gathered.
        if node.node is not None and node.name not in _SHALLOW_FILTERS:
            node.node = _filter(node.node, DEEP)
        return _filter(node, RESULT)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if node.args:
            node.args = [_filter(arg, DEEP) for arg in node.args]
            node.node = _filter(node.node, DEEP)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filter(node.expr, DEEP)
        for operand in node.ops:
            operand.expr = _filter(operand.expr, DEEP)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(nodes.Tuple(node.nodes, "load"), CONCAT)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _filter(node.node, SLICE, [bound or nodes.Const(None) for bound in bounds])

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, DEEP)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, DEEP) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, DEEP)


class GenerationTag(Extension):
    """{% generation %}: marks the assistant's words for training; for rendering it is a scope."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _filter(value: nodes.Expr, name: str, args: list[nodes.Expr] | None = None) -> nodes.Filter:
    return nodes.Filter(value, name, args or [], [], None, None, lineno=value.lineno)
