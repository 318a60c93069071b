"""Real workers whose weights are exchanged under streams: answers must be a fresh server's."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.rollouts.stack import OVER_SECONDS, stack
from tests.rollouts.streams import Ask, Load, Seen, Settled, make_ask, may_end
from tests.rollouts.trials import WAYS, Report, ended, judge_counts, update
from tests.support import tiny_llama
from tests.support.tiny_model import write_tiny_model

_FLAGS = (
    "--executor=compiled", "--threads=1", "--max-num-seqs=32", "--max-model-len=512",
    f"--kv-cache-memory-bytes={512 << 20}",
)  # fmt: skip
_VERSIONS = ("old", "new")


def tiny_real_model(folder: Path) -> Path:
    """A tiny random model with the tokenizer of bytes."""
    write_tiny_model(folder)
    kept = {path.name: path.read_bytes() for path in folder.glob("*token*")}
    tiny_llama.save(tiny_llama.llama(vocab_size=259, max_position_embeddings=512), folder)
    for name, data in kept.items():
        (folder / name).write_bytes(data)
    return folder


def write_two(model: Path, weights: Path) -> None:
    """The model, and one like it but for its numbers."""
    shutil.copytree(model, weights / "old")
    shutil.copytree(model, weights / "new")
    generator = torch.Generator().manual_seed(11)
    for file in (weights / "new").glob("*.safetensors"):
        tensors = load_file(file)
        for tensor in tensors.values():
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * 0.2
            tensor.add_(noise.to(tensor.dtype))
        file.unlink()  # it may be a link to the model's own
        save_file(tensors, file, metadata={"format": "pt"})


async def real_trial(
    model: Path | None, folder: Path, *, times: int, streams: int, tokens: int, seed: int
) -> Report:
    """`real`: each stream has one request, which it asks again and again."""
    report = Report("real")
    weights = folder / "weights"
    for each in (weights, *(folder / f"fresh-{name}" for name in _VERSIONS)):
        each.mkdir(parents=True)
    if model is None:
        model = await asyncio.to_thread(tiny_real_model, folder / "tiny")
    await asyncio.to_thread(write_two, model, weights)
    asks = [_ask(random.Random(f"{seed}/{number}"), tokens) for number in range(streams)]
    digests: dict[str, str] = {}
    async with (
        stack(folder, weights / "old", weights, _FLAGS) as server,
        server.operating() as operator,
    ):
        settled = Settled((await operator.settled()).replicas[0].digest)
        digests["old"] = settled.digest
        load = Load(server.address, settled, streams, lambda number, turn: asks[number])
        draw = random.Random(seed)
        for number in range(times):
            name = _VERSIONS[(number + 1) % 2]
            await asyncio.sleep(draw.uniform(0.2, 1.0))
            await update(operator, settled, report, name, WAYS[number % len(WAYS)])
            if digests.setdefault(name, settled.digest) != settled.digest:
                report.wrong.append(f"{name} has another digest than before")
        await asyncio.sleep(0.5)
        await load.stop()
        await ended(server, report, [])
    judge_counts(report, load.seen)
    if not _differ(load.seen):
        report.wrong.append("both weights make the same tokens: nothing is shown")
    for name in _VERSIONS:
        await _compare(report, folder / f"fresh-{name}", weights / name, digests[name], load.seen)
    return report


def _differ(seen: Sequence[Seen]) -> bool:
    """Whether a request has other tokens with other weights."""
    made: dict[str, set[tuple[int, ...]]] = {}
    for one in seen:
        if one.result is not None and len(one.result.weights_spans) == 1:
            made.setdefault(repr(one.ask), set()).add(one.result.token_ids)
    return any(len(each) > 1 for each in made.values())


def _ask(draw: random.Random, tokens: int) -> Ask:
    ask = make_ask(draw, 256, tokens)
    options = {**ask.options, "max_tokens": tokens, "seed": draw.getrandbits(60)}
    return replace(ask, options=options)  # type: ignore[arg-type]


async def _compare(
    report: Report, folder: Path, model: Path, digest: str, seen: Sequence[Seen]
) -> None:
    """Asks a fresh server of these weights the same, and what it makes of what others began."""
    wanted: list[tuple[Ask, list[int], str | None, Seen]] = []
    for one in seen:
        if one.result is None:
            assert one.error is not None
            if not may_end(one.error, one.policies, kills=False):
                report.wrong.append(f"{one.error!r}: {one.ask}")
            continue
        begun = 0
        for index, span in enumerate(one.result.weights_spans):
            end = begun + span.token_count
            if span.weights_digest == digest and not span.kv_of_other_weights:
                whole = len(one.result.weights_spans) == 1
                prompt = one.ask.prompt if index == 0 else [*one.prompt_ids, *one.token_ids[:begun]]
                options = {**one.ask.options}
                if index:
                    options["max_tokens"] = span.token_count
                    options.pop("stop", None)
                ask = Ask(prompt, options)  # type: ignore[arg-type]
                text = one.text if whole else None
                wanted.append((ask, one.token_ids[begun:end], text, one))
            begun = end
    different = {repr(ask): ask for ask, _, _, _ in wanted}
    asks = list(different.values())
    async with stack(folder, model, model.parent, _FLAGS, replicas=1) as server:
        load = Load(server.address, Settled(digest), min(16, len(asks)), _in_turn(asks))
        async with asyncio.timeout(OVER_SECONDS):
            while len(load.seen) < len(asks):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await load.stop()
    fresh = {repr(each.ask): each for each in load.seen}
    for ask, token_ids, text, one in wanted:
        right = fresh[repr(ask)]
        if right.result is None or right.result.weights_spans[0].weights_digest != digest:
            report.wrong.append(f"the fresh server has {right}")
        elif right.token_ids[: len(token_ids)] != token_ids:
            report.wrong.append(f"{token_ids}, fresh {right.token_ids}: {one}")
        elif text is not None and (text, token_ids) != (right.text, right.token_ids):
            report.wrong.append(f"{text!r}, fresh {right.text!r}: {one}")
    report.reasons.append(f"{len(wanted)} spans compared with a fresh server of {model.name}")


def _in_turn(asks: Sequence[Ask]) -> Callable[[int, int], Ask]:
    """Gives streams the next of these, round and round."""
    following = cycle(asks)
    return lambda number, turn: next(following)
