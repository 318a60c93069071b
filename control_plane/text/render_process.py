"""The process in which a chat template is compiled and rendered: limits first, then work.

    python -m control_plane.text.render_process MEMORY_BYTES CPU_SECONDS MAX_CHARACTERS

It reads frames on stdin and answers each with one on stdout. The first holds the template, and
the name of its file for messages:

    {"source": "…", "special_tokens": {"bos_token": "…"}, "file": "…",
     "tokens": [["<|end|>", true, false], …]}                             → {} or {"error": "…"}

The tokens are the tokenizer's, see control_plane.text.forgery.

Every other holds a conversation, with the local time that strftime_now tells:

    {"now": "2031-05-04T10:00:00", "messages": [["user", "Hi"], …]}       → {"text": "…"} or
                                                                            {"error": "…"}

The first of these replies may have more, see control_plane.text.forgery.

A reply with "last": true says that this process ends now. It also ends when stdin does, and the
kernel ends it (SIGPROF) when one frame's work takes more than CPU_SECONDS of processor time.
Imports nothing but the standard library and Jinja.
"""

from __future__ import annotations

import codecs
import encodings
import importlib
import json
import os
import pkgutil
import resource
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

import jinja2

from control_plane.text.forgery import Guard, Turn
from control_plane.text.frames import read_frame, write_frame
from control_plane.text.template_environment import Refused, compile_template

_MAX_REQUEST_BYTES = (1 << 32) - 1
"""The parent is trusted, so any length it can write is read."""
_MAX_QUOTED_CHARACTERS = 256
_LATE_MODULES = ("html", "jinja2.constants", "jinja2.debug", "pprint", "textwrap", "unicodedata")


def main(arguments: list[str]) -> int:
    memory_bytes, cpu_seconds, max_characters = arguments
    # A signal to the whole control group is meant for the control plane, which ends this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _load_what_comes_late()
    memory = _Memory()
    _limit(int(memory_bytes), open_files=4)
    renderer = Renderer(int(max_characters))
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


class _TooLong(Exception):
    """The rendering has more characters than it may have."""


class Renderer:
    """The template, once it was sent, and what it renders to."""

    def __init__(self, max_characters: int) -> None:
        self.max_characters = max_characters
        self._now = datetime.min
        self._special_tokens: dict[str, str] = {}
        self.file = ""
        self._guard: Guard | None = None
        self._template: jinja2.Template | None = None

    @property
    def compiled(self) -> bool:
        """Whether the template was sent and compiles: what follows are conversations."""
        return self._template is not None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._template is None:
            return self._compile(**request)
        self._now = datetime.fromisoformat(request["now"])
        # The encoder makes lists of pairs.
        messages = [(role, content) for role, content in request["messages"]]
        render = partial(self._render, self._template)
        if self._guard is None:
            return {"text": render(messages)}
        return self._guard.render(messages, render)

    def _compile(
        self,
        source: str,
        special_tokens: dict[str, str],
        file: str,
        tokens: list[tuple[str, bool, bool]],
    ) -> dict[str, Any]:
        self._special_tokens = special_tokens
        self.file = file
        self._guard = Guard(tokens, source) if tokens else None
        try:
            self._template = compile_template(source, lambda: self._now)
        except jinja2.TemplateSyntaxError as error:
            return {"error": f"line {error.lineno}: {error.message}"}
        except Exception as error:
            return {"error": type(error).__name__}
        return {}

    def _render(self, template: jinja2.Template, messages: Sequence[Turn]) -> str:
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
            if length > self.max_characters:
                raise _TooLong
            parts.append(part)
        text = "".join(parts)
        # Half a surrogate pair is no text, and no tokenizer takes it: raises UnicodeEncodeError.
        text.encode()
        return text


def _answer(renderer: Renderer, body: bytes) -> dict[str, Any]:
    file = renderer.file
    try:
        return renderer.answer(json.loads(body))
    except Refused as error:
        reason = str(error)[:_MAX_QUOTED_CHARACTERS]
        return {"error": f"{_template(file, error)} refuses the messages: {reason}"}
    except _TooLong:
        limit = renderer.max_characters
        return {"error": f"{_template(file)} makes more than {limit} characters of the messages"}
    except MemoryError:
        return {"error": f"{_template(file)} takes more memory than is allowed", "last": True}
    except Exception as error:
        # The template is foreign code: whatever it raises is its answer to these messages. The text
        # of such an error may quote them, so only its kind goes on.
        return {"error": f"{_template(file, error)} fails on the messages ({type(error).__name__})"}


def _template(file: str, error: Exception | None = None) -> str:
    """The template, its file and, where it is known, the line that the error comes from."""
    line = None
    traceback = None if error is None else error.__traceback__
    while traceback is not None:
        # Jinja puts frames for the template's own lines in place of those of its generated code.
        if "__jinja_exception__" in traceback.tb_frame.f_globals:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    where = file if line is None else f"{file}, line {line}"
    return f"the chat template ({where})"


def _load_what_comes_late() -> None:
    """What Python and Jinja would read on first use, when no file can be opened any more."""
    time.tzset()
    for module in _LATE_MODULES:
        importlib.import_module(module)
    for codec in pkgutil.iter_modules(encodings.__path__):
        with suppress(LookupError):  # some are another system's
            codecs.lookup(codec.name)


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
