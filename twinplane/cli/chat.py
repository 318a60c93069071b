"""`twinplane chat`: one question, or a conversation on a terminal or through a pipe."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from twinplane.cli.chat_commands import Chat
from twinplane.cli.chat_input import Entry, History, TerminalInput, read_entry
from twinplane.cli.conversation import Conversation
from twinplane.cli.failures import one_line
from twinplane.cli.request_flags import (
    CONVERSATION_WAIT,
    RequestFlags,
    add_request_flags,
    quiet_grpc,
    request_flags,
)
from twinplane.cli.served import served_model, tell_waiting
from twinplane.cli.word_wrap import WordWrap
from twinplane.errors import InvalidRequest, TwinplaneError
from twinplane.paths import expand
from twinplane.settings.command_parser import CommandParser, complete_as_path
from twinplane.settings.hints import parse

if TYPE_CHECKING:
    from twinplane import Client


def command_line() -> argparse.ArgumentParser:
    """What can be typed."""
    parser = CommandParser(
        "twinplane chat",
        "Ask a model one question, or talk to it. /help lists what can be typed.",
        usage="%(prog)s [QUESTION|-] [options]",
        examples=(
            'twinplane chat "What is the capital of France?"',
            "twinplane chat --system 'Answer in one sentence.' --temperature 0",
            "twinplane chat - < question.txt",
        ),
    )
    parser.add_argument(
        "question", nargs="?", help="answer this and leave; -: all of standard input"
    )
    parser.add_argument("--system", metavar="TEXT", help="instructions to begin with")
    parser.add_argument(
        "--drop-oldest",
        action="store_true",
        help="forget the oldest turns when the context is full",
    )
    history = parser.add_argument(
        "--history", metavar="FILE", help="keep what is typed in this file (default: not kept)"
    )
    complete_as_path(history)
    add_request_flags(parser, max_tokens=1024, conversation=True)
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns 0 after an answer, /exit or the end of the input. Raises TwinplaneError, except in a
    conversation on a terminal, which goes on."""
    parser = command_line()
    namespace = parse(parser, argv)
    question = sys.stdin.read().removesuffix("\n") if namespace.question == "-" else None
    question = namespace.question if question is None else question
    if question is not None and not question.strip():
        parser.error("the question is empty")
    history = None if namespace.history is None else History(Path(expand(namespace.history)))
    quiet_grpc()
    talking = question is None and sys.stdin.isatty() and sys.stdout.isatty()
    flags = (
        request_flags(namespace, wait=CONVERSATION_WAIT) if talking else request_flags(namespace)
    )
    address = flags.connection.address
    with flags.connection.client() as client:
        conversation = _conversation(client, flags, namespace.system, namespace.drop_oldest)
        chat = Chat(conversation, address, _output(sys.stdout), sys.stdout, sys.stderr)
        if question is not None:
            chat.answer(question)
        elif talking:
            print(chat.greeting())
            _talk(chat, TerminalInput(history).read)
        else:
            _listen(chat)
    return 0


def _conversation(
    client: Client, flags: RequestFlags, system: str | None, drop_oldest: bool
) -> Conversation:
    """Begins one with the model that the flags name. Raises TwinplaneError."""
    model = served_model(
        client,
        flags.options.get("model") or "",
        seconds=flags.wait_seconds,
        on_wait=tell_waiting(flags.connection.address),
    )
    if not model.supports_chat:
        raise InvalidRequest(
            f"{model.name} has no chat template; `twinplane generate` goes on from a text"
        )
    options = flags.options_with_max_tokens
    return Conversation(client, model, options, system=system, drop_oldest=drop_oldest)


def _output(output: TextIO) -> Callable[[str], object]:
    """What shows an answer's text: on a terminal it is wrapped."""

    def write(text: str) -> None:
        output.write(text)
        output.flush()

    if not output.isatty():
        return write
    return WordWrap(write, lambda: shutil.get_terminal_size().columns).push


def _talk(chat: Chat, read: Callable[[], Entry]) -> None:
    """A conversation on a terminal."""
    while True:
        try:
            entry = read()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        try:
            if not chat.take(entry):
                return
        except KeyboardInterrupt:
            pass  # it has ended the answer
        except TwinplaneError as error:
            print(one_line(error), file=sys.stderr)


def _listen(chat: Chat) -> None:
    """A conversation through a pipe: each line is a turn."""
    while True:
        try:
            entry = read_entry(lambda _: input())
        except EOFError:
            return
        if not chat.take(entry):
            return
