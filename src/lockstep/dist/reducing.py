"""Collectives that combine numbers: all_reduce, reduce, reduce_scatter. They add nothing to what is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from functools import reduce as fold
from typing import Literal, overload

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ReduceOp, ReduceOptions, ReduceScatterOptions, Work

from lockstep.dist.arguments import (
    NOT_GIVEN,
    PLAIN_TYPES,
    either,
    group_rank,
    require_alike,
    require_list,
    require_memory,
    require_tensor,
)
from lockstep.dist.devices import as_bytes, copy_back, to_comm, to_wire
from lockstep.dist.gradients import (
    ENDS_HERE,
    STAYS_LOCAL,
    LinearMap,
    agree_on_gradients,
    describe,
    require_blocking,
    require_fillable,
    require_linear,
    synced,
    warn_of_lost_gradients,
)
from lockstep.dist.groups import Group, GroupLike, resolve
from lockstep.dist.guard import check_call, watch
from lockstep.dist.handles import Handle, settled, wait_for
from lockstep.dist.reductions import TORCH_OPS, Reduction, op_name, reduction
from lockstep.dist.segments import broadcast_each

_BIT_OPS = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}


@overload
def all_reduce(
    data: Tensor = ...,
    op: str | ReduceOp.RedOpType = ...,
    group: GroupLike = ...,
    async_op: Literal[False] = ...,
    *,
    sync_grads: Literal[False] = ...,
    tensor: Tensor = ...,
) -> None: ...
@overload
def all_reduce(
    data: Tensor = ...,
    op: str | ReduceOp.RedOpType = ...,
    group: GroupLike = ...,
    *,
    async_op: Literal[True],
    sync_grads: Literal[False] = ...,
    tensor: Tensor = ...,
) -> Handle: ...
@overload
def all_reduce(
    data: Tensor = ...,
    op: str | ReduceOp.RedOpType = ...,
    group: GroupLike = ...,
    async_op: Literal[False] = ...,
    *,
    sync_grads: Literal[True],
    tensor: Tensor = ...,
) -> Tensor: ...
@overload
def all_reduce(
    data: Tensor = ...,
    op: str | ReduceOp.RedOpType = ...,
    group: GroupLike = ...,
    async_op: bool = ...,
    *,
    sync_grads: bool = ...,
    tensor: Tensor = ...,
) -> Handle | Tensor | None: ...
def all_reduce(
    data: Tensor = NOT_GIVEN,
    op: str | ReduceOp.RedOpType = "sum",
    group: GroupLike = None,
    async_op: bool = False,
    *,
    sync_grads: bool = False,
    tensor: Tensor = NOT_GIVEN,
) -> Handle | Tensor | None:
    """Reduce `data` over all ranks, in place, so that every rank has the same result.

    Args:
        data: contiguous or not, on any device. Its dtype is kept: bool follows logic (sum, max: any; product, min:
            all), integers wrap around as in torch. A leaf that requires grad, such as a parameter, gets its new values
            as it would under ``torch.no_grad()``.
        op: sum, mean (avg), product (prod), min, max, band, bor, bxor, or torch's `ReduceOp`.
        group: where; None is the default group.
        async_op: return at once, with a handle to wait for.
        sync_grads: leave `data` as it is, and return the result as a new tensor through which gradients flow back to
            every rank; sum and mean only. Every rank has to run backward through it then.
        tensor: `data` by its other published name.

    **Collective**: every rank of the group. **Shapes**: the same on every rank, any.

    **Gradients**: without `sync_grads` a tensor with a graph gets new values, but its gradient stays that of this
    rank's own, of which a warning tells once for each calling line. With it, the gradient of `data` is the same
    reduction of the gradients of all ranks' results: the one of the sum of all ranks' losses. Where DDP or FSDP average
    the gradients of the parameters, they come out as those of the mean of all ranks' losses.

    **Raises**: TypeError where `op` has no meaning for the dtype; ValueError where the mean of integers is no whole
    number: on every rank, `data` unchanged. With `sync_grads` CollectiveMismatchError on every rank where dtypes or
    shapes differ, and PeerError where the arguments of another rank are wrong.

    **Cost**: about ``2 * nbytes`` sent per rank; twice that for the mean of half types (averaged in float32) and of
    int64. With `sync_grads` a slot of 512 bytes from each rank to each before, and the same bytes again in backward.

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

    **Source**: `torch.distributed.all_reduce` (2.13). On gloo the mean of integers, bool and int16 fail there, and a
    non-contiguous tensor is reduced in part without an error.
    """
    here = resolve(group)
    data = either("data", data, "tensor", tensor)
    if sync_grads:
        return _all_reduce_with_grads(data, op, here, async_op)
    with watch("all_reduce", here):
        name, plan = _planned(data, op)
        require_memory("data", data)
    if data.requires_grad and not data.is_leaf:
        warn_of_lost_gradients("all_reduce", STAYS_LOCAL, has_sync_grads=True)
    return _all_reduce(data, name, plan, here, async_op)


def reduce(
    data: Tensor = NOT_GIVEN,
    dst: int = 0,
    op: str | ReduceOp.RedOpType = "sum",
    group: GroupLike = None,
    async_op: bool = False,
    *,
    tensor: Tensor = NOT_GIVEN,
) -> Handle | None:
    """Reduce `data` over all ranks into rank `dst`'s `data`, in place.

    On the other ranks `data` may serve as scratch space: its content afterwards is not defined, as with torch.

    Args: as for `all_reduce`, `sync_grads` apart; `dst` is a rank within the group.

    **Collective**: every rank of the group. **Raises**: as `all_reduce`; where the mean of integers is no whole number,
    on `dst` only, as only it sees the result. **Cost**: about ``nbytes`` sent per rank.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, reduce
        >>> data = torch.tensor([1, 2]) + get_rank()
        >>> reduce(data, dst=1)
        >>> data.tolist() if get_rank() == 1 else [3, 5]
        [3, 5]
    """
    here = resolve(group)
    data = either("data", data, "tensor", tensor)
    with watch("reduce", here):
        name, plan = _planned(data, op)
        require_memory("data", data)
        dst = group_rank("dst", dst, here)
    if data.requires_grad and not data.is_leaf:
        warn_of_lost_gradients("reduce", STAYS_LOCAL)
    return _reduce_to(data, dst, name, plan, here, async_op)


def _all_reduce(data: Tensor, name: str, plan: Reduction, here: Group, async_op: bool) -> Handle | None:
    check_call("all_reduce", here, data, name)
    if here.pg is None:
        _alone(data, plan)
        return Handle((), here) if async_op else None
    pg = here.pg
    if _is_plain(data, plan, here, async_op):
        wait_for(pg.allreduce([data], _allreduce_options(plan.wire_op, False)), here)
        return None

    def start(travelling: Tensor, wire_op: str) -> Work:
        return pg.allreduce([travelling], _allreduce_options(wire_op, async_op))

    return settled(_reduce(data, plan, here, start, keeps=True), async_op)


def _reduce_to(data: Tensor, dst: int, name: str, plan: Reduction, here: Group, async_op: bool) -> Handle | None:
    check_call("reduce", here, data, name, dst)
    if here.pg is None:
        _alone(data, plan)
        return Handle((), here) if async_op else None
    pg = here.pg

    if _is_plain(data, plan, here, async_op):
        wait_for(pg.reduce([data], _reduce_options(plan.wire_op, dst)), here)
        return None

    def start(travelling: Tensor, wire_op: str) -> Work:
        return pg.reduce([travelling], _reduce_options(wire_op, dst))

    return settled(_reduce(data, plan, here, start, keeps=here.rank == dst), async_op)


@overload
def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: str | ReduceOp.RedOpType = ...,
    group: GroupLike = ...,
    async_op: bool = ...,
    *,
    sync_grads: Literal[False] = ...,
) -> Handle | None: ...
@overload
def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: str | ReduceOp.RedOpType = ...,
    group: GroupLike = ...,
    async_op: Literal[False] = ...,
    *,
    sync_grads: Literal[True],
) -> Tensor: ...
def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: str | ReduceOp.RedOpType = "sum",
    group: GroupLike = None,
    async_op: bool = False,
    *,
    sync_grads: bool = False,
) -> Handle | Tensor | None:
    """Reduce the i-th tensors of all ranks' lists into rank i's `output`.

    Args:
        output: filled with the reduction of every rank's ``input_list[rank]``.
        input_list: one tensor for each rank; left as they are.
        op: as for `all_reduce`.
        group: where; None is the default group.
        async_op: return at once, with a handle to wait for.
        sync_grads: fill `output` within the graph, so that gradients flow back to every rank's list, and return it; sum
            and mean only. Every rank has to run backward through it then.

    **Collective**: every rank of the group. **Shapes**: ``input_list[i]`` is the same on every rank; the entries may
    differ from each other. **Raises**: ValueError where `output` does not match ``input_list[rank]``.

    **Gradients**: as for `all_reduce`: the gradient of ``input_list[i]`` is that of rank i's output, on every rank.

    **Cost**: about the bytes of the whole list sent per rank. With `sync_grads` a slot of 512 bytes from each rank to
    each before, and in backward the gradient of every rank's output to each.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank, reduce_scatter
        >>> output = torch.empty(1 if get_rank() == 0 else 2)
        >>> reduce_scatter(output, [torch.ones(1), torch.ones(2)])
        >>> output.tolist() == ([2.0] if get_rank() == 0 else [2.0, 2.0])
        True
    """
    here = resolve(group)
    if sync_grads:
        return _reduce_scatter_with_grads(output, input_list, op, here, async_op)
    with watch("reduce_scatter", here):
        name, plan = _planned(output, op, "output")
        is_plain = not async_op and _is_plain_list(input_list, output, plan, here)
        if not is_plain:
            _require_entries(output, input_list, here)
    if is_plain:
        check_call("reduce_scatter", here, *input_list, name)
        assert here.pg is not None  # it moves tensors
        work = here.pg.reduce_scatter([output], [list(input_list)], _reduce_scatter_options(plan.wire_op))
        wait_for(work, here)
        return None
    if (output.requires_grad and not output.is_leaf) or any(x.requires_grad for x in input_list):
        warn_of_lost_gradients("reduce_scatter", ENDS_HERE, has_sync_grads=True)
    return settled(_reduce_scatter(output, input_list, name, plan, here), async_op)


def _require_entries(output: Tensor, input_list: Sequence[Tensor], here: Group) -> None:
    require_list("input_list", input_list, here)
    require_alike("output", output, "input_list[rank]", input_list[here.rank], here)
    if any(entry.dtype != output.dtype for entry in input_list):
        dtypes = sorted({str(entry.dtype) for entry in input_list})
        raise ValueError(f"`input_list` must have one dtype, but has {', '.join(dtypes)} ({here.here})")
    require_memory("output", output)


def _reduce_scatter(output: Tensor, input_list: Sequence[Tensor], name: str, plan: Reduction, here: Group) -> Handle:
    check_call("reduce_scatter", here, *input_list, name)
    if here.pg is None:
        copy_back(output, input_list[0])
        _alone(output, plan)
        return Handle((), here)
    shape = input_list[0].shape
    if plan.wire_op in here.lacks or any(entry.shape != shape for entry in input_list):
        return _reduce_to_each(output, input_list, name, plan, here)
    pg = here.pg
    wires = [to_wire(entry, here) for entry in input_list]
    travelling = wires if plan.encode is None else [plan.encode(wire) for wire in wires]

    def start(received: Tensor, wire_op: str) -> Work:
        return pg.reduce_scatter([received], [travelling], _reduce_scatter_options(wire_op))

    return _reduce(output, plan, here, start, keeps=True)


def _reduce_to_each(output: Tensor, input_list: Sequence[Tensor], name: str, plan: Reduction, here: Group) -> Handle:
    """Run one reduction to each rank, all in flight at once, since the entries differ in shape."""
    copies = [x.detach().clone(memory_format=torch.contiguous_format) for x in input_list]
    handles = [_reduce_to(x, dst, name, plan, here, async_op=True) for dst, x in enumerate(copies)]

    started = [handle for handle in handles if handle is not None]
    return Handle(started, here, lambda: copy_back(output, copies[here.rank]))


def _all_reduce_with_grads(data: Tensor, op: object, here: Group, async_op: bool) -> Tensor:
    def check() -> tuple[str, Sequence[Tensor]]:
        require_blocking(async_op, here)
        name, _ = _planned(data, op)
        require_linear(name, here)
        return f"all_reduce({describe([data])}, {name})", [data]

    wanted = agree_on_gradients(here, check)
    name, plan = _planned(data, op)

    def total(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        result = inputs[0].clone(memory_format=torch.contiguous_format)
        _all_reduce(result, name, plan, here, async_op=False)
        return [result]

    return synced(LinearMap(total, total, here), [data], wanted)[0]


def _reduce_scatter_with_grads(
    output: Tensor, input_list: Sequence[Tensor], op: object, here: Group, async_op: bool
) -> Tensor:
    def check() -> tuple[str, Sequence[Tensor]]:
        require_blocking(async_op, here)
        name, _ = _planned(output, op, "output")
        require_linear(name, here)
        _require_entries(output, input_list, here)
        require_fillable("output", [output], here)
        return f"reduce_scatter({describe(input_list)}, {name})", input_list

    wanted = agree_on_gradients(here, check)
    name, plan = _planned(output, op, "output")
    like = [(x.shape, x.device) for x in input_list]

    def scatter(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        result = torch.empty(like[here.rank][0], dtype=inputs[0].dtype, device=like[here.rank][1])
        _reduce_scatter(result, inputs, name, plan, here).wait()
        return [result]

    def spread(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        own = gradients[0] / here.size if name == "mean" else gradients[0]
        return _on_every_rank(own, like, here)

    output.copy_(synced(LinearMap(scatter, spread, here), input_list, wanted)[0])
    return output


def scatter_sums(entries: Sequence[Tensor], here: Group) -> Tensor:
    """Return the sum of all ranks' ``entries[rank]``: the transpose of what `all_gather` does."""
    own = entries[here.rank]
    output = torch.empty(own.shape, dtype=own.dtype, device=own.device)
    _reduce_scatter(output, entries, "sum", reduction("sum", own.dtype), here).wait()
    return output


