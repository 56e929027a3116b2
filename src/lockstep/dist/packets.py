"""The header in a slot: what a rank is about to send, the data themselves where they are small, or why it failed."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.dist.groups import Group
from lockstep.errors import PeerError

SLOT_BYTES = 512

_OK, _FAILED = 0, 1
# status, expectation, dtype, number of dims, bytes; the dims follow, then the payload
_HEAD = struct.Struct("<5q")
_FAILURE = struct.Struct("<2q")
_DTYPES = sorted(
    {x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str
)  # the same order on every rank, whatever order torch defines them in
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Packet(NamedTuple):
    """What one rank's slot says.

    Attributes:
        shape: shape of its tensor.
        dtype: dtype of its tensor.
        inline: the tensor's bytes, where they came along; None where they follow.
        expectation: fingerprint of what this rank expects to receive; 0 where it takes what comes.
        failure: why this rank has nothing to send; None where it has.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    inline: memoryview | None
    expectation: int
    failure: str | None = None

    def tensor(self, device: torch.device) -> Tensor:
        """Return a new tensor as announced, on `device` where it follows, else filled, on the CPU."""
        if self.inline is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        data = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.fill(data)
        return data

    def fill(self, target: Tensor) -> None:
        """Copy what came along into a contiguous tensor on the CPU."""
        if self.inline:
            ctypes.memmove(target.data_ptr(), bytes(self.inline), len(self.inline))


def pack_tensor(data: Tensor, expected: Sequence[Tensor] | None = None) -> bytearray:
    """Return a slot that announces a contiguous tensor.

    **Raises**: ValueError for more dims than a slot can name.
    """
    shape, nbytes = data.shape, data.nbytes
    ndim = len(shape)
    start = _HEAD.size + 8 * ndim
    if start > SLOT_BYTES:
        raise ValueError(f"`data` must have at most {(SLOT_BYTES - _HEAD.size) // 8} dims, but has {ndim}")
    slot = bytearray(SLOT_BYTES)
    expectation = 0 if expected is None else _fingerprint([(x.dtype, x.shape) for x in expected])
    struct.pack_into(f"<{5 + ndim}q", slot, 0, _OK, expectation, _CODES[data.dtype], ndim, nbytes, *shape)
    if 0 < nbytes <= SLOT_BYTES - start:
        on_cpu = data if data.is_cpu else data.cpu()
        slot[start : start + nbytes] = ctypes.string_at(on_cpu.data_ptr(), nbytes)
    return slot


def fits(data: Tensor) -> bool:
    """Return whether a tensor travels inside its slot."""
    return _HEAD.size + 8 * data.dim() + data.nbytes <= SLOT_BYTES


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


def read_packet(slot: memoryview) -> Packet:
    """Return what a slot says."""
    status, expectation, code, ndim, nbytes = _HEAD.unpack_from(slot)
    if status == _FAILED:
        return Packet((), torch.uint8, None, 0, failure_in(slot))
    start = _HEAD.size + 8 * ndim
    shape = struct.unpack_from(f"<{ndim}q", slot, _HEAD.size)
    inline = slot[start : start + nbytes] if start + nbytes <= len(slot) else None
    return Packet(shape, _DTYPES[code], inline, expectation)


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
                f"`tensor_list[{rank}]` must be like rank {rank}'s tensor, {packet.shape} {packet.dtype}, but is "
                f"{tuple(output.shape)} {output.dtype} ({here.here}). Or leave the list out: all_gather(data)"
            )


def require_agreement(packets: Sequence[Packet], here: Group) -> None:
    """Raise if some rank's output list does not fit what the packets announce, naming the first.

    **Raises**: PeerError. A rank whose own list is wrong should raise its own error before it comes here.
    """
    expected = {packet.expectation for packet in packets} - {0}
    if not expected:
        return
    # What this rank expects was compared with the packets already.
    actual = packets[here.rank].expectation or _fingerprint([(packet.dtype, packet.shape) for packet in packets])
    if expected == {actual}:
        return
    require_no_failure(
        [
            "ValueError: its `tensor_list` does not fit the tensors of all ranks"
            if packet.expectation not in (0, actual)
            else None
            for packet in packets
        ],
        here,
    )


def _fingerprint(entries: list[tuple[torch.dtype, tuple[int, ...]]]) -> int:
    # Python's hash of integers is the same in every process; 0 means "takes what comes".
    return hash(tuple((_CODES[dtype], *shape) for dtype, shape in entries)) or 1
