"""From the start of the process to the first token, the model cached: ours and llama.cpp.

Each start is of a new process that is stopped again; they alternate. The clock runs from the
moment before the process is made until the first token of the first request is here. Files are in
the page cache and kernels are built, as on any start but a machine's first.

    python -m bench.cold_start --peers DIR [--rounds 3]
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from bench import options as flags
from bench.contestants import VOCABULARY
from bench.load import random_prompts
from bench.peers import completions, servers
from bench.service import load, served

PROMPT = random_prompts(1, 8, VOCABULARY, seed=0)


def main() -> None:
    parser = flags.parser(__doc__, rounds=3)
    options = parser.parse_args()
    results = flags.open_results("cold_start", options)
    starts: dict[str, Callable[[], float]] = {"twinplane": lambda: start_ours(options.model)}
    if options.peers is not None:
        file = servers.gguf_file(options.peers, options.gguf)
        if file is None:
            results.note("no GGUF file: llama.cpp is left out")
        else:
            environment = options.peers / "llamacpp"
            starts["llama.cpp"] = lambda: start_llamacpp(environment, file)
    seconds: dict[str, list[float]] = {name: [] for name in starts}
    for number in range(options.rounds + 1):
        for name, start in starts.items():
            taken = start()
            if number:  # the first brings files and kernels into their caches
                seconds[name].append(taken)
    own, *others = (
        results.measured("start to first token", name, "s", taken)
        for name, taken in seconds.items()
    )
    results.ratio(own.case, own.program, "6 s", "time", own.median / 6.0, at_most=1.0)
    for other in others:
        results.compared(own, other, "time")
    results.show()


def start_ours(model: str) -> float:
    """Seconds to the first token of `twinplane up`."""
    started = time.perf_counter()
    with served("--model", model) as service:
        load(service.address, PROMPT, 1, 1)
        return time.perf_counter() - started


def start_llamacpp(environment: Path, file: Path) -> float:
    """Seconds to the first token of llama.cpp's server."""
    started = time.perf_counter()
    with servers.llamacpp(environment, file, slots=32, slot_tokens=512, frozen=False) as server:
        asyncio.run(completions.complete(server.port, server.model, PROMPT[0], 1))
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
