"""The kernels' C ABI in ctypes: structures, signatures, and the owner of an open context.

Knows pointers and sizes only, no torch: `ops` is the face with tensors. The structures mirror
src/abi.h; the ABI version is compared when the library is loaded.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from enum import Enum
from pathlib import Path
from typing import ClassVar

from worker_service.kernels.cpu.compiler import KernelsUnavailable

_ABI_VERSION = 3
# Sums of so many products, int8 by int16, keep within int32.
MAX_GROUP_SIZE = 512


class InstructionSet(Enum):
    """What the kernels are compiled for; the value is the ABI's number."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_VNNI = 3


class Packed(Structure):
    """TwkPacked."""

    _fields_: ClassVar = [
        ("data", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("kind", c_int32),
        ("group", c_int32),
    ]


class Cache(Structure):
    """TwkCache."""

    _fields_: ClassVar = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("kind", c_int32),
        ("block_size", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
    ]


class Batch(Structure):
    """TwkBatch."""

    _fields_: ClassVar = [
        ("tokens", c_int64),
        ("sequences", c_int64),
        ("query_starts", c_void_p),
        ("context_lengths", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
    ]


class Layer(Structure):
    """TwkLayer."""

    _fields_: ClassVar = [
        ("qkv", Packed),
        ("output", Packed),
        ("gate_up", Packed),
        ("down", Packed),
        ("qkv_bias", c_void_p),
        ("output_bias", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int64),
    ]


class Model(Structure):
    """TwkModel."""

    _fields_: ClassVar = [
        ("layers", POINTER(Layer)),
        ("layer_count", c_int64),
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("q_heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rotary_dim", c_int32),
        ("block_size", c_int32),
        ("kv_kind", c_int32),
        ("epsilon", c_float),
        ("scale", c_float),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("final_norm", c_void_p),
        ("head", Packed),
    ]


_P, _I, _F = c_void_p, c_int64, c_float
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "twk_abi_version": (c_int, ()),
    "twk_supports": (c_int, (c_int,)),
    "twk_open": (c_void_p, (c_int, c_int)),
    "twk_close": (None, (_P,)),
    "twk_head_dim_multiple": (c_int64, (_P,)),
    "twk_scratch_bytes": (c_int64, (_P,)),
    "twk_advise_huge_pages": (None, (_P, _I)),
    "twk_packed_bytes": (c_int64, (_P, POINTER(Packed))),
    "twk_pack": (c_int, (_P, POINTER(Packed), _P, _I)),
    "twk_linear": (c_int, (_P, POINTER(Packed), _P, _P, _I, _I, _P, _I)),
    "twk_gather": (c_int, (_P, POINTER(Packed), _P, _I, _P)),
    "twk_rms_norm": (c_int, (_P, _P, _P, _P, _F, _I, _I, _P)),
    "twk_silu_multiply": (c_int, (_P, _P, _I, _I, _P)),
    "twk_row_statistics": (c_int, (_P, _P, _I, _I, _P, _P)),
    "twk_rope_write": (
        c_int,
        (_P, _P, _I, _I, _I, _P, _P, _P, _P, _F, POINTER(Cache), POINTER(Batch)),
    ),
    "twk_attention": (
        c_int,
        (_P, _P, _I, _P, _I, _P, _I, _I, _F, POINTER(Cache), POINTER(Batch)),
    ),
    "twk_decode": (c_int, (_P, POINTER(Model), POINTER(Batch), _P, _P, _I, _P)),
}


class Context:
    """An open context: its threads, scratch memory and instruction set. One call at a time.

    Calls release the interpreter lock. Raises MemoryError where scratch memory cannot be had.
    """

    def __init__(self, path: Path, threads: int, instruction_set: InstructionSet | None) -> None:
        """Opens the library; by default with the best instruction set of this CPU.

        Raises KernelsUnavailable where the library does not load or does not fit.
        """
        self._handle: int | None = None
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelsUnavailable(f"the kernel library does not load: {error}") from error
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, name, None)
            if function is None:
                raise KernelsUnavailable(f"the kernel library has no {name}")
            function.restype, function.argtypes = result, arguments
        version = self._library.twk_abi_version()
        if version != _ABI_VERSION:
            raise KernelsUnavailable(f"the kernel library has ABI {version}, not {_ABI_VERSION}")
        chosen = instruction_set or max(self.supported(), key=lambda each: each.value)
        handle = self._library.twk_open(threads, chosen.value)
        if handle is None:
            raise KernelsUnavailable(f"{chosen.name} with {threads} threads cannot be opened")
        self._handle = handle
        self.instruction_set = chosen
        self.threads = threads

    def supported(self) -> list[InstructionSet]:
        """The instruction sets that this CPU and this library have."""
        return [each for each in InstructionSet if self._library.twk_supports(each.value)]

    def close(self) -> None:
        """Ends the threads and frees the scratch memory. A second call does nothing."""
        if self._handle is not None:
            self._library.twk_close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()

    def call(self, name: str, *arguments: object) -> None:
        """Calls twk_<name> with this context. Raises MemoryError if it refuses."""
        assert self._handle is not None, "the context is closed"
        if getattr(self._library, f"twk_{name}")(self._handle, *arguments) != 0:
            raise MemoryError(f"no scratch memory for {name}")

    @property
    def head_dim_multiple(self) -> int:
        """Head dimensions must be a multiple of this."""
        return int(self._library.twk_head_dim_multiple(self._handle))

    @property
    def scratch_bytes(self) -> int:
        """What the context's buffers hold now."""
        return int(self._library.twk_scratch_bytes(self._handle))

    def packed_bytes(self, packed: Packed) -> int:
        """Bytes that pack writes for such a matrix."""
        return int(self._library.twk_packed_bytes(self._handle, ctypes.byref(packed)))

    def advise_huge_pages(self, address: int, size: int) -> None:
        """Asks the system to back the range by huge pages when it is first written."""
        self._library.twk_advise_huge_pages(address, size)
