"""Asks the worker's own code about a model before anything big is fetched or started."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from twinplane.models import ModelRefused


def check_model(name: str, folder: Path) -> None:
    """Raises ModelRefused where a worker would refuse the config.json in `folder`.

    `name` is what the user calls the model. Where the worker can't be imported nobody can say, and
    every model passes.
    """
    try:
        startup = import_module("worker_service.startup")
    except ModuleNotFoundError:
        return
    reason = startup.refusal_of(folder)
    if reason is not None:
        raise ModelRefused(f"{name} can't be served: {reason}")
