"""Headers: what a rank is about to send, including the data itself if it is small; or why it can't send.

Every collective that accepts any shapes sends a header first, so that all ranks know what follows. A 4-byte all_gather
still takes one message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from lockstep.errors import PeerError, error_in_words
from lockstep.groups import Comm
from lockstep.transport.memory import DIGEST_BYTES, HeaderMemory, is_plain_memory, memmove
from lockstep.transport.pairs import transport_of

# What a header holds: a tensor's shape and dtype, or a dict's digest; an object's sizes. A digest of the calls follows.
TENSOR_ROOM_BYTES = 512
OBJECT_ROOM_BYTES = 4096
TENSOR_HEADER_BYTES = TENSOR_ROOM_BYTES + DIGEST_BYTES
OBJECT_HEADER_BYTES = OBJECT_ROOM_BYTES + DIGEST_BYTES

_CPU = torch.device("cpu")

ON_CPU, _FAILED, ON_DEVICE = 0, 1, 2
# status, which says where the tensor travels; fingerprint of what the rank expects; dtype; number of dims; then the
# dims and the tensor
_HEAD = struct.Struct("<4q")
_MOST_DIMS = (TENSOR_ROOM_BYTES - _HEAD.size) // 8
_FAILURE = struct.Struct("<2q")
# Sorted, so that the order is the same on every rank.
_DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Header:
    """The header of one rank's tensor.

    Equal headers are mostly one object, which makes them cheap to compare.

    Attributes:
        shape: shape of its tensor.
        dtype: dtype of its tensor.
        nbytes: bytes of its tensor.
        expected: fingerprint of what this rank expects to receive; 0 if it accepts anything.
        on_cpu: whether the tensor travels from CPU to CPU, else between devices, where the host need not read it.
        failure: why this rank has nothing to send; None if it has something.
        encoded: all of this as bytes.
        is_inline: whether the tensor's bytes follow these in the same message; otherwise they have their own message.
    """

    __slots__ = ("_model", "dtype", "encoded", "expected", "failure", "is_inline", "nbytes", "on_cpu", "shape")

    def __init__(
        self, dtype: torch.dtype, shape: tuple[int, ...], expected: int, on_cpu: bool = True, failure: str | None = None
    ) -> None:
        self.dtype, self.shape, self.expected, self.on_cpu, self.failure = dtype, shape, expected, on_cpu, failure
        self.nbytes = prod(shape) * dtype.itemsize
        status = ON_CPU if on_cpu else ON_DEVICE
        self.encoded = struct.pack(f"<{4 + len(shape)}q", status, expected, _CODES[dtype], len(shape), *shape)
        self.is_inline = on_cpu and len(self.encoded) + self.nbytes <= TENSOR_ROOM_BYTES
        self._model: Tensor | None = None

    def write(self, memory: HeaderMemory, index: int, data: Tensor) -> None:
        """Write this header, and the tensor if it is inline, to position `index`."""
        start = index * memory.header_bytes
        memory.data[start : start + len(self.encoded)] = self.encoded
        if self.is_inline and self.nbytes:
            memmove(memory.address + start + len(self.encoded), data.data_ptr(), self.nbytes)

    def fill(self, target: Tensor, memory: HeaderMemory, index: int) -> None:
        """Copy the inline tensor at position `index` into `target`, a contiguous CPU tensor."""
        if self.nbytes:
            source = memory.address + index * memory.header_bytes + len(self.encoded)
            memmove(target.data_ptr(), source, self.nbytes)

    def tensor(self, memory: HeaderMemory, index: int, device: torch.device) -> Tensor:
        """Return a new tensor of the announced shape, where it travels; filled if inline, else empty."""
        if not self.is_inline:
            return torch.empty(self.shape, dtype=self.dtype, device=_CPU if self.on_cpu else device)
        (data,) = self.allocate(1)
        self.fill(data, memory, index)
        return data

    def allocate(self, number: int) -> list[Tensor]:
        """Return new tensors of the CPU, not filled, for inline data."""
        if self._model is None:
            self._model = torch.empty(self.shape, dtype=self.dtype, device=_CPU)
        # `empty_like` takes half as long as `empty` (0.65 and 1.4 us, torch 2.13).
        return [torch.empty_like(self._model) for _ in range(number)]


@lru_cache(maxsize=1024)
def _header(dtype: torch.dtype, shape: tuple[int, ...], expected: int, on_cpu: bool) -> Header:
    return Header(dtype, shape, expected, on_cpu)


def header_of(data: Tensor, expected: Sequence[Tensor] | None = None) -> Header:
    """Return the header of a contiguous tensor.

    **Raises**: ValueError for more dims than a header can hold.
    """
    shape = data.shape
    if len(shape) > _MOST_DIMS:
        raise ValueError(f"`data` must have at most {_MOST_DIMS} dims, but has {len(shape)}")
    if expected is None:
        return _header(data.dtype, shape, 0, data.is_cpu)
    return _header(data.dtype, shape, _fingerprint(tuple((x.dtype, x.shape) for x in expected)), data.is_cpu)


def read_header(memory: HeaderMemory, index: int, likely: Header | None = None) -> Header:
    """Return the header at position `index`; this is `likely` itself if they are equal."""
    start = index * memory.header_bytes
    # Headers are mostly equal, so usually nothing has to be decoded.
    if likely is not None and memory.data.startswith(likely.encoded, start):
        return likely
    status, expected, code, ndim = _HEAD.unpack_from(memory.data, start)
    if status == _FAILED:
        return Header(torch.uint8, (), 0, failure=decode_failure(memory.views[index]))
    shape = struct.unpack_from(f"<{ndim}q", memory.data, start + _HEAD.size)
    return _header(_DTYPES[code], shape, expected, status == ON_CPU)


def read_headers(memory: HeaderMemory, likely: Header | None = None) -> list[Header]:
    """Return every rank's header."""
    return [read_header(memory, index, likely) for index in range(len(memory.views))]


