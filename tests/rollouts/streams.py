"""Clients that ask while weights change, and what their answers must be.

A simulated worker's token follows from the tokens before it and from the weights that computed
their KV. So each token is checked against the weights that the answer names for it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from twinplane import (
    AsyncClient,
    FinishReason,
    GenerationResult,
    Message,
    RetryPolicy,
    TwinplaneError,
    WeightsChanged,
    WeightsSpan,
)
from twinplane.client.options import GenerateOptions
from twinplane.control.v1 import control_pb2 as pb
from worker_service.simulated.arithmetic import (
    Words,
    choose,
    mix,
    position_weights,
    preferences,
)
from worker_service.simulated.weights import salt_of

DEADLINE_SECONDS = 240.0
_STOPS = "abcdefghijklmnop"
_KEEP = pb.IN_FLIGHT_POLICY_KEEP_KV
_MIXING = frozenset({pb.IN_FLIGHT_POLICY_CONTINUE_ON_NEW, _KEEP})
"""With these an answer may have tokens of several weights."""


@dataclass(frozen=True)
class Ask:
    """A request: a text, tokens or one user's words."""

    prompt: str | list[int] | list[Message]
    options: GenerateOptions
    streams: bool = True


@dataclass
class Seen:
    """An answer, or an error, as its caller saw it.

    `wanted`: the digest of the weights that all replicas had when it began; empty while a rollout
    ran. `policies`: of the rollouts that ran meanwhile. `gaps`: seconds between two of its deltas;
    of them, `switches` are those behind which the tokens are of other weights.
    """

    ask: Ask
    wanted: str
    prompt_ids: tuple[int, ...] = ()
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    result: GenerationResult | None = None
    error: TwinplaneError | None = None
    gaps: list[float] = field(default_factory=list)
    switches: list[float] = field(default_factory=list)
    policies: frozenset[int] = frozenset()


def make_ask(draw: random.Random, vocabulary_size: int, longest: int) -> Ask:
    """A request of any kind: greedy or seeded, text, tokens or a chat, with stop strings or not."""
    words = "".join(draw.choice("abc ÄÖ€🙂") for _ in range(draw.randint(1, 30)))
    prompt: str | list[int] | list[Message] = draw.choice(
        (
            words,
            # A letter at the end: a half character there would go on in the answer's text.
            [*(draw.randrange(vocabulary_size) for _ in range(draw.randint(0, 60))), 40],
            [Message("user", words)],
        )
    )
    options: GenerateOptions = {
        "max_tokens": draw.randint(1, longest),
        "ignore_eos": True,
        "temperature": draw.choice([0.0, 1.0]),
    }
    if draw.random() < 0.5:
        options["seed"] = draw.getrandbits(64)
    if draw.random() < 0.4:
        length = draw.choice([1, 2])
        options["stop"] = [
            "".join(draw.choice(_STOPS) for _ in range(length)) for _ in range(2 * length)
        ]
    return Ask(prompt, options, draw.random() < 0.9)


@dataclass
class Settled:
    """The digest that all replicas have, empty while a rollout runs, and all rollouts' policies."""

    digest: str = ""
    policies: list[int] = field(default_factory=list)


class Load:
    """Streams that begin again as soon as they end, until `stop`."""

    def __init__(
        self,
        address: str,
        settled: Settled,
        count: int,
        ask: Callable[[int, int], Ask],
    ) -> None:
        """`ask` gives the nth request of a stream, by the stream's number and n."""
        self.seen: list[Seen] = []
        self._address, self._settled, self._ask = address, settled, ask
        self._is_over = False
        self._tasks = [asyncio.create_task(self._stream(number)) for number in range(count)]

    async def stop(self) -> None:
        """Lets each stream end."""
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _stream(self, number: int) -> None:
        # A call made while nobody serves was never taken up: it is tried for as long.
        retry = RetryPolicy(max_attempts=1000, max_backoff=1.0)
        turn = 0
        async with AsyncClient(self._address, retry=retry) as client:
            while not self._is_over:
                self.seen.append(await self._see(client, self._ask(number, turn)))
                turn += 1

    async def _see(self, client: AsyncClient, ask: Ask) -> Seen:
        seen = Seen(ask, self._settled.digest)
        began = len(self._settled.policies) - (not self._settled.digest)
        try:
            if isinstance(ask.prompt, list) and all(isinstance(each, int) for each in ask.prompt):
                seen.prompt_ids = tuple(ask.prompt)  # type: ignore[arg-type]
            else:
                seen.prompt_ids = await client.tokenize(ask.prompt, timeout=DEADLINE_SECONDS)  # type: ignore[arg-type]
            if ask.streams:
                await self._read(client, seen, began)
            else:
                seen.result = await client.complete(
                    ask.prompt, timeout=DEADLINE_SECONDS, **ask.options
                )
                self._begun(seen, began)
                seen.text, seen.token_ids = seen.result.text, list(seen.result.token_ids)
        except TwinplaneError as error:
            seen.error = error
        seen.policies = frozenset(self._settled.policies[began:])
        return seen

    def _begun(self, seen: Seen, began: int) -> None:
        """It has tokens. A rollout that has begun since it was asked may have made them."""
        if len(self._settled.policies) > began:
            seen.wanted = ""

    async def _read(self, client: AsyncClient, seen: Seen, began: int) -> None:
        last, digest = 0.0, ""
        generation = client.generate(seen.ask.prompt, timeout=DEADLINE_SECONDS, **seen.ask.options)
        async for delta in generation:
            now = time.monotonic()
            if last:
                seen.gaps.append(now - last)
            else:
                self._begun(seen, began)
            if delta.origin is not None:
                if digest and delta.origin.weights_digest != digest:
                    seen.switches.append(now - last)
                digest = delta.origin.weights_digest
            last = now
            seen.text += delta.text
            seen.token_ids += delta.token_ids
        seen.result = await generation.result()


