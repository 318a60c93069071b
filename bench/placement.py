"""Where placement sends a trace of shared prefixes: cache hits and evenness, in virtual time.

Real cores of 1, 16 and 256 simulated replicas are driven in virtual time by the fleet's own
placement, at several loads, 1 being what the fleet can just do. Hits are held against an oracle
that has everything that was asked or answered anywhere before, forever; a replica's share of all
computed tokens against the mean. Random and least-loaded placement are the peers. Nothing is timed:
the figures are the same on any machine.

    python -m bench.placement [--replicas 1 16] [--loads 0.3 0.7 1.0] [--requests 300]
"""

from __future__ import annotations

from bench import options as flags
from bench.fleet_in_time import Policy, Run, at_random, least_loaded, ours
from bench.results import Measurement, Results
from bench.shared_prefixes import Shape

POLICIES = {"twinplane": ours, "random": at_random, "least loaded": least_loaded}
LEAST_OF_ORACLE = 0.9
MOST_OF_MEAN, LEAST_OF_MEAN = 1.15, 0.85
MOST_PEERS = 64
"""Replicas up to which the peers are run, too."""


def shape_of(replicas: int) -> Shape:
    """More replicas serve more applications."""
    return Shape(applications=16 + 4 * replicas)


def main() -> None:
    parser = flags.parser(__doc__, rounds=1, peers=False)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.7, 1.0, 1.5])
    parser.add_argument("--requests", type=int, default=200, help="for each replica")
    options = parser.parse_args()
    results = flags.open_results("placement", options)
    for replicas in options.replicas:
        for load in options.loads:
            measure(results, replicas, load, options.requests)
    results.show()


def measure(results: Results, replicas: int, load: float, requests: int) -> None:
    """One case: ours, and the peers where there are not too many replicas."""
    case = f"{replicas} replicas, load {load:g}"
    shares: dict[str, Measurement] = {}
    for name, policy in POLICIES.items():
        if name == "twinplane" or 1 < replicas <= MOST_PEERS:
            shares[name] = run(results, case, name, policy(), replicas, load, requests)
    for name, share in shares.items():
        if name != "twinplane":
            results.compared(shares["twinplane"], share, "hits", at_least=1.0)


def run(
    results: Results, case: str, name: str, policy: Policy, replicas: int, load: float,
    requests: int,
) -> Measurement:  # fmt: skip
    """One policy. Returns the share of prompt tokens that it hit."""
    outcome = Run(replicas, policy, load, requests * replicas, shape_of(replicas)).outcome()
    share = results.measured(
        case, name, "% hit", [100 * outcome.hit_tokens / outcome.prompt_tokens],
        oracle=100 * outcome.oracle_tokens / outcome.prompt_tokens,
        moves=outcome.moves,
        milliseconds_to_start=1e3 * outcome.median_start_seconds,
    )  # fmt: skip
    bound = name == "twinplane"
    for against, quantity, ratio, at_least, at_most in (
        ("oracle", "hits", outcome.of_oracle, LEAST_OF_ORACLE, None),
        ("mean", "tokens of the busiest replica", outcome.most, None, MOST_OF_MEAN),
        ("mean", "tokens of the idlest replica", outcome.least, LEAST_OF_MEAN, None),
    ):
        results.ratio(
            case, name, against, quantity, ratio,
            at_least=at_least if bound else None, at_most=at_most if bound else None,
        )  # fmt: skip
    return share


if __name__ == "__main__":
    main()
