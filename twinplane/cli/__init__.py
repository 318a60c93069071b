"""The command line: `main` finds the command and runs it.

Each command is a module of its own. It is imported only when it is called, so that
`twinplane --help` is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

from twinplane import __version__
from twinplane.cli.failures import one_line
from twinplane.errors import TwinplaneError
from twinplane.extras import Extra, extra_of, how_to_get, missing_modules
from twinplane.models.errors import ModelError
from twinplane.paths import NoHomeFolder
from twinplane.process.standard_streams import prepare_standard_streams


@dataclass(frozen=True, slots=True)
class _Command:
    """A command. Its `module` has a function `main(argv)`, which returns the exit code.

    `extra` is what it needs beyond the base install, which is the client's.
    """

    name: str
    help: str
    module: str
    extra: Extra | None = None


_GROUPS = (
    (
        "serve",
        (
            _Command(
                "up", "control plane and worker on this machine", "twinplane.cli.up", Extra.CONTROL
            ),
            _Command("control", "the control plane alone", "control_plane.__main__", Extra.CONTROL),
            _Command(
                "worker",
                "a worker alone (--simulate: no model)",
                "worker_service.__main__",
                Extra.CONTROL,
            ),
        ),
    ),
    (
        "use",
        (
            _Command("generate", "answer one prompt", "twinplane.cli.generate"),
            _Command("chat", "ask a model, or talk to it", "twinplane.cli.chat"),
            _Command("status", "what a running server serves", "twinplane.cli.status"),
        ),
    ),
    (
        "operate",
        (
            _Command("weights", "other weights for running workers", "twinplane.cli.weights"),
            _Command("pause", "compute nothing for a while", "twinplane.cli.pause"),
            _Command("resume", "go on after a pause", "twinplane.cli.resume"),
        ),
    ),
    (
        "manage",
        (
            _Command(
                "model",
                "pull, list, show and remove models",
                "twinplane.cli.model",
                Extra.CONTROL,
            ),
            _Command("doctor", "check this machine and say what to fix", "twinplane.cli.doctor"),
            _Command("completion", "let a shell complete commands", "twinplane.cli.completion"),
        ),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0 done, 1 failed, 2 wrong usage, 130 Ctrl-C."""
    prepare_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        if not _show(_help()):
            return 1
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        return 0 if _show(f"twinplane {__version__}") else 1
    command = _find(arguments[0])
    if command is None:
        print(f"twinplane: no command {arguments[0]!r}; {_advice(arguments[0])}", file=sys.stderr)
        return 2
    return _run(command, arguments[1:])


def _show(text: str) -> bool:
    """Prints to standard output; says whether that was possible."""
    try:
        print(text, flush=True)
    except OSError as error:
        _discard_output()
        print(f"twinplane: {error.strerror}", file=sys.stderr)
        return False
    return True


def _run(command: _Command, arguments: list[str]) -> int:
    if command.extra is not None and (missing := missing_modules(command.extra)):
        with_model = command.name in ("up", "worker") and "--simulate" not in arguments
        return _not_installed(command, missing, Extra.WORKER if with_model else command.extra)
    try:
        code: int = import_module(command.module).main(arguments)
        sys.stdout.flush()
        return code
    except (TwinplaneError, ModelError, NoHomeFolder) as error:
        print(f"twinplane {command.name}: {one_line(error)}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        extra = extra_of(error.name or "")
        if extra is None:
            raise
        return _not_installed(command, (str(error.name),), extra)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output is gone
        _discard_output()
        return 1
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        reason = f"{error.strerror or error}{where}"
        _discard_output()
        print(f"twinplane {command.name}: {reason}", file=sys.stderr)
        return 1


def _not_installed(command: _Command, modules: Sequence[str], extra: Extra) -> int:
    what = f"not installed: {', '.join(modules)}; run: {how_to_get(extra)}"
    print(f"twinplane {command.name}: {what}", file=sys.stderr)
    return 1


def _discard_output() -> None:
    """Sends what is still in the output's buffer nowhere: the interpreter's last flush must not
    fail as well."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def commands() -> dict[str, tuple[str, str]]:
    """Every command: its help and its module, by its name."""
    return {c.name: (c.help, c.module) for _, group in _GROUPS for c in group}


def _find(name: str) -> _Command | None:
    return next((c for _, commands in _GROUPS for c in commands if c.name == name), None)


# Names that other programs have for it.
_ALIASES = {
    "serve": "up",
    "server": "up",
    "start": "up",
    "launch": "up",
    "run": "chat",
    "prompt": "generate",
    "complete": "generate",
    "pull": "model pull",
    "download": "model pull",
    "list": "model list",
    "ls": "model list",
    "models": "model list",
    "show": "model show",
    "rm": "model rm",
    "ps": "status",
    "check": "doctor",
    "env": "doctor",
    "update": "weights update",
    "rollback": "weights rollback",
    "rollout": "weights status",
    "unpause": "resume",
}


def _advice(name: str) -> str:
    """What to say to whoever typed a command that is none."""
    names = {command.name: command.name for _, commands in _GROUPS for command in commands}
    meant = {**_ALIASES, **names}
    close = get_close_matches(name, sorted(meant), n=1)
    if close:
        return f"did you mean `twinplane {meant[close[0]]}`?"
    return "see twinplane --help"


def _help() -> str:
    lines = ["usage: twinplane COMMAND [options]", ""]
    for title, commands in _GROUPS:
        lines.append(f"{title}:")
        lines += [f"  {command.name:11}{command.help}" for command in commands]
        lines.append("")
    lines.append("twinplane COMMAND --help says more; --version prints the version.")
    return "\n".join(lines)