def encode_failure(error: BaseException, size: int = TENSOR_HEADER_BYTES) -> bytes:
    """Return a header that says why this rank has nothing to send; the text is cut to fit."""
    # A file name in a message may contain what UTF-8 can't encode; that must not leave the other ranks waiting.
    text = error_in_words(error).encode(errors="backslashreplace")[: size - _FAILURE.size - DIGEST_BYTES]
    return (_FAILURE.pack(_FAILED, len(text)) + text).ljust(size, b"\0")


def decode_failure(header: bytes | memoryview) -> str | None:
    """Return the failure that a header reports, or None."""
    status, length = _FAILURE.unpack_from(header)
    if status != _FAILED:
        return None
    return bytes(header[_FAILURE.size : _FAILURE.size + length]).decode(errors="replace")


def fill_inline(memory: HeaderMemory, own: Header, outputs: Sequence[Tensor]) -> bool:
    """Fill `outputs` and return True if every rank's header equals this rank's and is inline; else do nothing.

    This is the usual case of small tensors. It is kept short, because in small calls the overhead dominates.
    """
    if not isinstance(outputs, list | tuple) or len(outputs) != len(memory.views) or not _all_inline(memory, own):
        return False
    for output in outputs:
        if not isinstance(output, Tensor) or output.shape != own.shape or output.dtype is not own.dtype:
            return False
        if not (output.is_cpu and output.is_contiguous()) or output.is_neg() or output.is_conj():
            return False
    for index, output in enumerate(outputs):
        own.fill(output, memory, index)
    return True


def fill_new(memory: HeaderMemory, own: Header, outputs: Sequence[Tensor]) -> bool:
    """Do what `fill_inline` does, for new tensors of `Header.allocate`."""
    if not _all_inline(memory, own):
        return False
    for index, output in enumerate(outputs):
        own.fill(output, memory, index)
    return True


def _all_inline(memory: HeaderMemory, own: Header) -> bool:
    if not own.is_inline:
        return False
    data, encoded = memory.data, own.encoded
    for start in range(0, len(data), memory.header_bytes):  # noqa: SIM110 - half the time of all() with a generator
        if not data.startswith(encoded, start):
            return False
    return True


@contextmanager
def report_failure(
    comm: Comm,
    send: Callable[..., object] | None = None,
    size: int = TENSOR_HEADER_BYTES,
    kind: type[BaseException] = Exception,
) -> Iterator[None]:
    """If the block raises, send the reason to the other ranks, which wait for this rank's header.

    Args:
        comm: the group.
        send: sends the header, as ``send(header, comm=comm)``; None is `all_gather_header`.
        size: size of the header in bytes.
        kind: which errors are sent; others are not.
    """
    try:
        yield
    except kind as error:
        (send or all_gather_header)(encode_failure(error, size), comm=comm)
        raise


