"""`twinplane chat`: a conversation, turn by turn, on a terminal or through a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from twinplane.cli.failures import one_line
from twinplane.cli.request_flags import add_request_flags, quiet_grpc, request_flags
from twinplane.client.options import GenerateOptions
from twinplane.errors import TwinplaneError

if TYPE_CHECKING:
    from twinplane import Client, Message

_HELP = """\
/reset        forget the conversation
/system TEXT  begin again with these instructions (no TEXT: the model's own)
/exit         leave (or Ctrl-D)
Ctrl-C stops an answer."""


def command_line() -> argparse.ArgumentParser:
    """What can be typed."""
    parser = argparse.ArgumentParser(
        prog="twinplane chat",
        usage="%(prog)s [options]",
        description="Talk to a model. /help lists what can be typed.",
        allow_abbrev=False,
    )
    parser.add_argument("--system", metavar="TEXT", help="instructions to begin with")
    add_request_flags(parser, max_tokens=1024)
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns 0 after /exit or at the end of the input. Raises TwinplaneError if input is piped."""
    parser = command_line()
    namespace = parser.parse_args(argv)
    quiet_grpc()

    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 (gives `input` line editing and history)

        print("/help lists commands, Ctrl-D leaves.")
    flags = request_flags(namespace)
    with flags.connection.client() as client:
        chat = Chat(client, flags.options, namespace.system, sys.stdout)
        return _loop(chat, interactive=interactive)


def _loop(chat: Chat, *, interactive: bool) -> int:
    while True:
        try:
            line = input("> ") if interactive else input()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()
            continue
        try:
            if not chat.take(line):
                return 0
        except TwinplaneError as error:
            if not interactive:
                raise
            print(one_line(error), file=sys.stderr)


class Chat:
    """The conversation so far. Each line of input changes or continues it."""

    def __init__(
        self, client: Client, options: GenerateOptions, system: str | None, output: TextIO
    ) -> None:
        self._client = client
        self._options = options
        self._system = system or None
        self._output = output
        self._turns: list[Message] = []

    def take(self, line: str) -> bool:
        """Handles one line. Returns False when the chat is over.

        Raises TwinplaneError when a turn fails; the conversation is then as before that turn.
        """
        command, _, rest = line.strip().partition(" ")
        match command:
            case "":
                pass
            case "/exit" | "/quit":
                return False
            case "/reset":
                self._turns.clear()
            case "/system":
                self._turns.clear()
                self._system = rest.strip() or None
            case "/help":
                self._say(_HELP)
            case _ if command.startswith("/"):
                self._say(f"no command {command}; /help lists them")
            case _:
                self._answer(line)
        return True

    def _answer(self, question: str) -> None:
        from twinplane import Message

        turns = [*self._turns, Message("user", question)]
        first = [] if self._system is None else [Message("system", self._system)]
        parts: list[str] = []
        try:
            with self._client.generate([*first, *turns], **self._options) as generation:
                for delta in generation:
                    parts.append(delta.text)
                    self._output.write(delta.text)
                    self._output.flush()
        except KeyboardInterrupt:
            self._output.write(" …")  # what was said so far stays in the conversation
        except TwinplaneError:
            if "".join(parts):
                self._say("")  # the error gets a line of its own
            raise
        self._say("")
        if parts:
            self._turns = [*turns, Message("assistant", "".join(parts))]

    def _say(self, text: str) -> None:
        self._output.write(text + "\n")
        self._output.flush()
