"""broadcast, all_to_all and barrier: collectives whose shapes every rank knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import torch
import torch.distributed as torch_dist
from numpy.typing import NDArray
from torch import Tensor

from lockstep.device import copy_into
from lockstep.dist.consistency import check_call
from lockstep.dist.gradients import (
    Apply,
    LinearMap,
    apply_with_gradients,
    fill_in_graph,
    require_linear,
    warn_of_lost_gradients,
)
from lockstep.dist.validate import NOT_GIVEN, No, Yes, either, require_list, require_rank, require_tensor
from lockstep.errors import CollectiveMismatchError
from lockstep.groups import Comm, GroupLike, resolve
from lockstep.transport.control import control_group, exchange, report_failure
from lockstep.transport.handles import Handle, note_running, start, wait_unless_async
from lockstep.transport.moving import as_native, send_to_each, used_on_current_stream


@overload
def broadcast(
    data: Tensor = ..., src: int = ..., group: GroupLike = ..., async_op: No = ..., *, tensor: Tensor = ...
) -> None: ...
@overload
def broadcast(
    data: Tensor = ..., src: int = ..., group: GroupLike = ..., *, async_op: Yes, tensor: Tensor = ...
) -> Handle: ...
def broadcast(
    data: Tensor = NOT_GIVEN,
    src: int = 0,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    tensor: Tensor = NOT_GIVEN,
) -> Handle | None:
    """Copy rank `src`'s `data` into every other rank's, in place.

    Args:
        data: contiguous or not, of any dtype, on any device. A leaf that requires grad, such as a parameter, gets its
            new values as if under ``torch.no_grad()``.
        src: rank within the group.
        group: the process group; None is the default group.
        async_op: return at once, with a handle to wait for.
        tensor: an alias for `data`.

    **Collective**: every rank of the group. **Shapes**: the same on every rank, any.

    **Cost**: ``nbytes`` sent to every rank.

    **Example (2 ranks)**::

        >>> from lockstep.dist import broadcast, get_rank
        >>> data = torch.arange(2) + get_rank()
        >>> broadcast(data, src=0)
        >>> data.tolist()
        [0, 1]
    """
    comm = resolve(group)
    data = either("data", data, "tensor", tensor)
    require_tensor("data", data, is_filled=True)
    src = require_rank("src", src, comm)
    warn_of_lost_gradients("broadcast", filled=[data])
    check_call("broadcast", comm, data, src, async_op=async_op)
    if comm.pg is None or data.numel() == 0:
        return wait_unless_async(Handle((), comm), async_op)
    wire = comm.to_wire(data)
    work = start(torch_dist.broadcast, comm, wire.device, as_native(wire), group_src=src, async_op=async_op)

    def finish() -> None:
        used_on_current_stream(wire)
        if comm.rank != src:
            copy_into(data, wire)

    is_staged = wire.data_ptr() != data.data_ptr()
    return wait_unless_async(Handle([work], comm, finish if is_staged else None), async_op)


@overload
def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: GroupLike = ...,
    async_op: No = ...,
    *,
    sync_grads: No = ...,
) -> None: ...
@overload
def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: GroupLike = ..., *, async_op: Yes
) -> Handle: ...
@overload
def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: GroupLike = ...,
    *,
    sync_grads: Yes,
) -> list[Tensor]: ...
def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: GroupLike = None,
    async_op: bool = False,
    *,
    sync_grads: bool = False,
) -> Handle | list[Tensor] | None:
    """Send the i-th input to rank i, and fill the i-th output with what rank i sent here.

    Args:
        output_tensor_list: one tensor for each rank, filled in place.
        input_tensor_list: one tensor for each rank.
        group: the process group; None is the default group.
        async_op: return at once, with a handle to wait for.
        sync_grads: fill the outputs as part of the autograd graph, so that gradients flow back to the sending ranks,
            and return the outputs. Every rank must then run backward through them.

    **Collective**: every rank of the group. **Shapes**: rank a's ``input_tensor_list[b]`` has as many elements as rank
    b's ``output_tensor_list[a]``; otherwise any sizes. All tensors have one dtype.

    **Raises**: CollectiveMismatchError on every rank if numbers of elements don't fit, in calls that are compared (see
    `check_collectives`). In others, gloo ends the process, and NCCL hangs.

    **Gradients**: as for `all_reduce`: rank a's ``input_tensor_list[b]`` gets the gradient of rank b's
    ``output_tensor_list[a]``.

    **Cost**: each rank sends the bytes of all its inputs. With `sync_grads`, an exchange of 256
    bytes between the hosts comes first, and backward sends the same bytes as the call.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_to_all, get_rank
        >>> outputs = [torch.empty(1), torch.empty(1)]
        >>> all_to_all(outputs, [torch.full((1,), 10.0 * get_rank() + i) for i in range(2)])
        >>> [x.item() for x in outputs] == ([0.0, 10.0] if get_rank() == 0 else [1.0, 11.0])
        True
    """
    comm = resolve(group)
    if sync_grads:
        return _all_to_all_with_grads(output_tensor_list, input_tensor_list, comm, async_op)
    _check_all_to_all(output_tensor_list, input_tensor_list, comm)
    warn_of_lost_gradients("all_to_all", input_tensor_list, has_sync_grads=True)
    return wait_unless_async(_start_all_to_all(output_tensor_list, input_tensor_list, comm, async_op), async_op)


def _check_all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], comm: Comm) -> None:
    require_list("output_tensor_list", outputs, comm, is_filled=True)
    require_list("input_tensor_list", inputs, comm)
    dtypes = {x.dtype for x in (*outputs, *inputs)}
    if len(dtypes) != 1:
        raise ValueError(f"`all_to_all` must have one dtype, but has {sorted(map(str, dtypes))} ({comm.this_rank})")
    own_in, own_out = inputs[comm.rank], outputs[comm.rank]
    if own_in.numel() != own_out.numel():
        raise ValueError(
            f"`output_tensor_list[{comm.rank}]` must have the {own_in.numel()} elements this rank sends itself, "
            f"but has {own_out.numel()} ({comm.this_rank})"
        )


def _all_to_all_with_grads(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], comm: Comm, async_op: bool
) -> list[Tensor]:
    # `report_failure` compares the ranks' calls, so that this need not. "sync_grads" tells this call from one without.
    check_call("all_to_all", comm, "sync_grads", compares=False)
    with report_failure(comm):
        _check_all_to_all(outputs, inputs, comm)
        require_linear(comm, async_op, name="output_tensor_list", outputs=outputs)

    def all_to_all_like(like: Sequence[Tensor]) -> Apply:
        shapes = [(x.shape, x.dtype, x.device) for x in like]

        def apply(sent: Sequence[Tensor]) -> Sequence[Tensor]:
            received = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in shapes]
            _start_all_to_all(received, sent, comm).wait()
            return received

        return apply

    collective = LinearMap(all_to_all_like(outputs), all_to_all_like(inputs), comm)
    return fill_in_graph(outputs, apply_with_gradients("all_to_all", collective, inputs, str(inputs[0].dtype)))


def _start_all_to_all(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], comm: Comm, async_op: bool = False
) -> Handle:
    def numels() -> bytes:
        return np.array([[x.numel() for x in tensors] for tensors in (inputs, outputs)], np.int64).tobytes()

    told = check_call("all_to_all", comm, inputs[comm.rank].dtype, async_op=async_op, payload=numels)
    if told:
        _require_pairs(np.frombuffer(b"".join(told), np.int64).reshape(comm.size, 2, comm.size), comm)
    if comm.pg is None:
        copy_into(outputs[0], inputs[0])
        return Handle((), comm)
    parts = [as_native(comm.to_wire(x)) for x in inputs]
    item_bytes = parts[0].element_size()
    sizes_out = [x.nbytes // item_bytes for x in outputs]
    received, handle = send_to_each(parts, sizes_out, comm, async_op)

    def finish() -> None:
        for output, part in zip(outputs, torch.split_with_sizes(received, sizes_out), strict=True):
            if part.dtype != output.dtype:
                part = part.clone().view(output.dtype)  # a slice of bytes may not be aligned for the wider dtype
            copy_into(output, part)

    return Handle([handle], comm, finish)


def _require_pairs(numels: NDArray[np.int64], comm: Comm) -> None:
    """Raise CollectiveMismatchError, on every rank, unless all get as many elements as are sent to them.

    Args:
        numels: of each rank, how many elements it sends to each, and how many it expects of each.
        comm: the group.
    """
    sent, expected = numels[:, 0], numels[:, 1].T
    for source, target in np.argwhere(sent != expected)[:1].tolist():
        raise CollectiveMismatchError(
            f"ranks of {comm.name} must expect as many elements in all_to_all as are sent to them, but rank {source} "
            f"sends {sent[source, target]} to rank {target}, which expects {expected[source, target]}",
            failed_ranks=[comm.ranks[source], comm.ranks[target]],
        )


@overload
def barrier(group: GroupLike = ..., async_op: No = ...) -> None: ...
@overload
def barrier(group: GroupLike = ..., *, async_op: Yes) -> Handle: ...
def barrier(group: GroupLike = None, async_op: bool = False) -> Handle | None:
    """Wait until the host of every rank of the group has reached this call; devices are not waited for.

    **Collective**: every rank of the group. **Cost**: a few bytes over gloo, as for any compared call.

    **Example (2 ranks)**::

        >>> from lockstep.dist import barrier
        >>> barrier()  # here both ranks go on at about the same time
    """
    comm = resolve(group)
    check_call("barrier", comm, compares=False, async_op=async_op)
    if not async_op:
        exchange(comm)
        return None
    if comm.is_alone:
        return Handle((), comm)
    token = torch.zeros(1, device="cpu")
    works = [torch_dist.all_reduce(token, group=control_group(comm), async_op=True)]
    note_running(comm, token.device, works[0])
    return Handle(works, comm)
