"""Collectives that move tensors of shapes that every rank knows, adding nothing: broadcast, all_to_all, barrier."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal, overload

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions

from lockstep.dist.arguments import NOT_GIVEN, either, group_rank, require_list, require_memory, require_tensor
from lockstep.dist.devices import as_bytes, copy_back, is_bare, to_comm, to_wire
from lockstep.dist.gradients import (
    ENDS_HERE,
    STAYS_LOCAL,
    Apply,
    LinearMap,
    agree_on_gradients,
    require_blocking,
    require_fillable,
    synced,
    warn_of_lost_gradients,
)
from lockstep.dist.groups import Group, GroupLike, resolve
from lockstep.dist.guard import check_call, watch
from lockstep.dist.handles import Handle, settled
from lockstep.dist.segments import talk

# Dtypes that every backend moves by name; all others travel as bytes.
_MOVABLE = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)  # fmt: skip


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
            new values as it would under ``torch.no_grad()``.
        src: rank within the group.
        group: where; None is the default group.
        async_op: return at once, with a handle to wait for.
        tensor: `data` by its other published name.

    **Collective**: every rank of the group. **Shapes**: the same on every rank, any.

    **Cost**: ``nbytes`` to every rank.

    **Example (2 ranks)**::

        >>> from lockstep.dist import broadcast, get_rank
        >>> data = torch.arange(2) + get_rank()
        >>> broadcast(data, src=0)
        >>> data.tolist()
        [0, 1]
    """
    here = resolve(group)
    data = either("data", data, "tensor", tensor)
    with watch("broadcast", here):
        require_tensor("data", data)
        require_memory("data", data)
        src = group_rank("src", src, here)
    if data.requires_grad and not data.is_leaf:
        warn_of_lost_gradients("broadcast", STAYS_LOCAL)
    check_call("broadcast", here, data, src)
    if here.pg is None or data.numel() == 0:
        return Handle((), here) if async_op else None
    wire = to_wire(data, here)
    work = here.pg.broadcast([_travelling(wire)], _broadcast_options(src, async_op))
    if wire is data or here.rank == src:
        handle = Handle([work], here)
    else:
        handle = Handle([work], here, lambda: copy_back(data, wire))
    return settled(handle, async_op)


