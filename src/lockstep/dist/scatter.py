"""scatter: tensors whose shapes may differ from rank to rank; see `gather.py`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, overload

from torch import Tensor

from lockstep.device import copy_into
from lockstep.dist.consistency import check_call, report_refusals
from lockstep.dist.gradients import ENDS_HERE, warn_of_lost_gradients
from lockstep.dist.header import (
    TENSOR_HEADER_BYTES,
    Header,
    allocate_outputs,
    are_like,
    fill_inline,
    header_of,
    read_header,
    report_failure,
    require_no_failure,
    scatter_failure,
)
from lockstep.dist.validate import require_alike, require_list, require_rank, require_tensor
from lockstep.groups import Comm, GroupLike, resolve
from lockstep.transport.handles import Handle
from lockstep.transport.memory import as_native, copy_all
from lockstep.transport.pairs import transport_of


@overload
def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = ...,
    src: int = ...,
    group: GroupLike = ...,
    async_op: Literal[False] = ...,
) -> None: ...
@overload
def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = ...,
    src: int = ...,
    group: GroupLike = ...,
    *,
    async_op: Literal[True],
) -> Handle: ...
@overload
def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = ...,
    src: int = ...,
    group: GroupLike = ...,
    async_op: bool = ...,
) -> Handle | None: ...
def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: GroupLike = None,
    async_op: bool = False,
) -> Handle | None:
    """Fill rank i's `tensor` with the i-th tensor of rank `src`'s list.

    Args:
        tensor: filled in place.
        scatter_list: on `src`, one tensor for each rank; elsewhere None.
        src: rank within the group.
        group: the process group; None is the default group.
        async_op: return a handle, for compatibility; the work is already done.

    **Collective**: every rank of the group. **Shapes**: ``scatter_list[i]`` has the shape and dtype of rank i's
    `tensor`; the entries may differ.

    **Raises**: ValueError or TypeError on `src` if its list does not hold one tensor for each rank, PeerError on the
    others; ValueError on a rank whose `tensor` does not match what was sent to it.

    **Cost**: a header of 512 bytes from `src` to each rank, and the bytes of those tensors that don't fit in it.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, scatter
        >>> data = torch.empty(get_rank() + 1)
        >>> scatter(data, [torch.tensor([5.0]), torch.tensor([6.0, 7.0])] if get_rank() == 0 else None)
        >>> data.tolist() == ([5.0] if get_rank() == 0 else [6.0, 7.0])
        True
    """
    comm = resolve(group)
    with report_refusals("scatter", comm):
        src = require_rank("src", src, comm)
    check_call("scatter", comm, src)
    if comm.rank == src:
        _send_parts(tensor, scatter_list, comm)
    else:
        _receive_part(tensor, src, comm)
    sent = scatter_list if comm.rank == src and scatter_list is not None else ()
    if (tensor.requires_grad and not tensor.is_leaf) or any(x.requires_grad for x in sent):
        warn_of_lost_gradients("scatter", ENDS_HERE)
    return Handle((), comm) if async_op else None


def _send_parts(tensor: Tensor, scatter_list: Sequence[Tensor] | None, comm: Comm) -> None:
    """Send each rank its tensor; fill this rank's own."""
    transport = transport_of(comm)
    buffers = transport.buffers(TENSOR_HEADER_BYTES)
    with report_failure(comm, partial(scatter_failure, src=comm.rank)):
        if scatter_list is None:
            raise ValueError(f"`scatter_list` must be a list on `src`, but is None ({comm.this_rank})")
        require_list("scatter_list", scatter_list, comm)
        require_tensor("tensor", tensor, is_filled=True)
        wires = [comm.to_wire(entry) for entry in scatter_list]
        headers = [header_of(wire) for wire in wires]
    for rank, header in enumerate(headers):
        header.write(buffers.every, rank, wires[rank])
    following = [rank for rank, header in enumerate(headers) if not header.is_inline and rank != comm.rank]
    sent = transport.scatter_headers(buffers, comm.rank, [(as_native(wires[rank]), rank) for rank in following])
    own = wires[comm.rank]
    # Copy while the sends are in flight, unless `tensor` may share memory with what is sent.
    in_use = {wires[rank].untyped_storage().data_ptr() for rank in following}
    at_once = are_like([tensor], [own]) and tensor.untyped_storage().data_ptr() not in in_use
    if at_once:
        copy_into(tensor, own)
    sent.wait()
    require_alike("tensor", tensor, "what arrived", own, comm)
    if not at_once:
        copy_into(tensor, own)


def _receive_part(tensor: Tensor, src: int, comm: Comm) -> None:
    """Receive this rank's tensor, directly into `tensor` if it matches."""
    refusal: Exception | None = None
    expected: Header | None = None
    try:
        require_tensor("tensor", tensor, is_filled=True)
        expected = header_of(tensor)
    except Exception as error:  # a tensor of a class of the user's may raise anything
        refusal = error  # raised after everything has been received
    transport = transport_of(comm)
    buffers = transport.buffers(TENSOR_HEADER_BYTES)
    transport.scatter_headers(buffers, src)
    if expected is not None and fill_inline(buffers.own, expected, [tensor]):
        return
    header = read_header(buffers.own, 0)
    if refusal is None:
        require_no_failure([header.failure], comm, ranks=[src])
    fitting = refusal is None and are_like([tensor], [header])
    (received,) = allocate_outputs([header], buffers.own, comm, [tensor] if fitting else None)
    if not header.is_inline:
        transport.receive([as_native(received)], src).wait()
    if refusal is not None:
        raise refusal
    require_alike("tensor", tensor, "what arrived", received, comm)
    copy_all([tensor], [received])
