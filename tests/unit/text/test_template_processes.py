"""The processes that render: what they may touch, how they end, and what an end costs."""

from __future__ import annotations

import asyncio
import io
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime

import psutil
import pytest

from control_plane.text.chat_template import ChatMessage, ChatTemplate
from control_plane.text.control_tokens import added_tokens
from control_plane.text.end_of_sequence import EndTokens
from control_plane.text.errors import NoChatTemplate, TemplateFailed
from control_plane.text.frames import FrameTooLong, read_frame, write_frame
from control_plane.text.model_files import TextModel
from control_plane.text.processor import TextLimits, TextProcessor
from control_plane.text.template_pool import TemplatePool
from control_plane.text.template_process import RenderLimits
from control_plane.text.tokenizer import Tokenizer

# Does what the message says, so that one template serves kind and hostile clients.
OBEDIENT = ChatTemplate(
    "{% set say = messages[0].content %}"
    "{% if say == 'spin' %}{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}"
    "{% endfor %}"
    "{% elif say == 'eat' %}{{ ('a' * 10 ** 9) | length }}"
    "{% elif say == 'flood' %}{% for i in range(100000) %}0123456789{% endfor %}"
    "{% elif say == 'keep' %}{{ ([1] * 10 ** 7) | length }}"
    "{% elif say == 'work' %}{% for i in range(30000) %}{% endfor %}done"
    "{% else %}{{ say }}{% endif %}",
    {},
    "chat_template.jinja",
)
LIMITS = RenderLimits(max_characters=10_000, cpu_seconds=0.3, memory_bytes=256 << 20)
PATIENT = RenderLimits(max_characters=10_000, cpu_seconds=600.0, memory_bytes=256 << 20)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
    assert not render_processes()


def pool_of(stack: ExitStack, limits: RenderLimits = LIMITS) -> TemplatePool:
    pool = TemplatePool(OBEDIENT, limits, now=datetime.now)
    stack.callback(pool.close)
    return pool


def say(pool: TemplatePool, text: str) -> str:
    return pool.render([ChatMessage("user", text)]).text


def render_processes() -> list[psutil.Process]:
    """Those of this test process; one that has ended but was not waited for counts, too."""
    return [
        child
        for child in psutil.Process().children()
        if child.status() == psutil.STATUS_ZOMBIE
        or "control_plane.text.render_process" in child.cmdline()
    ]


def test_a_process_serves_many_renderings(stack: ExitStack) -> None:
    pool = pool_of(stack)
    assert say(pool, "a") == "a"
    before = render_processes()
    assert [say(pool, f"{index}") for index in range(100)] == [f"{index}" for index in range(100)]
    assert render_processes() == before
    assert len(before) == 1


def test_each_rendering_has_its_own_processor_time(stack: ExitStack) -> None:
    pool = pool_of(stack)
    say(pool, "work")
    [process] = render_processes()
    while sum(process.cpu_times()[:2]) < 3 * LIMITS.cpu_seconds:
        assert say(pool, "work") == "done"
    assert render_processes() == [process]


@pytest.mark.parametrize(
    ("text", "reason", "ends"),
    [
        ("spin", r"0\.3 s of processor time", True),
        ("eat", "memory", True),
        ("flood", "more than 10000 characters", False),
    ],
)
def test_a_limit_costs_one_rendering(stack: ExitStack, text: str, reason: str, ends: bool) -> None:
    pool = pool_of(stack)
    say(pool, "a")
    before = render_processes()
    for _ in range(2):
        with pytest.raises(TemplateFailed, match=reason):
            say(pool, text)
    assert say(pool, "a") == "a"
    after = render_processes()
    assert len(after) == 1
    assert (after != before) is ends