def may_end(error: TwinplaneError, policies: frozenset[int], *, kills: bool) -> bool:
    """Whether an exchange may have ended an answer. Where nobody is killed, only ABORT does."""
    if pb.IN_FLIGHT_POLICY_ABORT in policies:
        # A client that comes back to the next control plane learns it when it resumes.
        return isinstance(error, WeightsChanged) or (kills and "weights changed" in str(error))
    is_old = pb.IN_FLIGHT_POLICY_FINISH_ON_OLD in policies
    return kills and is_old and isinstance(error, WeightsChanged)


class Checker:
    """Says what is wrong with answers of simulated workers."""

    def __init__(self, tokenizer: Tokenizer, first_digest: str) -> None:
        self._tokenizer = tokenizer
        self._size = tokenizer.get_vocab_size()
        self._first_digest = first_digest
        alphabet = (*_STOPS, *"<|endoftext|><|im_start|><|im_end|>")
        self._ids = {letter: tokenizer.encode(letter).ids[0] for letter in alphabet}
        self._special = set(tokenizer.get_added_tokens_decoder())

    def trouble(self, seen: Seen, *, kills: bool) -> str | None:
        """What is wrong; None: nothing. `kills`: whether workers were killed meanwhile, so that
        nobody may have been left on whom an answer could end with its weights."""
        if seen.error is not None:
            if may_end(seen.error, seen.policies, kills=kills):
                return None
            return f"{type(seen.error).__name__} {seen.error.reason}: {seen.error}"
        result = seen.result
        assert result is not None
        tokens, spans = list(result.token_ids), result.weights_spans
        if (seen.text, seen.token_ids) != (result.text, tokens):
            return "the deltas are not the result"
        if result.usage.prompt_token_count != len(seen.prompt_ids):
            return "another count of prompt tokens"
        if sum(span.token_count for span in spans) != len(tokens):
            return f"spans {spans} of {len(tokens)} tokens"
        if seen.wanted and spans[0].weights_digest != seen.wanted:
            return f"asked of {seen.wanted[:12]}, begun with {spans[0].weights_digest[:12]}"
        if len(spans) > 1 and not seen.policies & _MIXING:
            return f"policies {set(seen.policies)} allow no {spans}"
        if any(span.kv_of_other_weights for span in spans) and _KEEP not in seen.policies:
            return f"policies {set(seen.policies)} keep no KV: {spans}"
        sampled = seen.ask.options["temperature"] > 0  # type: ignore[operator]
        seed = result.seed if sampled else 0
        if not any(self._made(seen.prompt_ids, tokens, spans, seed, kept) for kept in (1, 0)):
            return f"tokens that {spans} don't make"
        return self._wrong_end(seen, result)

    def _made(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        spans: Sequence[WeightsSpan],
        seed: int,
        kept: int,
    ) -> bool:
        """Whether these weights make these tokens. `kept` 0: what a span with KV of other weights
        has begun with had been computed again since the exchange before."""
        known = np.array([*prompt, *tokens], dtype=np.int32)
        places = np.arange(len(known), dtype=np.int32)
        factors = position_weights(places.astype(np.uint64))
        seeds = np.array([seed], dtype=np.uint64)
        kv: Words = np.zeros(len(known), dtype=np.uint64)
        start, last = len(prompt), 0
        for span in spans:
            is_first = span.weights_digest == self._first_digest
            salt = 0 if is_first else salt_of(span.weights_digest)
            computed = 0
            if span.kv_of_other_weights:
                computed = start - 1  # the newest token's KV is computed with the next
                if not kept:
                    kv[:computed] = mix(known[:computed], places[:computed], last)
            kv[computed:] = mix(known[computed:], places[computed:], salt)
            end, last = start + span.token_count, salt
            sums = np.cumsum(kv * factors, dtype=np.uint64)[start - 1 : end - 1]
            wanted = preferences(sums, seeds, places[start:end].astype(np.uint64))
            if (choose(wanted, self._size) != known[start:end]).any():
                return False
            start = end
        return True

    def _wrong_end(self, seen: Seen, result: GenerationResult) -> str | None:
        tokens, options = list(result.token_ids), seen.ask.options
        ends = self._first_stop(tokens, options.get("stop") or ())
        whole = self._tokenizer.decode(tokens)
        if ends is None:
            if result.finish_reason is not FinishReason.LENGTH:
                return f"it ended with {result.finish_reason}"
            if len(tokens) != options["max_tokens"]:
                return f"{len(tokens)} tokens"
            return None if result.text == whole else f"text {result.text!r}, not {whole!r}"
        end, stop = ends
        if (result.finish_reason, end) != (FinishReason.STOP, len(tokens)):
            return f"{stop!r} occurs in token {end}, and it ended after {len(tokens)}"
        if not whole.startswith(result.text) or stop in result.text:
            return f"text {result.text!r} of {whole!r} before {stop!r}"
        return None

    def _first_stop(self, tokens: Sequence[int], stops: Sequence[str]) -> tuple[int, str] | None:
        """Behind how many tokens the first of these strings is complete, and which."""
        shown = [(index, token) for index, token in enumerate(tokens) if token not in self._special]
        wanted = {stop: [self._ids[letter] for letter in stop] for stop in stops}
        for place, (index, _) in enumerate(shown):
            for stop, ids in wanted.items():
                begin = place + 1 - len(ids)
                if begin >= 0 and [token for _, token in shown[begin : place + 1]] == ids:
                    return index + 1, stop
        return None