def _on_every_rank(own: Tensor, like: Sequence[tuple[torch.Size, torch.device]], here: Group) -> list[Tensor]:
    """Return every rank's tensor, whose shapes all know: the transpose of what `reduce_scatter` does."""
    wire = to_comm(own, here)
    landing = [torch.empty(shape, dtype=wire.dtype, device=here.comm_device) for shape, _ in like]
    segments = [[as_bytes(x)] if x.numel() else [] for x in landing]
    broadcast_each([as_bytes(wire)] if wire.numel() else [], segments, here).wait()
    return [x.to(device) for x, (_, device) in zip(landing, like, strict=True)]


def _reduce(
    data: Tensor,
    plan: Reduction,
    here: Group,
    start: Callable[[Tensor, str], Work],
    *,
    keeps: bool,
) -> Handle:
    """Encode, start, and say how to finish; only a rank that `keeps` the result writes it back."""
    wire = to_wire(data, here)
    travelling = wire if plan.encode is None else plan.encode(wire)
    wire_op = plan.wire_op
    if wire_op in here.lacks and wire_op in _BIT_OPS:
        return _reduce_bits(data, wire, travelling, plan, here)
    divides = wire_op in here.lacks  # the mean
    work = start(travelling, "sum" if divides else wire_op)

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


