"""Output rate of the service against `transformers.generate`, alternating in one run.

usage: python -m bench.transformers_throughput [--model NAME] [--rounds 3]

Both get the same random prompts, greedy, float32, both cores. The peer runs one request at a time
and in batches of as many as we have streams. Prints a JSON line per measurement, then the ratios
of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict

from bench.service import load, random_prompts, served
from twinplane.models import resolve

VOCABULARY = 40_000


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    streams, output = options.streams, options.output_tokens
    ours: list[float] = []
    alone: list[float] = []
    batched: list[float] = []
    peer = Peer(str(resolve(options.model)))
    try:
        with served("--model", options.model) as service:
            warm = random_prompts(streams, 16, VOCABULARY, seed=0)
            load(service.address, warm, streams, 4)
            peer.generate(warm, 4, streams)
            for number in range(1, options.rounds + 1):
                prompts = random_prompts(2 * streams, options.prompt_tokens, VOCABULARY, number)
                result = load(service.address, prompts, streams, output)
                ours.append(result.output_tokens_per_second)
                alone.append(peer.generate(prompts[:2], output, 1))
                batched.append(peer.generate(prompts, output, streams))
                record = {
                    "round": number,
                    "streams": streams,
                    "twinplane": asdict(result),
                    "transformers_alone": alone[-1],
                    "transformers_batched": batched[-1],
                }
                print(json.dumps(record), flush=True)
    finally:
        peer.close()
    median = statistics.median(ours)
    summary = {
        "streams": streams,
        "twinplane_tokens_per_second": round(median, 1),
        "ratio_to_transformers_alone": round(median / statistics.median(alone), 2),
        "ratio_to_transformers_batched": round(median / statistics.median(batched), 2),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
