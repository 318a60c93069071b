"""Chat templates render as their models expect, and can't cost more than they may."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime

import pytest

from control_plane.text.chat_template import ChatMessage, ChatTemplate, RenderLimits
from control_plane.text.errors import ModelFilesInvalid, TemplateFailed

LIMITS = RenderLimits(max_characters=100_000, seconds=5.0)
MESSAGES = (
    ChatMessage("system", "Be brief."),
    ChatMessage("user", " Hi <b>&'\" "),
    ChatMessage("assistant", "Hello"),
    ChatMessage("user", "日本 🙂"),
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(
        source,
        {"bos_token": "<s>", "eos_token": "</s>"},
        now=lambda: datetime(2031, 5, 4, tzinfo=UTC),
        clock=time.monotonic,
    )


def render(source: str, limits: RenderLimits = LIMITS) -> str:
    return template(source).render(MESSAGES, limits)


CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_chatml() -> None:
    assert render(CHATML) == (
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
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
    ],
)
def test_what_templates_use(source: str, expected: str) -> None:
    assert render(source) == expected


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
    "tuple repetition": "{{ ('a',) * 1000 }}",
    "big numbers": "{% set ns = namespace(x=10) %}{% for i in range(100) %}"
        "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "power": "{{ 10 ** 10000 }}",
    "numbers out of texts": "{{ ('f' * 100000) | int(0, 16) is odd }}",
    "rounding": "{{ 5 | round(-10 ** 9) }}",
    "rounding up": "{{ 5 | round(10 ** 9, 'ceil') }}",
    "indenting backwards": "{{ 'a' | indent(-10 ** 6) }}",
    "slices": "{% set x = range(100000) | list %}{% for i in range(100000) %}"
        "{% set y = x[1:] %}{% endfor %}",
    "a block's buffer": "{% set x %}{% for i in range(100000) %}" + "a" * 1000
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
    "date formats": "{{ strftime_now('%Y' * 100) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
        "{% endmacro %}{{ f(60) }}",
    "Python's insides": "{{ ''.__class__.__mro__ }}",
    "changing messages": "{{ messages.append(1) }}",
    "other files": "{% include '/etc/passwd' %}",
    "lorem ipsum": "{{ lipsum(1000000) }}",
    "undefined names": "{{ nothing.at_all }}",
}  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_templates_fail_without_hanging(source: str) -> None:
    limits = RenderLimits(max_characters=100_000, seconds=0.3)
    with pytest.raises(TemplateFailed):
        render(source, limits)


def test_time_is_bounded_by_the_clock() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    slow = ChatTemplate("{% for i in range(100) %}{% endfor %}", {}, now=datetime.now, clock=clock)
    with pytest.raises(TemplateFailed, match="longer"):
        slow.render(MESSAGES, RenderLimits(1000, seconds=50.0))
    slow.render(MESSAGES, RenderLimits(1000, seconds=1000.0))


def test_a_long_honest_conversation_fits() -> None:
    turns = [ChatMessage("user", "word " * 200), ChatMessage("assistant", "so " * 300)] * 200
    limits = RenderLimits(max_characters=1 << 20, seconds=60.0)
    rendered = template(CHATML).render(turns, limits)
    assert rendered.count("<|im_start|>") == 401


def test_a_refusal_is_passed_on_and_cut() -> None:
    with pytest.raises(TemplateFailed, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateFailed) as caught:
        render("{{ raise_exception('x' * 10000) }}")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ {messages: 1} }}",
        "{{ messages[0].content | int(1) / 0 }}",
    ],
)
def test_errors_do_not_quote_the_messages(source: str) -> None:
    with pytest.raises(TemplateFailed) as caught:
        render(source)
    assert "brief" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a' | center(3) }}", "{{ a", "x" * (1 << 21)])
def test_what_does_not_compile_is_found_at_start(source: str) -> None:
    with pytest.raises(ModelFilesInvalid):
        template(source)


def test_compiling_computes_nothing() -> None:
    template("{{ 'a' * 10 ** 12 }}{{ [[1] * 10 ** 12] | length }}{% set x = 10 ** 10 ** 10 %}")


def test_threads_do_not_share_a_budget() -> None:
    chatml = template(CHATML)
    expected = chatml.render(MESSAGES, LIMITS)
    results: list[str] = []

    def work() -> None:
        results.extend(chatml.render(MESSAGES, LIMITS) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 200
