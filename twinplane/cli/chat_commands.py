"""What happens to each entry of a chat: a command is carried out, anything else is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

from twinplane.cli.chat_input import Entry
from twinplane.cli.chat_settings import NUMBERS, with_option
from twinplane.cli.conversation import Conversation
from twinplane.errors import TwinplaneError

_HELP = '''\
/reset             forget the conversation
/system [TEXT]     begin again with these instructions (no TEXT: the model's own)
/set NAME [VALUE]  change an option, e.g. /set temperature 0 (no VALUE: the default again)
/show              the model, the context, and all options
/exit              leave (or Ctrl-D)
"""                begins and ends a text of several lines; a pasted text needs none
Ctrl-C stops an answer.'''
_SWITCHES = {"on": True, "off": False, "": False}


class Chat:
    """Carries out commands and asks questions.

    `show` takes an answer's text piece by piece; `output` what was asked for besides; `notes` what
    is to be said of an answer.
    """

    def __init__(
        self,
        conversation: Conversation,
        address: str,
        show: Callable[[str], object],
        output: TextIO,
        notes: TextIO,
    ) -> None:
        self._conversation = conversation
        self._address = address
        self._show = show
        self._output = output
        self._notes = notes
        self._defaults = conversation.options

    def greeting(self) -> str:
        """Who answers, and how to learn more."""
        model = self._conversation.model
        return (
            f"{model.name} at {self._address}, context {model.max_sequence_token_count} tokens\n"
            "/help lists commands, Ctrl-D leaves."
        )

    def take(self, entry: Entry) -> bool:
        """Handles one entry. Returns False when the chat is over.

        Raises TwinplaneError, and KeyboardInterrupt once it has ended an answer.
        """
        if not entry.is_command:
            if entry.text.strip():
                self.answer(entry.text)
            return True
        command, _, rest = entry.text.strip().partition(" ")
        rest = rest.strip()
        match command:
            case "/exit" | "/quit" | "/bye":
                return False
            case "/reset" | "/clear":
                self._conversation.reset()
            case "/system":
                self._conversation.reset()
                self._conversation.system = rest or None
            case "/set":
                self._set(*rest.partition(" ")[::2])
            case "/show":
                self._say(self._shown())
            case "/help":
                self._say(_HELP)
            case _:
                self._say(f"no command {command}; /help lists them")
        return True

    def answer(self, question: str) -> None:
        """Asks, and shows the answer. Raises what `take` raises."""
        try:
            note = self._conversation.ask(question, self._show)
        except KeyboardInterrupt:
            self._show(" …\n")  # what was said so far stays in the conversation
            raise
        except TwinplaneError as error:
            if error.partial is not None and error.partial.text:
                self._show("\n")  # the error gets a line of its own
            raise
        self._show("\n")
        if note is not None:
            self._notes.write(f"({note})\n")
            self._notes.flush()

    def _set(self, name: str, value: str) -> None:
        """Changes one option; says what is wrong with it."""
        name, value = name.replace("-", "_"), value.strip()
        conversation = self._conversation
        if name in NUMBERS:
            default = self._defaults.get(name)
            text = value or ("" if default is None else str(default))
            try:
                conversation.options = with_option(conversation.options, name, text)
            except ValueError as error:
                self._say(str(error))
                return
        elif name == "stop":
            stop = [value] if value else self._defaults.get("stop", [])
            conversation.options = {**conversation.options, "stop": stop}
        elif name == "drop_oldest":
            if value not in _SWITCHES:
                self._say(f"drop_oldest: {value} is neither on nor off")
                return
            conversation.drop_oldest = _SWITCHES[value]
        else:
            options = ", ".join((*NUMBERS, "stop", "drop_oldest"))
            what = f"no option {name}; there are" if name else "/set NAME [VALUE]; NAME is one of"
            self._say(f"{what} {options}")
            return
        self._say(_row(name, self._value(name)))

    def _shown(self) -> str:
        conversation = self._conversation
        model = conversation.model
        used = f"{conversation.token_count} used by {len(conversation.turns)} turns"
        rows = {
            "model": f"{model.name} at {self._address}",
            "context": f"{model.max_sequence_token_count} tokens; {used}",
            "system": conversation.system or "the model's own",
        } | {name: self._value(name) for name in (*NUMBERS, "stop", "drop_oldest")}
        return "\n".join(_row(name, value) for name, value in rows.items())

    def _value(self, name: str) -> str:
        """An option as it is now."""
        conversation = self._conversation
        if name == "drop_oldest":
            return "on" if conversation.drop_oldest else "off"
        if name == "stop":
            stop = conversation.options.get("stop") or []
            return ", ".join(repr(text) for text in stop) or "no text"
        value = conversation.options.get(name)
        return self._default(name) if value is None else f"{value}"

    def _default(self, name: str) -> str:
        value = getattr(self._conversation.model.default_sampling, name, None)
        if value is None:
            return "another for each answer" if name == "seed" else "the server's"
        return f"{value:g} (default)"

    def _say(self, text: str) -> None:
        self._output.write(text + "\n")
        self._output.flush()


def _row(name: str, value: str) -> str:
    return f"{name:12} {value}"
