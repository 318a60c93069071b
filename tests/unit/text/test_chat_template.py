"""Chat templates render as their models expect, and can't cost more than they may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime

import pytest

from control_plane.text.chat_template import ChatMessage, ChatTemplate
from control_plane.text.errors import NoChatTemplate, TemplateFailed
from control_plane.text.template_pool import TemplatePool
from control_plane.text.template_process import RenderLimits

LIMITS = RenderLimits(max_characters=100_000, cpu_seconds=5.0, memory_bytes=512 << 20)
SMALL = RenderLimits(max_characters=100_000, cpu_seconds=0.2, memory_bytes=256 << 20)
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = (
    ChatMessage("system", "Be brief."),
    ChatMessage("user", " Hi <b>&'\" "),
    ChatMessage("assistant", "Hello"),
    ChatMessage("user", "日本 🙂"),
)


@pytest.fixture
def template() -> Iterator[Callable[..., TemplatePool]]:
    """Makes a renderer of a template's source; its processes end with the test."""
    with ExitStack() as stack:

        def make(source: str, limits: RenderLimits = LIMITS) -> TemplatePool:
            pool = TemplatePool(
                ChatTemplate(source, SPECIAL_TOKENS, "chat_template.jinja"),
                limits,
                now=lambda: datetime(2031, 5, 4, tzinfo=UTC),
            )
            stack.callback(pool.close)
            return pool

        yield make


CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_chatml(template: Callable[..., TemplatePool]) -> None:
    assert template(CHATML).render(MESSAGES).text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n Hi <b>&'\" <|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\n日本 🙂<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}{{ unk_token }}", "<s></s>"),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
        ("{{ messages[0].content }}|{{ messages[-1]['role'] }}", "Be brief.|user"),
        ("{{ messages[1].content | trim }}", "Hi <b>&'\""),
        ("{{ messages[1].content.strip().upper() }}", "HI <B>&'\""),
        ("{{ messages[1:][0].role ~ '-' ~ messages | length }}", "user-4"),
        ("{{ messages[::-1] | map(attribute='role') | join(',') }}", "user,assistant,user,system"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "2"),
        ("{{ messages[0] | tojson }}", '{"role": "system", "content": "Be brief."}'),
        ("{{ {'a': ['日', 1]} | tojson(indent=2) }}", '{\n  "a": [\n    "日",\n    1\n  ]\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "04 May 2031"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
            "{% endfor %}{{ ns.n }}",
            "4",
        ),
        (
            "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}"
            "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}{{ loop.last }}"
            "{{ loop.previtem.role }}{{ loop.length }}{% endfor %}",
            "userFalsesystem4",
        ),
        ("{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('ab') }}", "abab"),
        ("{% set x %}a{{ 1 + 1 }}{% endset %}[{{ x }}]", "[a2]"),
        ("{% filter upper | replace('B', 'c') %}a{{ 'b' }}{% endfilter %}", "Ac"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% if 'x' in ['x', 'y'] and 'z' not in ('x',) %}in{% endif %}", "in"),
        ("{{ '-' * 3 }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ [1] + [2] }}", "---332[1, 2]"),
        ("{{ 'a,b'.split(',')[1] }}{{ 'abc'[1:] }}{{ 'a-b'.replace('-', '+') }}", "bbca+b"),
        ("{{ ', '.join(['a', 'b']) }}{{ messages[0].get('tool_calls', 'no') }}", "a, bno"),
        ("{{ 'a\nb' | indent(2) }}{{ 2.345 | round(1) }}{{ -3 | abs }}", "a\n  b2.33"),
        ("{{ messages[0] is mapping }}{{ messages[0].content is string }}", "TrueTrue"),
        ("{% for m in messages recursive %}{{ loop.index }}{% endfor %}", "1234"),
        (
            "{{ ('a',) * 3 }}{{ '%s-%d' % ('a', 2) }}{{ '{}{:>3}'.format(1, 2) }}",
            "('a', 'a', 'a')a-21  2",
        ),
        ("{{ [3, 4] | sum }}{{ '%05d' | format(7) }}{{ 'a' | center(3) }}|", "700007 a |"),
        ("{% for g in [1, 2, 3] | batch(2) %}{{ g }}{% endfor %}", "[1, 2][3]"),
        (
            "{% for g in messages | groupby('role') %}{{ g.grouper }}{{ g.list | length }}"
            "{% endfor %}",
            "assistant1system1user2",
        ),
        ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}", "aba"),
        (
            "{% set j = joiner('+') %}{% for m in messages %}{{ j() }}{{ loop.index }}{% endfor %}",
            "1+2+3+4",
        ),
        (
            "{% for m in messages %}{{ loop.changed(m.role == 'user') }} {% endfor %}",
            "True True True True ",
        ),
        ("{{ messages[0].content.replace('e', '3') }}{{ '7'.zfill(3) }}", "B3 bri3f.007"),
        ("{{ ['a', 'b'].index('b') }}{{ 'é'.encode('utf-16-le') }}", "1b'\\xe9\\x00'"),
        (
            "{{ 'a b c' | wordwrap(3) }}{{ '<a>b</a>' | striptags }}{{ 'a b' | urlencode }}",
            "a b\ncba%20b",
        ),
        ("{{ {'a': 1} | pprint }}{{ 'ab' | attr('upper') is callable }}", "{'a': 1}True"),
        ("{{ dict(a=1) | tojson }}{{ dict.fromkeys(['a'], 2) }}", "{\"a\": 1}{'a': 2}"),
        (
            "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
            "21",
        ),
        ("{{ '\\u65e5\\N{BULLET}' }}", "日•"),
        (
            "{{ [1, 2] | tojson(separators=(',', ':')) }}"
            "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}",
            '[1,2]{"a": 2, "b": 1}',
        ),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
    ],
)
def test_what_templates_use(
    template: Callable[..., TemplatePool], source: str, expected: str
) -> None:
    assert template(source).render(MESSAGES).text == expected


