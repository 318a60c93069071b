"""Output rate of the service against `transformers.generate`, alternating in one run.

usage: python -m bench.transformers_throughput [--model NAME] [--rounds 3]

Both get the same random prompts, greedy, float32, both cores. The peer runs one request at a time
and in batches of as many as we have streams.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from bench import options as flags
from bench.load import random_prompts
from bench.service import load, served
from twinplane.models import resolve

VOCABULARY = 40_000
OURS, ALONE, BATCHED = "twinplane", "transformers, one by one", "transformers, batched"


class Peer:
    """The peer's process and its jobs."""

    def __init__(self, model: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.transformers_peer", model, str(os.cpu_count())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def generate(self, prompts: list[list[int]], output_tokens: int, batch: int) -> float:
        """Output tokens per second."""
        assert self.process.stdin and self.process.stdout
        job = {"prompts": prompts, "output_tokens": output_tokens, "batch": batch}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("the transformers peer died")
        return float(json.loads(answer)["output_tokens_per_second"])

    def close(self) -> None:
        self.process.communicate()


def main() -> None:
    parser = flags.parser(__doc__, rounds=3, peers=False)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    options = parser.parse_args()
    results = flags.open_results("transformers_throughput", options)
    streams, output = options.streams, options.output_tokens
    rates: dict[str, list[float]] = {name: [] for name in (OURS, ALONE, BATCHED)}
    peer = Peer(str(resolve(options.model)))
    try:
        with served("--model", options.model) as service:
            warm = random_prompts(streams, 16, VOCABULARY, seed=0)
            load(service.address, warm, streams, 4)
            peer.generate(warm, 4, streams)
            for number in range(1, options.rounds + 1):
                prompts = random_prompts(2 * streams, options.prompt_tokens, VOCABULARY, number)
                taken = load(service.address, prompts, streams, output)
                rates[OURS].append(taken.output_tokens_per_second)
                rates[ALONE].append(peer.generate(prompts[:2], output, 1))
                rates[BATCHED].append(peer.generate(prompts, output, streams))
    finally:
        peer.close()
    case = f"{streams} streams, {options.prompt_tokens} + {output} tokens"
    own, *others = (
        results.measured(case, name, "output tok/s", samples) for name, samples in rates.items()
    )
    for other in others:
        results.compared(own, other, "output rate")
    results.show()


if __name__ == "__main__":
    main()
