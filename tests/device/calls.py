"""The calls of lockstep.dist on two ranks, on tensors of the simulated accelerator, with what each rank gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep import dist

DEVICE = "sim"
LARGE = 300  # floats, more than a header holds


class Call(NamedTuple):
    """A call, what it gives on ranks 0 and 1, and how often the host then reads the device on either.

    `beside` is that number in a group which also has gloo for the CPU, where it differs.
    """

    run: Callable[[int], Any]
    gives: tuple[Any, Any]
    reads: tuple[int, int]
    beside: tuple[int, int] | None = None


def on(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(DEVICE)


def _changes(call: Callable[..., Any], *values: float, dtype: torch.dtype = torch.float32) -> Callable[[int], Tensor]:
    """Return a function that makes a tensor of a rank, lets a call change it, and returns it."""

    def run(rank: int) -> Tensor:
        data = on(1 + rank, *(values or (2,)), dtype=dtype)
        handle = call(data)
        assert handle is None or not isinstance(handle, dist.Handle) or handle.wait()
        return data

    return run


def _fills(call: Callable[[list[Tensor], int], Any], *sizes: int) -> Callable[[int], list[Tensor]]:
    def run(rank: int) -> list[Tensor]:
        outputs = [torch.zeros(size, device=DEVICE) for size in sizes or (1, 1)]
        handle = call(outputs, rank)
        assert handle is None or not isinstance(handle, dist.Handle) or handle.wait()
        return outputs

    return run


def _gradients(rank: int) -> Tensor:
    own = on(1 + rank).requires_grad_()
    weight = own * 2
    torch.cat(dist.all_gather(weight, sync_grads=True)).sum().backward()
    assert own.grad is not None
    return own.grad


def _to_every_rank(rank: int) -> list[Tensor]:
    return [on(10 * rank), on(10 * rank + 1)]


def _summed(rank: int, async_op: bool, op: str = "sum", dtype: torch.dtype = torch.float32) -> Tensor:
    output = torch.zeros(1, device=DEVICE, dtype=dtype)
    handle = dist.reduce_scatter(output, [on(1 + rank, dtype=dtype), on(4 + rank, dtype=dtype)], op, async_op=async_op)
    assert (handle is not None) == async_op
    if handle is not None:
        handle.wait()
    return output


def _scattered(rank: int, async_op: bool, size: int = 1) -> Tensor:
    output = torch.zeros(size, device=DEVICE)
    parts = [torch.full((size,), value, device=DEVICE) for value in (5.0, 6.0)]
    handle = dist.scatter(output, parts if rank == 0 else None, 0, async_op=async_op)
    assert handle is None or handle.wait()
    return output[-1:]


def _last(tensors: list[Tensor]) -> list[Tensor]:
    return [x[-1:] for x in tensors]


def _large(rank: int) -> Tensor:
    return torch.full((LARGE + rank,), 1.0 + rank, device=DEVICE)


I64, BF16 = torch.int64, torch.bfloat16
CALLS: dict[str, Call] = {
    "all_reduce": Call(_changes(dist.all_reduce), ([3, 4], [3, 4]), (0, 0)),
    "all_reduce, async": Call(_changes(lambda x: dist.all_reduce(x, async_op=True)), ([3, 4], [3, 4]), (0, 0)),
    "all_reduce, mean": Call(_changes(lambda x: dist.all_reduce(x, "mean")), ([1.5, 2], [1.5, 2]), (0, 0)),
    "all_reduce, mean, bfloat16": Call(
        _changes(lambda x: dist.all_reduce(x, "mean"), dtype=BF16), ([1.5, 2], [1.5, 2]), (0, 0)
    ),
    "all_reduce, mean of int64": Call(
        _changes(lambda x: dist.all_reduce(x[1:], "mean"), dtype=I64), ([1, 2], [2, 2]), (1, 1)
    ),
    "all_reduce, bor": Call(_changes(lambda x: dist.all_reduce(x, "bor"), dtype=I64), ([3, 2], [3, 2]), (0, 0)),
    "all_reduce, bor, async": Call(
        _changes(lambda x: dist.all_reduce(x, "bor", async_op=True), dtype=I64), ([3, 2], [3, 2]), (0, 0)
    ),
    "all_reduce, bool": Call(
        lambda rank: _changes(dist.all_reduce, 0, dtype=torch.bool)(rank - 1), ([True, False], [True, False]), (0, 0)
    ),
    "all_reduce, a view": Call(_changes(lambda x: dist.all_reduce(x[::2]), 2, 3), ([3, 2, 6], [3, 2, 6]), (0, 0)),
    "reduce": Call(_changes(lambda x: dist.reduce(x, 0)), ([3, 4], [2, 2]), (0, 0)),
    "reduce, async": Call(_changes(lambda x: dist.reduce(x, 0, async_op=True)), ([3, 4], [2, 2]), (0, 0)),
    "reduce, bor": Call(_changes(lambda x: dist.reduce(x, 0, "bor"), dtype=I64), ([3, 2], [2, 2]), (0, 0)),
    "reduce_scatter": Call(lambda rank: _summed(rank, False), ([3], [9]), (0, 0)),
    "reduce_scatter, async": Call(lambda rank: _summed(rank, True), ([3], [9]), (0, 0)),
    "reduce_scatter, bor": Call(lambda rank: _summed(rank, False, "bor", I64), ([3], [5]), (0, 0)),
    "broadcast": Call(_changes(lambda x: dist.broadcast(x, 1)), ([2, 2], [2, 2]), (0, 0)),
    "broadcast, async": Call(_changes(lambda x: dist.broadcast(x, 1, async_op=True)), ([2, 2], [2, 2]), (0, 0)),
    "all_to_all": Call(
        _fills(lambda out, rank: dist.all_to_all(out, _to_every_rank(rank))), ([[0], [10]], [[1], [11]]), (0, 0)
    ),
    "all_to_all, async": Call(
        _fills(lambda out, rank: dist.all_to_all(out, _to_every_rank(rank), async_op=True)),
        ([[0], [10]], [[1], [11]]),
        (0, 0),
    ),
    "all_gather": Call(lambda rank: dist.all_gather(on(1 + rank)), ([[1], [2]], [[1], [2]]), (1, 1), (0, 0)),
    "all_gather, filling": Call(
        _fills(lambda out, rank: dist.all_gather(out, on(1 + rank))), ([[1], [2]], [[1], [2]]), (1, 1), (0, 0)
    ),
    "all_gather, uneven": Call(
        lambda rank: dist.all_gather(on(*[1 + rank] * (1 + rank))), ([[1], [2, 2]], [[1], [2, 2]]), (1, 1), (0, 0)
    ),
    "all_gather, large": Call(
        lambda rank: _last(dist.all_gather(_large(rank))), ([[1], [2]], [[1], [2]]), (1, 1), (0, 0)
    ),
    "all_gather, filling, async": Call(
        lambda rank: _last(
            _fills(lambda out, rank: dist.all_gather(out, _large(rank), async_op=True), LARGE, LARGE + 1)(rank)
        ),
        ([[1], [2]], [[1], [2]]),
        (1, 1),
        (0, 0),
    ),
    "all_gather, sync_grads": Call(_gradients, ([4], [4]), (2, 2), (0, 0)),
    "gather": Call(lambda rank: dist.gather(on(1 + rank), 1), ([], [[1], [2]]), (0, 1), (0, 0)),
    "gather, large": Call(lambda rank: _last(dist.gather(_large(rank), 1)), ([], [[1], [2]]), (0, 1), (0, 0)),
    "scatter": Call(lambda rank: _scattered(rank, False), ([5], [6]), (1, 1), (0, 0)),
    "scatter, async": Call(lambda rank: _scattered(rank, True), ([5], [6]), (1, 1), (0, 0)),
    "scatter, large": Call(lambda rank: _scattered(rank, False, LARGE), ([5], [6]), (1, 1), (0, 0)),
    "all_reduce_params": Call(_changes(lambda x: dist.all_reduce_params([x[:1], x[1:]])), ([3, 4], [3, 4]), (0, 0)),
    "all_reduce_dict": Call(
        lambda rank: dist.all_reduce_dict({"a": on(1 + rank), "b": rank})["a"], ([3], [3]), (2, 2), (1, 1)
    ),
    "all_reduce_dict, on the device": Call(
        lambda rank: dist.all_reduce_dict({"a": on(1 + rank), "b": on(2)})["a"], ([3], [3]), (1, 1), (0, 0)
    ),
    "all_reduce_dict, of the CPU": Call(
        lambda rank: dist.all_reduce_dict({"a": rank, "b": 1.0})["a"], (1, 1), (3, 3), (0, 0)
    ),
    "all_reduce_tree": Call(
        lambda rank: dist.all_reduce_tree([on(1 + rank), 2.0]), ([[3], 4.0], [[3], 4.0]), (2, 2), (1, 1)
    ),
    "all_gather_tree": Call(
        lambda rank: dist.all_gather_tree([on(rank)]), ([[[0]], [[1]]], [[[0]], [[1]]]), (2, 2), (1, 1)
    ),
    "broadcast_tree": Call(lambda rank: dist.broadcast_tree([on(rank)], 1), ([[1]], [[1]]), (1, 1), (0, 1)),
    "all_gather_object": Call(lambda rank: dist.all_gather_object({"r": rank})[1]["r"], (1, 1), (1, 1), (0, 0)),
    "all_gather_object, large": Call(
        lambda rank: [x["x"][-1:] for x in dist.all_gather_object({"x": torch.full((2**15,), rank)})],
        ([[0], [1]], [[0], [1]]),
        (3, 3),
        (0, 0),
    ),
    "gather_object": Call(lambda rank: dist.gather_object("ab"[rank], 1), (None, ["a", "b"]), (1, 1), (0, 0)),
    "broadcast_object": Call(lambda rank: dist.broadcast_object("ab"[rank], 1), ("b", "b"), (1, 0), (0, 0)),
    "collect_results": Call(lambda rank: dist.collect_results([rank, rank + 2], 3), ([0, 1, 2], None), (2, 3), (0, 0)),
    "run_on_main": Call(lambda rank: dist.run_on_main(lambda: rank), (0, 0), (0, 1), (0, 0)),
    "sync_random_seed": Call(lambda rank: dist.sync_random_seed(7 + rank), (7, 7), (0, 1), (0, 0)),
    "barrier": Call(lambda rank: dist.barrier(), (None, None), (0, 0)),
    "all_reduce, of the CPU": Call(
        lambda rank: (x := torch.tensor([1.0 + rank]), dist.all_reduce(x))[0], ([3], [3]), (1, 1), (0, 0)
    ),
    "all_gather, of the CPU": Call(
        lambda rank: dist.all_gather(torch.tensor([1.0 + rank])), ([[1], [2]], [[1], [2]]), (3, 3), (0, 0)
    ),
}