def all_gather_header(header: bytes, comm: Comm) -> list[bytes]:
    """Return every rank's header, all of one size. **Collective**."""
    transport = transport_of(comm)
    buffers = transport.buffers(len(header))
    buffers.own.data[:] = header
    transport.all_gather_headers(buffers)
    return [bytes(view) for view in buffers.every.views]


def scatter_header(headers: Sequence[bytes] | None, header_bytes: int, src: int, comm: Comm) -> bytes:
    """Return the header that rank `src` has for this rank; only `src` passes `headers`. **Collective**."""
    transport = transport_of(comm)
    buffers = transport.buffers(header_bytes)
    if headers is not None:
        buffers.every.data[:] = b"".join(headers)
    transport.scatter_headers(buffers, src)
    return bytes(buffers.own.data)


def scatter_failure(header: bytes, src: int, comm: Comm) -> None:
    """Send one header to every rank; this rank is `src`."""
    scatter_header([header] * comm.size, len(header), src, comm)


def broadcast_header(header: bytes, src: int, comm: Comm) -> bytes:
    """Return rank `src`'s header; the others pass any header of the same size. **Collective**."""
    transport = transport_of(comm)
    buffers = transport.buffers(len(header))
    buffers.own.data[:] = header
    transport.broadcast_header(buffers, src)
    return bytes(buffers.own.data)


def require_no_failure(failures: Sequence[str | None], comm: Comm, ranks: Sequence[int] | None = None) -> None:
    """Raise if some rank failed, naming the first.

    **Raises**: PeerError. The failing rank itself should raise its own error before this call.
    """
    for index, failure in enumerate(failures):
        if failure is not None:
            rank = index if ranks is None else ranks[index]
            raise PeerError(
                f"rank {rank} of {comm.size} could not take part: {failure} (seen on {comm.this_rank}). "
                "Nothing was exchanged, and the group can be used further",
                rank=rank,
                cause=failure,
            )


def allocate_outputs(
    headers: Sequence[Header], memory: HeaderMemory, comm: Comm, outputs: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Return where each rank's tensor arrives: in its tensor of `outputs` if possible, else in a new one.

    Inline tensors have arrived already; the others are still to be received.
    """
    destinations = []
    for rank, header in enumerate(headers):
        arrives_on = _CPU if header.on_cpu else comm.comm_device
        output = None if outputs is None else outputs[rank]
        if output is None or output.device != arrives_on or not is_plain_memory(output):
            output = header.tensor(memory, rank, comm.comm_device)
        elif header.is_inline:
            header.fill(output, memory, rank)
        destinations.append(output)
    return destinations


def are_like(outputs: Sequence[Tensor], models: Sequence[Header | Tensor]) -> bool:
    """Return whether `outputs` is a list of tensors of exactly the announced shapes and dtypes."""
    is_list = isinstance(outputs, Sequence) and len(outputs) == len(models)
    return is_list and all(
        isinstance(output, Tensor) and output.shape == model.shape and output.dtype is model.dtype
        for output, model in zip(outputs, models, strict=True)
    )


def require_agreement(headers: Sequence[Header], comm: Comm) -> None:
    """Raise if some rank's output list does not fit what the headers announce, naming the first.

    **Raises**: PeerError. A rank whose own list is wrong should raise its own error before this call.
    """
    own = headers[comm.rank]
    # This rank's own expectation has already been compared with the headers.
    if all(header is own or header.expected in (0, own.expected) for header in headers):
        return
    actual = own.expected or _fingerprint(tuple((header.dtype, header.shape) for header in headers))
    refusal = "ValueError: its `tensor_list` does not fit the tensors of all ranks"
    require_no_failure([None if header.expected in (0, actual) else refusal for header in headers], comm)


@lru_cache(maxsize=1024)
def _fingerprint(entries: tuple[tuple[torch.dtype, tuple[int, ...]], ...]) -> int:
    # Python's hash of integers is the same in every process; 0 means "accepts anything".
    return hash(tuple((_CODES[dtype], *shape) for dtype, shape in entries)) or 1
