"""Puts together what operators use: a fleet's rollouts, and the port on which to ask for them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from control_plane.core.weights import DiskSource
from control_plane.rpc.control_servicer import ControlServicer
from control_plane.rpc.errors import status_of
from control_plane.rpc.server import (
    MAX_REQUEST_BYTES,
    ControlServer,
    control_service,
)
from control_plane.shell.fleet import Fleet
from control_plane.shell.rollout_store import RolloutStore
from control_plane.shell.rollouts import Rollouts
from twinplane.grpc.health import SettableReadiness
from twinplane.grpc.interceptors import CallEnd, StatusInterceptor
from twinplane.grpc.listen import CannotListen, check_port
from twinplane.settings.control import ControlConfig

_logger = logging.getLogger(__name__)

_STOP_GRACE_SECONDS = 1.0


def check_admin(config: ControlConfig) -> None:
    """Raises CannotListen unless the operators' port can be listened on, if there is to be one."""
    port = config.admin_port
    if port is None:
        return
    if port != 0 and port in (config.metrics_port, None if config.uds else config.port):
        raise CannotListen(
            f"--admin-port is {port}, which another server of this control plane has; another "
            "--admin-port may do"
        )
    check_port(config.admin_host, port, "admin-")


def open_rollouts(
    config: ControlConfig, fleet: Fleet, folder: Path, stack: AsyncExitStack
) -> Rollouts:
    """The rollouts as they were written down last; `folder` is the model's.

    Raises StoreUnusable.
    """
    store = RolloutStore(Path(config.state_dir).expanduser() if config.state_dir else None)
    stack.callback(store.close)
    if config.admin_port is not None and config.state_dir is None:
        _logger.warning("rollouts are kept in memory: without --state-dir a restart forgets them")
    return Rollouts(
        fleet,
        store,
        clock=time.monotonic,
        new_id=lambda: f"rollout-{secrets.token_hex(6)}",
        # Workers are usually given the same model. They check the digest.
        first_source=DiskSource(str(folder.absolute())),
    )


async def start_admin(
    config: ControlConfig,
    rollouts: Rollouts,
    fleet: Fleet,
    on_call: Callable[[CallEnd], None],
    stack: AsyncExitStack,
) -> str | None:
    """Listens for operators, until the stack closes. Returns the address; None: it is off.

    Raises CannotListen.
    """
    if config.admin_port is None:
        return None
    readiness = SettableReadiness()
    readiness.set_serving(True)
    server = ControlServer(
        [control_service(ControlServicer(rollouts, fleet.weights))],
        readiness,
        StatusInterceptor(
            status_of, on_call, lambda: secrets.token_hex(8), max_message_bytes=MAX_REQUEST_BYTES
        ),
    )
    address = await server.start(config.admin_host, config.admin_port)
    stack.push_async_callback(server.stop, _STOP_GRACE_SECONDS)
    return address


async def run_beside(run: Coroutine[Any, Any, None], beside: asyncio.Task[None] | None) -> None:
    """Runs it until it ends, or the task beside it does. Raises what either raises."""
    if beside is None:
        return await run
    task = asyncio.create_task(run)
    try:
        await asyncio.wait((task, beside), return_when=asyncio.FIRST_COMPLETED)
        (task if task.done() else beside).result()
    finally:
        task.cancel()
        await asyncio.wait((task,))
