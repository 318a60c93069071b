"""`twinplane chat`: what becomes of what is typed, without a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.quick import examples
from tests.support.scripted_inference import (
    delta,
)
from twinplane import (
    FinishReason,
    GenerationResult,
    Message,
    SamplingDefaults,
    ServedModel,
    TwinplaneError,
    Usage,
    WeightVersion,
)
from twinplane.bounds import SAMPLING_RANGES
from twinplane.cli.chat_commands import Chat
from twinplane.cli.chat_input import read_entry
from twinplane.cli.chat_settings import NUMBERS, with_option
from twinplane.cli.conversation import ContextFull, Conversation
from twinplane.client.options import GenerateOptions

LENGTH = 4096


@dataclass
class FakeClient:
    """Plays one answer per call: texts, or an exception raised after those before it.

    A conversation has a token for each character. With `length`, answers end by it.
    """

    answers: list[list[str | BaseException]]
    ends: FinishReason = FinishReason.STOP
    seen: list[list[Message]] = field(default_factory=list)
    options: list[GenerateOptions] = field(default_factory=list)
    counted: int = 0

    def generate(self, prompt: list[Message], **options: Any) -> FakeClient:
        self.seen.append(prompt)
        self.options.append(GenerateOptions(**options))
        self.said = ""
        return self

    def tokenize(self, prompt: list[Message], *, model: str) -> tuple[int, ...]:
        self.counted += 1
        return (1,) * count(prompt)

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        for item in self.answers.pop(0):
            if isinstance(item, BaseException):
                raise item
            self.said += item
            yield delta(item).delta

    def result(self) -> GenerationResult:
        usage = Usage(count(self.seen[-1]), 0, len(self.said))
        return GenerationResult(self.said, (), self.ends, None, None, usage, 7, "r", "m")


def count(prompt: list[Message]) -> int:
    return sum(len(turn.content) for turn in prompt)


@dataclass
class Rig:
    chat: Chat
    client: FakeClient
    conversation: Conversation
    shown: io.StringIO = field(default_factory=io.StringIO)
    said: io.StringIO = field(default_factory=io.StringIO)
    notes: io.StringIO = field(default_factory=io.StringIO)

    def take(self, line: str) -> bool:
        return self.chat.take(read_entry(lambda _: line))


def rig(
    *answers: list[str | BaseException],
    system: str | None = None,
    length: int = LENGTH,
    ends: FinishReason = FinishReason.STOP,
    drop_oldest: bool = False,
    options: GenerateOptions | None = None,
) -> Rig:
    client = FakeClient(list(answers), ends)
    untyped: Any = client
    model = ServedModel(
        "m", length, 9, True, WeightVersion(1, "ab"), SamplingDefaults(0.25, 0, 0.5, 0.0)
    )
    asked = GenerateOptions(max_tokens=64) if options is None else options
    conversation = Conversation(untyped, model, asked, system=system, drop_oldest=drop_oldest)
    made = Rig(None, client, conversation)  # type: ignore[arg-type]
    made.chat = Chat(conversation, "here:1", made.shown.write, made.said, made.notes)
    return made


# Turns.


def test_a_conversation_carries_its_turns() -> None:
    talk = rig(["He", "llo"], ["Bye"], system="Be kind.")
    assert talk.take("hi")
    assert talk.take("  ")
    assert talk.take("more")
    assert talk.shown.getvalue() == "Hello\nBye\n"
    assert talk.client.seen[1] == [
        Message("system", "Be kind."),
        Message("user", "hi"),
        Message("assistant", "Hello"),
        Message("user", "more"),
    ]
    assert not talk.take("/exit")


def test_reset_and_system_begin_again() -> None:
    talk = rig(["1"], ["2"], ["3"], ["4"])
    for line in ("a", "/reset", "b", "/system Be brief.", "c", "/system", "d"):
        assert talk.take(line)
    assert talk.client.seen[1] == [Message("user", "b")]
    assert talk.client.seen[2] == [Message("system", "Be brief."), Message("user", "c")]
    assert talk.client.seen[3] == [Message("user", "d")]


@pytest.mark.parametrize("line", ["/rest", "/", "/etc", "/SET x", "/show me", "/help me"])
def test_commands_are_not_sent(line: str) -> None:
    talk = rig()
    assert talk.take(line)
    assert talk.client.seen == []
    assert talk.said.getvalue()


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said() -> None:
    talk = rig(["par", KeyboardInterrupt()], ["ok"])
    with pytest.raises(KeyboardInterrupt):
        talk.take("hi")
    assert talk.take("go on")
    assert talk.shown.getvalue() == "par …\nok\n"
    assert talk.client.seen[1][1] == Message("assistant", "par")


def test_a_failed_turn_is_undone() -> None:
    talk = rig([TwinplaneError("no")], ["ok"])
    with pytest.raises(TwinplaneError):
        talk.take("first")
    assert talk.take("second")
    assert talk.client.seen[1] == [Message("user", "second")]


# /set and /show.


def test_an_option_is_set_shown_and_set_back() -> None:
    talk = rig(["1"], ["2"], ["3"], options={"max_tokens": 64, "top_k": 5})
    for line in ("/set temperature 0.5", "/set top-k 9", "/set seed 3", "/set stop END", "/show"):
        assert talk.take(line)
    said = talk.said.getvalue().splitlines()
    assert [line.split() for line in said[:2]] == [["temperature", "0.5"], ["top_k", "9"]]
    lines = dict(line.split(None, 1) for line in said)
    assert lines["model"] == "m at here:1"
    assert lines["context"] == "4096 tokens; 0 used by 0 turns"
    assert (lines["temperature"], lines["top_k"], lines["seed"]) == ("0.5", "9", "3")
    assert (lines["top_p"], lines["min_p"]) == ("0.5 (default)", "0 (default)")
    assert (lines["stop"], lines["max_tokens"]) == ("'END'", "64")
    assert talk.take("a")
    assert talk.client.options[0] == {
        "max_tokens": 64, "temperature": 0.5, "top_k": 9, "seed": 3, "stop": ["END"],
    }  # fmt: skip
    for line in ("/set temperature", "/set top_k", "/set stop", "/set seed", "a"):
        assert talk.take(line)
    assert talk.client.options[1] == {"max_tokens": 64, "top_k": 5, "stop": []}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["x", "-1", "1e999", "nan", "9" * 40, "0x1", "1.5.2"])
def test_a_wrong_value_changes_nothing_and_is_named(name: str, value: str) -> None:
    talk = rig(["1"])
    assert talk.take(f"/set {name} {value}")
    assert talk.said.getvalue().startswith(f"{name}: {value} is not ")
    assert talk.take("a")
    assert talk.client.options == [{"max_tokens": 64}]


@pytest.mark.parametrize("name", SAMPLING_RANGES)
def test_every_sampling_parameter_can_be_set(name: str) -> None:
    value = with_option({}, name, "1")[name]  # type: ignore[literal-required]
    assert value == 1


@pytest.mark.parametrize("line", ["/set", "/set nothing", "/set nothing 5", "/set drop_oldest 5"])
def test_set_says_what_there_is(line: str) -> None:
    talk = rig()
    assert talk.take(line)
    assert "drop_oldest" in talk.said.getvalue()


# A full context.


def test_a_conversation_that_is_full_says_what_to_do() -> None:
    talk = rig(["a" * 1200], ["b" * 1500], length=2800)
    assert talk.take("one")
    assert talk.take("two")
    with pytest.raises(ContextFull, match=r"has 2809 tokens.* 2800: /reset .*/set drop_oldest on"):
        talk.take("x" * 103)
    assert len(talk.conversation.turns) == 4, "as before"
    assert talk.take("/reset")
    talk.client.answers = [["fine"]]
    assert talk.take("x" * 103)


def test_a_question_that_is_too_long_alone() -> None:
    talk = rig(length=600)
    with pytest.raises(ContextFull, match="this has 700 tokens, and the model's context is 600"):
        talk.take("x" * 700)


def test_an_answer_gets_what_room_there_is() -> None:
    talk = rig(["a"], length=2000, options={"max_tokens": 1024}, ends=FinishReason.LENGTH)
    assert talk.take("x" * 1990)
    assert talk.client.options == [{"max_tokens": 10}]


def test_an_answer_that_was_cut_says_why() -> None:
    cut = rig(["a" * 64], ends=FinishReason.LENGTH)
    assert cut.take("x")
    assert cut.notes.getvalue() == "(stopped after 64 tokens, a larger max_tokens allows more)\n"
    full = rig(["a" * 10], ["b" * 80], length=2000, ends=FinishReason.LENGTH)
    assert full.take("x" * 1990)
    assert full.notes.getvalue() == "(the context of 2000 tokens is full)\n"
    full.take("/reset")
    full.client.answers = [["a" * 10], ["b" * 10]]
    assert full.take("x" * 970)
    assert full.take("x" * 1010)
    assert "is full; /reset begins anew, /set drop_oldest on forgets" in full.notes.getvalue()
    whole = rig(["a" * 64])
    assert whole.take("x")
    assert whole.notes.getvalue() == ""


@settings(max_examples=examples(60), deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 1500), st.integers(1, 300)), min_size=1, max_size=12),
    length=st.integers(1024, 6000),
)
def test_dropping_the_oldest_never_fails(lengths: list[tuple[int, int]], length: int) -> None:
    """Whatever was said, a question that fits alone is answered, behind whole turns."""
    talk = rig(length=length, drop_oldest=True)
    for asked, answered in lengths:
        talk.client.answers = [["a" * answered]]
        question = "q" * asked
        if asked >= length:
            with pytest.raises(ContextFull):
                talk.take(question)
            continue
        assert talk.take(question)
        prompt, options = talk.client.seen[-1], talk.client.options[-1]
        assert prompt[-1] == Message("user", question)
        assert [turn.role for turn in prompt] == ["user", "assistant"] * (len(prompt) // 2) + [
            "user"
        ]
        most = options["max_tokens"]
        assert most is not None
        assert count(prompt) + most <= length
