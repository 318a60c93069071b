"""The `transformers` peer, in a process of its own: reads one JSON job a line, answers one.

Job: {"prompts": [[token, …], …], "output_tokens": n, "batch": b}. Answer: {"seconds": wall,
"output_tokens_per_second": rate}. Prompts of one job have one length, so no padding is needed.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    model.eval()
    for line in sys.stdin:
        job = json.loads(line)
        prompts, count, batch = job["prompts"], job["output_tokens"], job["batch"]
        started = time.perf_counter()
        for begin in range(0, len(prompts), batch):
            ids = torch.tensor(prompts[begin : begin + batch])
            with torch.inference_mode():
                out = model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                )
            if out.shape[1] != ids.shape[1] + count:
                raise RuntimeError("transformers stopped early")
        seconds = time.perf_counter() - started
        rate = len(prompts) * count / seconds
        answer = {"seconds": seconds, "output_tokens_per_second": rate}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
