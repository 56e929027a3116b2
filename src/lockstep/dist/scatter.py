"""scatter: tensors whose shapes may differ from rank to rank; see `gather.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from lockstep.device import copy_into
from lockstep.dist.consistency import check_call, report_refusals
from lockstep.dist.gradients import ENDS_HERE, warn_of_lost_gradients
from lockstep.dist.header import decode_each, encode, header_of
from lockstep.dist.validate import require_alike, require_list, require_rank, require_tensor
from lockstep.groups import Comm, GroupLike, resolve
from lockstep.transport.control import exchange, report_failure, require_no_failure
from lockstep.transport.handles import Handle
from lockstep.transport.memory import copy_all
from lockstep.transport.moving import place_for, transfer


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
        async_op: return at once, with a handle to wait for. No rank then waits for another one before it sends:
            `tensor` says what each receives, and must be right.

    **Collective**: every rank of the group. **Shapes**: ``scatter_list[i]`` has the shape and dtype of rank i's
    `tensor`; the entries may differ.

    **Raises**: ValueError or TypeError on `src` if its list does not hold one tensor for each rank, ValueError on a
    rank whose `tensor` does not match what it would get, PeerError on the others; nothing has been sent by then.

    **Cost**: 256 bytes from each rank to each, between the hosts, and a header of `src` for each rank; then the bytes
    of each tensor from `src`.

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
    sent = scatter_list if comm.rank == src and isinstance(scatter_list, Sequence) else ()
    is_mixed = False  # some are on the CPU, and some are not
    if async_op:
        with report_refusals("scatter", comm):
            _require_arguments(tensor, scatter_list, src, comm)
        check_call("scatter", comm, src, async_op=True)
    else:
        check_call("scatter", comm, src, compares=False)
        is_mixed = _agree_on_headers(tensor, scatter_list, src, comm)
    if (tensor.requires_grad and not tensor.is_leaf) or any(x.requires_grad for x in sent):
        warn_of_lost_gradients("scatter", ENDS_HERE)
    wires = [comm.to_wire(entry) for entry in sent]
    if is_mixed:
        wires = [wire.to(comm.comm_device) for wire in wires]
    if comm.rank == src:
        handle = transfer([], [(wire, rank) for rank, wire in enumerate(wires) if rank != src], comm)
        own = wires[src]
        if tensor.untyped_storage().data_ptr() in {wire.untyped_storage().data_ptr() for wire in wires}:
            handle = Handle([handle], comm, lambda: copy_into(tensor, own))  # once nothing is sent from there
        else:
            copy_into(tensor, own)
    else:
        stays = comm.is_alone or (comm.carries(tensor) and not is_mixed)
        received = place_for(tensor, tensor.device if stays else comm.comm_device)
        handle = Handle([transfer([(received, src)], [], comm)], comm, lambda: copy_all([tensor], [received]))
    if async_op:
        return handle
    handle.wait()
    return None


def _require_arguments(tensor: Tensor, scatter_list: Sequence[Tensor] | None, src: int, comm: Comm) -> None:
    require_tensor("tensor", tensor, is_filled=True)
    if comm.rank == src:
        if scatter_list is None:
            raise ValueError(f"`scatter_list` must be a list on `src`, but is None ({comm.this_rank})")
        require_list("scatter_list", scatter_list, comm)
        require_alike("tensor", tensor, f"scatter_list[{src}]", scatter_list[src], comm)


def _agree_on_headers(tensor: Tensor, scatter_list: Sequence[Tensor] | None, src: int, comm: Comm) -> bool:
    """Return whether some tensors are on the CPU, and some are not; if one is not like what it gets, all raise."""
    with report_failure(comm):
        _require_arguments(tensor, scatter_list, src, comm)
        entries = scatter_list if comm.rank == src and scatter_list is not None else ()
        encoded = b"".join(
            [encode(header_of(x, on_cpu=x.is_cpu or comm.device_type == "cpu")) for x in (tensor, *entries)]
        )
    found = [decode_each(one) for one in exchange(comm, encoded)]
    _, *sent = found[src]
    require_alike("tensor", tensor, f"what rank {src} sends here", sent[comm.rank], comm)
    refusal = "ValueError: its `tensor` is not like what is sent to it"
    wrong = [headers[0][:2] != one[:2] for headers, one in zip(found, sent, strict=True)]
    require_no_failure([refusal if one else None for one in wrong], comm)
    return len({header.on_cpu for headers in found for header in headers}) > 1
