"""Memory on this worker's GPU that another process has allocated."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from worker_service.domain.errors import SourceLost, UpdateInvalid
from worker_service.domain.weights import CudaMemory
from worker_service.weights.sources.interface import Check

_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class _Span:
    """Bytes on the device, as torch takes them over without a copy."""

    def __init__(self, address: int, byte_count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (byte_count,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class CudaReader:
    """ipc.SharedMemory of bytes on a GPU."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def read(self, offset: int, into: torch.Tensor, check: Check) -> None:
        """See SharedMemory."""
        check()
        flat = into.reshape(-1).view(torch.uint8)
        try:
            flat.copy_(self._data[offset : offset + flat.numel()])
        except RuntimeError as error:
            raise SourceLost(f"the GPU memory can't be read: {error}") from error


@contextmanager
def opened(memory: CudaMemory, byte_count: int, device: torch.device) -> Iterator[CudaReader]:
    """The memory behind a handle. Raises UpdateInvalid where this worker can't open it, or it is
    smaller than was said."""
    if device.type != "cuda":
        raise UpdateInvalid("update.ipc.cuda", f"this worker computes on {device.type}, not a GPU")
    own = str(torch.cuda.get_device_properties(device).uuid)
    if _plain(memory.device_uuid) != _plain(own):
        raise UpdateInvalid("update.ipc.cuda.device_uuid", f"this worker's GPU is {own}")
    runtime, driver = _libraries()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the context that the handle is opened in
        address = ctypes.c_void_p()
        status = runtime.cudaIpcOpenMemHandle(
            ctypes.byref(address), _Handle(memory.handle), ctypes.c_uint(_LAZY_PEER_ACCESS)
        )
        if status or address.value is None:
            raise UpdateInvalid("update.ipc.cuda.handle", f"CUDA does not open it: error {status}")
        try:
            size = ctypes.c_size_t()
            if driver.cuMemGetAddressRange_v2(None, ctypes.byref(size), address):
                raise UpdateInvalid("update.ipc.cuda.handle", "CUDA does not tell its size")
            if size.value < byte_count:
                raise UpdateInvalid(
                    "update.ipc.byte_count", f"the allocation has {size.value} bytes"
                )
            yield CudaReader(torch.as_tensor(_Span(address.value, byte_count), device=device))
        finally:
            torch.cuda.synchronize(device)
            runtime.cudaIpcCloseMemHandle(address)


def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """CUDA's runtime, which torch has loaded, and its driver."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(f"libcudart.so.{major}"), ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UpdateInvalid("update.ipc.cuda", f"CUDA's libraries are missing: {error}") from error


def _plain(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-")
