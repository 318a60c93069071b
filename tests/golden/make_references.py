"""Makes tests/golden/data/references.json: what `transformers` generates greedily in float32.

usage: python -m tests.golden.make_references [MODEL_FOLDER]

For each prompt: its token ids (by transformers' own tokenizer and chat template), the next
64 greedy tokens with end-of-sequence ignored, and at each of them the gap between the two highest
logits. A server may differ from the reference only where that gap is tiny: there the order of
additions decides.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.golden.prompts import CHATS, PLAIN
from twinplane.models import resolve

TOKENS = 64
DATA = Path(__file__).parent / "data" / "references.json"


def load_model(folder: Path) -> PreTrainedModel:
    """The reference, in float32; no token ends its output."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


def continuation(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    """TOKENS greedy tokens after the prompt, and the top-two gap at each."""
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    top = torch.topk(torch.cat(out.logits).float(), 2).values
    gaps = (top[:, 0] - top[:, 1]).tolist()
    return out.sequences[0, len(prompt) :].tolist(), [round(gap, 6) for gap in gaps]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else resolve("smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_model(folder)
    prompts = [("plain", tokenizer(text)["input_ids"]) for text in PLAIN]
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        prompts.append(("chat", tokenizer(rendered, add_special_tokens=False)["input_ids"]))
    references = []
    for number, (kind, prompt) in enumerate(prompts):
        tokens, gaps = continuation(model, prompt)
        references.append({"kind": kind, "prompt": prompt, "tokens": tokens, "gaps": gaps})
        print(f"{number + 1}/{len(prompts)}", file=sys.stderr)
    lines = ",\n".join(json.dumps(r, separators=(",", ":")) for r in references)
    DATA.parent.mkdir(parents=True, exist_ok=True)
    DATA.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
