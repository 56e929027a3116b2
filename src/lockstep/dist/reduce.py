"""Collectives that combine numbers: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

import torch
import torch.distributed as torch_dist
from torch import Tensor

from lockstep.device import copy_into
from lockstep.dist.consistency import check_call
from lockstep.dist.gradients import (
    LinearMap,
    apply_with_gradients,
    describe,
    fill_in_graph,
    require_linear,
    warn_of_lost_gradients,
)
from lockstep.dist.validate import NOT_GIVEN, No, Yes, either, require_alike, require_list, require_rank, require_tensor
from lockstep.groups import BIT_OPS, Comm, GroupLike, resolve
from lockstep.transport.control import report_failure
from lockstep.transport.handles import Handle, start, wait_unless_async
from lockstep.transport.moving import gather_into, is_plain_memory, send_to_each, used_on_current_stream
from lockstep.transport.reduce_ops import TORCH_OPS, OpLike, OpName, Reduction, combine, op_name, reduction


@overload
def all_reduce(
    data: Tensor = ...,
    op: OpLike = ...,
    group: GroupLike = ...,
    async_op: No = ...,
    *,
    sync_grads: No = ...,
    tensor: Tensor = ...,
) -> None: ...
@overload
def all_reduce(
    data: Tensor = ..., op: OpLike = ..., group: GroupLike = ..., *, async_op: Yes, tensor: Tensor = ...
) -> Handle: ...
@overload
def all_reduce(
    data: Tensor = ..., op: OpLike = ..., group: GroupLike = ..., *, sync_grads: Yes, tensor: Tensor = ...
) -> Tensor: ...
def all_reduce(
    data: Tensor = NOT_GIVEN,
    op: OpLike = "sum",
    group: GroupLike = None,
    async_op: bool = False,
    *,
    sync_grads: bool = False,
    tensor: Tensor = NOT_GIVEN,
) -> Handle | Tensor | None:
    """Reduce `data` over all ranks, in place, so that every rank has the same result.

    Args:
        data: contiguous or not, on any device. Its dtype is kept: for bool, sum and max mean any, product and min mean
            all; integers wrap around as in torch. A leaf that requires grad, such as a parameter, gets its new values
            as if under ``torch.no_grad()``.
        op: sum, mean (avg), product (prod), min, max, band, bor, bxor, or torch's `ReduceOp`. Of min and max, too, the
            result is NaN where any rank has NaN.
        group: the process group; None is the default group.
        async_op: return at once, with a handle to wait for.
        sync_grads: leave `data` unchanged, and return the result as a new tensor through which gradients flow back to
            every rank; sum and mean only. Every rank must then run backward through it.
        tensor: an alias for `data`.

    **Collective**: every rank of the group. **Shapes**: the same on every rank, any.

    **Gradients**: without `sync_grads` a tensor with a graph gets new values, but its gradient stays that of this
    rank's own value; a warning says so once for each calling line. With it, the gradient of `data` is the same
    reduction of the gradients of all ranks' results: the gradient of the sum of all ranks' losses. DDP and FSDP then
    average the gradients of the parameters, which gives the gradient of the mean of all ranks' losses.

    **Raises**: TypeError if `op` has no meaning for the dtype, or `data` is no dense tensor; ValueError if its elements
    share memory, as after ``expand``; and, on every rank and with `data` unchanged, if the mean of integers is not a
    whole number. With `sync_grads`, CollectiveMismatchError on every rank if dtypes or shapes differ, and PeerError if
    the arguments of another rank are wrong.

    **Cost**: about ``2 * nbytes`` sent per rank, with ``nbytes`` in the dtype that is sent: float32 for the mean, and
    int32 for min and max, of half types; two int64 per element for the mean of integers and bool; int32 for other
    reductions of int16 and uint16 and for the bxor of bool; int64 for uint32. With `sync_grads`, an exchange of
    256 bytes between the hosts comes first, and backward sends the same bytes as the call.

    **Example (2 ranks)**::

        >>> from lockstep.dist import all_reduce, get_rank
        >>> data = torch.tensor([1.0, 3.0]) * (get_rank() + 1)
        >>> all_reduce(data, op="mean")
        >>> data.tolist()
        [1.5, 4.5]
        >>> weight = torch.tensor(2.0, requires_grad=True)
        >>> total = all_reduce(weight * (get_rank() + 1), sync_grads=True)
        >>> (total**2 / 2).backward()  # (6**2 / 2) on each of the ranks: 2 * 6 times this rank's own factor
        >>> total.item(), weight.grad.item() / (get_rank() + 1)
        (6.0, 12.0)

    **Source**: `torch.distributed.all_reduce` (2.13). On gloo the mean of integers, bool and int16 fail there, a
    non-contiguous tensor is reduced in part without an error, and min and max lose NaN of some ranks.
    """
    comm = resolve(group)
    data = either("data", data, "tensor", tensor)
    if sync_grads:
        return _all_reduce_with_grads(data, op, comm, async_op)
    name = _checked_op("data", data, op)
    warn_of_lost_gradients("all_reduce", filled=[data], has_sync_grads=True)
    check_call("all_reduce", comm, data, name, async_op=async_op)
    return wait_unless_async(start_reduction(data, None, name, comm, async_op), async_op)


@overload
def reduce(
    data: Tensor = ...,
    dst: int = ...,
    op: OpLike = ...,
    group: GroupLike = ...,
    async_op: No = ...,
    *,
    tensor: Tensor = ...,
) -> None: ...
@overload
def reduce(
    data: Tensor = ..., dst: int = ..., op: OpLike = ..., group: GroupLike = ..., *, async_op: Yes, tensor: Tensor = ...
) -> Handle: ...
def reduce(
    data: Tensor = NOT_GIVEN,
    dst: int = 0,
    op: OpLike = "sum",
    group: GroupLike = None,
    async_op: bool = False,
    *,
    tensor: Tensor = NOT_GIVEN,
) -> Handle | None:
    """Reduce `data` over all ranks into rank `dst`'s `data`, in place.

    On the other ranks `data` may be used as scratch space: its content afterwards is undefined, as with torch.

    Args: as for `all_reduce`, without `sync_grads`; `dst` is a rank within the group.

    **Collective**: every rank of the group. **Raises**: as `all_reduce`; if the mean of integers is not a whole number,
    on `dst` only, because only `dst` sees the result. **Cost**: about ``nbytes`` sent per rank.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, reduce
        >>> data = torch.tensor([1, 2]) + get_rank()
        >>> reduce(data, dst=1)
        >>> data.tolist() if get_rank() == 1 else [3, 5]
        [3, 5]
    """
    comm = resolve(group)
    data = either("data", data, "tensor", tensor)
    name = _checked_op("data", data, op)
    dst = require_rank("dst", dst, comm)
    warn_of_lost_gradients("reduce", filled=[data])
    check_call("reduce", comm, data, name, dst, async_op=async_op)
    return wait_unless_async(start_reduction(data, dst, name, comm, async_op), async_op)


def start_reduction(data: Tensor, dst: int | None, op: OpName, comm: Comm, async_op: bool) -> Handle:
    """Reduce into rank `dst`'s data, or into every rank's if `dst` is None; without `async_op`, this may block."""
    if comm.pg is None:
        return Handle((), comm)
    collective = torch_dist.all_reduce if dst is None else partial(torch_dist.reduce, group_dst=dst)
    return _reduce(data, reduction(op, data.dtype), comm, collective, async_op, keeps=dst in (None, comm.rank))


@overload
def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: OpLike = ...,
    group: GroupLike = ...,
    async_op: No = ...,
    *,
    sync_grads: No = ...,
) -> None: ...
@overload
def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: OpLike = ..., group: GroupLike = ..., *, async_op: Yes
) -> Handle: ...
@overload
def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: OpLike = ..., group: GroupLike = ..., *, sync_grads: Yes
) -> Tensor: ...
def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: OpLike = "sum",
    group: GroupLike = None,
    async_op: bool = False,
    *,
    sync_grads: bool = False,
) -> Handle | Tensor | None:
    """Reduce the i-th tensors of all ranks' lists into rank i's `output`.

    Args:
        output: filled with the reduction of every rank's ``input_list[rank]``.
        input_list: one tensor for each rank; not changed.
        op: as for `all_reduce`.
        group: the process group; None is the default group.
        async_op: return at once, with a handle to wait for.
        sync_grads: fill `output` as part of the autograd graph, so that gradients flow back to every rank's list, and
            return it; sum and mean only. Every rank must then run backward through it.

    **Collective**: every rank of the group. **Shapes**: ``input_list[i]`` is the same on every rank; the entries may
    differ from each other. **Raises**: ValueError if `output` does not match ``input_list[rank]``.

    **Gradients**: as for `all_reduce`: the gradient of ``input_list[i]`` is that of rank i's output, on every rank (for
    the mean, divided by the group size).

    **Cost**: each rank sends about the bytes of its whole list. With `sync_grads`, an exchange of 256
    bytes between the hosts comes first, and in backward it sends the gradient of its output to each rank.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, reduce_scatter
        >>> output = torch.empty(1 if get_rank() == 0 else 2)
        >>> reduce_scatter(output, [torch.ones(1), torch.ones(2)])
        >>> output.tolist() == ([2.0] if get_rank() == 0 else [2.0, 2.0])
        True
    """
    comm = resolve(group)
    if sync_grads:
        return _reduce_scatter_with_grads(output, input_list, op, comm, async_op)
    name = _checked_op("output", output, op)
    _require_entries(output, input_list, comm)
    warn_of_lost_gradients("reduce_scatter", input_list, [output], has_sync_grads=True)
    return wait_unless_async(_reduce_scatter(output, input_list, name, comm, async_op), async_op)


def _require_entries(output: Tensor, input_list: Sequence[Tensor], comm: Comm) -> None:
    require_list("input_list", input_list, comm)
    require_alike("output", output, "`input_list[rank]`", input_list[comm.rank], comm)
    if any(entry.dtype != output.dtype for entry in input_list):
        dtypes = sorted({str(entry.dtype) for entry in input_list})
        raise ValueError(f"`input_list` must have one dtype, but has {', '.join(dtypes)} ({comm.this_rank})")


def _reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: OpName, comm: Comm, async_op: bool = False
) -> Handle:
    check_call("reduce_scatter", comm, *input_list, op, async_op=async_op)
    if comm.pg is None:
        copy_into(output, input_list[0])
        return Handle((), comm)
    plan = reduction(op, output.dtype)
    device = output.device if comm.carries(output) else comm.comm_device
    wires = [comm.to_wire(entry).to(device) for entry in input_list]
    travelling = wires if plan.encode is None else [plan.encode(wire) for wire in wires]
    is_even = len({entry.shape for entry in input_list}) == 1
    if not is_even or plan.wire_op in comm.missing_ops or (async_op and device.type == "cpu"):
        return _combine_here(output, travelling, plan, comm, async_op)

    def finish() -> None:
        for sent in travelling if async_op else ():
            used_on_current_stream(sent)

    collective = partial(torch_dist.reduce_scatter, input_list=travelling)
    return Handle([_reduce(output, plan, comm, collective, async_op)], comm, finish)


def _combine_here(output: Tensor, travelling: Sequence[Tensor], plan: Reduction, comm: Comm, async_op: bool) -> Handle:
    """Send each rank its tensors, which it combines: entries of any shape, and what a backend can't reduce.

    Also with `async_op` on the CPU, where a `reduce_scatter` can't be asked whether it is complete (gloo, torch 2.13).
    """
    own = travelling[comm.rank]
    received, handle = send_to_each(travelling, [own.numel()] * comm.size, comm, async_op)

    def finish() -> None:
        parts = received.view(comm.size, *own.shape).unbind()
        total = parts[0]
        combine(parts, plan.wire_op, total)
        # What is encoded without a `decode` is a view of another dtype.
        copy_into(output, total.view(output.dtype) if plan.decode is None else plan.decode(total, comm.size))

    return Handle([handle], comm, finish)


def _all_reduce_with_grads(data: Tensor, op: object, comm: Comm, async_op: bool) -> Tensor:
    check_call("all_reduce", comm, "sync_grads", compares=False)
    with report_failure(comm):
        name = _checked_op("data", data, op, is_filled=False)
        require_linear(comm, async_op, name)

    def total(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        result = inputs[0].clone(memory_format=torch.contiguous_format)
        check_call("all_reduce", comm, result, name)
        start_reduction(result, None, name, comm, async_op=False).wait()
        return [result]

    return apply_with_gradients("all_reduce", LinearMap(total, total, comm), [data], describe([data]), name)[0]


def _reduce_scatter_with_grads(
    output: Tensor, input_list: Sequence[Tensor], op: object, comm: Comm, async_op: bool
) -> Tensor:
    check_call("reduce_scatter", comm, "sync_grads", compares=False)
    with report_failure(comm):
        name = _checked_op("output", output, op)
        _require_entries(output, input_list, comm)
        require_linear(comm, async_op, name, "output", [output])
    like = [(x.shape, x.device) for x in input_list]

    def scatter(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [scatter_reduced(inputs, name, comm)]

    def send_back(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Give every rank every rank's gradient: the transpose of a `reduce_scatter`."""
        wire = comm.to_wire(gradients[0] / comm.size if name == "mean" else gradients[0])
        received = [torch.empty(shape, dtype=wire.dtype, device=wire.device) for shape, _ in like]
        gather_into(received, wire, comm).wait()
        return [x.to(device) for x, (_, device) in zip(received, like, strict=True)]

    linear = LinearMap(scatter, send_back, comm)
    parts = apply_with_gradients("reduce_scatter", linear, input_list, describe(input_list), name)
    return fill_in_graph([output], parts)[0]


