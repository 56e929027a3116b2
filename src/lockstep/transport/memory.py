"""Memory for messages, and tensors as the bytes that are sent."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.device import copy_into
from lockstep.groups import Comm

# ctypes.memmove would release the GIL, and get it back late when the backend's thread is waiting for it.
memmove = ctypes.PyDLL(None).memmove
memmove.argtypes, memmove.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None

_WORD = struct.Struct("<q")
DIGEST_BYTES = _WORD.size  # at the end of every header

# Dtypes that every backend moves by name; all others travel as bytes.
_NATIVE_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)  # fmt: skip


class HeaderMemory:
    """Headers of one size, one after the other in one piece of memory.

    Attributes:
        data: their bytes.
        address: start address of the memory.
        header_bytes: size of each header.
        views: one view for each header.
    """

    __slots__ = ("_ends", "address", "data", "header_bytes", "views")

    def __init__(self, number: int, header_bytes: int) -> None:
        self.data = bytearray(number * header_bytes)
        self.address = ctypes.addressof((ctypes.c_char * len(self.data)).from_buffer(self.data))
        self.header_bytes = header_bytes
        self.views = [memoryview(self.data)[k * header_bytes : (k + 1) * header_bytes] for k in range(number)]
        self._ends = range(header_bytes, number * header_bytes + 1, header_bytes)

    def stamp(self, digest: int) -> None:
        """Write the digest of this rank's calls to the end of each header."""
        for end in self._ends:
            _WORD.pack_into(self.data, end - DIGEST_BYTES, digest)

    def agrees(self, digest: int) -> bool:
        """Return whether every header ends with this digest."""
        word, data = _WORD.pack(digest), self.data
        for end in self._ends:  # noqa: SIM110 - half the time of all() with a generator
            if not data.startswith(word, end - DIGEST_BYTES):
                return False
        return True


class HeaderBuffers:
    """Memory for the headers of one group and size, reused by every call: this rank's own header, and every rank's.

    Reuse does not only save allocations: a tensor that Python has released is freed by the backend's thread, which must
    then wait for the GIL. That costs a small collective a third of its time (gloo, torch 2.13).
    """

    def __init__(self, header_bytes: int, comm: Comm) -> None:
        self.own, self.every = HeaderMemory(1, header_bytes), HeaderMemory(comm.size, header_bytes)
        on_cpu = [torch.frombuffer(x.data, dtype=torch.uint8) for x in (self.own, self.every)]
        self.own_staged, self.every_staged = staged = [x.to(comm.bytes_device) for x in on_cpu]
        self._copies: dict[HeaderMemory, tuple[Tensor, Tensor]] = {}
        if comm.bytes_device.type != "cpu":
            self._copies = dict(zip((self.own, self.every), zip(on_cpu, staged, strict=True), strict=True))
        self.parts = list(torch.split(self.every_staged, header_bytes))
        self.of_others = {rank: part for rank, part in enumerate(self.parts) if rank != comm.rank}
        self.own_to_others = dict.fromkeys(self.of_others, self.own_staged)
        self.in_flight: list[object] = []
        self._own_slice = slice(comm.rank * header_bytes, (comm.rank + 1) * header_bytes)

    def copy_own(self) -> None:
        """Copy this rank's header to its position among every rank's."""
        self.every.data[self._own_slice] = self.own.data

    def stage(self, memory: HeaderMemory | None) -> None:
        """Copy `own` or `every`, which is to be sent, to the device that carries them."""
        if memory in self._copies:
            on_cpu, staged = self._copies[memory]
            staged.copy_(on_cpu)

    def fetch(self, memory: HeaderMemory | None) -> None:
        """Copy what arrived on that device into `own` or `every`; the host waits for it."""
        if memory in self._copies:
            on_cpu, staged = self._copies[memory]
            on_cpu.copy_(staged)


def copy_all(data: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Copy each result into its tensor, as `copy_into` does, unless they are the same tensor."""
    for one, result in zip(data, results, strict=True):
        if result is not one:
            copy_into(one, result)


def is_plain_memory(data: Tensor) -> bool:
    """Return whether a tensor's memory holds exactly its values, in order, so that bytes may be written there."""
    return data.is_contiguous() and not data.is_neg() and not data.is_conj()


def as_bytes(data: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as a flat uint8 view of the same memory."""
    # This works for any dtype, also for those that a backend does not know. as_strided is needed because view(dtype)
    # fails for a 0-dim tensor, and for one element of a strided view, which counts as contiguous whatever its stride.
    return data.detach().as_strided((data.numel(),), (1,)).view(torch.uint8)


def as_native(wire: Tensor) -> Tensor:
    """Return a contiguous tensor unchanged, or as bytes if not every backend supports its dtype."""
    return wire if wire.dtype in _NATIVE_DTYPES else as_bytes(wire)


def bytes_of(data: Tensor) -> ctypes.Array[ctypes.c_char]:
    """Return a writable buffer over a contiguous CPU tensor's memory, which it keeps alive."""
    buffer = (ctypes.c_char * (data.numel() * data.element_size())).from_address(data.data_ptr())
    buffer._owner = data  # type: ignore[attr-defined]  # the buffer borrows the tensor's memory
    return buffer
