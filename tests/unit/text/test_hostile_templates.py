"""Templates that want more than they may have, or what is not theirs."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from control_plane.text.chat_template import ChatMessage, ChatTemplate
from control_plane.text.errors import NoChatTemplate, TemplateFailed
from control_plane.text.template_pool import TemplatePool
from control_plane.text.template_process import RenderLimits
from tests.support.quick import spread

LIMITS = RenderLimits(max_characters=100_000, cpu_seconds=0.1, memory_bytes=256 << 20)
MESSAGES = (ChatMessage("system", "Be brief."), ChatMessage("user", "Hi"))

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


@pytest.mark.parametrize("source", spread(HOSTILE.values(), 10), ids=HOSTILE.keys())
def test_hostile_templates_fail_without_hanging(source: str) -> None:
    template = ChatTemplate(source, {}, "chat_template.jinja")
    pool = TemplatePool(template, LIMITS, now=lambda: datetime(2031, 5, 4, tzinfo=UTC))
    try:
        # Jinja computes constants when it compiles, so some fail there.
        with pytest.raises((TemplateFailed, NoChatTemplate)):
            pool.render(MESSAGES)
    finally:
        pool.close()
