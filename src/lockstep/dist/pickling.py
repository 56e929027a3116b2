"""Objects as bytes, and how these travel between ranks: pickle's protocol 5, large tensors and arrays out of band.

An object becomes *parts*, flat tensors of bytes on the CPU: first the pickle, then its *segments*, the memory of each
large tensor and array, which protocol 5 passes as buffers (PEP 574). The sender copies no contiguous segment of the
CPU, and what arrives uses the memory in which the segments arrived. Tensors that share memory arrive apart. Between
ranks, parts travel on the control plane.

A rank whose object can't be pickled says so in the exchange that comes first, so all ranks raise together, and the
group stays usable.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lockstep.errors import DistError, error_in_words, message_of
from lockstep.groups import Comm
from lockstep.transport.control import broadcast_from_all, exchange, report_failure, transfer_between_hosts
from lockstep.transport.moving import bytes_of

Parts: TypeAlias = list[Tensor]

# Below this size, a separate message costs more than a copy.
_SEGMENT_MIN_BYTES = 64 * 1024
_TAG = 0x10C4  # of objects for one rank alone; users' own messages have others


def dump(obj: object, comm: Comm, on_tensors: Callable[[list[Tensor]], None] | None = None) -> Parts:
    """Return an object as parts.

    Args:
        obj: the object.
        comm: the group, for errors.
        on_tensors: called with the tensors in the object, of parameters with their data.

    **Raises**: TypeError if it can't be pickled, chained to the cause, naming this rank of `comm`.
    """
    stream, segments = io.BytesIO(), list[Tensor]()
    pickler = _Pickler(stream, protocol=5, buffer_callback=partial(_keep_in_band, segments))
    pickler.tensors = []
    try:
        pickler.dump(obj)
    except (KeyboardInterrupt, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # the last are those of what is copied to the host
    except BaseException as error:  # an object may pickle itself by its own code, which may also exit: others must hear
        raise TypeError(
            f"the object must be picklable, but {type(obj).__name__} is not: {message_of(error)} ({comm.this_rank})"
        ) from error
    if on_tensors is not None:
        on_tensors(pickler.tensors)
    return [_as_bytes_tensor(stream.getbuffer()), *segments]


def load(parts: Sequence[Tensor | memoryview]) -> Any:
    """Return the object that `dump` has made into parts, built upon the memory of its segments."""
    pickled, *segments = [part if isinstance(part, memoryview) else bytes_of(part) for part in parts]
    return pickle.loads(pickled, buffers=segments)


def all_gather_pickled(obj: object, comm: Comm, on_tensors: Callable[[list[Tensor]], None] | None = None) -> list[Any]:
    """Return every rank's object, in rank order, this rank's own as a copy; `on_tensors`: as for `dump`.

    **Collective**: every rank.
    """
    with report_failure(comm):
        own = dump(obj, comm, on_tensors)
    # The other ranks of a fake group send nothing, and have the same.
    every = [own] * comm.size if comm.is_alone else _exchange_parts(own, comm)
    return [
        load_from(rank, [part.clone() for part in parts] if parts is own else parts, comm)
        for rank, parts in enumerate(every)
    ]


def broadcast_pickled(
    obj: object, src: int, comm: Comm, on_tensors: Callable[[list[Tensor]], None] | None = None
) -> Any:
    """Return rank `src`'s object, there the object itself; `on_tensors`: as for `dump`. **Collective**: every rank."""
    if comm.rank != src and not comm.is_alone:
        return load_from(src, _exchange_parts(None, comm)[src], comm)
    with report_failure(comm):
        parts = dump(obj, comm, on_tensors)
    _exchange_parts(parts, comm)
    return obj


def gather_pickled(obj: object, dst: int, comm: Comm, *, copy_own: bool) -> Iterator[Any] | None:
    """Give rank `dst` every rank's object, in rank order; None elsewhere.

    An exchange comes first, so that all raise if one object can't be pickled. The objects go only to `dst`, where each
    is loaded when the iterator reaches it.

    Args:
        obj: this rank's object.
        dst: rank within the group.
        comm: the group.
        copy_own: whether `dst` gets a copy of its own object; if not, it gets the object itself, which is not pickled.

    **Collective**: every rank.
    """
    if comm.is_alone and comm.size > 1:  # the other ranks of a fake group send nothing, and have the same
        objects = all_gather_pickled(obj, comm)
        if not copy_own:
            objects[dst] = obj
        return iter(objects) if comm.rank == dst else None
    is_kept = comm.rank == dst and not copy_own
    with report_failure(comm):
        own = dump(None if is_kept else obj, comm)
    sizes = exchange(comm, _sizes_of(own))
    if comm.rank != dst:
        transfer_between_hosts([], [(part, dst) for part in own], comm, _TAG).wait()
        return None
    every = {rank: _places_for(pickle.loads(one)) for rank, one in enumerate(sizes) if rank != dst}
    transfer_between_hosts([(part, rank) for rank, parts in every.items() for part in parts], [], comm, _TAG).wait()
    every[dst] = [part.clone() for part in own]
    return (obj if is_kept and rank == dst else load_from(rank, every.pop(rank), comm) for rank in range(comm.size))


