"""What a template renders to here is what `transformers` renders, to the character."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.text.chat_template import ChatMessage, ChatTemplate
from control_plane.text.errors import TextError
from control_plane.text.template_environment import compile_template
from control_plane.text.template_pool import TemplatePool
from control_plane.text.template_process import RenderLimits
from tests.support.quick import examples
from tests.support.reference_template import reference_rendering

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
LIMITS = RenderLimits(max_characters=1 << 20, cpu_seconds=10.0, memory_bytes=512 << 20)

# The shapes in which models' templates are written, not any model's own.
TEMPLATES = {
    "tags around each turn": """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
""",
    "a default system turn": """\
{% if messages and messages[0]['role'] == 'system' %}
{% set system, turns = messages[0]['content'], messages[1:] %}
{% else %}
{% set system, turns = 'You help.', messages %}
{% endif %}
{{ bos_token }}[SYS]{{ system | trim }}[/SYS]
  {% for m in turns %}
  {% if m.role == 'user' -%}
    [INST]{{ m['content'].strip() }}[/INST]
  {%- else %}
 {{ m['content'] ~ eos_token }}
  {% endif %}
  {% endfor %}
""",
    "alternation": """\
{% for m in messages %}
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate, not ' ~ m.role) }}
{% endif %}
{{ '%s: %s' % (m.role | capitalize, m.content) }}
{% endfor %}
""",
    "a search for the last question": """\
{% set ns = namespace(last=-1, text='') %}
{% for m in messages[::-1] %}
{% set index = messages | length - 1 - loop.index0 %}
{% if ns.last < 0 and m.role == 'user' and not m.content.startswith('<tool>') %}
{% set ns.last = index %}
{% endif %}
{% endfor %}
{% for m in messages %}
{% if loop.index0 > ns.last and '</think>' in m.content %}
{{ m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') }}
{% elif loop.first %}{% continue %}{% else %}
{{ m.content.split('</think>') | last }}
{% endif %}
{% endfor %}
""",
    "macros and blocks": """\
{%- macro show(turn, n=1) -%}
{{ turn.role | upper }}#{{ n }} {{ caller(turn.content) if caller else turn.content }}
{%- endmacro -%}
{% for m in messages %}
{% call(text) show(m, n=loop.index) %}<{{ text | e }}>{% endcall %}
{% generation %}
{% set x = m.content | length %}{{ x }}
{% endgeneration %}
{{ x }}{{ loop.changed(m.role) }}
{% endfor %}
{% filter indent(2, true) %}{% for m in messages %}{{ m.content }}
{% endfor %}{% endfilter %}
""",
    "data": """\
{{ messages | tojson }}{{ messages | tojson(indent=2, ensure_ascii=true) }}
{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}
{{ {'tools': tools, 'documents': documents, 'ids': [1, 2.5, true, none]} | tojson }}
{{ dict(a=1, b=messages | length) }}{{ dict.fromkeys('ab', 0) }}{{ messages | pprint }}
{{ messages | map(attribute='role') | unique | list }}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}
{% for role, group in messages | groupby('role') %}{{ role }}:{{ group | length }} {% endfor %}
{% for part in messages | batch(3, 'pad') %}{{ part }}{% endfor %}
{% for part in messages | slice(2) %}{{ part | length }}{% endfor %}
{{ messages | rejectattr('role', 'in', ['user']) | list | count }}{{ [3, 1, 2] | sort | sum }}
""",
    "texts": """\
{% for m in messages %}
{% set t = m.content %}
{{ t.replace('e', '3') }}{{ t | replace('a', '4') }}{{ t.title() }}{{ t | title }}
{{ t | center(9) }}{{ t.zfill(12) }}{{ t.ljust(8) }}|{{ t.partition(' ') }}{{ t.encode('utf-8') }}
{{ t[::-1] }}{{ t[1:3] }}{{ t | urlencode }}{{ t | striptags }}
{{ t | wordwrap(5) }}{{ t | truncate(7) }}{{ t | wordcount }}
{{ '{:>10}|{}'.format(t, loop.index) }}{{ '%5d' | format(loop.index) }}
{{ t | attr('upper') is defined }}{{ t | string | list | tojson }}
{{ t is string }}{{ t | forceescape }}
{% endfor %}
{{ cycler('a', 'b').next() }}{{ ('a',) + ('b',) * 2 }}{{ 7 // 2 }}{{ 2 ** 10 }}{{ 7 / 2 }}
{{ 1234567 | filesizeformat }}{{ 3.14159 | round(2) }}{{ '0x1f' | int(0, 16) }}
""",
    "names that are not there": """\
{{ unk_token }}{{ messages[0].tool_calls is defined }}{{ nothing | default('d') }}
{{ messages[0].nothing or 'none' }}{% if tools %}tools{% endif %}{{ messages[0].nothing.deeper }}
""",
}  # fmt: skip

turns = st.lists(
    st.tuples(
        st.sampled_from(["user", "assistant", "system", "tool", "", "日"]),
        st.one_of(
            st.text(st.characters(codec="utf-8"), max_size=20),
            st.sampled_from(["<think>\nhm\n</think>\n\nyes", "<tool>x", "{{ 7 * 7 }}", " a e \n"]),
        ),
    ),
    max_size=6,
)


def expected(source: str, messages: list[tuple[str, str]]) -> str | None:
    """None: it raises."""
    return reference_rendering(source, messages, SPECIAL_TOKENS)


def in_environment(source: str, messages: list[tuple[str, str]]) -> str | None:
    """Rendered here, without a process."""
    template = compile_template(source, datetime.now)
    try:
        return template.render(
            **SPECIAL_TOKENS,
            messages=[{"role": role, "content": content} for role, content in messages],
            add_generation_prompt=True,
            tools=None,
            documents=None,
        )
    except Exception:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=examples(40), deadline=None)
@given(messages=turns)
def test_the_environment_is_that_of_transformers(
    name: str, messages: list[tuple[str, str]]
) -> None:
    source = TEMPLATES[name]
    assert in_environment(source, messages) == expected(source, messages)


@pytest.fixture(scope="module", params=TEMPLATES)
def process(request: pytest.FixtureRequest) -> Iterator[tuple[str, TemplatePool]]:
    source = TEMPLATES[request.param]
    template = ChatTemplate(source, SPECIAL_TOKENS, "chat_template.jinja")
    pool = TemplatePool(template, LIMITS, now=datetime.now)
    yield source, pool
    pool.close()


@settings(max_examples=examples(40), deadline=None)
@given(messages=turns)
def test_the_process_renders_what_transformers_renders(
    process: tuple[str, TemplatePool], messages: list[tuple[str, str]]
) -> None:
    source, pool = process
    try:
        rendered = pool.render([ChatMessage(role, content) for role, content in messages]).text
    except TextError:
        rendered = None
    assert rendered == expected(source, messages)


def test_each_template_renders_something() -> None:
    """So that the comparison above is not of errors."""
    messages = [("user", "Hello there"), ("assistant", "<think>x</think>yes"), ("user", "é 🙂")]
    for name, source in TEMPLATES.items():
        assert (expected(source, messages) is None) is (name == "names that are not there")
    assert expected(TEMPLATES["alternation"], messages[1:]) is None