def _is_plain(data: Tensor, plan: Reduction, here: Group, async_op: bool) -> bool:
    """Return whether the backend can take `data` as it is.

    The usual case, kept short, as small calls are all overhead.
    """
    return (
        plan.encode is None
        and not async_op
        and data.is_contiguous()
        and not data.is_neg()
        and not data.requires_grad  # gloo divides and copies in sight of autograd
        and plan.wire_op not in here.lacks
        and data.device.type in here.devices
    )


def _is_plain_list(entries: Sequence[Tensor], output: Tensor, plan: Reduction, here: Group) -> bool:
    """Return whether the backend can take `entries` and `output` as they are; anything wrong with them is no."""
    if not isinstance(entries, list | tuple) or len(entries) != here.size or not _is_plain(output, plan, here, False):
        return False
    shape, dtype = output.shape, output.dtype
    return all(
        type(entry) in PLAIN_TYPES
        and not entry.is_nested
        and entry.dtype is dtype
        and entry.shape == shape
        and entry.layout is torch.strided
        and _is_plain(entry, plan, here, False)
        for entry in entries
    )


def _planned(data: Tensor, op: object, argument: str = "data") -> tuple[str, Reduction]:
    name = op_name(op)
    require_tensor(argument, data)
    return name, reduction(name, data.dtype)


@cache
def _allreduce_options(wire_op: str, async_op: bool) -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp, options.asyncOp = TORCH_OPS[wire_op], async_op  # type: ignore[assignment]
    return options


@cache
def _reduce_options(wire_op: str, dst: int) -> ReduceOptions:
    options = ReduceOptions()
    options.reduceOp, options.rootRank = TORCH_OPS[wire_op], dst  # type: ignore[assignment]
    return options


@cache
def _reduce_scatter_options(wire_op: str) -> ReduceScatterOptions:
    options = ReduceScatterOptions()
    options.reduceOp = TORCH_OPS[wire_op]  # type: ignore[assignment]  # torch's stubs know no ReduceOp.RedOpType
    return options
