"""The calls of lockstep.dist on tensors of the device that there is, on any number of ranks, with what each rank gets.

A case is a function of a rank and the number of ranks: it makes what the call takes, and returns the call and its
result. Tensors are made before, because making one from numbers waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from lockstep import dist
from lockstep.tree import tree_map

from .guard import no_syncs

Case = Callable[[int, int], tuple[Callable[[], Any], Any]]
LARGE = 2**20  # elements


def on(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(dist.get_device())


def changed(call: Callable[[Tensor], Any], data: Tensor) -> Tensor:
    """Let a call change a tensor, wait for its handle if it gives one, and return the tensor."""
    handle = call(data)
    if handle is not None and hasattr(handle, "wait"):
        handle.wait()
    return data


def reduced(op: str, own: Callable[[int], list[float]], dtype: torch.dtype = torch.float32, **options: Any) -> Case:
    """An all_reduce of a tensor that holds `own(rank)`."""

    def case(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
        data = on(*own(rank), dtype=dtype)
        columns = [torch.tensor(column, dtype=dtype) for column in zip(*map(own, range(size)), strict=True)]
        results = {
            "sum": lambda x: x.sum(dtype=None if dtype.is_floating_point else torch.int64),
            "mean": lambda x: x.to(torch.float64).mean(),
            "product": lambda x: x.prod(),
            "min": lambda x: x.min(),
            "max": lambda x: x.max(),
            "band": partial(_folded, torch.bitwise_and),
            "bor": partial(_folded, torch.bitwise_or),
            "bxor": partial(_folded, torch.bitwise_xor),
        }
        expected = torch.stack([results[op](column).to(dtype) for column in columns])
        return partial(changed, lambda x: dist.all_reduce(x, op, **options), data), expected.tolist()

    return case


def _folded(combine: Callable[[Tensor, Tensor], Tensor], column: Tensor) -> Tensor:
    result = column[0]
    for other in column[1:]:
        result = combine(result, other)
    return result


def a_view(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    data = on(rank, 7, rank, 7)
    return partial(changed, lambda x: dist.all_reduce(x[::2]), data), [sum(range(size)), 7, sum(range(size)), 7]


def large(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    data = torch.full((LARGE,), 1.0 + rank, device=dist.get_device())
    return lambda: changed(dist.all_reduce, data)[-2:], [sum(range(1, size + 1))] * 2


def reduce_to_last(rank: int, size: int, **options: Any) -> tuple[Callable[[], Any], Any]:
    """On the other ranks the tensor is scratch space."""
    data, is_dst = on(1 + rank), rank == size - 1
    expected = [sum(range(1, size + 1))] if is_dst else None

    def call() -> Tensor | None:
        changed(lambda x: dist.reduce(x, size - 1, **options), data)
        return data if is_dst else None

    return call, expected


def broadcast_from_last(rank: int, size: int, step: int = 1, **options: Any) -> tuple[Callable[[], Any], Any]:
    data = on(rank, rank, rank, rank)
    expected = [size - 1 if index % step == 0 else rank for index in range(4)]
    return partial(changed, lambda x: dist.broadcast(x[::step], size - 1, **options), data), expected


def gathered(make: Callable[[int], Tensor], gather: Callable[[Tensor], Any], on_rank: int | None = None) -> Case:
    """An all_gather or gather, of tensors whose last elements are looked at."""

    def case(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
        data = make(rank)
        dst = None if on_rank is None else on_rank % size
        expected = [make(other).flatten()[-2:].tolist() for other in range(size)] if dst in (None, rank) else []
        return lambda: [x.flatten()[-2:] for x in gather(data)], expected

    return case


def filled(make: Callable[[int], Tensor], fill: Callable[[list[Tensor], Tensor], Any]) -> Case:
    def case(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
        outputs = [torch.zeros_like(make(other)) for other in range(size)]
        data = make(rank)

        def call() -> list[Tensor]:
            changed(lambda out: fill(out, data), outputs)
            return outputs

        return call, [make(other).tolist() for other in range(size)]

    return case


def few(rank: int) -> Tensor:
    return on(rank, 10 + rank)


def uneven(rank: int) -> Tensor:
    return on(*[float(rank)] * (1 + rank))


def many(rank: int) -> Tensor:
    return torch.full((LARGE,), float(rank), device=dist.get_device())


def many_uneven(rank: int) -> Tensor:
    return torch.full((LARGE + rank,), float(rank), device=dist.get_device())


def of_half(rank: int) -> Tensor:
    return few(rank).bfloat16()


def scattered(rank: int, size: int, **options: Any) -> tuple[Callable[[], Any], Any]:
    output = on(0.0)
    parts = [on(10 + other) for other in range(size)] if rank == 0 else None
    return partial(changed, lambda x: dist.scatter(x, parts, 0, **options), output), [10 + rank]


def scattered_sums(rank: int, size: int, op: str = "sum", **options: Any) -> tuple[Callable[[], Any], Any]:
    output, parts = on(0.0), [on(10 * rank + place) for place in range(size)]
    total = sum(10 * other + rank for other in range(size))
    expected = [total if op == "sum" else total / size]
    return partial(changed, lambda x: dist.reduce_scatter(x, parts, op, **options), output), expected


def each_to_each(rank: int, size: int, lengths: Sequence[int] | None = None, **options: Any) -> Any:
    """All to all; with `lengths`, rank r sends `lengths[r % len]` numbers to each."""
    length = [1] * size if lengths is None else [lengths[other % len(lengths)] for other in range(size)]
    parts = [on(*[10 * rank + other] * length[rank]) for other in range(size)]
    outputs = [on(*[0.0] * length[other]) for other in range(size)]

    def call() -> list[Tensor]:
        changed(lambda out: dist.all_to_all(out, parts, **options), outputs)
        return outputs

    return call, [[10 * other + rank] * length[other] for other in range(size)]


def gradients(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    own = on(1 + rank).requires_grad_()

    def call() -> Tensor:
        torch.cat(dist.all_gather(own * 2, sync_grads=True)).sum().backward()
        assert own.grad is not None
        return own.grad

    return call, [2 * size]


def params(rank: int, size: int, **options: Any) -> tuple[Callable[[], Any], Any]:
    tensors = [on(1 + rank), on(rank, rank), on(rank).bfloat16()]
    ranks = sum(range(size))
    return lambda: (dist.all_reduce_params(tensors, **options), tensors)[1], [[ranks + size], [ranks, ranks], [ranks]]


def device_scalars(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    values = {f"loss_{i}": on(rank + i)[0] for i in range(20)}
    expected = {f"loss_{i}": sum(range(i, size + i)) for i in range(20)}
    return lambda: dist.all_reduce_dict(values), expected


def plain_numbers(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    return lambda: dist.all_reduce_dict({"a": rank, "b": 1.5}), {"a": sum(range(size)), "b": 1.5 * size}


def mixed(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    value = on(rank)
    return lambda: dist.all_reduce_tree({"a": [value], "b": rank}), {"a": [[sum(range(size))]], "b": sum(range(size))}


def gathered_tree(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    value = on(rank)
    return lambda: dist.all_gather_tree([value]), [[[other]] for other in range(size)]


def broadcast_tree(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    value = on(rank)
    return lambda: dist.broadcast_tree([value], size - 1), [[size - 1]]


def objects(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    return lambda: dist.all_gather_object({"rank": rank}), [{"rank": other} for other in range(size)]


def large_objects(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    own = {"x": torch.full((LARGE,), rank)}
    return lambda: [other["x"][-1:] for other in dist.all_gather_object(own)], [[other] for other in range(size)]


def objects_on_last(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    expected = list(range(size)) if rank == size - 1 else None
    return lambda: dist.gather_object(rank, size - 1), expected


def object_from_last(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    return lambda: dist.broadcast_object(("from", rank), size - 1), ["from", size - 1]


def object_list(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    data = [rank, "x"]
    return lambda: (dist.broadcast_object_list(data, size - 1), data)[1], [size - 1, "x"]


def scattered_objects(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    output: list[Any] = [None]
    parts = [f"for {other}" for other in range(size)] if rank == 0 else None
    return lambda: (dist.scatter_object_list(output, parts), output)[1], [f"for {rank}"]


def results(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    total = 2 * size - 1
    mine = list(range(rank, 2 * size, size))
    return lambda: dist.collect_results(mine, total), list(range(total)) if rank == 0 else None


def on_main(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    return lambda: dist.run_on_main(lambda: rank), 0


def seed(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    return lambda: dist.sync_random_seed(7 + rank), 7


def barrier(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    return lambda: dist.barrier(), None


def of_the_cpu(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    data = torch.tensor([1.0 + rank])
    return partial(changed, dist.all_reduce, data), [sum(range(1, size + 1))]


def gathered_on_the_cpu(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    data = torch.full((1 + rank,), float(rank))
    return lambda: dist.all_gather(data), [[float(other)] * (1 + other) for other in range(size)]


def in_order(rank: int, size: int) -> tuple[Callable[[], Any], Any]:
    """Several in flight at once, waited for in another order."""
    first, second = on(rank), many(rank)

    def call() -> list[Tensor]:
        handles = [dist.all_reduce(first, async_op=True), dist.broadcast(second, size - 1, async_op=True)]
        for handle in reversed(handles):
            assert handle is not None
            handle.wait()
        return [first, second[-1:]]

    return call, [[sum(range(size))], [size - 1]]


I64, BF16, F16 = torch.int64, torch.bfloat16, torch.float16
ASYNC = {"async_op": True}
CASES: dict[str, Case] = {
    **{
        f"all_reduce, {op}": reduced(op, lambda rank: [1.0 + rank, 2.0])
        for op in ("sum", "mean", "product", "min", "max")
    },
    **{f"all_reduce, {op}": reduced(op, lambda rank: [1 + rank, 6], I64) for op in ("band", "bor", "bxor")},
    **{
        f"all_reduce, {str(dtype).removeprefix('torch.')}": reduced("sum", lambda rank: [rank, 1], dtype)
        for dtype in (BF16, F16, torch.float64, I64, torch.int32, torch.uint8)
    },
    "all_reduce, bool": reduced("max", lambda rank: [rank == 0, False], torch.bool),
    "all_reduce, mean of bfloat16": reduced("mean", lambda rank: [rank, 2], BF16),
    "all_reduce, async": reduced("sum", lambda rank: [rank, 1], **ASYNC),
    "all_reduce, mean, async": reduced("mean", lambda rank: [rank, 1], **ASYNC),
    "all_reduce, a view": a_view,
    "all_reduce, large": large,
    "reduce": reduce_to_last,
    "reduce, async": partial(reduce_to_last, **ASYNC),
    "broadcast": broadcast_from_last,
    "broadcast, a view": partial(broadcast_from_last, step=2),
    "broadcast, async": partial(broadcast_from_last, **ASYNC),
    "all_gather": gathered(few, dist.all_gather),
    "all_gather, uneven": gathered(uneven, dist.all_gather),
    "all_gather, uneven=False": gathered(few, lambda data: dist.all_gather(data, uneven=False)),
    "all_gather, large, uneven=False": gathered(many, lambda data: dist.all_gather(data, uneven=False)),
    "all_gather, bfloat16": gathered(of_half, dist.all_gather),
    "all_gather, scalars": gathered(lambda rank: on(rank)[0], dist.all_gather),
    "all_gather, large": gathered(many, dist.all_gather),
    "all_gather, large and uneven": gathered(many_uneven, dist.all_gather),
    "all_gather, filling": filled(few, dist.all_gather),
    "all_gather, filling, async": filled(few, lambda out, data: dist.all_gather(out, data, async_op=True)),
    "all_gather, sync_grads": gradients,
    "gather": gathered(few, lambda data: dist.gather(data, 0), 0),
    "gather to the last, uneven": gathered(uneven, lambda data: dist.gather(data, dist.get_world_size() - 1), -1),
    "gather, large": gathered(many_uneven, lambda data: dist.gather(data, 0), 0),
    "scatter": scattered,
    "scatter, async": partial(scattered, **ASYNC),
    "reduce_scatter": scattered_sums,
    "reduce_scatter, mean": partial(scattered_sums, op="mean"),
    "reduce_scatter, async": partial(scattered_sums, **ASYNC),
    "all_to_all": each_to_each,
    "all_to_all, uneven": partial(each_to_each, lengths=(1, 3)),
    "all_to_all, async": partial(each_to_each, **ASYNC),
    "all_reduce_params": params,
    "all_reduce_params, one by one": partial(params, coalesce=False),
    "all_reduce_dict, 20 scalars": device_scalars,
    "all_reduce_dict, numbers": plain_numbers,
    "all_gather_object": objects,
    "all_gather_object, large": large_objects,
    "gather_object": objects_on_last,
    "broadcast_object": object_from_last,
    "broadcast_object_list": object_list,
    "scatter_object_list": scattered_objects,
    "collect_results": results,
    "run_on_main": on_main,
    "sync_random_seed": seed,
    "all_reduce, of the CPU": of_the_cpu,
    "all_gather, of the CPU": gathered_on_the_cpu,
    "several at once": in_order,
}
# These wait: for the host's copies of trees, for a mean that must be a whole number, and torch's own barrier.
WAITING: dict[str, Case] = {
    "all_reduce, mean of int64": reduced("mean", lambda rank: [2, 4], I64),
    "all_reduce_tree": mixed,
    "all_gather_tree": gathered_tree,
    "broadcast_tree": broadcast_tree,
    "barrier": barrier,
}


def plain(value: Any) -> Any:
    """Return lists in place of tensors and tuples."""
    return _listed(tree_map(lambda x: x.detach().cpu().tolist() if isinstance(x, Tensor) else x, value))


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _listed(one) for key, one in value.items()}
    return [_listed(one) for one in value] if isinstance(value, list | tuple) else value


def check(names: Sequence[str]) -> None:
    """Make each call twice, the second time without a wait for the GPU, and compare what it gives on this rank."""
    rank, size = dist.get_dist_info()
    for name in names:
        call, expected = {**CASES, **WAITING}[name](rank, size)
        assert plain(call()) == expected, name  # also makes what the group needs
        call, _ = {**CASES, **WAITING}[name](rank, size)
        if name in WAITING:
            result = call()
        else:
            with no_syncs():
                result = call()
        assert plain(result) == expected, name


def check_in_groups() -> None:
    """Make some of the calls in groups without rank 0, on which `src` and `dst` are ranks of the group."""
    size, rank = torch_dist.get_world_size(), torch_dist.get_rank()
    members = list(range(1, size))
    group = torch_dist.new_group(members)
    if rank == 0:
        return
    data = on(rank)
    dist.all_reduce(data, "product", group)
    assert data.tolist() == [prod(members)]
    assert plain(dist.all_gather(uneven(rank), group)) == [[float(x)] * (1 + x) for x in members]
    assert dist.broadcast_object(rank, 0, group) == 1
    data = on(rank)
    dist.broadcast(data, len(members) - 1, group)
    assert data.tolist() == [members[-1]]