@overload
def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: GroupLike = ...,
    async_op: bool = ...,
    *,
    sync_grads: Literal[False] = ...,
) -> Handle | None: ...
@overload
def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: GroupLike = ...,
    async_op: Literal[False] = ...,
    *,
    sync_grads: Literal[True],
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
        group: where; None is the default group.
        async_op: return at once, with a handle to wait for.
        sync_grads: fill the outputs within the graph, so that gradients flow back to the ranks they came from, and
            return them. Every rank has to run backward through them then.

    **Collective**: every rank of the group. **Shapes**: rank a's ``input_tensor_list[b]`` has as many elements as rank
    b's ``output_tensor_list[a]``; otherwise sizes are free. One dtype throughout.

    **Gradients**: as for `all_reduce`: rank a's ``input_tensor_list[b]`` gets the gradient of rank b's
    ``output_tensor_list[a]``.

    **Cost**: the bytes of all inputs sent per rank. With `sync_grads` a slot of 512 bytes from each rank to each
    before, and the same bytes again in backward.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_to_all, get_rank
        >>> outputs = [torch.empty(1), torch.empty(1)]
        >>> all_to_all(outputs, [torch.full((1,), 10.0 * get_rank() + i) for i in range(2)])
        >>> [x.item() for x in outputs] == ([0.0, 10.0] if get_rank() == 0 else [1.0, 11.0])
        True
    """
    here = resolve(group)
    if sync_grads:
        return _all_to_all_with_grads(output_tensor_list, input_tensor_list, here, async_op)
    with watch("all_to_all", here):
        _require_exchange(output_tensor_list, input_tensor_list, here)
    if any(x.requires_grad for x in input_tensor_list):
        warn_of_lost_gradients("all_to_all", ENDS_HERE, has_sync_grads=True)
    return settled(_exchange(output_tensor_list, input_tensor_list, here), async_op)


def _require_exchange(outputs: Sequence[Tensor], inputs: Sequence[Tensor], here: Group) -> None:
    require_list("output_tensor_list", outputs, here)
    require_list("input_tensor_list", inputs, here)
    dtypes = {x.dtype for x in (*outputs, *inputs)}
    if len(dtypes) != 1:
        raise ValueError(f"`all_to_all` must have one dtype, but has {sorted(map(str, dtypes))} ({here.here})")
    own_in, own_out = inputs[here.rank], outputs[here.rank]
    if own_in.numel() != own_out.numel():
        raise ValueError(
            f"`output_tensor_list[{here.rank}]` must have the {own_in.numel()} elements this rank sends itself, "
            f"but has {own_out.numel()} ({here.here})"
        )
    for rank, output in enumerate(outputs):
        require_memory(f"output_tensor_list[{rank}]", output)


def _all_to_all_with_grads(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], here: Group, async_op: bool
) -> list[Tensor]:
    def check() -> tuple[str, Sequence[Tensor]]:
        require_blocking(async_op, here)
        _require_exchange(outputs, inputs, here)
        require_fillable("output_tensor_list", outputs, here)
        return f"all_to_all({inputs[0].dtype})", inputs

    def exchange_into(like: Sequence[Tensor]) -> Apply:
        places = [(x.shape, x.dtype, x.device) for x in like]

        def apply(sent: Sequence[Tensor]) -> Sequence[Tensor]:
            received = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in places]
            _exchange(received, sent, here).wait()
            return received

        return apply

    wanted = agree_on_gradients(here, check)
    exchange = LinearMap(exchange_into(outputs), exchange_into(inputs), here)
    for output, received in zip(outputs, synced(exchange, inputs, wanted), strict=True):
        output.copy_(received)
    return list(outputs)


def _exchange(outputs: Sequence[Tensor], inputs: Sequence[Tensor], here: Group) -> Handle:
    own_in = inputs[here.rank]
    check_call("all_to_all", here, own_in.dtype)
    if here.pg is None:
        copy_back(outputs[here.rank], own_in)
        return Handle((), here)
    return (_exchange_in_pairs if here.in_pairs else _exchange_at_once)(outputs, inputs, here)


def _exchange_in_pairs(outputs: Sequence[Tensor], inputs: Sequence[Tensor], here: Group) -> Handle:
    """Send to and receive from each other rank, out of the caller's own memory, and into it where it is free."""
    sent = {x.untyped_storage().data_ptr() for x in inputs}  # memory that must not change before it has left
    landing = [
        x if x.is_cpu and is_bare(x) and x.untyped_storage().data_ptr() not in sent else _on_comm_device(x, here)
        for x in outputs
    ]
    others = [rank for rank in range(here.size) if rank != here.rank]
    talking = talk(
        [(_travelling(landing[rank].detach()), rank) for rank in others if landing[rank].numel()],
        [(_travelling(to_comm(inputs[rank], here)), rank) for rank in others if inputs[rank].numel()],
        here,
    )
    copy_back(landing[here.rank], inputs[here.rank].detach())

    def finish() -> None:
        for output, landed in zip(outputs, landing, strict=True):
            if landed is not output:
                copy_back(output, landed)

    return Handle([talking], here, finish)


def _exchange_at_once(outputs: Sequence[Tensor], inputs: Sequence[Tensor], here: Group) -> Handle:
    """Exchange one tensor with the data for all ranks."""
    assert here.pg is not None
    parts = [_travelling(to_comm(x, here)).view(-1) for x in inputs]
    item_bytes = parts[0].element_size()
    sizes_out = [x.nbytes // item_bytes for x in outputs]
    received = torch.empty(sum(sizes_out), dtype=parts[0].dtype, device=here.comm_device)
    work = here.pg.alltoall_base(received, torch.cat(parts), sizes_out, [x.numel() for x in parts])

    def finish() -> None:
        for output, part in zip(outputs, torch.split_with_sizes(received, sizes_out), strict=True):
            if part.dtype != output.dtype:
                part = part.clone().view(output.dtype)  # a slice of bytes may not be aligned for the wider dtype
            copy_back(output, part)

    return Handle([work], here, finish)


def _on_comm_device(output: Tensor, here: Group) -> Tensor:
    return torch.empty(output.shape, dtype=output.dtype, device=here.comm_device)


def barrier(group: GroupLike = None, async_op: bool = False) -> Handle | None:
    """Wait until every rank of the group has come here.

    **Collective**: every rank of the group.

    **Example (2 ranks)**::

        >>> from lockstep.dist import barrier
        >>> barrier()  # here both ranks go on at about the same time
    """
    here = resolve(group)
    check_call("barrier", here)
    if here.pg is None:
        return Handle((), here) if async_op else None
    return settled(Handle([here.pg.barrier()], here), async_op)


def _travelling(wire: Tensor) -> Tensor:
    return wire if wire.dtype in _MOVABLE else as_bytes(wire)


@cache
def _broadcast_options(src: int, async_op: bool) -> BroadcastOptions:
    options = BroadcastOptions()
    options.rootRank, options.asyncOp = src, async_op
    return options
