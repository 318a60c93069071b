"""The flags that several benchmarks share, and what they open."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.machine import this_machine
from bench.results import Results
from twinplane.models import DEFAULT_MODEL


def parser(doc: str | None, *, rounds: int, peers: bool = True) -> argparse.ArgumentParser:
    """A parser with --model, --rounds, --save and, with `peers`, where the peers are."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--model", default=DEFAULT_MODEL, help="the model, as `twinplane up` takes it"
    )
    made.add_argument(
        "--rounds",
        type=int,
        default=rounds,
        help="turns of ours and the peer (default: %(default)s)",
    )
    made.add_argument("--save", type=Path, metavar="FOLDER", help="also write FOLDER/NAME.jsonl")
    made.set_defaults(peers=None)
    if peers:
        made.add_argument(
            "--peers", type=Path, metavar="DIR",
            help="folder of the peers' environments, DIR/vllm and DIR/llamacpp (default: no peer)",
        )  # fmt: skip
        made.add_argument(
            "--gguf", type=Path, metavar="FILE",
            help="the model for llama.cpp (default: the first DIR/*.gguf)",
        )  # fmt: skip
        made.add_argument(
            "--vllm", metavar="PORT:PID",
            help="a vLLM that runs already (default: start one, which takes minutes)",
        )  # fmt: skip
    return made


def open_results(benchmark: str, options: argparse.Namespace) -> Results:
    """The results of a run with these options."""
    results = Results(benchmark, this_machine(options.peers), options.save)
    if options.peers is None and "gguf" in options:
        results.note("no --peers: ours and the floor only, no ratio to a peer")
    return results
