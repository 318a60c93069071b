"""Ours and the peers as one kind of thing: something that generates from prompts at some rate."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.load import Load
from bench.peers import completions, servers
from bench.results import Results
from bench.service import load, served
from twinplane.models import resolve

VOCABULARY = 40_000


@dataclass(frozen=True, slots=True)
class Contestant:
    """`generate(prompts, streams, output_tokens)` loads it; others don't run meanwhile."""

    name: str
    generate: Callable[[Sequence[list[int]], int, int], Load]


def ours(stack: contextlib.ExitStack, model: str, quantization: str | None = None) -> Contestant:
    """A `twinplane up` of its own, float32 or with quantized weights."""
    flags = [] if quantization is None else ["--quantization", quantization]
    service = stack.enter_context(served("--model", model, *flags))
    return Contestant(
        f"twinplane {quantization or 'float32'}",
        lambda prompts, streams, output: load(service.address, prompts, streams, output),
    )


def theirs(server: servers.PeerServer) -> Contestant:
    """A peer that is frozen except while it is loaded."""

    def generate(prompts: Sequence[list[int]], streams: int, output: int) -> Load:
        with server.awake():
            return completions.load(server.port, server.model, prompts, streams, output)

    return Contestant(server.name, generate)


def open_peers(
    stack: contextlib.ExitStack,
    options: argparse.Namespace,
    names: Iterable[str],
    results: Results,
    *,
    slots: int,
    slot_tokens: int,
) -> dict[str, Contestant]:
    """Those of the named peers, "vllm" and "llamacpp", that can be started here."""
    found: dict[str, Contestant] = {}
    folder = options.peers
    if folder is None:
        return found
    for name in names:
        match name:
            case "vllm" if options.vllm or (folder / "vllm").is_dir():
                model = resolve(options.model)
                server = stack.enter_context(
                    servers.vllm(folder / "vllm", model, running=options.vllm)
                )
                found[name] = theirs(server)
            case "llamacpp" if file := servers.gguf_file(folder, options.gguf):
                server = stack.enter_context(
                    servers.llamacpp(
                        folder / "llamacpp", file, slots=slots, slot_tokens=slot_tokens
                    )
                )
                found[name] = theirs(server)
            case _:
                results.note(f"{name} is not here: left out")
    return found
