"""Pickling for all of lockstep.dist: an object becomes a short byte string, with large tensors and arrays as segments.

Protocol 5 passes the memory of large arrays out of band (PEP 574). Large tensors travel the same way; torch would copy
their storage. The sender copies no segment, and received objects use the memory that their segments arrived in.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from io import BufferedReader
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from lockstep.errors import message_of
from lockstep.groups import Comm
from lockstep.transport.memory import as_bytes, bytes_of

# Below this size, a separate message costs more than a copy.
_SEGMENT_MIN_BYTES = 64 * 1024


class Pickled(NamedTuple):
    """A pickled object and its segments.

    Attributes:
        body: the pickle.
        segments: flat uint8 tensors that the pickle refers to by position; views of the object's own memory.
        num_tensors: how many segments, from the front, are tensors; the others are buffers of arrays.
        in_graph: whether some tensor other than a parameter requires grad.
    """

    body: bytes | memoryview
    segments: list[Tensor]
    num_tensors: int
    in_graph: bool = False


def dump(obj: object, comm: Comm) -> Pickled:
    """Pickle an object.

    **Raises**: TypeError if it can't be pickled, chained to the cause, naming this rank of `comm`.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(obj)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an object may pickle itself by its own code, which may raise anything
        raise TypeError(
            f"the object must be picklable, but {type(obj).__name__} is not: {message_of(error)} ({comm.this_rank})"
        ) from error
    return Pickled(stream.getvalue(), pickler.tensors + pickler.buffers, len(pickler.tensors), pickler.in_graph)


def load(pickled: Pickled) -> Any:
    """Unpickle an object, using the memory of its segments."""
    tensors = pickled.segments[: pickled.num_tensors]
    buffers = [bytes_of(x.cpu()) for x in pickled.segments[pickled.num_tensors :]]
    return _Unpickler(io.BytesIO(pickled.body), tensors, buffers).load()


def dump_to(file: BinaryIO, obj: object, comm: Comm) -> None:
    """Append an object to a file; its large tensors and arrays are written from their own memory. Raises as `dump`."""
    pickled = dump(obj, comm)
    segments = [pickle.PickleBuffer(bytes_of(segment.cpu())) for segment in pickled.segments]
    pickle.dump((pickled.body, segments, pickled.num_tensors), file, protocol=5)


def load_each(file: BufferedReader) -> Iterator[Any]:
    """Yield the objects that `dump_to` has written, in order."""
    while file.peek():
        body, segments, num_tensors = pickle.load(file)
        yield load(Pickled(body, [torch.frombuffer(x, dtype=torch.uint8) for x in segments], num_tensors))


# Neither class may refer to itself: both remember every object that went through them, and a cycle would keep these
# alive until the next garbage collection.


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        self.tensors: list[Tensor] = []
        self.buffers: list[Tensor] = []
        self.in_graph = False
        super().__init__(stream, protocol=5, buffer_callback=partial(_keep_in_band, self.buffers))

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.layout is torch.strided and not (obj.is_quantized or obj.is_meta):
            return *self._reduce_tensor(obj), *_attributes_of(obj)
        if type(obj) is torch.nn.Parameter:
            return torch.nn.Parameter, (obj.data, obj.requires_grad), *_attributes_of(obj)
        return NotImplemented

    def _reduce_tensor(self, data: Tensor) -> tuple[object, tuple[object, ...]]:
        flat = data.detach().resolve_conj().resolve_neg().contiguous()
        accelerator = "" if flat.device.type == "cpu" else flat.device.type
        head = (flat.dtype, tuple(flat.shape), data.requires_grad, accelerator)
        self.in_graph |= data.requires_grad
        if flat.nbytes >= _SEGMENT_MIN_BYTES:
            self.tensors.append(as_bytes(flat))
            return _rebuild_from_segment, (len(self.tensors) - 1, *head)
        on_cpu = flat.cpu()
        payload = bytearray(ctypes.string_at(on_cpu.data_ptr(), on_cpu.nbytes) if on_cpu.nbytes else b"")
        return _rebuild_tensor, (payload, *head)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, tensors: Sequence[Tensor], buffers: Sequence[object]) -> None:
        super().__init__(stream, buffers=buffers)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if name == _rebuild_from_segment.__name__ and module == __name__:
            tensors = self._tensors  # the function must not refer to this object
            return lambda index, *head: _rebuild_from_segment(tensors[index], *head)
        return super().find_class(module, name)


def _keep_in_band(buffers: list[Tensor], buffer: pickle.PickleBuffer) -> bool:
    raw = buffer.raw()
    if raw.nbytes < _SEGMENT_MIN_BYTES:
        return True
    buffers.append(_borrowed(raw))
    return False


def _rebuild_tensor(
    payload: bytearray, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, accelerator: str
) -> Tensor:
    flat = torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8, device="cpu")
    return _rebuild_from_segment(flat, dtype, shape, requires_grad, accelerator)


def _rebuild_from_segment(
    flat: Tensor, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, accelerator: str
) -> Tensor:
    data = flat.view(dtype).reshape(shape)
    # The receiver's own device of that type, whatever the sender's index was: one context per process.
    if accelerator != data.device.type:
        data = data.to(accelerator or "cpu")
    return data.requires_grad_(requires_grad)


def _attributes_of(data: Tensor) -> tuple[object, ...]:
    """Return the third to sixth part of a reduction: the attributes that Python code has set on the tensor, if any."""
    return (vars(data), None, None, _set_attributes) if vars(data) else ()


def _set_attributes(data: Tensor, attributes: dict[str, object]) -> None:
    vars(data).update(attributes)


def _borrowed(raw: memoryview) -> Tensor:
    """Return a flat uint8 tensor that shares a buffer's memory and keeps it alive."""
    if not raw.readonly:
        return torch.frombuffer(raw, dtype=torch.uint8)
    with warnings.catch_warnings():
        # torch warns about read-only memory; this tensor is only read.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(raw, dtype=torch.uint8)