HOSTILE = {
    "nested loops that emit nothing":
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "a long range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "filtered loops":
        "{% for i in range(100000) %}{% for j in range(100000) if j < 0 %}{% endfor %}{% endfor %}",
    "long output": "{% for i in range(100000) %}0123456789{% endfor %}",
    "repetition": "{{ 'a' * 10 ** 10 }}",
    "repetition reversed": "{{ 10 ** 10 * 'a' }}",
    "list repetition": "{{ [1] * 10 ** 10 }}",
    "doubling by +": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
        "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by ~": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
        "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by nesting": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
        "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "doubling by dict": "{% set ns = namespace(x={}) %}{% for i in range(60) %}"
        "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "nesting by repetition": "{% set ns = namespace(x=range(1000)|list) %}{% for i in range(5) %}"
        "{% set ns.x = [ns.x] * 1000 %}{% endfor %}{{ ns.x | upper }}",
    "comparing": "{% set ns = namespace(x=range(1000)|list, y=range(1000)|list) %}"
        "{% for i in range(5) %}{% set ns.x = [ns.x] * 1000 %}{% set ns.y = [ns.y] * 1000 %}"
        "{% endfor %}{{ ns.x == ns.y }}",
    "comparing by test": "{% set ns = namespace(x=range(1000)|list, y=range(1000)|list) %}"
        "{% for i in range(5) %}{% set ns.x = [ns.x] * 1000 %}{% set ns.y = [ns.y] * 1000 %}"
        "{% endfor %}{{ ns.x is eq(ns.y) }}",
    "hashing": "{% set ns = namespace(x=('a',)) %}{% for i in range(60) %}"
        "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {}[ns.x] }}",
    "big numbers": "{% set ns = namespace(x=10) %}{% for i in range(100) %}"
        "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "power": "{{ 10 ** 10000 }}",
    "rounding": "{{ 5 | round(-10 ** 9) }}",
    "rounding up": "{{ 5 | round(10 ** 9, 'ceil') }}",
    "slices": "{% set x = range(100000) | list %}{% for i in range(100000) %}"
        "{% set y = x[1:] %}{% endfor %}",
    "a block's buffer": "{% set x %}{% for i in range(100000) %}" + "a" * 10000
        + "{% endfor %}{% endset %}{{ x | length }}",
    "replace by method": "{{ ('a' * 1000).replace('', 'b' * 100000) }}",
    "replace by filter": "{{ ('a' * 1000) | replace('', 'b' * 100000) }}",
    "join by method": "{{ ('b' * 100000).join(['a'] * 1000) }}",
    "join by filter": "{{ (['a' * 100000] * 1000) | join }}",
    "upper over a map": "{{ (['a' * 100000] * 10000) | map('upper') | list | length }}",
    "indent": "{{ 'a' | indent(10 ** 9, true) }}",
    "json indent": "{{ [1] | tojson(indent=10 ** 9) }}",
    "json separators": "{{ [1, 2] | tojson(separators=('a' * 100000, 'b')) }}",
    "justification": "{{ 'a'.ljust(10 ** 9) }}",
    "formatting by %": "{{ '%1000000000d' % 1 }}",
    "formatting by method": "{{ '{:1000000000d}'.format(1) }}",
    "formatting by getitem": "{{ '{:1000000000d}'['format'](1) }}",
    "bytes": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
        "{% endmacro %}{{ f(60) }}",
    "Python's insides": "{{ ''.__class__.__mro__ }}",
    "changing messages": "{{ messages.append(1) }}",
    "other files": "{% include '/etc/passwd' %}",
    "lorem ipsum": "{{ lipsum(1000000) }}",
    "undefined names": "{{ nothing.at_all }}",
    "formatting by filter": "{{ '%1000000000d' | format(1) }}",
    "padding": "{{ 'a' | center(10 ** 10) }}{{ '1'.zfill(10 ** 10) }}",
    "batches": "{{ [1] | batch(10 ** 10, 0) | list | length }}",
    "sums": "{{ ([[1] * 10000] * 100000) | sum(start=[]) | length }}",
    "wrapping": "{{ ('a' * 10 ** 7) | wordwrap(1) | length }}",
    "a hash of shared tuples": "{% set ns = namespace(x=('a',)) %}{% for i in range(60) %}"
        "{% set ns.x = ns.x + (ns.x,) %}{% endfor %}{{ {}[ns.x] }}",
    "deep nesting": "{% set ns = namespace(x=[]) %}{% for i in range(90000) %}"
        "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "insides by filter": "{{ ('' | attr('__class__')).mro() }}",
    "insides by map": "{{ [''] | map(attribute='__class__') | map(attribute='x.y') | list }}",
    "insides by format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "insides of functions": "{{ raise_exception.__globals__.x }}",
    "insides of lipsum": "{{ lipsum.__globals__['os'].getcwd() }}",
    "insides of the template": "{{ self._TemplateReference__context.environment }}",
    "insides of cycler": "{{ cycler.__init__.__globals__.x }}",
    "private names of a namespace": "{{ namespace(__class__=1) }}",
    "set private names": "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "Python's modules": "{% import 'os' as os %}{{ os.getcwd() }}",
    "changing globals": "{{ dict.update({}) }}",
    "formatting by map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "formatting by width from data": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "formatting by a star": "{{ '%*d' % (10 ** 9, 1) }}",
    "formatting precision": "{{ '%.1000000000f' % 1.5 }}",
    "formatting a tuple's insides": "{{ '{0[0].__class__.__base__}'.format([1]) }}",
    "insides by format of a macro": "{% macro f() %}{% endmacro %}{{ '{0._func.__globals__}'"
        ".format(f) }}",
    "insides by a format filter's text": "{{ ('{0.__class__.__mro__}' | attr('format'))('') }}",
    "insides by format_map": "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
    "insides by a method's attribute": "{{ ''.upper.__self__.__class__.__mro__ }}",
    "insides of a generator": "{{ (messages | map('upper')).gi_frame.f_globals['x'] }}",
    "insides of joiner": "{{ joiner.__init__.__globals__.x }}",
    "insides of range": "{{ range.__class__.__subclasses__() }}",
    "insides of loop": "{% for m in messages %}{{ loop._iterable.__class__.x }}{% endfor %}",
    "insides by mapped attributes": "{{ messages | map(attribute='__class__.__mro__.x') | list }}",
    "insides by sort": "{{ messages | sort(attribute='__class__.__mro__.x') }}",
    "insides by groupby": "{{ messages | groupby('__class__.__mro__.x') }}",
    "insides by selectattr": "{{ messages | selectattr('__class__.__mro__.x.y') | list }}",
    "insides of the context": "{{ self.__init__.__globals__.x }}{{ caller.x }}",
    "insides of strftime_now": "{{ strftime_now.__globals__.x }}{{ strftime_now.__closure__ }}",
    "a template of its own": "{% extends '/etc/passwd' %}",
    "justification by width": "{{ 'a'.rjust(10 ** 9) ~ 'a'.center(10 ** 9) }}",
    "tabs": "{{ ('\\t' * 1000).expandtabs(10 ** 7) }}",
    "translation": "{{ ('a' * 10 ** 6).translate({97: 'b' * 10 ** 6}) }}",
    "a truncated power": "{{ (10 ** (10 ** 8)) | string | truncate(3) }}",
    "a shifted factorial": "{% set n = namespace(x=1) %}{% for i in range(99999) %}"
        "{% set n.x = n.x * (10 ** 100) %}{% endfor %}{{ n.x }}",
    "a slice of a long range": "{% for i in range(100001) %}{% endfor %}",
    "batches of batches": "{{ ((range(99999) | batch(1) | list) * 99) | tojson(indent=99999) }}",
    "a sum of texts": "{{ (['a' * 100000] * 100000) | sum(start='') }}",
    "urlencoded": "{{ ('é' * 10 ** 8) | urlencode }}",
    "json of what contains itself": "{% set x = namespace() %}{% set x.x = x %}{{ x | tojson }}",
    "a deep recursion of json": "{% set n = namespace(x=[]) %}{% for i in range(9999) %}"
        "{% set n.x = [n.x] %}{% endfor %}{{ n.x | tojson }}",
    "loops within loops": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "callers within callers": "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}"
        "{% endmacro %}{{ f() }}",
    "time for ever": "{{ strftime_now('%Y' * 10 ** 8) }}",
    "a refusal that is long": "{{ raise_exception('a' * 10 ** 9) }}",
    "a wide batch": "{{ [1] | slice(10 ** 9) | list | length }}",
    "codecs": "{{ ('a' * 10 ** 8).encode('utf-32') | length }}",
    "an undefined name's insides": "{{ nothing.__class__.__mro__ }}",
    "splitting": "{% for i in range(99999) %}{% set x = ('a ' * 10 ** 6).split() %}{% endfor %}",
    "replacing by a count": "{{ ('ab' * 10 ** 6).replace('a', 'b' * 10 ** 5) | length }}",
    "changing a list": "{% set x = [1] %}{{ x.append(2) }}",
}  # fmt: skip


