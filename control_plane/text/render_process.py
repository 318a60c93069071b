"""The process in which a chat template is compiled and rendered: limits first, then work.

    python -m control_plane.text.render_process MEMORY_BYTES CPU_SECONDS MAX_CHARACTERS

It reads frames on stdin and answers each with one on stdout. The first holds the template:

    {"source": "…", "special_tokens": {"bos_token": "…"}}                 → {} or {"error": "…"}

Every other holds a conversation, with the local time that strftime_now tells:

    {"now": "2031-05-04T10:00:00", "messages": [["user", "Hi"], …]}       → {"text": "…"} or
                                                                            {"error": "…"}

A reply with "last": true says that this process ends now. It also ends when stdin does, and the
kernel ends it (SIGPROF) when one frame's work takes more than CPU_SECONDS of processor time.
Imports nothing but the standard library and Jinja.
"""

from __future__ import annotations

import codecs
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import jinja2

from control_plane.text.frames import read_frame, write_frame
from control_plane.text.template_environment import Refused, compile_template

_MAX_REQUEST_BYTES = (1 << 32) - 1
"""The parent is trusted, so any length it can write is read."""
_MAX_QUOTED_CHARACTERS = 256
_LATE_MODULES = ("html", "jinja2.constants", "jinja2.debug", "pprint", "textwrap", "unicodedata")
_LATE_CODECS = (
    *("ascii", "cp1252", "idna", "latin-1", "punycode", "raw-unicode-escape", "unicode-escape"),
    *("utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-16-le", "utf-32"),
)


def main(arguments: list[str]) -> int:
    memory_bytes, cpu_seconds, max_characters = arguments
    # A signal to the whole control group is meant for the control plane, which ends this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _load_what_comes_late()
    memory = _Memory()
    _limit(int(memory_bytes), open_files=4)
    renderer = _Renderer(int(max_characters))
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    while (body := read_frame(requests, _MAX_REQUEST_BYTES)) is not None:
        # The timer counts this process's own processor time, so a busy machine does not matter.
        signal.setitimer(signal.ITIMER_PROF, float(cpu_seconds))
        is_rendering = renderer.compiled
        reply = _answer(renderer, body)
        if is_rendering and memory.used() > int(memory_bytes) // 2:
            # Freed memory may stay in pieces. The next rendering must find all of it again.
            reply["last"] = True
        # Half a surrogate pair, which a refusal may quote, can't be encoded: it becomes "?".
        encoded = json.dumps(reply, ensure_ascii=False).encode(errors="replace")
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(replies, encoded)
        if reply.get("last"):
            break
    return 0


class _Memory:
    """This process's address space, read from a file that is opened before the limits are set."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY)

    def used(self) -> int:
        """Bytes."""
        [pages, *_] = os.pread(self._file, 256, 0).split()
        return int(pages) * resource.getpagesize()


class _Renderer:
    """The template, once it was sent, and what it renders to."""

    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters
        self._now = datetime.min
        self._special_tokens: dict[str, str] = {}
        self._template: jinja2.Template | None = None

    @property
    def compiled(self) -> bool:
        """Whether the template was sent and compiles: what follows are conversations."""
        return self._template is not None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._template is None:
            return self._compile(request["source"], request["special_tokens"])
        self._now = datetime.fromisoformat(request["now"])
        return self._render(self._template, request["messages"])

    def _compile(self, source: str, special_tokens: dict[str, str]) -> dict[str, Any]:
        self._special_tokens = special_tokens
        try:
            self._template = compile_template(source, lambda: self._now)
        except jinja2.TemplateSyntaxError as error:
            return {"error": f"line {error.lineno}: {error.message}"}
        except Exception as error:
            return {"error": type(error).__name__}
        return {}

    def _render(
        self, template: jinja2.Template, messages: Iterable[tuple[str, str]]
    ) -> dict[str, Any]:
        variables = {
            **self._special_tokens,
            "messages": [{"role": role, "content": content} for role, content in messages],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }
        parts: list[str] = []
        length = 0
        for part in template.generate(variables):
            length += len(part)
            if length > self._max_characters:
                return {"error": f"the chat renders to more than {self._max_characters} characters"}
            parts.append(part)
        text = "".join(parts)
        # Half a surrogate pair is no text, and no tokenizer takes it: raises UnicodeEncodeError.
        text.encode()
        return {"text": text}


def _answer(renderer: _Renderer, body: bytes) -> dict[str, Any]:
    try:
        return renderer.answer(json.loads(body))
    except Refused as error:
        reason = str(error)[:_MAX_QUOTED_CHARACTERS]
        return {"error": f"the chat template refuses the messages: {reason}"}
    except MemoryError:
        return {"error": "the chat template takes more memory than is allowed", "last": True}
    except Exception as error:
        # The template is foreign code: whatever it raises is its answer to these messages. The text
        # of such an error may quote them, so only its kind goes on.
        return {"error": f"the chat template fails on the messages ({type(error).__name__})"}


def _load_what_comes_late() -> None:
    """What Python and Jinja would read on first use, when no file can be opened any more."""
    time.tzset()
    for module in _LATE_MODULES:
        importlib.import_module(module)
    for codec in _LATE_CODECS:
        codecs.lookup(codec)


def _limit(memory_bytes: int, *, open_files: int) -> None:
    """What this process may use from now on. None of it can be raised again.

    `open_files` is how many are open: no other file or socket can be opened.
    """
    # Whoever started this process may have ignored or blocked what ends a rendering.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    _lower(resource.RLIMIT_NOFILE, open_files)
    _lower(resource.RLIMIT_NPROC, 0)
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_AS, memory_bytes)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    if hard == resource.RLIM_INFINITY or hard > value:
        hard = value
    resource.setrlimit(limit, (hard, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
