"""vLLM's scheduler with no model behind it, by the interpreter of the environment with vLLM.

usage: python vllm_scheduler.py MODEL_FOLDER. Reads one job per line on standard input, {"running":
n, "prompt_tokens": p, "max_tokens": m, "block_size": b, "steps": s}, and answers each with
{"us_per_step": median}: what schedule() and update_from_output() take together in a step in which
all n requests decode. While it waits for a job it takes no time from anybody.
"""

import json
import os
import statistics
import sys
import time

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

OUTPUT_TOKEN = 5


def open_scheduler(folder, running, block_size, blocks):
    """An empty scheduler for `running` requests, prefix caching on, no async scheduling."""
    arguments = EngineArgs(
        model=folder,
        max_num_seqs=running,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        block_size=block_size,
        enable_prefix_caching=True,
        async_scheduling=False,
    )
    settings = arguments.create_engine_config()
    settings.cache_config.num_gpu_blocks = blocks
    layer = FullAttentionSpec(
        block_size=block_size, num_kv_heads=3, head_size=64, dtype=torch.float32
    )
    cache = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)],
    )
    grammar = StructuredOutputManager(settings)
    return Scheduler(settings, cache, grammar, block_size=block_size, log_stats=False)


def fill(scheduler, job):
    """Queues the job's requests, each with a prompt of its own."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(job["block_size"], sha256)
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True)
    for index in range(job["running"]):
        prompt = [(index * 7 + place) % 40000 for place in range(job["prompt_tokens"])]
        scheduler.add_request(Request(str(index), prompt, sampling, None, block_hasher=hasher))


def timed_step(scheduler):
    """Seconds inside the scheduler for one step, and whether all that ran was one token each.

    The answer, OUTPUT_TOKEN for whoever has reached its end, is made between the two clocks.
    """
    started = time.perf_counter()
    plan = scheduler.schedule()
    seconds = time.perf_counter() - started
    counts = plan.num_scheduled_tokens
    requests = scheduler.requests
    tokens = [
        [OUTPUT_TOKEN] if requests[name].num_computed_tokens >= requests[name].num_tokens else []
        for name in counts
    ]
    answer = ModelRunnerOutput(
        req_ids=list(counts),
        req_id_to_index={name: place for place, name in enumerate(counts)},
        sampled_token_ids=tokens,
    )
    started = time.perf_counter()
    scheduler.update_from_output(plan, answer)
    seconds += time.perf_counter() - started
    return seconds, len(counts) == len(requests) == plan.total_num_scheduled_tokens


def measure(folder, job):
    running, size = job["running"], job["block_size"]
    length = job["prompt_tokens"] + job["max_tokens"]
    scheduler = open_scheduler(folder, running, size, running * (length // size + 2) + 100)
    fill(scheduler, job)
    seconds = []
    while len(seconds) < job["steps"]:
        taken, decoding = timed_step(scheduler)
        if decoding:
            seconds.append(taken)
    return 1e6 * statistics.median(seconds)


def main():
    for line in sys.stdin:
        print(json.dumps({"us_per_step": measure(sys.argv[1], json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