def test_there_are_enough_of_them() -> None:
    assert len(HOSTILE) > 90


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_templates_fail_without_hanging(
    template: Callable[..., TemplatePool], source: str
) -> None:
    # Jinja computes constants when it compiles, so some fail there.
    with pytest.raises((TemplateFailed, NoChatTemplate)):
        template(source, SMALL).render(MESSAGES)


def test_a_long_honest_conversation_fits(template: Callable[..., TemplatePool]) -> None:
    turns = [ChatMessage("user", "word " * 200), ChatMessage("assistant", "so " * 300)] * 200
    limits = RenderLimits(max_characters=1 << 20, cpu_seconds=1.0, memory_bytes=512 << 20)
    rendered = template(CHATML, limits).render(turns).text
    assert rendered.count("<|im_start|>") == 401


def test_many_small_messages_arrive_in_order(template: Callable[..., TemplatePool]) -> None:
    turns = [ChatMessage(str(index), "x") for index in range(5000)]
    source = "{% for m in messages %}{{ m.role }},{% endfor %}"
    assert template(source).render(turns).text == "".join(f"{index}," for index in range(5000))
    assert template(source).render([]).text == ""


def test_a_refusal_is_passed_on_and_cut(template: Callable[..., TemplatePool]) -> None:
    with pytest.raises(TemplateFailed, match="roles must alternate"):
        template("{{ raise_exception('roles must alternate') }}").render(MESSAGES)
    with pytest.raises(TemplateFailed) as caught:
        template("{{ raise_exception('x' * 10000) }}").render(MESSAGES)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ {messages: 1} }}",
        "{{ messages[0].content | int(1) / 0 }}",
        "{{ messages[0].content ~ '\\ud800' }}",
    ],
)
def test_errors_do_not_quote_the_messages(
    template: Callable[..., TemplatePool], source: str
) -> None:
    with pytest.raises(TemplateFailed, match="fails on the messages") as caught:
        template(source).render(MESSAGES)
    assert "brief" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("{{ nothing.at_all }}", 1),
        ("a\n\n{{ messages[0].content + 1 }}", 3),
        ("{% for m in messages %}\n{{ m.content / 2 }}\n{% endfor %}", 2),
        ("{% macro f(x) %}\n\n{{ x.y.z }}{% endmacro %}\n\n\n{{ f('a') }}", 3),
        ("\n{{ raise_exception('no') }}", 2),
        ("\n{{ messages | map('int') | sum / 0 }}", 2),
        ("\n\n{% set x = messages.append(1) %}", 3),
        ("\n{%- if messages | length > 'a' -%}{% endif %}", 2),
        ("\n{% include 'x' %}", 2),
        ("\n{% for x in 3 %}{% endfor %}", 2),
        ("\n{{ strftime_now(3) }}", 2),
        ("\n{% set x %}\n{{ 'a'.encode('rot13') }}{% endset %}", 3),
    ],
)
def test_an_error_names_the_file_and_the_line(
    template: Callable[..., TemplatePool], source: str, line: int
) -> None:
    with pytest.raises(TemplateFailed, match=rf"\(chat_template\.jinja, line {line}\)"):
        template(source).render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "line"), [("\n{% if %}", 2), ("a\nb\n{{ 'a' | no_filter }}", 3), ("\n{{ a", 2)]
)
def test_what_does_not_compile_names_the_line(
    template: Callable[..., TemplatePool], source: str, line: int
) -> None:
    with pytest.raises(NoChatTemplate, match=rf"chat_template\.jinja.* line {line}:"):
        template(source).render(MESSAGES)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 'a' | no_filter }}", "{{ a", "{% break %}", "x" * (1 << 21)]
)
def test_what_does_not_compile_costs_chat_and_says_where(
    template: Callable[..., TemplatePool], source: str
) -> None:
    pool = template(source)
    assert not pool.usable()
    for _ in range(2):
        with pytest.raises(NoChatTemplate, match=r"chat_template\.jinja"):
            pool.render(MESSAGES)


def test_compiling_is_bounded(template: Callable[..., TemplatePool]) -> None:
    pool = template("{% set x = ([[1] * 1000] * 10000) | sum(start=[]) %}", SMALL)
    assert not pool.usable()
    with pytest.raises(NoChatTemplate, match=r"0\.2 s of processor time"):
        pool.render(MESSAGES)


def test_a_template_that_compiles_is_usable(template: Callable[..., TemplatePool]) -> None:
    assert template(CHATML).usable()