def test_a_killed_process_costs_nothing_while_it_is_idle(stack: ExitStack) -> None:
    pool = pool_of(stack)
    say(pool, "a")
    [process] = render_processes()
    process.kill()
    while process.status() != psutil.STATUS_ZOMBIE:
        pass
    assert say(pool, "b") == "b"
    assert process not in render_processes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_a_control_group_is_told_costs_no_rendering(
    stack: ExitStack, number: signal.Signals
) -> None:
    """The control plane drains, and ends its processes itself."""
    pool = pool_of(stack)
    assert say(pool, "a") == "a"
    before = render_processes()
    for process in before:
        process.send_signal(number)
    assert say(pool, "b") == "b"
    assert render_processes() == before


def test_a_killed_process_costs_the_rendering_it_had(stack: ExitStack) -> None:
    pool = pool_of(stack, PATIENT)
    say(pool, "a")
    [process] = render_processes()
    with ThreadPoolExecutor(1) as thread:
        spinning = thread.submit(say, pool, "spin")
        wait_until_it_works(process)
        process.kill()
        with pytest.raises(TemplateFailed, match="SIGKILL"):
            spinning.result()
    assert say(pool, "b") == "b"


def test_close_ends_what_renders(stack: ExitStack) -> None:
    pool = pool_of(stack, PATIENT)
    say(pool, "a")
    [process] = render_processes()
    with ThreadPoolExecutor(1) as thread:
        spinning = thread.submit(say, pool, "spin")
        wait_until_it_works(process)
        pool.close()
        with pytest.raises(TemplateFailed):
            spinning.result()
    with pytest.raises(TemplateFailed):
        say(pool, "a")
    assert not render_processes()


def wait_until_it_works(process: psutil.Process) -> None:
    """Until it has used processor time since the call."""
    before = sum(process.cpu_times()[:2])
    while sum(process.cpu_times()[:2]) == before:
        pass


async def test_eight_at_once_get_what_one_gets(stack: ExitStack, byte_level: Tokenizer) -> None:
    limits = TextLimits(thread_count=2, render_cpu_seconds=0.3)
    pool = TemplatePool(OBEDIENT, limits.rendering, now=datetime.now)
    processor = TextProcessor(TextModel(byte_level, OBEDIENT, EndTokens()), limits, pool)
    stack.callback(processor.close)
    texts = ["spin", *("abcdefg" * 10)]
    results = await gather(processor, texts)
    assert isinstance(results[0], TemplateFailed)
    assert results[1:] == [list(text.encode()) for text in texts[1:]]
    assert len(render_processes()) <= limits.thread_count


async def gather(processor: TextProcessor, texts: Sequence[str]) -> list[object]:
    chats = [processor.encode_chat([ChatMessage("user", text)]) for text in texts]
    return list(await asyncio.gather(*chats, return_exceptions=True))


@pytest.mark.slow
async def test_eight_long_chats_at_once_all_get_what_one_gets(
    stack: ExitStack, byte_level: Tokenizer
) -> None:
    source = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    tokens = added_tokens(byte_level.backend, frozenset(), source)
    template = ChatTemplate(source, {}, "chat_template.jinja", added_tokens=tokens)
    limits = TextLimits()
    pool = TemplatePool(template, limits.rendering, now=datetime.now)
    processor = TextProcessor(TextModel(byte_level, template, EndTokens()), limits, pool)
    stack.callback(processor.close)
    chat = [ChatMessage("user", "a <|end|> b < c " * 64)] * 401
    [one] = await asyncio.gather(processor.encode_chat(chat))
    assert one.count(byte_level.id_of("<|end|>") or -1) == len(chat)
    assert await asyncio.gather(*[processor.encode_chat(chat) for _ in range(8)]) == [one] * 8


