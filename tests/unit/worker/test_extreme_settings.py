"""Every number among the settings at its extremes: a start, or one line that names the setting.

The settings' own classes are the table, so that a new setting is covered here by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import fields
from itertools import product
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import pytest

from bench.inprocess import InProcessWorker
from control_plane.app import _drain, _replica_settings, text_processor
from control_plane.observability.metrics import Telemetry
from control_plane.shell.fleet import Fleet
from control_plane.text.model_files import load_text_model
from tests.support.quick import spread
from tests.support.tiny_spec import TINY_CONFIG, save_random, tiny_spec
from twinplane import models
from twinplane.settings.control import ControlConfig
from twinplane.settings.known import known_settings
from twinplane.settings.ranges import NumberRange, range_of
from twinplane.settings.resolution import SettingsError, flag, resolve
from twinplane.settings.worker import WorkerConfig
from worker_service.facade import WorkerFacade
from worker_service.load_errors import LoadError
from worker_service.startup import StartupError, check_start, start_runner

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CLASSES: dict[str, type[DataclassInstance]] = {"worker": WorkerConfig, "control": ControlConfig}


def numbers(cls: type[DataclassInstance]) -> dict[str, NumberRange | None]:
    """The ranges of a class's numbers, by name."""
    hints = get_type_hints(cls)

    def kinds(name: str) -> set[object]:
        hint = hints[name]
        return set(get_args(hint)) if isinstance(hint, UnionType) else {hint}

    return {each.name: range_of(each) for each in fields(cls) if kinds(each.name) & {int, float}}


def extremes(allowed: NumberRange) -> set[str]:
    """As they are typed."""
    edges = {allowed.minimum, allowed.minimum + 1, allowed.maximum, allowed.maximum - 1}
    beyond = {allowed.minimum - 1, allowed.maximum + 1, -1, 0, 1}
    huge = {10**4, 10**6, 10**9, 2**31 - 1, 10**9 * 2**32, 2**64, 10**40}
    return {str(number) for number in edges | beyond | huge} | {"nan", "inf", "-inf", "9" * 5000}


CASES = [
    pytest.param(plane, name, id=f"{plane}-{name}")
    for plane, cls in CLASSES.items()
    for name in numbers(cls)
]


def resolved(plane: str, **texts: str) -> Any:
    """The settings with flags of these texts. Raises SettingsError."""
    namespace = argparse.Namespace(**texts)
    return resolve(CLASSES[plane], namespace, {}, None, plane, known=known_settings())


def told(name: str, error: Exception) -> str:
    """One line that names the setting, or its flag."""
    message = str(error)
    assert message and "\n" not in message
    assert name in message or flag(name) in message, message
    return message


@pytest.mark.parametrize(("plane", "name"), CASES)
def test_every_number_has_a_range(plane: str, name: str) -> None:
    allowed = numbers(CLASSES[plane])[name]
    assert allowed is not None, "give option() a range"
    assert allowed.minimum < allowed.maximum


@pytest.mark.parametrize(("plane", "name"), CASES)
def test_what_is_outside_is_refused_in_one_line(plane: str, name: str) -> None:
    allowed = numbers(CLASSES[plane])[name]
    assert allowed is not None
    for text in extremes(allowed):
        try:
            value = getattr(resolved(plane, **{name: text}), name)
        except SettingsError as error:
            message = told(name, error)
            if text.isdecimal() and len(text) < 4000:
                assert not allowed.minimum <= int(text) <= allowed.maximum or (
                    allowed.excludes_minimum and int(text) == allowed.minimum
                ), message
        else:
            assert allowed.minimum <= value <= allowed.maximum


# Every second of them has every setting and every kind: three kinds stand side by side.
STARTS = list(product(numbers(WorkerConfig), ("simulated", "compiled", "torch")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_random(tiny_spec(), tmp_path_factory.mktemp("tiny") / "model")
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    return folder


@pytest.mark.parametrize(("name", "kind"), spread(STARTS, len(STARTS) // 2))
def test_a_worker_starts_or_says_why(folder: Path, kind: str, name: str) -> None:
    """`check_start` says what a start says."""
    allowed = numbers(WorkerConfig)[name]
    assert allowed is not None
    base = {"simulate": "true"} if kind == "simulated" else {"executor": kind}
    if kind != "simulated":
        base |= {"model": str(folder), "threads": "1", "kv_cache_memory_bytes": "1MiB"}
    for text in sorted(extremes(allowed)):
        try:
            config = resolved("worker", **{**base, name: text})
        except SettingsError:
            continue
        if name.startswith("simulate_") and kind != "simulated":
            continue
        said = happened = ""
        try:
            check_start(config)
        except (StartupError, LoadError) as error:
            said = told(name, error)
        try:
            start_runner(config, lambda line: None)
        except (StartupError, LoadError) as error:
            happened = told(name, error)
        assert said == happened or without_numbers(said) == without_numbers(happened)


def without_numbers(message: str) -> str:
    """What is free changes between two looks."""
    return "".join(each for each in message if not each.isdecimal())


@pytest.mark.parametrize("name", numbers(ControlConfig))
async def test_a_control_plane_can_be_made(name: str) -> None:
    """It tokenizes, claims a worker and drains."""
    allowed = numbers(ControlConfig)[name]
    assert allowed is not None
    model = load_text_model(models.resolve(models.SIMULATED_MODEL, weights=False))
    simulated = WorkerConfig(simulate=True, simulate_block_count=100)
    worker = WorkerFacade(
        lambda: start_runner(simulated, lambda line: None), worker_id="w", incarnation_id="i"
    )
    await worker.load()
    for text in sorted(extremes(allowed)):
        try:
            config = resolved("control", model=models.SIMULATED_MODEL, **{name: text})
        except SettingsError:
            continue
        assert isinstance(config, ControlConfig)
        processor = text_processor(config, model)
        assert await processor.encode("hello", add_special_tokens=False)
        processor.close()
        await claim_and_drain(config, worker)
    await worker.close()


async def claim_and_drain(config: ControlConfig, worker: WorkerFacade) -> None:
    ready = asyncio.Event()
    fleet = Fleet(
        [InProcessWorker(worker)],
        _replica_settings(config),
        clock=time.monotonic,
        jitter=random.Random(0).random,
        metrics=Telemetry("test"),
        on_readiness=lambda is_ready: ready.set() if is_ready else None,
    )
    running = asyncio.create_task(fleet.run())
    async with asyncio.timeout(60):
        await ready.wait()
        await _drain(fleet, nobody_waits, config.drain_grace_seconds)
    running.cancel()
    await asyncio.wait([running])


async def nobody_waits() -> None:
    """No client has to be waited for."""
