"""A model folder without weights: a byte-level tokenizer and a chat template.

Enough for the control plane and a simulated worker; made in milliseconds, needs no download.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_SEQUENCE = "<|endoftext|>"
MAX_LENGTH = 2048
_SPECIAL = (END_OF_SEQUENCE, "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path) -> Path:
    """Writes the folder: token ids 0 to 255 are single bytes, then three special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_SEQUENCE)
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": MAX_LENGTH,
            "eos_token_id": end,
            "bos_token_id": end,
        },
    )
    _write_json(folder / "generation_config.json", {"eos_token_id": end, "bos_token_id": end})
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_SEQUENCE,
            "eos_token": END_OF_SEQUENCE,
            "model_max_length": MAX_LENGTH,
            "chat_template": _CHAT_TEMPLATE,
        },
    )
    return folder


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2))