async def test_the_loop_does_no_work_for_what_a_chat_says(
    stack: ExitStack, byte_level: Tokenizer
) -> None:
    limits = TextLimits()
    pool = TemplatePool(OBEDIENT, limits.rendering, now=datetime.now)
    processor = TextProcessor(TextModel(byte_level, OBEDIENT, EndTokens()), limits, pool)
    stack.callback(processor.close)

    async def calls_for(chat: list[ChatMessage]) -> int:
        """Functions that this thread calls until the work is another's."""
        count = 0

        def on_event(_frame: object, event: str, _argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        coroutine = processor.encode_chat(chat)
        sys.setprofile(on_event)
        try:
            future = coroutine.send(None)
        finally:
            sys.setprofile(None)
        assert future is not None
        coroutine.close()
        return count

    few = await calls_for([ChatMessage("user", "a")])
    assert await calls_for([ChatMessage("user", "<|end|>" * 100_000)]) == few
    assert await calls_for([ChatMessage("user", "a")] * 4096) < few + 4 * 4096


async def test_chat_is_prepared_once(stack: ExitStack, byte_level: Tokenizer) -> None:
    limits = TextLimits()
    pool = TemplatePool(OBEDIENT, limits.rendering, now=datetime.now)
    processor = TextProcessor(TextModel(byte_level, OBEDIENT, EndTokens()), limits, pool)
    stack.callback(processor.close)
    processor.prepare_chat()
    processor.prepare_chat()
    assert await processor.supports_chat()
    assert len(render_processes()) == 1


async def test_a_broken_template_leaves_text_alone(
    stack: ExitStack, byte_level: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    limits = TextLimits()
    template = ChatTemplate("{% if %}", {}, "chat_template.jinja")
    pool = TemplatePool(template, limits.rendering, now=datetime.now)
    processor = TextProcessor(TextModel(byte_level, template, EndTokens()), limits, pool)
    stack.callback(processor.close)
    assert not await processor.supports_chat()
    with pytest.raises(NoChatTemplate, match=r"chat_template\.jinja.*line 1"):
        await processor.encode_chat([ChatMessage("user", "a")])
    assert await processor.encode("a", add_special_tokens=False) == list(b"a")
    [record] = caplog.records
    assert "chat_template.jinja" in vars(record)["fields"]["error"]


def test_it_can_open_nothing_and_knows_nothing(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    pool = pool_of(stack)
    say(pool, "a")
    [process] = render_processes()
    assert process.num_fds() == 4
    assert process.rlimit(psutil.RLIMIT_NOFILE) == (4, 4)
    for limit in (psutil.RLIMIT_NPROC, psutil.RLIMIT_FSIZE, psutil.RLIMIT_CORE):
        assert process.rlimit(limit) == (0, 0)
    assert process.rlimit(psutil.RLIMIT_AS) == (LIMITS.memory_bytes, LIMITS.memory_bytes)
    assert process.environ().keys() <= {
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
        "PYTHONHOME",
        "TZ",
        "LC_CTYPE",
    }
    assert process.cwd() == "/"


@pytest.mark.parametrize(
    ("module", "there", "absent"),
    [
        ("control_plane.text.render_process", {"jinja2"}, {"tokenizers", "twinplane", "grpc"}),
        ("control_plane.app", {"tokenizers"}, {"jinja2", "torch"}),
    ],
)
def test_each_process_imports_what_it_needs(module: str, there: set[str], absent: set[str]) -> None:
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    names = set(output.stdout.split())
    assert there <= names
    assert not absent & names


def test_a_process_that_kept_much_memory_is_replaced(stack: ExitStack) -> None:
    pool = pool_of(stack)
    say(pool, "a")
    [process] = render_processes()
    assert process.memory_info().vms < LIMITS.memory_bytes // 2
    # With limits so small that it has used half of them when it starts.
    memory_bytes = process.memory_info().vms * 3 // 2
    narrow = pool_of(stack, RenderLimits(10_000, 5.0, memory_bytes))
    for _ in range(2):
        assert say(narrow, "a") == "a"
        assert render_processes() == [process]


def test_frames() -> None:
    stream = io.BytesIO()
    for body in (b"", b"a", b"b" * 100_000):
        write_frame(stream, body)
    whole = stream.getvalue()
    stream.seek(0)
    assert [read_frame(stream, 100_000) for _ in range(4)] == [b"", b"a", b"b" * 100_000, None]
    for cut in (1, 4, 6, len(whole) - 1):
        stream = io.BytesIO(whole[:cut])
        while read_frame(stream, 100_000) is not None:
            pass
    with pytest.raises(FrameTooLong):
        read_frame(io.BytesIO(whole[:4] + b"\x7f"), -1)