def scatter_pickled(objects: Sequence[object], src: int, comm: Comm) -> Any:
    """Return on rank i the i-th of `src`'s objects, on `src` the object itself. **Collective**: every rank."""
    if comm.rank != src:
        if comm.is_alone:
            raise DistError(
                f"objects must be scattered by {comm.this_rank} itself, but `src` is {src}, which is not there: the "
                "group is a fake one. Scatter them from this rank, or broadcast the list"
            )
        parts = _places_for(pickle.loads(exchange(comm)[src])[comm.rank])
        transfer_between_hosts([(part, src) for part in parts], [], comm, _TAG).wait()
        return load_from(src, parts, comm)
    with report_failure(comm):
        every = [dump(None if rank == src else obj, comm) for rank, obj in enumerate(objects)]
    exchange(comm, pickle.dumps([[part.numel() for part in parts] for parts in every]))
    sent = [(part, rank) for rank, parts in enumerate(every) if rank != src for part in parts]
    transfer_between_hosts([], sent, comm, _TAG).wait()
    return objects[src]


def load_from(rank: int, parts: Sequence[Tensor | memoryview], comm: Comm) -> Any:
    """Return the object that a rank has sent.

    **Raises**: DistError if it can't be loaded. All ranks have received everything by now, so only this one is
    affected.
    """
    try:
        return load(parts)
    except Exception as error:  # an object may be rebuilt by its own code, which may raise anything
        is_unknown = isinstance(error, AttributeError | ImportError)
        remedy = ". Define its class in a module that every rank can import" if is_unknown else ""
        raise DistError(
            f"the object of rank {rank} must be loadable here, but is not: {error_in_words(error)} "
            f"({comm.this_rank}){remedy}"
        ) from error


def _exchange_parts(own: Parts | None, comm: Comm) -> list[list[Any]]:
    """Return the parts of every rank, none for a rank that has none.

    The pickle is in the exchange that tells the sizes, so that a small object takes no further message. It stays a
    piece of what has arrived: a tensor of it would take ten times as long as to load a small one.
    """
    heads = exchange(comm, b"" if own is None else _sizes_of(own) + bytes(bytes_of(own[0])))
    every: list[list[Any]] = []
    for head in heads:
        size, *others = pickle.loads(head) if head else (0,)  # what follows the sizes is ignored
        every.append([memoryview(head)[len(head) - size :], *_places_for(others)] if head else [])
    if own is not None:
        every[comm.rank] = own
    broadcast_from_all([(part, rank) for rank, parts in enumerate(every) for part in parts[1:]], comm)
    return every


def _sizes_of(parts: Parts) -> bytes:
    return pickle.dumps([part.numel() for part in parts])


def _places_for(sizes: Sequence[int]) -> Parts:
    return [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]


class _Pickler(pickle.Pickler):
    """Pickles tensors as buffers; `tensors` are those, of parameters their data.

    A pickler refers to every object that went through it. It must not be part of a reference cycle, which would keep
    them alive until the next garbage collection.
    """

    tensors: list[Tensor]

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and _is_buffer(obj):
            return *self._reduce_tensor(obj), *_attributes_of(obj)
        if type(obj) is torch.nn.Parameter:
            return torch.nn.Parameter, (obj.data, obj.requires_grad), *_attributes_of(obj)
        return NotImplemented

    def _reduce_tensor(self, data: Tensor) -> tuple[object, tuple[object, ...]]:
        self.tensors.append(data)
        flat = data.detach().resolve_conj().resolve_neg().contiguous()
        accelerator = "" if flat.device.type == "cpu" else flat.device.type
        buffer = pickle.PickleBuffer(bytes_of(flat.cpu()))
        return _rebuild_tensor, (buffer, flat.dtype, tuple(flat.shape), data.requires_grad, accelerator)


def _is_buffer(data: Tensor) -> bool:
    return data.layout is torch.strided and not (data.is_quantized or data.is_meta or data.is_nested)


def _keep_in_band(segments: Parts, buffer: pickle.PickleBuffer) -> bool:
    """Return True to keep a small buffer in the pickle; add a large one to the segments, and return False."""
    raw = buffer.raw()
    if raw.nbytes >= _SEGMENT_MIN_BYTES:
        segments.append(_as_bytes_tensor(raw))
    return raw.nbytes < _SEGMENT_MIN_BYTES


def _rebuild_tensor(
    buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, accelerator: str
) -> Tensor:
    is_empty = 0 in shape  # torch makes no tensor of an empty buffer
    flat = torch.empty(0, dtype=torch.uint8, device="cpu") if is_empty else torch.frombuffer(buffer, dtype=torch.uint8)
    data = flat.view(dtype).reshape(shape)
    # The receiver's own device of that type, whatever the sender's index was: one context per process.
    if accelerator:
        data = data.to(accelerator)
    return data.requires_grad_(requires_grad)


def _attributes_of(data: Tensor) -> tuple[object, ...]:
    """Return the third to sixth part of a reduction: the attributes that Python code has set on the tensor, if any."""
    return (vars(data), None, None, _set_attributes) if vars(data) else ()


def _set_attributes(data: Tensor, attributes: dict[str, object]) -> None:
    vars(data).update(attributes)


def _as_bytes_tensor(raw: memoryview) -> Tensor:
    """Return a flat tensor of bytes that shares a buffer's memory, and keeps it alive."""
    if not raw.readonly:
        return torch.frombuffer(raw, dtype=torch.uint8)
    with warnings.catch_warnings():
        # torch warns about read-only memory; this tensor is only read.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(raw, dtype=torch.uint8)
