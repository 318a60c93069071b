"""Prompt rate on the CPU: whole prompts in, one token out, against vLLM in float32.

python -m bench.prefill --peers DIR [--prompt-tokens 1024] [--prompts 4]
"""

from __future__ import annotations

import contextlib

from bench import options as flags
from bench.contestants import VOCABULARY, open_peers, ours
from bench.load import random_prompts


def main() -> None:
    parser = flags.parser(__doc__, rounds=3)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=4, help="how many at once")
    options = parser.parse_args()
    results = flags.open_results("prefill", options)
    count, length = options.prompts, options.prompt_tokens
    with contextlib.ExitStack() as stack:
        peers = open_peers(stack, options, ["vllm"], results, slots=count, slot_tokens=length + 64)
        contestants = [ours(stack, options.model), *peers.values()]
        rates: dict[str, list[float]] = {each.name: [] for each in contestants}
        for number in range(options.rounds + 1):
            prompts = random_prompts(count, length, VOCABULARY, seed=number)
            for each in contestants:
                load = each.generate(prompts, count, 1)
                if number:  # the first warms up
                    prompt_rate = load.total_tokens_per_second - load.output_tokens_per_second
                    rates[each.name].append(prompt_rate)
    case = f"{count} prompts of {length} tokens"
    own, *others = (
        results.measured(case, name, "prompt tok/s", taken) for name, taken in rates.items()
    )
    for other in others:
        results.compared(own, other, "prompt rate", at_least=1.15)
    results.show()


if __name__ == "__main__":
    main()
