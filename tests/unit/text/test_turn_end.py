"""How a template ends what the assistant says, for the shapes that templates have."""

from __future__ import annotations

from datetime import datetime

import pytest

from control_plane.text.chat_template import ChatMessage, ChatTemplate
from control_plane.text.template_pool import TemplatePool
from control_plane.text.template_process import RenderLimits
from control_plane.text.turn_end import SAMPLE_CHAT, find_turn_end
from tests.support.quick import spread

TOKENS = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|user|>"),
    *("<|assistant|>", "<start_of_turn>", "<end_of_turn>", "<|start_header_id|>", "[INST]"),
    *("<|end_header_id|>", "<|eot_id|>", "[/INST]", "\n", "  ", "<|eot|>", "<|end_of_turn|>"),
]
EACH = "{% for m in messages %}"
DONE = "{% endfor %}"
SHAPES = {
    "chatml": (EACH + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n" + DONE, "<|im_end|>"),
    "chatml with a system turn": (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        + EACH
        + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        + DONE,
        "<|im_end|>",
    ),
    "llama 3": (
        EACH
        + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
        + DONE,
        "<|eot_id|>",
    ),
    "gemma": (
        EACH + "<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n" + DONE,
        "<end_of_turn>",
    ),
    "phi": (EACH + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n" + DONE, "<|end|>"),
    "zephyr": (EACH + "<|{{ m.role }}|>\n{{ m.content }}</s>\n" + DONE, "</s>"),
    "llama 2": (
        EACH
        + "{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
        + "{% else %} {{ m.content }} </s>{% endif %}"
        + DONE,
        "</s>",
    ),
    "mistral": (
        "<s>"
        + EACH
        + "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        + "{% else %}{{ m.content }}</s>{% endif %}"
        + DONE,
        "</s>",
    ),
    "vicuna": (
        "<s>"
        + EACH
        + "{{ m.role | upper }}: {{ m.content }}{{ '</s>' if m.role == 'assistant' else ' ' }}"
        + DONE,
        "</s>",
    ),
    "nothing but the next turn's header": (EACH + "<|{{ m.role }}|>\n{{ m.content }}" + DONE, None),
    "the next header behind a line": (EACH + "<|{{ m.role }}|>\n{{ m.content }}\n" + DONE, None),
    "text between": (EACH + "{{ m.role }}: {{ m.content }} END<|im_end|>" + DONE, None),
    "no tokens": (EACH + "### {{ m.role }}:\n{{ m.content }}\n\n" + DONE, None),
    "only white space that is a token": (EACH + "{{ m.content }}\n" + DONE, None),
    "the longest name": (EACH + "{{ m.content }}<|end_of_turn|>" + DONE, "<|end_of_turn|>"),
    "the assistant is not shown": (EACH + "{{ m.role }}<|im_end|>" + DONE, None),
    "upper case": (EACH + "{{ m.content | upper }}<|im_end|>" + DONE, None),
    "only the last": ("{{ messages[-1].content }}<|im_end|>", None),
    "backwards": ("{% for m in messages[::-1] %}{{ m.content }}<|im_end|>" + DONE, None),
    "openchat": (
        "<s>" + EACH + "GPT4 {{ m.role | title }}: {{ m.content }}<|end_of_turn|>" + DONE,
        "<|end_of_turn|>",
    ),
}


@pytest.mark.parametrize("shape", spread(SHAPES, 6))
def test_the_token_behind_the_assistants_words(shape: str) -> None:
    source, expected = SHAPES[shape]
    limits = RenderLimits(max_characters=10_000, cpu_seconds=5.0, memory_bytes=512 << 20)
    pool = TemplatePool(ChatTemplate(source, {}, "chat_template.jinja"), limits, now=datetime.now)
    try:
        rendered = pool.render(SAMPLE_CHAT).text
    finally:
        pool.close()
    assert find_turn_end(rendered, TOKENS) == expected
    assert find_turn_end(rendered, []) is None


def test_the_sample_is_a_chat_that_templates_take() -> None:
    assert [turn.role for turn in SAMPLE_CHAT] == ["user", "assistant", "user"]
    assert len({turn.content for turn in SAMPLE_CHAT}) == 3
    assert all(isinstance(turn, ChatMessage) for turn in SAMPLE_CHAT)
