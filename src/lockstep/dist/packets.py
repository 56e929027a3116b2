"""The header in a slot: what a rank is about to send, the data themselves where they are small, or why it failed."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from lockstep.dist.groups import Group
from lockstep.dist.slots import Slots
from lockstep.errors import PeerError

SLOT_BYTES = 512

_CPU = torch.device("cpu")

_OK, _FAILED = 0, 1
# status, expectation, dtype, number of dims; the dims follow, then the tensor
_HEAD = struct.Struct("<4q")
_MOST_DIMS = (SLOT_BYTES - _HEAD.size) // 8
_FAILURE = struct.Struct("<2q")
_DTYPES = sorted(
    {x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str
)  # the same order on every rank, whatever order torch defines them in
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}

# ctypes.memmove lets go of the interpreter, and gets it back late where the backend's thread is waiting for it.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes, _memmove.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None


class Packet:
    """What one rank says of its tensor.

    Packets that say the same are one object most of the time, which makes them cheap to compare.

    Attributes:
        shape: shape of its tensor.
        dtype: dtype of its tensor.
        nbytes: bytes of its tensor.
        expectation: fingerprint of what this rank expects to receive; 0 where it takes what comes.
        failure: why this rank has nothing to send; None where it has.
        header: all that as bytes.
        comes_along: whether the tensor's bytes are in the slot, behind the header; they follow otherwise.
    """

    __slots__ = ("comes_along", "dtype", "expectation", "failure", "header", "nbytes", "shape")

    def __init__(
        self, dtype: torch.dtype, shape: tuple[int, ...], expectation: int, failure: str | None = None
    ) -> None:
        self.dtype, self.shape, self.expectation, self.failure = dtype, shape, expectation, failure
        self.nbytes = prod(shape) * dtype.itemsize
        self.header = struct.pack(f"<{4 + len(shape)}q", _OK, expectation, _CODES[dtype], len(shape), *shape)
        self.comes_along = len(self.header) + self.nbytes <= SLOT_BYTES

    def write(self, slots: Slots, index: int, data: Tensor) -> None:
        """Write the header, and the tensor where there is room for it, into a slot."""
        start = index * slots.slot_bytes
        slots.memory[start : start + len(self.header)] = self.header
        if self.comes_along and self.nbytes:
            on_cpu = data if data.is_cpu else data.cpu()
            _memmove(slots.address + start + len(self.header), on_cpu.data_ptr(), self.nbytes)

    def fill(self, target: Tensor, slots: Slots, index: int) -> None:
        """Copy the tensor that came along in a slot into a contiguous one on the CPU."""
        if self.nbytes:
            source = slots.address + index * slots.slot_bytes + len(self.header)
            _memmove(target.data_ptr(), source, self.nbytes)

    def tensor(self, slots: Slots, index: int, device: torch.device) -> Tensor:
        """Return a new tensor: filled, on the CPU, where it came along, else as announced, on `device`."""
        if not self.comes_along:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        data = torch.empty(self.shape, dtype=self.dtype)
        self.fill(data, slots, index)
        return data


@lru_cache(maxsize=1024)
def _packet(dtype: torch.dtype, shape: tuple[int, ...], expectation: int) -> Packet:
    return Packet(dtype, shape, expectation)


def packet_of(data: Tensor, expected: Sequence[Tensor] | None = None) -> Packet:
    """Return what to say of a contiguous tensor.

    **Raises**: ValueError for more dims than a slot can name.
    """
    shape = data.shape
    if len(shape) > _MOST_DIMS:
        raise ValueError(f"`data` must have at most {_MOST_DIMS} dims, but has {len(shape)}")
    if expected is None:
        return _packet(data.dtype, shape, 0)
    return _packet(data.dtype, shape, _fingerprint(tuple((x.dtype, x.shape) for x in expected)))


def read_packet(slots: Slots, index: int, likely: Packet | None = None) -> Packet:
    """Return what a slot says; `likely`, where it says that."""
    start = index * slots.slot_bytes
    # Ranks mostly say the same, so that nothing has to be read.
    if likely is not None and slots.memory.startswith(likely.header, start):
        return likely
    status, expectation, code, ndim = _HEAD.unpack_from(slots.memory, start)
    if status == _FAILED:
        return Packet(torch.uint8, (), 0, failure_in(slots.views[index]))
    shape = struct.unpack_from(f"<{ndim}q", slots.memory, start + _HEAD.size)
    return _packet(_DTYPES[code], shape, expectation)


def read_packets(slots: Slots, likely: Packet | None = None) -> list[Packet]:
    """Return what every slot says."""
    return [read_packet(slots, index, likely) for index in range(len(slots.views))]


def pack_failure(error: BaseException, size: int = SLOT_BYTES) -> bytearray:
    """Return a slot that says why this rank has nothing to send; the text is cut to what fits."""
    # A file's name in a message may hold what utf-8 can't; that must not keep the other ranks waiting.
    text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace")[: size - _FAILURE.size]
    slot = bytearray(size)
    _FAILURE.pack_into(slot, 0, _FAILED, len(text))
    slot[_FAILURE.size : _FAILURE.size + len(text)] = text
    return slot


def failure_in(slot: memoryview) -> str | None:
    """Return the failure that a slot reports, if it does."""
    status, length = _FAILURE.unpack_from(slot)
    if status != _FAILED:
        return None
    return bytes(slot[_FAILURE.size : _FAILURE.size + length]).decode(errors="replace")


def take_all(slots: Slots, own: Packet, outputs: Sequence[Tensor]) -> bool:
    """Fill `outputs` out of the slots, where all ranks say what this one says and all came along; else do nothing.

    The usual case of small tensors, kept short, as small calls are all overhead.
    """
    if not isinstance(outputs, list | tuple) or len(outputs) != len(slots.views) or not _are_all(slots, own):
        return False
    for output in outputs:
        if not isinstance(output, Tensor) or output.shape != own.shape or output.dtype is not own.dtype:
            return False
        if not (output.is_cpu and output.is_contiguous()) or output.is_neg() or output.is_conj():
            return False
    for index, output in enumerate(outputs):
        own.fill(output, slots, index)
    return True


def take_new(slots: Slots, own: Packet) -> list[Tensor] | None:
    """Return new tensors out of the slots, where all ranks say what this one says and all came along."""
    if not _are_all(slots, own):
        return None
    return [own.tensor(slots, index, _CPU) for index in range(len(slots.views))]


def _are_all(slots: Slots, own: Packet) -> bool:
    if not own.comes_along:
        return False
    starts = range(0, len(slots.memory), slots.slot_bytes)
    return all(slots.memory.startswith(own.header, start) for start in starts)


def require_no_failure(failures: Sequence[str | None], here: Group, ranks: Sequence[int] | None = None) -> None:
    """Raise if some rank failed, naming the first.

    **Raises**: PeerError. The failing rank itself should raise its own error before it comes here.
    """
    for index, failure in enumerate(failures):
        if failure is not None:
            rank = index if ranks is None else ranks[index]
            raise PeerError(
                f"rank {rank} of {here.size} could not take part: {failure} (seen on {here.here}). "
                "Nothing was exchanged, and the group can be used further",
                rank=rank,
                cause=failure,
            )


def require_expected(packets: Sequence[Packet], outputs: Sequence[Tensor], here: Group) -> None:
    """Raise if this rank's output list does not fit what the packets announce.

    **Raises**: ValueError; `require_agreement` tells the others.
    """
    for rank, (packet, output) in enumerate(zip(packets, outputs, strict=True)):
        if packet.shape != output.shape or packet.dtype != output.dtype:
            raise ValueError(
                f"`tensor_list[{rank}]` must be like rank {rank}'s tensor, {tuple(packet.shape)} {packet.dtype}, but "
                f"is {tuple(output.shape)} {output.dtype} ({here.here}). Or leave the list out: all_gather(data)"
            )


def require_agreement(packets: Sequence[Packet], here: Group) -> None:
    """Raise if some rank's output list does not fit what the packets announce, naming the first.

    **Raises**: PeerError. A rank whose own list is wrong should raise its own error before it comes here.
    """
    own = packets[here.rank]
    # What this rank expects was compared with the packets already.
    if all(packet is own or packet.expectation in (0, own.expectation) for packet in packets):
        return
    actual = own.expectation or _fingerprint(tuple((packet.dtype, packet.shape) for packet in packets))
    require_no_failure(
        [
            "ValueError: its `tensor_list` does not fit the tensors of all ranks"
            if packet.expectation not in (0, actual)
            else None
            for packet in packets
        ],
        here,
    )


@lru_cache(maxsize=1024)
def _fingerprint(entries: tuple[tuple[torch.dtype, tuple[int, ...]], ...]) -> int:
    # Python's hash of integers is the same in every process; 0 means "takes what comes".
    return hash(tuple((_CODES[dtype], *shape) for dtype, shape in entries)) or 1
