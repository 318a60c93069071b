"""`twinplane generate` streams the completion of one prompt to standard output."""

from __future__ import annotations

import argparse
import codecs
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from twinplane.cli.request_flags import RequestFlags, add_request_flags, quiet_grpc, request_flags
from twinplane.cli.served import fitting, served_model, tell_waiting
from twinplane.errors import TwinplaneError
from twinplane.settings.command_parser import CommandParser
from twinplane.settings.hints import parse

if TYPE_CHECKING:
    from twinplane import Client, Generation, GenerationResult


def command_line() -> argparse.ArgumentParser:
    """What can be typed."""
    parser = CommandParser(
        "twinplane generate",
        "Answer a prompt, in the chat template of a model that has one.\n"
        "The answer is printed as it comes.",
        usage="%(prog)s [PROMPT|-] [options]",
        examples=(
            'twinplane generate "Name three rivers." --max-tokens 50',
            'twinplane generate --raw "The capital of France is"',
            "twinplane generate --json < prompt.txt",
        ),
    )
    parser.add_argument("prompt", nargs="?", help="the prompt; - or nothing: standard input")
    parser.add_argument(
        "--raw", action="store_true", help="go on from the text as it is, without a chat template"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end, for scripts"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print the usage to standard error"
    )
    add_request_flags(parser, max_tokens=256)
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns 0. Raises TwinplaneError. Ctrl-C cancels the generation."""
    parser = command_line()
    namespace = parse(parser, argv)
    prompt = _prompt(namespace.prompt, sys.stdin)
    if prompt is None:
        parser.error("no prompt: give one, or pipe it in")
    if not prompt:
        parser.error("the prompt is empty")
    quiet_grpc()

    flags = request_flags(namespace)
    with (
        flags.connection.client() as client,
        _generation(client, flags, prompt, raw=namespace.raw) as generation,
    ):
        if not namespace.json:
            _stream(generation)
        result = generation.result()
    if namespace.json:
        # What the output's encoding lacks is escaped, so that nothing is lost.
        is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        print(json.dumps(_as_json(result), ensure_ascii=not is_utf8))
    if namespace.verbose:
        print(_usage_line(result), file=sys.stderr)
    return 0


def _stream(generation: Generation) -> None:
    """Prints the text as it comes. An error that breaks it gets a line of its own."""
    try:
        for delta in generation:
            print(delta.text, end="", flush=True)
    except TwinplaneError as error:
        if error.partial is not None and error.partial.text:
            print(flush=True)
        raise
    print()


def _generation(client: Client, flags: RequestFlags, prompt: str, *, raw: bool) -> Generation:
    from twinplane import Message

    model = served_model(
        client,
        flags.options.get("model") or "",
        seconds=flags.wait_seconds,
        on_wait=tell_waiting(flags.connection.address),
    )
    asked = [Message("user", prompt)] if model.supports_chat and not raw else prompt
    options = flags.options
    if "max_tokens" not in options:
        options = fitting(client, asked, flags.options_with_max_tokens, model)
    return client.generate(asked, **options)


def _prompt(given: str | None, stdin: TextIO) -> str | None:
    if given is not None and given != "-":
        return given
    if given is None and stdin.isatty():
        return None
    return stdin.read().removesuffix("\n")  # with which `echo` and every text file end


def _as_json(result: GenerationResult) -> dict[str, object]:
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason.value,
        "stop_string": result.stop_string,
        "stop_token_id": result.stop_token_id,
        "usage": {
            "prompt_tokens": result.usage.prompt_token_count,
            "cached_prompt_tokens": result.usage.cached_prompt_token_count,
            "completion_tokens": result.usage.completion_token_count,
        },
        "seed": result.seed,
        "request_id": result.request_id,
        "model": result.model,
    }


def _usage_line(result: GenerationResult) -> str:
    usage = result.usage
    return (
        f"{usage.prompt_token_count} prompt tokens ({usage.cached_prompt_token_count} cached), "
        f"{usage.completion_token_count} generated, finish {result.finish_reason.value}, "
        f"seed {result.seed}"
    )
