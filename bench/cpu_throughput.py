"""Output rate on the CPU: ours in float32 and int8 against vLLM in float32 and llama.cpp in Q4_1.

All get the same random token-id prompts, greedy, with a fixed number of output tokens, through
their own network servers on loopback. They take turns; only the one that is measured is awake.

    python -m bench.cpu_throughput --peers DIR [--streams 1 8 32] [--prompt-tokens 1024]
"""

from __future__ import annotations

import contextlib

from bench import options as flags
from bench.contestants import VOCABULARY, Contestant, open_peers, ours
from bench.load import Load, random_prompts
from bench.results import Measurement, Results

# Wanted ratios for 128 + 64 tokens, by streams.
_AT_LEAST = {
    ("twinplane float32", "vllm"): {1: 1.7, 8: 1.6, 32: 1.35},
    ("twinplane int8", "llamacpp"): {1: 1.4, 8: 2.3, 32: 2.6},
}


def main() -> None:
    parser = flags.parser(__doc__, rounds=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument(
        "--quantization", nargs="+", default=["float32", "int8"], choices=["float32", "int8"],
        help="which of ours (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--only-peers", nargs="*", default=["vllm", "llamacpp"], choices=["vllm", "llamacpp"]
    )
    options = parser.parse_args()
    length, output = options.prompt_tokens, options.output_tokens
    usual = (length, output) == (128, 64)
    name = "cpu_throughput" if usual else f"cpu_throughput_{length}"
    results = flags.open_results(name, options)
    with contextlib.ExitStack() as stack:
        peers = open_peers(
            stack, options, options.only_peers, results,
            slots=max(options.streams), slot_tokens=-(-(length + output) // 64) * 64 + 64,
        )  # fmt: skip
        own = [
            ours(stack, options.model, None if name == "float32" else name)
            for name in options.quantization
        ]
        contestants = [*own, *peers.values()]
        warm_up(contestants, max(options.streams))
        names = {peer: each.name for peer, each in peers.items()}
        for streams in options.streams:
            measured = contest(results, contestants, options.rounds, streams, length, output)
            compare(results, measured, names, streams, bounded=usual)
    results.show()


def warm_up(contestants: list[Contestant], streams: int) -> None:
    """A few tokens from each, at one stream and at the most."""
    for count in (1, streams):
        prompts = random_prompts(count, 16, VOCABULARY, seed=count)
        for each in contestants:
            each.generate(prompts, count, 4)


def contest(
    results: Results,
    contestants: list[Contestant],
    rounds: int,
    streams: int,
    prompt_tokens: int,
    output_tokens: int,
) -> dict[str, Measurement]:
    """Each in turn, `rounds` times; each round has prompts of its own, the same for all."""
    loads: dict[str, list[Load]] = {each.name: [] for each in contestants}
    for number in range(rounds):
        seed = number + 1000 * streams + prompt_tokens
        prompts = random_prompts(max(2, streams), prompt_tokens, VOCABULARY, seed)
        for each in contestants:
            loads[each.name].append(each.generate(prompts, streams, output_tokens))
    case = f"{streams} streams, {prompt_tokens} + {output_tokens} tokens"
    return {
        name: results.measured(
            case, name, "output tok/s", [load.output_tokens_per_second for load in taken],
            first_token_s=sorted(load.first_token_seconds for load in taken)[rounds // 2],
            between_tokens_ms=1e3
            * sorted(load.between_tokens_seconds for load in taken)[rounds // 2],
        )
        for name, taken in loads.items()
    }  # fmt: skip


def compare(
    results: Results,
    measured: dict[str, Measurement],
    peers: dict[str, str],
    streams: int,
    *,
    bounded: bool,
) -> None:
    """The ratios that are wanted, and each of ours to every other peer."""
    for own in (name for name in measured if name.startswith("twinplane")):
        for peer, name in peers.items():
            wanted = _AT_LEAST.get((own, peer), {}) if bounded else {}
            results.compared(
                measured[own], measured[name], "output rate", at_least=wanted.get(streams)
            )


if __name__ == "__main__":
    main()
