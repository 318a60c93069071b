"""How a worker is given adapters over gRPC: their files as they lie here, a chunk at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from control_plane.core.weights import SpooledSource
from control_plane.rpc.weights_client import Spool, SpoolUnusable, tensor_to_pb
from control_plane.shell.adapter_files import AdapterFiles
from twinplane.worker.v1 import adapters_pb2


async def load(
    stub: Any, epoch: int, slot: int, files: AdapterFiles, timeout_seconds: float
) -> None:
    """Streams an adapter into a slot. Raises AioRpcError, or SpoolUnusable where the files are no
    longer as they were."""
    spool = await asyncio.to_thread(Spool, SpooledSource(files.tensors_path, files.sha256))
    troubles: list[SpoolUnusable] = []
    try:
        await stub.LoadAdapter(
            _messages(epoch, slot, files, spool, troubles), timeout=timeout_seconds
        )
    except asyncio.CancelledError:
        # gRPC cancels a call whose messages can't be made, and does not say why.
        task = asyncio.current_task()
        if troubles and not (task is not None and task.cancelling()):
            raise troubles[0] from None
        raise
    finally:
        await spool.close()


async def held(stub: Any, timeout_seconds: float) -> dict[int, str]:
    """The digests of what a worker's slots hold, by slot. Raises AioRpcError."""
    answer = await stub.ListAdapters(adapters_pb2.ListAdaptersRequest(), timeout=timeout_seconds)
    return {loaded.slot: loaded.adapter.digest for loaded in answer.adapters}


async def _messages(
    epoch: int, slot: int, files: AdapterFiles, spool: Spool, troubles: list[SpoolUnusable]
) -> AsyncIterator[adapters_pb2.LoadAdapterRequest]:
    tensors = [tensor_to_pb(tensor) for tensor, _, _ in spool.tensors]
    stream = adapters_pb2.StreamedAdapter(config_json=files.config_json, tensors=tensors)
    yield adapters_pb2.LoadAdapterRequest(
        update=adapters_pb2.AdapterUpdate(
            epoch=epoch, slot=slot, expected_digest=files.digest, stream=stream
        )
    )
    try:
        async for chunk in spool.chunks():
            yield adapters_pb2.LoadAdapterRequest(chunk=chunk)
    except SpoolUnusable as error:
        troubles.append(error)
        raise
