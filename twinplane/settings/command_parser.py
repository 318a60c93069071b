"""The parser of every command, so that all their helps look alike: options, then examples.

A plane has some forty settings. Its `--help` shows those that are used most, on one screen, and
`--help-all` shows them all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

MOST_USED = (
    "model", "worker", "device", "dtype", "quantization", "simulate", "host", "port", "uds",
    "metrics_port", "kv_cache_memory_bytes", "max_model_len", "max_num_seqs", "log_level",
)  # fmt: skip
"""Names of settings, in the order in which the short help shows them."""


class CommandParser(argparse.ArgumentParser):
    """A parser that takes no abbreviations. Its help ends with `examples`, lines to be typed.

    One that `has_settings` has a short help and `--help-all`.
    """

    def __init__(
        self,
        prog: str,
        description: str,
        *,
        usage: str = "%(prog)s [options]",
        examples: Sequence[str] = (),
        notes: Sequence[str] = (),
        has_settings: bool = False,
    ) -> None:
        lines = [*notes, *(["examples:"] if examples else []), *(f"  {line}" for line in examples)]
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog="\n".join(lines) or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._has_settings = has_settings
        if has_settings:
            self.add_argument(
                "--help-all", action=_HelpAll, nargs=0, help="show every option and exit"
            )

    def format_help(self) -> str:
        """The short help, where there are settings."""
        return self._short_help() if self._has_settings else super().format_help()

    def format_whole_help(self) -> str:
        """All options, by group."""
        return super().format_help()

    def _short_help(self) -> str:
        by_name = {action.dest: action for action in self._actions}
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        sections = {
            "options": self._optionals._group_actions,
            "settings that are used most": [by_name[name] for name in MOST_USED if name in by_name],
        }
        for title, actions in sections.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def complete_as_path(action: argparse.Action) -> None:
    """Lets a shell complete the files of this machine for it."""
    action.is_path = True  # type: ignore[attr-defined]  # for `twinplane completion`


class _HelpAll(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, CommandParser)
        sys.stdout.write(parser.format_whole_help())
        parser.exit()
