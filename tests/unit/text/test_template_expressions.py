"""Every filter, test and method renders in the process as it does with `transformers`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime

import pytest
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS

from control_plane.text.chat_template import ChatMessage, ChatTemplate
from control_plane.text.errors import TextError
from control_plane.text.template_pool import TemplatePool
from control_plane.text.template_process import RenderLimits

pytestmark = pytest.mark.slow

reference = pytest.importorskip("transformers.utils.chat_template_utils")

LIMITS = RenderLimits(max_characters=1 << 20, cpu_seconds=10.0, memory_bytes=512 << 20)
VALUES = (
    *("'a b<c>&é ß 日'", "' x\\ny '", "''", "'12'", "-7", "3.25", "true", "none", "nothing"),
    *("[3, 1, 2]", "['b', 'A', 'a']", "(1, 'x')", "{'b': 1, 'a': [2]}", "messages", "range(4)"),
)
ARGUMENTS = {
    "attr": ["'upper'", "'__class__'"],
    "batch": ["2", "2, '-'"],
    "center": ["9"],
    "default": ["1", "1, true"],
    "dictsort": ["", "true, 'value'", "reverse=true"],
    "format": ["1", "'x', 2", "a=1"],
    "groupby": ["'role'", "'role', default='x'", "0"],
    "indent": ["", "2, true", "'> ', blank=true"],
    "int": ["", "5", "0, 16"],
    "join": ["", "','", "'-', attribute='role'"],
    "map": ["'upper'", "attribute='role'", "attribute='x', default='y'", "'string'"],
    "reject": ["'string'", "'eq', 1"],
    "rejectattr": ["'role', 'eq', 'user'"],
    "replace": ["'a', 'b'", "'a', 'b', 1"],
    "round": ["", "1", "1, 'floor'"],
    "select": ["", "'number'", "'in', [1, 'a']"],
    "selectattr": ["'role', 'eq', 'user'", "'content'"],
    "slice": ["2", "3, '-'"],
    "sort": ["", "true", "case_sensitive=true", "attribute='role'"],
    "sum": ["", "start=1", "attribute='x', start=2"],
    "tojson": [
        *("", "indent=2", "ensure_ascii=true", "separators=(',', ':')", "sort_keys=true"),
        *("indent='\\t'", "true, 1, (';', '='), true"),
    ],
    "trim": ["", "'a'"],
    "truncate": ["5", "5, true, '', 0", "9, false, '…'"],
    "unique": ["", "true", "attribute='role'"],
    "wordwrap": ["3", "4, false", "5, wrapstring='|'"],
    "xmlattr": ["", "false"],
}
TESTS = {"divisibleby": "2", "in": "[1, 'a']", "sameas": "none", "test": "'string'", "filter": ""}
COMPARISONS = (
    "eq",
    "==",
    "equalto",
    "ne",
    "!=",
    "lt",
    "<",
    "lessthan",
    "le",
    "<=",
    "gt",
    ">",
    "ge",
)
METHODS = {
    "'a,B c\\tß日'": (
        *("capitalize()", "casefold()", "center(12, '*')", "count('a')", "encode()", "index('B')"),
        *(
            "encode('utf-16')",
            "encode('latin-1', 'replace')",
            "encode('ascii', 'xmlcharrefreplace')",
        ),
        *("encode('cp1252', 'ignore')", "encode('iso8859-15', 'ignore')", "encode('utf-7')"),
        *("encode('koi8-r', 'replace')", "encode('gbk')", "encode('shift_jis', 'replace')"),
        *(
            "encode('big5', 'replace')",
            "encode('cp437', 'replace')",
            "encode('mac-roman', 'replace')",
        ),
        *("encode('punycode')", "encode('unicode-escape').decode()", "encode().hex(':')"),
        *("endswith(('日', 'x'))", "expandtabs(2)", "find('c')", "isalnum()", "isidentifier()"),
        *("join(['1', '2'])", "ljust(9)", "lower()", "lstrip('a')", "partition(',')", "title()"),
        *("removeprefix('a')", "removesuffix('日')", "replace('a', 'b')", "rfind('a')"),
        *("rindex('a')", "rjust(9, '0')", "rpartition(' ')", "rsplit(None, 1)", "rstrip()"),
        *("split()", "split(',', 1)", "splitlines(true)", "startswith('a')", "strip('a日')"),
        *("swapcase()", "translate({97: 'z'})", "upper()", "zfill(12)", "__len__()", "no_such()"),
    ),
    "'{0!r:>6}|{x[a]}|{1:.2f}'": ("format(1, 2.5, x={'a': 3})", "format_map({'x': 1})"),
    "'{a}{b:05d}'": ("format(a='x', b=7)", "format_map({'a': 1, 'b': 2})", "format()"),
    "'{0.__class__}'": ("format(1)",),
    "'%s|%5.1f|%x|%%'": ("__mod__((1, 2, 3))",),
    "[1, [2], 'a']": (
        *("index('a')", "count(1)", "copy()", "append(1)", "pop()", "sort()", "extend([1])"),
        *("insert(0, 1)", "remove(1)", "reverse()", "clear()"),
    ),
    "{'a': 1, 'b': {'c': 2}}": (
        *("get('a')", "get('x', 3)", "items() | list", "keys() | list", "values() | list"),
        *("copy()", "update({})", "pop('a')", "setdefault('a')", "popitem()", "clear()"),
    ),
    "(1, 2, 1)": ("count(1)", "index(2)"),
    "255": ("bit_length()", "to_bytes(2, 'big')", "conjugate()", "real"),
    "2.5": ("is_integer()", "hex()", "as_integer_ratio()"),
    "dict": ("fromkeys('ab')", "fromkeys([1], 2)", "keys()", "__name__", "update({})"),
    "namespace": ("x",),
    "cycler('a', 'b')": ("next()", "current", "reset()"),
}
OTHERS = (
    *("'%s-%05d-%.2f-%r' % ('a', 7, 1.5, 'b')", "'%(a)s' % {'a': 1}", "'%s' % ('a',)", "'a' % 1"),
    *("(1, 2) + (3,)", "(1,) * 3", "[0] * 2 + [1]", "'ab' * 2", "2 ** 70", "7 // 2", "-7 // 2"),
    *("7 / 2", "7.5 % 2", "1 / 0", "'a' ~ 1 ~ none", "1 < 2 < 3", "'a' in 'abc'", "not 1", "-'a'"),
    *("'abc'[::-1]", "'abc'[5]", "[1, 2][-1]", "{'a': 1}.a", "{'a': 1}['b']", "'a' if false"),
    *(
        "dict(a=1, b=2)",
        "dict([('a', 1)])",
        "namespace(a=1).a",
        "namespace(a=1)",
        "lipsum(1) is string",
    ),
    *("range(3) | list", "range(10, 0, -3) | list", "strftime_now('%d %b %Y')", "strftime_now('')"),
    *("strftime_now('%A %B %j %U %y %%')", "strftime_now(1)", "raise_exception('no')", "self"),
    *("messages[0].content | length", "messages[-1]['role']", "messages[9]", "messages[0].x.y"),
    *("'\\u65e5\\N{BULLET}\\x41\\n'", "'<' | e | string", "'<' | safe", "('<' | e) + '<'"),
    *("[1, 2] | map('string') | join", "[[1, 2], [3]] | sum(start=[])", "'1.5' | float + 1"),
    *("add_generation_prompt", "tools", "documents", "bos_token ~ eos_token", "tools is none"),
    *("joiner('+')()", "1e400", "0x1f", "1_000", "'a' 'b'", "[1, 2, 3][1:]", "'a' is sameas 'a'"),
)
STATEMENTS = (
    "{% for i in range(3) %}{{ loop.changed(i // 2) }}{{ loop.cycle('a', 'b') }}{{ loop.depth0 }}"
    "{{ loop.revindex }}{{ loop.nextitem }}{% endfor %}",
    "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i > 4 %}{% break %}{% endif %}"
    "{{ i }}{% else %}none{% endfor %}",
    "{% for a, b in {'x': 1, 'y': 2}.items() %}{{ a }}{{ b }}{% endfor %}",
    "{% for m in messages if m.role == 'user' recursive %}{{ m.content }}{% endfor %}",
    "{% set j = joiner('+') %}{% for i in range(3) %}{{ j() }}{{ i }}{% endfor %}",
    "{% set n = namespace(x=0) %}{% for i in range(4) %}{% set n.x = n.x + i %}"
    "{% endfor %}{{ n.x }}",
    "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller and caller() }}"
    "{% endmacro %}"
    "{{ f(1) }}{{ f(1, 2, 3, x=4) }}{% call f(0) %}c{% endcall %}{{ f.name }}{{ f.arguments }}",
    "{% set x, y = 1, 2 %}{{ x }}{{ y }}{% set z %} a {% endset %}[{{ z }}]",
    "{% set z | upper | trim %} a {% endset %}[{{ z }}]",
    "{% generation %}a{% set x = 1 %}{% endgeneration %}{{ x }}",
    "{% with a = 1 %}{{ a }}{% endwith %}{{ a }}",
    "{% filter replace('a', 'b') | upper %}banana{% endfilter %}",
    "{% raw %}{{ x }}{% endraw %}{# no #}",
    "  {%- if true -%}  a  {%- endif -%}  b",
    "a\n  {% if true %}\n  b\n  {% endif %}\n  {# c #}\nd\n\n",
    "{%+ if true %}a{%+ endif %} b",
    "{% block x %}a{% endblock %}{{ self.x() }}",
    "{% autoescape true %}{{ '<' }}{% endautoescape %}",
    "{% do messages %}",
    "{% include 'a' %}",
    "{% import 'a' as a %}",
    "{% trans %}a{% endtrans %}",
    "{% debug %}",
)  # fmt: skip


def expressions() -> list[str]:
    found = [f"{v} | {name}" for name in DEFAULT_FILTERS if name not in ARGUMENTS for v in VALUES]
    for name, arguments in ARGUMENTS.items():
        found += [f"{v} | {name}({given})" for given in arguments for v in VALUES]
    for name in DEFAULT_TESTS:
        given = "2" if name in COMPARISONS else TESTS.get(name, "")
        if name.isidentifier():
            found += [f"{v} is {name}{f'({given})' if given else ''}" for v in VALUES]
    for value, methods in METHODS.items():
        found += [f"{value}.{method}" for method in methods]
    return [e for e in (*found, *OTHERS) if "| random" not in e]


def sources() -> list[str]:
    return [f"{{{{ {expression} }}}}" for expression in expressions()] + list(STATEMENTS)


def compiles(source: str) -> bool:
    try:
        reference._compile_jinja_template(source)
    except Exception:
        return False
    return True


@pytest.fixture(scope="module")
def usable() -> list[str]:
    return [source for source in sources() if compiles(source)]


@pytest.fixture(scope="module")
def pool(usable: list[str]) -> Iterator[TemplatePool]:
    """Renders the source whose number the first message says. Blocks need names of their own."""
    cases = "".join(
        f"{{% elif messages[0].content == '{index}' %}}{{{{ '[' }}}}{source}{{{{ ']' }}}}"
        for index, source in enumerate(usable)
        if "{% block" not in source
    )
    template = ChatTemplate(f"{{% if false %}}{cases}{{% endif %}}", {"eos_token": "</s>"}, "")
    pool = TemplatePool(template, LIMITS, now=datetime.now)
    assert pool.usable()
    yield pool
    pool.close()


def test_there_are_many(usable: list[str]) -> None:
    assert len(usable) > 900


def test_what_does_not_compile_there_does_not_compile_here(usable: list[str]) -> None:
    for source in set(sources()) - set(usable):
        pool = TemplatePool(ChatTemplate(source, {}, ""), LIMITS, now=datetime.now)
        assert not pool.usable(), source
        pool.close()


def without_addresses(text: str | None) -> str | None:
    return text and re.sub(" at 0x[0-9a-f]+", "", text)


def test_each_renders_what_transformers_renders(usable: list[str], pool: TemplatePool) -> None:
    failures, differing = 0, []
    for index, source in enumerate(usable):
        chat = [("user", str(index)), ("assistant", "b")]
        try:
            [there], _ = reference.render_jinja_template(
                conversations=[[{"role": role, "content": content} for role, content in chat]],
                chat_template=f"{{{{ '[' }}}}{source}{{{{ ']' }}}}",
                add_generation_prompt=True,
                eos_token="</s>",
            )
        except Exception:
            there, failures = None, failures + 1
        try:
            here = pool.render([ChatMessage(role, content) for role, content in chat]).text
        except TextError:
            here = None
        if "{% block" not in source and without_addresses(here) != without_addresses(there):
            differing.append((source, here, there))
    assert not differing
    assert failures < len(usable) // 2
