"""Collectives that combine numbers: all_reduce, reduce, reduce_scatter. They add nothing to what is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from functools import reduce as fold
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor
from torch.distributed import (
    AllreduceOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    Work,
)

from lockstep.dist.arguments import group_rank, require_alike, require_list, require_tensor
from lockstep.dist.devices import copy_back, to_wire
from lockstep.dist.groups import Group, GroupLike, resolve
from lockstep.dist.guard import check_call
from lockstep.dist.handles import Handle, settled, wait_for
from lockstep.dist.reductions import Reduction, op_name, reduction

WireOp: TypeAlias = Any  # torch's stubs take a ReduceOp where its own constants are of another type

_BIT_OPS = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_AVERAGING_BACKENDS = ("gloo", "nccl")


@overload
def all_reduce(
    data: Tensor,
    op: str | ReduceOp.RedOpType = ...,
    group: GroupLike = ...,
    async_op: Literal[False] = ...,
) -> None: ...
@overload
def all_reduce(
    data: Tensor,
    op: str | ReduceOp.RedOpType = ...,
    group: GroupLike = ...,
    *,
    async_op: Literal[True],
) -> Handle: ...
@overload
def all_reduce(
    data: Tensor, op: str | ReduceOp.RedOpType = ..., group: GroupLike = ..., async_op: bool = ...
) -> Handle | None: ...
def all_reduce(
    data: Tensor,
    op: str | ReduceOp.RedOpType = "sum",
    group: GroupLike = None,
    async_op: bool = False,
) -> Handle | None:
    """Reduce `data` over all ranks, in place, so that every rank has the same result.

    Args:
        data: contiguous or not, on any device. Its dtype is kept: bool follows logic (sum, max: any; product, min:
            all),
            integers wrap around as in torch.
        op: sum, mean (avg), product (prod), min, max, band, bor, bxor, or torch's `ReduceOp`.
        group: where; None is the default group.
        async_op: return at once, with a handle to wait for.

    **Collective**: every rank of the group. **Shapes**: the same on every rank, any.

    **Raises**: TypeError where `op` has no meaning for the dtype; ValueError where the mean of integers is no whole
    number: on every rank, `data` unchanged.

    **Cost**: about ``2 * nbytes`` sent per rank; twice that for the mean of half types (averaged in float32) and of
    int64.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_reduce, get_rank
        >>> data = torch.tensor([1.0, 3.0]) * (get_rank() + 1)
        >>> all_reduce(data, op="mean")
        >>> data.tolist()
        [1.5, 4.5]

    **Source**: `torch.distributed.all_reduce` (2.13). On gloo the mean of integers, bool and int16 fail there, and a
    non-contiguous tensor is reduced in part without an error.
    """
    here = resolve(group)
    name, plan = _planned(data, op)
    check_call("all_reduce", here, data, name)
    if here.pg is None:
        _alone(data, plan)
        return Handle((), here) if async_op else None
    pg = here.pg

    def start(travelling: Tensor, wire_op: WireOp) -> Work:
        return pg.allreduce([travelling], _allreduce_options(wire_op, async_op))

    if (
        plan.encode is None
        and not async_op
        and data.device.type in here.devices
        and data.is_contiguous()
        and _runs_natively(plan.wire_op, here)
    ):  # the usual case, kept short: a 4-byte all_reduce is all overhead
        wait_for(start(data, plan.wire_op), here)
        return None
    return settled(_reduce(data, plan, here, start, keeps=True), async_op)


def reduce(
    data: Tensor,
    dst: int = 0,
    op: str | ReduceOp.RedOpType = "sum",
    group: GroupLike = None,
    async_op: bool = False,
) -> Handle | None:
    """Reduce `data` over all ranks into rank `dst`'s `data`, in place.

    On the other ranks `data` may serve as scratch space: its content afterwards is not defined, as with torch.

    Args: as for `all_reduce`; `dst` is a rank within the group.

    **Collective**: every rank of the group. **Raises**: as `all_reduce`; where the mean of integers is no whole
    number, on `dst` only,
    as only it sees the result. **Cost**: about ``nbytes`` sent per rank.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, reduce
        >>> data = torch.tensor([1, 2]) + get_rank()
        >>> reduce(data, dst=1)
        >>> data.tolist() if get_rank() == 1 else [3, 5]
        [3, 5]
    """
    here = resolve(group)
    name, plan = _planned(data, op)
    group_rank("dst", dst, here)
    check_call("reduce", here, data, name, dst)
    if here.pg is None:
        _alone(data, plan)
        return Handle((), here) if async_op else None
    pg = here.pg

    def start(travelling: Tensor, wire_op: WireOp) -> Work:
        options = ReduceOptions()
        options.reduceOp, options.rootRank = wire_op, dst
        return pg.reduce([travelling], options)

    return settled(_reduce(data, plan, here, start, keeps=here.rank == dst), async_op)


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: str | ReduceOp.RedOpType = "sum",
    group: GroupLike = None,
    async_op: bool = False,
) -> Handle | None:
    """Reduce the i-th tensors of all ranks' lists into rank i's `output`.

    Args:
        output: filled with the reduction of every rank's ``input_list[rank]``.
        input_list: one tensor for each rank; left as they are.
        op: as for `all_reduce`.
        group: where; None is the default group.
        async_op: return at once, with a handle to wait for.

    **Collective**: every rank of the group. **Shapes**: ``input_list[i]`` is the same on every rank; the entries may
    differ
    from each other. **Raises**: ValueError where `output` does not match ``input_list[rank]``.

    **Cost**: about the bytes of the whole list sent per rank.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, reduce_scatter
        >>> output = torch.empty(1 if get_rank() == 0 else 2)
        >>> reduce_scatter(output, [torch.ones(1), torch.ones(2)])
        >>> output.tolist() == ([2.0] if get_rank() == 0 else [2.0, 2.0])
        True
    """
    here = resolve(group)
    name, plan = _planned(output, op)
    require_list("input_list", input_list, here)
    require_alike("output", output, "input_list[rank]", input_list[here.rank], here)
    check_call("reduce_scatter", here, *input_list, name)
    if here.pg is None:
        output.copy_(input_list[0])
        _alone(output, plan)
        return Handle((), here) if async_op else None
    if len({entry.shape for entry in input_list}) > 1:
        return settled(_reduce_to_each(output, input_list, name, here), async_op)
    pg = here.pg
    wires = [to_wire(entry.detach(), here) for entry in input_list]
    travelling = wires if plan.encode is None else [plan.encode(wire) for wire in wires]

    def start(received: Tensor, wire_op: WireOp) -> Work:
        options = ReduceScatterOptions()
        options.reduceOp = wire_op
        return pg.reduce_scatter([received], [travelling], options)

    return settled(_reduce(output, plan, here, start, keeps=True), async_op)


def _reduce_to_each(output: Tensor, input_list: Sequence[Tensor], op: str, here: Group) -> Handle:
    """Run one reduction to each rank, all in flight at once, since the entries differ in shape."""
    copies = [x.detach().clone(memory_format=torch.contiguous_format) for x in input_list]
    handles = [reduce(x, dst, op, here.pg, async_op=True) for dst, x in enumerate(copies)]

    def finish() -> None:
        for handle in handles:
            assert handle is not None
            handle.wait()
        copy_back(output, copies[here.rank])

    return Handle((), here, finish)


def _reduce(
    data: Tensor,
    plan: Reduction,
    here: Group,
    start: Callable[[Tensor, WireOp], Work],
    *,
    keeps: bool,
) -> Handle:
    """Encode, start, and say how to finish; only a rank that `keeps` the result writes it back."""
    wire = to_wire(data.detach(), here)
    travelling = wire if plan.encode is None else plan.encode(wire)
    wire_op = plan.wire_op
    if wire_op in _BIT_OPS and not _runs_natively(wire_op, here):
        return _reduce_bits(data, wire, travelling, plan, here)
    divides = wire_op == ReduceOp.AVG and not _runs_natively(wire_op, here)
    work = start(travelling, ReduceOp.SUM if divides else wire_op)

    def finish() -> None:
        if keeps:
            if divides:
                travelling.div_(here.size)
            _deliver(data, wire, travelling, plan, here)

    return Handle([work], here, finish)


def _reduce_bits(data: Tensor, wire: Tensor, travelling: Tensor, plan: Reduction, here: Group) -> Handle:
    """Gather and combine locally: NCCL has no bit operations."""
    assert here.pg is not None
    parts = [torch.empty_like(travelling) for _ in range(here.size)]
    work = here.pg.allgather([parts], [travelling])

    def finish() -> None:
        travelling.copy_(fold(_BIT_OPS[plan.wire_op], parts))
        _deliver(data, wire, travelling, plan, here)

    return Handle([work], here, finish)


def _deliver(data: Tensor, wire: Tensor, travelled: Tensor, plan: Reduction, here: Group) -> None:
    result = wire if plan.decode is None else plan.decode(travelled, here.size)
    if result.data_ptr() != data.data_ptr() or result.device != data.device:
        copy_back(data, result)


def _alone(data: Tensor, plan: Reduction) -> None:
    """Reduce over one rank: through the same coding, so that one process answers as many do."""
    if plan.decode is not None and plan.encode is not None:
        wire = data.detach().contiguous()
        copy_back(data, plan.decode(plan.encode(wire).clone(), 1))


def _runs_natively(wire_op: WireOp, here: Group) -> bool:
    backend = str(here.backend)
    if wire_op == ReduceOp.AVG:
        return backend in _AVERAGING_BACKENDS
    return wire_op not in _BIT_OPS or "nccl" not in backend


def _planned(data: Tensor, op: object) -> tuple[str, Reduction]:
    name = op_name(op)
    require_tensor("data", data)
    return name, reduction(name, data.dtype)


@cache
def _allreduce_options(wire_op: WireOp, async_op: bool) -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp, options.asyncOp = wire_op, async_op
    return options