def scatter_reduced(entries: Sequence[Tensor], op: OpName, comm: Comm) -> Tensor:
    """Return the reduction of all ranks' ``entries[rank]``; as a sum, it is the transpose of what `all_gather` does."""
    own = entries[comm.rank]
    output = torch.empty(own.shape, dtype=own.dtype, device=own.device)
    _reduce_scatter(output, entries, op, comm).wait()
    return output


def _reduce(
    data: Tensor,
    plan: Reduction,
    comm: Comm,
    collective: Callable[..., Any],
    async_op: bool,
    *,
    keeps: bool = True,
) -> Handle:
    """Encode, run the collective, and return a handle that finishes it; `keeps`: write the result back to `data`.

    An operation that the backend lacks is computed here: bitwise ones from the tensors of all ranks, the mean from the
    sum.
    """

    def run(travelling: Tensor, wire_op: OpName) -> Any:
        return start(collective, comm, travelling.device, travelling, op=TORCH_OPS[wire_op], async_op=async_op)

    is_missing = plan.wire_op in comm.missing_ops
    # The usual case is kept short, because in small calls the overhead dominates. gloo would record what it does to a
    # tensor that requires grad.
    is_plain = plan.encode is None and is_plain_memory(data) and not data.requires_grad
    if is_plain and not is_missing and comm.carries(data):
        return Handle([run(data, plan.wire_op)], comm)
    wire = comm.to_wire(data)
    travelling = wire if plan.encode is None else plan.encode(wire)
    parts: list[Tensor] = []
    if is_missing and plan.wire_op in BIT_OPS:
        parts = [torch.empty_like(travelling) for _ in range(comm.size)]
        work = start(torch_dist.all_gather, comm, travelling.device, parts, travelling, async_op=True)
    else:
        work = run(travelling, "sum" if is_missing else plan.wire_op)

    def finish() -> None:
        used_on_current_stream(travelling)
        if not keeps:
            return
        if parts:
            combine([used_on_current_stream(part) for part in parts], plan.wire_op, travelling)
        elif is_missing:
            travelling.div_(comm.size)
        result = wire if plan.decode is None else plan.decode(travelling, comm.size)
        if result.data_ptr() != data.data_ptr() or result.device != data.device:
            copy_into(data, result)

    return Handle([work], comm, finish)


def _checked_op(argument: str, data: Tensor, op: object, *, is_filled: bool = True) -> OpName:
    name = op_name(op)
    require_tensor(argument, data, is_filled=is_filled)
    reduction(name, data.dtype)  # raises if there is none
    return name
