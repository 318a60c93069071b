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

_ABI_VERSION = 5
# Sums of this many products, int8 by int16, stay within int32.
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


class AdapterBatch(Structure):
    """TwkAdapterBatch."""

    _fields_: ClassVar = [
        ("segments", c_int64),
        ("starts", c_void_p),
        ("slots", c_void_p),
        ("tokens", c_void_p),
        ("rank_stride", c_int64),
    ]


class AdapterTarget(Structure):
    """TwkAdapterTarget."""

    _fields_: ClassVar = [("first", c_int64), ("count", c_int64)]


class AdapterPart(Structure):
    """TwkAdapterPart."""

    _fields_: ClassVar = [
        ("a", c_void_p),
        ("b", c_void_p),
        ("rank", c_int32),
        ("kind", c_int32),
        ("scale", c_float),
    ]


class Adapters(Structure):
    """TwkAdapters."""

    _fields_: ClassVar = [
        ("batch", AdapterBatch),
        ("targets", POINTER(AdapterTarget)),
        ("first_targets", c_int64 * 5),
        ("parts", POINTER(AdapterPart)),
        ("part_stride", c_int64),
    ]


class Call(Structure):
    """The arguments of one kernel, named as the library's function is after twk_.

    A structure keeps what its `pointer` fields point to alive, but not what its addresses do.
    """

    kernel: ClassVar[str]


class PackCall(Call):
    """TwkPackCall."""

    kernel = "pack"
    _fields_: ClassVar = [
        ("packed", POINTER(Packed)),
        ("weight", c_void_p),
        ("weight_stride", c_int64),
    ]


class LinearCall(Call):
    """TwkLinearCall."""

    kernel = "linear"
    _fields_: ClassVar = [
        ("packed", POINTER(Packed)),
        ("bias", c_void_p),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("rows", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
    ]


class GatherCall(Call):
    """TwkGatherCall."""

    kernel = "gather"
    _fields_: ClassVar = [
        ("packed", POINTER(Packed)),
        ("ids", c_void_p),
        ("count", c_int64),
        ("out", c_void_p),
    ]


class RmsNormCall(Call):
    """TwkRmsNormCall."""

    kernel = "rms_norm"
    _fields_: ClassVar = [
        ("x", c_void_p),
        ("added", c_void_p),
        ("weight", c_void_p),
        ("epsilon", c_float),
        ("rows", c_int64),
        ("width", c_int64),
        ("out", c_void_p),
    ]


class SiluMultiplyCall(Call):
    """TwkSiluMultiplyCall."""

    kernel = "silu_multiply"
    _fields_: ClassVar = [
        ("gate_up", c_void_p),
        ("rows", c_int64),
        ("width", c_int64),
        ("out", c_void_p),
    ]


class RopeWriteCall(Call):
    """TwkRopeWriteCall."""

    kernel = "rope_write"
    _fields_: ClassVar = [
        ("qkv", c_void_p),
        ("stride", c_int64),
        ("q_heads", c_int64),
        ("rotary_dim", c_int64),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("epsilon", c_float),
        ("cache", POINTER(Cache)),
        ("batch", POINTER(Batch)),
    ]


class AttentionCall(Call):
    """TwkAttentionCall."""

    kernel = "attention"
    _fields_: ClassVar = [
        ("queries", c_void_p),
        ("query_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("q_heads", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("cache", POINTER(Cache)),
        ("batch", POINTER(Batch)),
    ]


class AdaptCall(Call):
    """TwkAdaptCall."""

    kernel = "adapt"
    _fields_: ClassVar = [
        ("own", POINTER(LinearCall)),
        ("batch", POINTER(AdapterBatch)),
        ("targets", POINTER(AdapterTarget)),
        ("target_count", c_int64),
        ("parts", POINTER(AdapterPart)),
        ("part_stride", c_int64),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("k", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
    ]


class DecodeCall(Call):
    """TwkDecodeCall."""

    kernel = "decode"
    _fields_: ClassVar = [
        ("model", POINTER(Model)),
        ("batch", POINTER(Batch)),
        ("hidden", c_void_p),
        ("logit_indices", c_void_p),
        ("logit_count", c_int64),
        ("logits", c_void_p),
        ("adapters", POINTER(Adapters)),
    ]


_CALLS: tuple[type[Call], ...] = (
    PackCall,
    LinearCall,
    GatherCall,
    RmsNormCall,
    SiluMultiplyCall,
    RopeWriteCall,
    AttentionCall,
    AdaptCall,
    DecodeCall,
)
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "twk_abi_version": (c_int, ()),
    "twk_open": (c_void_p, (c_int, c_int)),
    "twk_close": (None, (c_void_p,)),
    "twk_head_dim_multiple": (c_int64, (c_int,)),
    "twk_scratch_bytes": (c_int64, (c_void_p,)),
    "twk_advise_huge_pages": (None, (c_void_p, c_int64)),
    "twk_packed_bytes": (c_int64, (c_void_p, POINTER(Packed))),
    **{f"twk_{call.kernel}": (c_int, (c_void_p, POINTER(call))) for call in _CALLS},
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
        #: What head dimensions must be a multiple of, for each set of this library and this CPU.
        self.head_dim_multiples = self._head_dim_multiples()
        chosen = instruction_set or max(self.head_dim_multiples, key=lambda each: each.value)
        handle = self._library.twk_open(threads, chosen.value)
        if handle is None:
            raise KernelsUnavailable(f"{chosen.name} with {threads} threads cannot be opened")
        self._handle = handle
        self.instruction_set = chosen
        self.threads = threads
        self.build = path.parent.name
        """Digest of the sources and, unless the library came prebuilt, of the compiler."""

    def close(self) -> None:
        """Ends the threads and frees the scratch memory. A second call does nothing."""
        if self._handle is not None:
            self._library.twk_close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()

    def run(self, call: Call) -> None:
        """Runs the call's kernel on its arguments. Raises MemoryError if it refuses."""
        assert self._handle is not None, "the context is closed"
        kernel = getattr(self._library, f"twk_{call.kernel}")
        if kernel(self._handle, ctypes.byref(call)) != 0:
            raise MemoryError(f"no scratch memory for {call.kernel}")

    @property
    def head_dim_multiple(self) -> int:
        """What head dimensions must be a multiple of in this context."""
        return self.head_dim_multiples[self.instruction_set]

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

    def _head_dim_multiples(self) -> dict[InstructionSet, int]:
        multiples = {
            each: int(self._library.twk_head_dim_multiple(each.value)) for each in InstructionSet
        }
        return {each: multiple for each, multiple in multiples.items() if multiple}
