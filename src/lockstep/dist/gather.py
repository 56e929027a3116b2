"""all_gather and gather: tensors whose shapes may differ from rank to rank.

Every call first sends one header with shape and dtype. A tensor that fits into the header arrives with it; a larger one
follows in a second message of exactly its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lockstep.device import copy_into
from lockstep.dist.consistency import check_call, report_refusals
from lockstep.dist.gradients import (
    ENDS_HERE,
    LinearMap,
    fill_in_graph,
    require_blocking,
    require_fillable,
    synced,
    warn_of_lost_gradients,
)
from lockstep.dist.header import (
    TENSOR_HEADER_BYTES,
    Header,
    allocate_outputs,
    are_like,
    encode_failure,
    fill_inline,
    fill_new,
    header_of,
    read_headers,
    report_failure,
    require_agreement,
    require_no_failure,
)
from lockstep.dist.reduce import scatter_sums
from lockstep.dist.validate import NOT_GIVEN, either, require_alike, require_list, require_rank, require_tensor
from lockstep.groups import Comm, GroupLike, resolve
from lockstep.transport.handles import Handle, wait_unless_async
from lockstep.transport.memory import HeaderMemory, as_native, copy_all
from lockstep.transport.pairs import transport_of

_CPU = torch.device("cpu")


@overload
def all_gather(data: Tensor, group: GroupLike = ..., /, *, sync_grads: bool = ...) -> list[Tensor]: ...
@overload
def all_gather(data: Tensor, *, group: GroupLike = ..., sync_grads: bool = ...) -> list[Tensor]: ...
@overload
def all_gather(
    data: Sequence[Tensor] = ...,
    tensor: Tensor = ...,
    group: GroupLike = ...,
    async_op: Literal[False] = ...,
    *,
    sync_grads: Literal[False] = ...,
    tensor_list: Sequence[Tensor] = ...,
) -> None: ...
@overload
def all_gather(
    data: Sequence[Tensor] = ...,
    tensor: Tensor = ...,
    group: GroupLike = ...,
    *,
    async_op: Literal[True],
    sync_grads: Literal[False] = ...,
    tensor_list: Sequence[Tensor] = ...,
) -> Handle: ...
@overload
def all_gather(
    data: Sequence[Tensor] = ...,
    tensor: Tensor = ...,
    group: GroupLike = ...,
    async_op: Literal[False] = ...,
    *,
    sync_grads: Literal[True],
    tensor_list: Sequence[Tensor] = ...,
) -> list[Tensor]: ...
def all_gather(
    data: Tensor | Sequence[Tensor] = NOT_GIVEN,
    tensor: Tensor | GroupLike = None,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    sync_grads: bool = False,
    tensor_list: Sequence[Tensor] = NOT_GIVEN,
) -> list[Tensor] | Handle | None:
    """Give every rank every rank's tensor, as ``all_gather(data) -> list`` or ``all_gather(tensor_list, tensor)``.

    Args:
        data: this rank's tensor; or the list to fill, with one tensor for each rank.
        tensor: this rank's tensor, in the filling form; in the other form the second argument is the group.
        group: the process group; None is the default group.
        async_op: in the filling form, return a handle while larger tensors are still in flight.
        sync_grads: let gradients flow back to every rank through the returned tensors. In the filling form the filled
            tensors are returned, too. Every rank must then run backward through them.
        tensor_list: an alias for `data` in the filling form.

    **Collective**: every rank of the group; ranks may mix the two forms. **Shapes**: any shape and dtype on every rank;
    in the filling form ``tensor_list[i]`` has the shape and dtype of rank i's tensor.

    **Returns**: the tensors in rank order, each with its own memory, on the device of `data`; or None, or a handle.

    **Gradients**: without `sync_grads` no gradient flows; a warning says so once for each calling line. With it, the
    gradient of `data` is the sum over the ranks of the gradients of what they received: the gradient of the sum of all
    ranks' losses. DDP and FSDP then average the gradients of the parameters, which gives the gradient of the mean of
    all ranks' losses. In the second example it equals the gradient of one process that has the whole batch.

    **Raises**: ValueError on a rank whose list does not match the tensors of all ranks, TypeError on one that passes
    something other than tensors, PeerError on the others; no tensor that follows its header has been sent by then. With
    `sync_grads`, CollectiveMismatchError on every rank if dtypes differ.

    **Cost**: a header of 512 bytes from each rank, and the bytes of those tensors that don't fit in it, without
    padding. With `sync_grads` one more header, and in backward the bytes of the gradients of everything that was
    received.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_gather, get_rank
        >>> [x.tolist() for x in all_gather(torch.arange(get_rank() + 1))]
        [[0], [0, 1]]
        >>> filled = [torch.empty(2), torch.empty(2)]
        >>> all_gather(filled, torch.full((2,), float(get_rank())))
        >>> filled[1].tolist()
        [1.0, 1.0]

    **Example (2 ranks)**: a contrastive loss, as in CLIP, over the features of all ranks::

        >>> from lockstep.dist import all_reduce
        >>> images, texts = torch.tensor([[0.2], [-0.5]]), torch.tensor([[0.3], [0.9]])  # a batch of two pairs
        >>> def loss_of(weight, image, text):  # of the whole batch
        ...     logits = (image * weight) @ (text * weight).T
        ...     pairs = torch.arange(len(image))
        ...     return torch.nn.functional.cross_entropy(logits, pairs)
        >>> weight = torch.tensor(2.0, requires_grad=True)
        >>> own = slice(get_rank(), get_rank() + 1)  # one pair for each rank
        >>> image = torch.cat(all_gather(images[own] * weight, sync_grads=True))
        >>> text = torch.cat(all_gather(texts[own] * weight, sync_grads=True))
        >>> loss_of(1.0, image, text).backward()
        >>> gradient = weight.grad.clone()
        >>> all_reduce(gradient, "mean")  # which DDP does
        >>> whole = torch.tensor(2.0, requires_grad=True)
        >>> loss_of(whole, images, texts).backward()  # on one process
        >>> torch.allclose(gradient, whole.grad)
        True

    **Source**: `torch.distributed.all_gather` (2.13), which on gloo aborts the process if shapes differ.
    """
    data = either("data", data, "tensor_list", tensor_list)
    if isinstance(data, Tensor):
        if async_op:
            raise TypeError("`async_op` needs the form all_gather(tensor_list, tensor)")
        comm = resolve(_group_argument(tensor, group))
        if sync_grads:
            return _all_gather_with_grads(data, comm)
        if data.requires_grad:
            warn_of_lost_gradients("all_gather", ENDS_HERE, has_sync_grads=True)
        return _all_gather(data, comm)
    comm = resolve(tensor if isinstance(tensor, ProcessGroup | DeviceMesh) else group)
    if sync_grads:
        return _all_gather_with_grads(tensor, comm, data, async_op)
    if isinstance(tensor, Tensor) and tensor.requires_grad:
        warn_of_lost_gradients("all_gather", ENDS_HERE, has_sync_grads=True)
    return wait_unless_async(_all_gather_into(data, tensor, comm), async_op)


@overload
def gather(data: Tensor = ..., dst: int = ..., group: GroupLike = ..., *, tensor: Tensor = ...) -> list[Tensor]: ...
@overload
def gather(
    data: Tensor = ...,
    gather_list: Sequence[Tensor] | None = ...,
    dst: int = ...,
    group: GroupLike = ...,
    *,
    async_op: Literal[True],
    tensor: Tensor = ...,
) -> Handle: ...
@overload
def gather(
    data: Tensor = ...,
    gather_list: Sequence[Tensor] | None = ...,
    dst: int = ...,
    group: GroupLike = ...,
    async_op: bool = ...,
    *,
    tensor: Tensor = ...,
) -> list[Tensor] | Handle | None: ...
def gather(  # type: ignore[misc]  # the overloads share their places, not their names
    data: Tensor = NOT_GIVEN,
    gather_list: Sequence[Tensor] | Integral | int | None = None,
    dst: int | GroupLike = 0,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    tensor: Tensor = NOT_GIVEN,
) -> list[Tensor] | Handle | None:
    """Give rank `dst` every rank's tensor, as ``gather(data, dst) -> list`` or ``gather(tensor, gather_list, dst)``.

    Args:
        data: this rank's tensor.
        gather_list: on `dst`, the tensors to fill, one for each rank; elsewhere None.
        dst: rank within the group.
        group: the process group; None is the default group.
        async_op: in the filling form, return a handle.
        tensor: an alias for `data`.

    **Collective**: every rank of the group. **Shapes**: any shape and dtype on every rank.

    **Returns**: on `dst` the tensors in rank order, on the device of its `data`, or None if it filled a list; ``[]``
    elsewhere.

    **Raises**: ValueError on `dst` if its list does not match what arrived, after everything has been received. The
    other ranks do not learn of it.

    **Cost**: a header of 512 bytes from each rank to `dst`, and the bytes of those tensors that don't fit in it.

    **Example (2 ranks)**::

        >>> from lockstep.dist import gather, get_rank
        >>> parts = gather(torch.ones(get_rank() + 1), dst=1)
        >>> [x.tolist() for x in parts] == ([[1.0], [1.0, 1.0]] if get_rank() == 1 else [])
        True
    """
    if isinstance(gather_list, Integral):
        third = None if isinstance(dst, int) and dst == 0 else dst  # the group, if one was given in that place
        gather_list, dst, group = None, gather_list, _group_argument(third, group)
    comm = resolve(group)
    data = either("data", data, "tensor", tensor)
    with report_refusals("gather", comm):
        dst = require_rank("dst", dst, comm)
    if isinstance(data, Tensor) and data.requires_grad:
        warn_of_lost_gradients("gather", ENDS_HERE)
    check_call("gather", comm, dst)
    parts: list[Tensor] = []
    wire, header, memory, sent = _gather_headers(data, dst, comm, parts if gather_list is None else None)
    if comm.rank != dst:
        return wait_unless_async(sent, async_op) or []
    if gather_list is not None:
        filling = _gather_into(cast(Sequence[Tensor], gather_list), wire, header, memory, comm)
        return wait_unless_async(filling, async_op)
    parts = _gather(wire, header, memory, parts, comm)
    if async_op:
        raise TypeError(f"`async_op` needs the form gather(tensor, gather_list, dst) ({comm.this_rank})")
    return _on_device_of(data, parts)


def _all_gather(data: Tensor, comm: Comm) -> list[Tensor]:
    check_call("all_gather", comm)
    outputs: list[Tensor] = []
    wire, own, memory = _all_gather_headers("data", data, comm, new=outputs)
    if not fill_new(memory, own, outputs):
        headers = _agreed(memory, own, comm)
        outputs = allocate_outputs(headers, memory, comm)
        _exchange(wire, headers, outputs, comm).wait()
    return _on_device_of(data, outputs)


def _all_gather_into(tensor_list: Sequence[Tensor], data: Any, comm: Comm) -> Handle:
    check_call("all_gather", comm)
    wire, own, memory = _all_gather_headers("tensor", data, comm, tensor_list)
    if fill_inline(memory, own, tensor_list):
        return Handle((), comm)
    headers = _agreed(memory, own, comm, tensor_list)
    destinations = allocate_outputs(headers, memory, comm, tensor_list)
    exchange = _exchange(wire, headers, destinations, comm)
    return Handle([exchange], comm, lambda: copy_all(tensor_list, destinations))


def _all_gather_with_grads(
    data: Any, comm: Comm, tensor_list: Sequence[Tensor] = NOT_GIVEN, async_op: bool = False
) -> list[Tensor]:
    with report_failure(comm):
        require_blocking(async_op, comm)
        _require_form("data", data, tensor_list, comm)
        if tensor_list is not NOT_GIVEN:
            require_fillable("tensor_list", tensor_list, comm)
    # The closure lives in the graph. It must not hold the filled tensors, which refer to that graph.
    likes = None if tensor_list is NOT_GIVEN else [(x.shape, x.dtype) for x in tensor_list]

    def gather_all(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if likes is None:
            return _all_gather(inputs[0], comm)
        parts = [torch.empty(shape, dtype=dtype, device=inputs[0].device) for shape, dtype in likes]
        _all_gather_into(parts, inputs[0], comm).wait()
        return parts

    def sum_up(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        return [scatter_sums(gradients, comm)]

    gathered = synced(f"all_gather({data.dtype})", LinearMap(gather_all, sum_up, comm), [data])
    return list(gathered) if tensor_list is NOT_GIVEN else fill_in_graph(tensor_list, gathered)


def _require_form(name: str, data: object, tensor_list: Sequence[Tensor], comm: Comm) -> None:
    """Raise unless `data` is a tensor and `tensor_list`, if given, holds one tensor for each rank."""
    if tensor_list is NOT_GIVEN:
        require_tensor(name, data)
        return
    if not isinstance(data, Tensor):
        raise TypeError(
            "`data` must be a tensor, or a list to fill with a tensor in second place, but they are "
            f"{type(tensor_list).__name__} and {type(data).__name__} ({comm.this_rank})"
        )
    require_tensor("tensor", data)
    require_list("tensor_list", tensor_list, comm, is_filled=True)


def _on_device_of(data: Tensor, outputs: list[Tensor]) -> list[Tensor]:
    return outputs if data.is_cpu and outputs[0].is_cpu else [output.to(data.device) for output in outputs]


def _all_gather_headers(
    name: str, data: Any, comm: Comm, outputs: Sequence[Tensor] = NOT_GIVEN, *, new: list[Tensor] | None = None
) -> tuple[Tensor, Header, HeaderMemory]:
    """Give every rank every rank's header. Returns the tensor to send, this rank's header, and the memory of all.

    Meanwhile, `new` gets a tensor like this rank's for each rank, if that is inline.
    """
    transport = transport_of(comm)
    buffers = transport.buffers(TENSOR_HEADER_BYTES)
    own = _write_header(name, data, comm, buffers.own, outputs)
    transport.all_gather_headers(buffers, _allocation(own, comm, new))
    if isinstance(own, Exception):
        raise own
    return *own, buffers.every


def _gather_headers(
    data: Any, dst: int, comm: Comm, new: list[Tensor] | None
) -> tuple[Tensor, Header, HeaderMemory, Handle]:
    """Give rank `dst` every rank's header, and start to send what does not fit into it; see `_all_gather_headers`.

    Returns the tensor to send, this rank's header, the memory of all headers (valid on `dst`), and the handle.
    """
    transport = transport_of(comm)
    buffers = transport.buffers(TENSOR_HEADER_BYTES)
    own = _write_header("data", data, comm, buffers.own)
    if isinstance(own, Exception):
        transport.gather_headers(buffers, dst)
        if comm.rank == dst:
            _receive_and_discard(read_headers(buffers.every), buffers.every, comm)
        raise own
    wire, header = own
    is_dst = comm.rank == dst
    following = () if header.is_inline or is_dst else ((as_native(wire), dst),)
    meanwhile = _allocation(own, comm, new) if is_dst else None
    return wire, header, buffers.every, transport.gather_headers(buffers, dst, following, meanwhile)


def _allocation(
    own: tuple[Tensor, Header] | Exception, comm: Comm, new: list[Tensor] | None
) -> Callable[[], None] | None:
    """Return a function that puts a tensor for each rank into `new`; None if that is not wanted, or not known."""
    if new is None or isinstance(own, Exception) or not own[1].is_inline:
        return None
    header = own[1]
    return lambda: new.extend(header.allocate(comm.size))


def _write_header(
    name: str, data: Any, comm: Comm, memory: HeaderMemory, outputs: Sequence[Tensor] = NOT_GIVEN
) -> tuple[Tensor, Header] | Exception:
    """Write this rank's header, or why it can't take part: only this rank sees that, and the others wait for a header.

    Returns the tensor to send and its header, or the error to raise once the header has been sent.
    """
    try:
        _require_form(name, data, outputs, comm)
        wire = comm.to_wire(data)
        header = header_of(wire, None if outputs is NOT_GIVEN else outputs)
        header.write(memory, 0, wire)
    except Exception as error:  # also where a device has no memory left
        memory.data[:] = encode_failure(error)
        return error
    return wire, header


def _agreed(memory: HeaderMemory, own: Header, comm: Comm, outputs: Sequence[Tensor] = ()) -> list[Header]:
    """Return every rank's header; if a rank can't take part, or its list does not fit, all raise."""
    headers = read_headers(memory, own)
    require_no_failure([header.failure for header in headers], comm)
    remedy = ". Or leave the list out: all_gather(data)"
    for rank, output in enumerate(outputs):
        require_alike(f"tensor_list[{rank}]", output, f"rank {rank}'s tensor", headers[rank], comm, remedy)
    require_agreement(headers, comm)
    return headers


def _exchange(wire: Tensor, headers: Sequence[Header], destinations: Sequence[Tensor], comm: Comm) -> Handle:
    """Exchange the tensors that did not fit into the headers."""
    if all(header.is_inline for header in headers):
        return Handle((), comm)
    own = [] if headers[comm.rank].is_inline else [as_native(wire.detach())]
    targets = [
        [] if header.is_inline else [as_native(target.detach())]
        for header, target in zip(headers, destinations, strict=True)
    ]
    return transport_of(comm).all_gather_segments(own, targets)


def _all_there(memory: HeaderMemory, own: Header, comm: Comm) -> list[Header]:
    """Return every rank's header, on `dst`; if a rank can't take part, receive what the others send, then raise."""
    headers = read_headers(memory, own)
    if any(header.failure is not None for header in headers):
        _receive_and_discard(headers, memory, comm)
        require_no_failure([header.failure for header in headers], comm)
    return headers


def _receive_and_discard(headers: Sequence[Header], memory: HeaderMemory, comm: Comm) -> None:
    destinations = allocate_outputs(headers, memory, comm)
    _receive(headers, destinations, destinations[comm.rank], comm).wait()


def _gather(wire: Tensor, own: Header, memory: HeaderMemory, parts: list[Tensor], comm: Comm) -> list[Tensor]:
    """Return every rank's tensor, on `dst`; in `parts`, if all are like this rank's and inline."""
    if not fill_new(memory, own, parts):
        headers = _all_there(memory, own, comm)
        parts = allocate_outputs(headers, memory, comm)
        _receive(headers, parts, wire, comm).wait()
    return parts


def _gather_into(outputs: Sequence[Tensor], wire: Tensor, own: Header, memory: HeaderMemory, comm: Comm) -> Handle:
    """Start receiving on `dst`; a list that does not fit raises at the end, after everything has been received."""
    if fill_inline(memory, own, outputs):
        return Handle((), comm)
    headers = _all_there(memory, own, comm)
    fitting = are_like(outputs, headers)
    destinations = allocate_outputs(headers, memory, comm, outputs if fitting else None)

    def finish() -> None:
        require_list("gather_list", outputs, comm, is_filled=True)
        for rank, (output, received) in enumerate(zip(outputs, destinations, strict=True)):
            require_alike(f"gather_list[{rank}]", output, "what arrived", received, comm)
        copy_all(outputs, destinations)

    return Handle([_receive(headers, destinations, wire, comm)], comm, finish)


def _receive(headers: Sequence[Header], destinations: Sequence[Tensor], wire: Tensor, comm: Comm) -> Handle:
    """Receive what did not fit into the headers; this rank's own tensor is `wire`."""
    transport, own = transport_of(comm), comm.rank
    following = [rank for rank, header in enumerate(headers) if not header.is_inline and rank != own]
    # Copy while the others are on their way, unless they arrive in memory that `wire` may share.
    filled = {destinations[rank].untyped_storage().data_ptr() for rank in following}
    copies_own, is_shared = not headers[own].is_inline, wire.untyped_storage().data_ptr() in filled
    if copies_own and is_shared:
        copy_into(destinations[own], wire)
    receiving = [transport.receive([as_native(destinations[rank])], rank) for rank in following]
    if copies_own and not is_shared:
        copy_into(destinations[own], wire)
    return Handle(receiving, comm)


def _group_argument(second: object, group: GroupLike) -> GroupLike:
    """Return the group of the short form, which may be given in the place after the data."""
    return group if second is None else cast(GroupLike, second)  # resolve() checks it
