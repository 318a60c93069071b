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
from tests.support.quick import spread

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
    spread([
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
    ], 10),
)  # fmt: skip
def test_what_templates_use(
    template: Callable[..., TemplatePool], source: str, expected: str
) -> None:
    assert template(source).render(MESSAGES).text == expected


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
