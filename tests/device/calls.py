"""The calls of lockstep.dist on two ranks, on tensors of the simulated accelerator: what each gives, and what it costs.

Beside each stands torch's own call, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import ReduceOp

from lockstep import dist

DEVICE = "sim"
LARGE = 100_000  # floats
FEW = 20  # scalars

Cost = tuple[int, int, str]
"""How often the hosts of ranks 0 and 1 wait for the device, and the collectives that are begun on it, by name."""


class Call(NamedTuple):
    """A call, what it gives on ranks 0 and 1, and its cost; torch's call, and its cost."""

    run: Callable[[int], Any]
    gives: tuple[Any, Any]
    cost: Cost
    bare: Callable[[int], Any] | None = None
    bare_cost: Cost | None = None


def on(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor on the device, without a copy from the host."""
    return torch.cat([torch.full((1,), value, dtype=dtype, device=DEVICE) for value in values])


def wait(handle: Any) -> None:
    if handle is not None:
        handle.wait()


def _changes(call: Callable[..., Any], *values: float, dtype: torch.dtype = torch.float32) -> Callable[[int], Tensor]:
    """Return a function that makes a tensor of a rank, lets a call change it, and returns it."""

    def run(rank: int) -> Tensor:
        data = on(1 + rank, *(values or (2,)), dtype=dtype)
        wait(call(data))
        return data

    return run


def _fills(call: Callable[[list[Tensor], int], Any], *sizes: int) -> Callable[[int], list[Tensor]]:
    def run(rank: int) -> list[Tensor]:
        outputs = [torch.zeros(size, device=DEVICE) for size in sizes or (1, 1)]
        wait(call(outputs, rank))
        return [x[-1:] for x in outputs]

    return run


def _gradients(rank: int) -> Tensor:
    own = on(1 + rank).requires_grad_()
    weight = own * 2
    torch.cat(dist.all_gather(weight, sync_grads=True)).sum().backward()
    assert own.grad is not None
    return own.grad


def _to_every_rank(rank: int) -> list[Tensor]:
    return [on(10 * rank), on(10 * rank + 1)]


def _summed(call: Callable[..., Any], dtype: torch.dtype = torch.float32, **options: Any) -> Callable[[int], Tensor]:
    def run(rank: int) -> Tensor:
        output = torch.zeros(1, device=DEVICE, dtype=dtype)
        wait(call(output, [on(1 + rank, dtype=dtype), on(4 + rank, dtype=dtype)], **options))
        return output

    return run


def _scattered_from_cpu(rank: int) -> Tensor:
    output = torch.zeros(1, device=DEVICE)
    dist.scatter(output, [torch.tensor([5.0]), torch.tensor([6.0])] if rank == 0 else None)
    return output


def _scattered(call: Callable[..., Any], size: int = 1, **options: Any) -> Callable[[int], Tensor]:
    def run(rank: int) -> Tensor:
        output = torch.zeros(size, device=DEVICE)
        parts = [torch.full((size,), value, device=DEVICE) for value in (5.0, 6.0)]
        wait(call(output, parts if rank == 0 else None, 0, **options))
        return output[-1:]

    return run


def _last(tensors: list[Tensor]) -> list[Tensor]:
    return [x[-1:] for x in tensors]


def _many(rank: int, more: int = 0) -> Tensor:
    return torch.full((LARGE + more,), 1.0 + rank, device=DEVICE)


def _each(values: dict[str, Tensor]) -> dict[str, Tensor]:
    for value in values.values():
        torch_dist.all_reduce(value)
    return values


def _scalars(rank: int) -> dict[str, Tensor]:
    return {str(number): torch.full((), 1.0 + rank, device=DEVICE) for number in range(FEW)}


def _list_of_all(make: Callable[[int], Any]) -> Callable[[int], list[Any]]:
    def run(rank: int) -> list[Any]:
        objects = [None, None]
        torch_dist.all_gather_object(objects, make(rank))
        return objects

    return run


def _broadcast_list(call: Callable[..., Any]) -> Callable[[int], list[Any]]:
    def run(rank: int) -> list[Any]:
        objects = ["ab"[rank]]
        call(objects, 1)
        return objects

    return run


I64, BF16 = torch.int64, torch.bfloat16
CALLS: dict[str, Call] = {
    "all_reduce": Call(
        _changes(dist.all_reduce), ([3, 4], [3, 4]), (0, 0, "all_reduce"),
        _changes(torch_dist.all_reduce), (0, 0, "all_reduce"),
    ),
    "all_reduce, async": Call(
        _changes(lambda x: dist.all_reduce(x, async_op=True)), ([3, 4], [3, 4]), (0, 0, "all_reduce"),
        _changes(lambda x: torch_dist.all_reduce(x, async_op=True)), (0, 0, "all_reduce"),
    ),
    "all_reduce, mean": Call(
        _changes(lambda x: dist.all_reduce(x, "mean")), ([1.5, 2], [1.5, 2]), (0, 0, "all_reduce"),
        _changes(lambda x: torch_dist.all_reduce(x, ReduceOp.AVG)), (0, 0, "all_reduce"),
    ),
    "all_reduce, mean, bfloat16": Call(
        _changes(lambda x: dist.all_reduce(x, "mean"), dtype=BF16), ([1.5, 2], [1.5, 2]), (0, 0, "all_reduce"),
        _changes(lambda x: torch_dist.all_reduce(x, ReduceOp.AVG), dtype=BF16), (0, 0, "all_reduce"),
    ),
    "all_reduce, mean of int64": Call(
        _changes(lambda x: dist.all_reduce(x[1:], "mean"), dtype=I64), ([1, 2], [2, 2]), (1, 1, "all_reduce")
    ),
    "all_reduce, bor": Call(
        _changes(lambda x: dist.all_reduce(x, "bor"), dtype=I64), ([3, 2], [3, 2]), (0, 0, "all_gather")
    ),
    "all_reduce, bor, async": Call(
        _changes(lambda x: dist.all_reduce(x, "bor", async_op=True), dtype=I64), ([3, 2], [3, 2]), (0, 0, "all_gather")
    ),
    "all_reduce, bool": Call(
        lambda rank: _changes(dist.all_reduce, 0, dtype=torch.bool)(rank - 1),
        ([True, False], [True, False]),
        (0, 0, "all_reduce"),
    ),
    "all_reduce, a view": Call(
        _changes(lambda x: dist.all_reduce(x[::2]), 2, 3), ([3, 2, 6], [3, 2, 6]), (0, 0, "all_reduce")
    ),
    "all_reduce, of the CPU": Call(
        lambda rank: (x := torch.tensor([1.0 + rank]), dist.all_reduce(x))[0], ([3], [3]), (0, 0, "")
    ),
    "reduce": Call(
        _changes(lambda x: dist.reduce(x, 0)), ([3, 4], [2, 2]), (0, 0, "reduce"),
        _changes(lambda x: torch_dist.reduce(x, 0)), (0, 0, "reduce"),
    ),
    "reduce, async": Call(
        _changes(lambda x: dist.reduce(x, 0, async_op=True)), ([3, 4], [2, 2]), (0, 0, "reduce")
    ),
    "reduce, bor": Call(
        _changes(lambda x: dist.reduce(x, 0, "bor"), dtype=I64), ([3, 2], [2, 2]), (0, 0, "all_gather")
    ),
    "reduce_scatter": Call(
        _summed(dist.reduce_scatter), ([3], [9]), (0, 0, "reduce_scatter"),
        _summed(torch_dist.reduce_scatter), (0, 0, "reduce_scatter"),
    ),
    "reduce_scatter, async": Call(
        _summed(dist.reduce_scatter, async_op=True), ([3], [9]), (0, 0, "reduce_scatter"),
    ),
    "reduce_scatter, bor": Call(
        _summed(dist.reduce_scatter, I64, op="bor"), ([3], [5]), (0, 0, "all_to_all_single")
    ),
    "broadcast": Call(
        _changes(lambda x: dist.broadcast(x, 1)), ([2, 2], [2, 2]), (0, 0, "broadcast"),
        _changes(lambda x: torch_dist.broadcast(x, 1)), (0, 0, "broadcast"),
    ),
    "broadcast, async": Call(
        _changes(lambda x: dist.broadcast(x, 1, async_op=True)), ([2, 2], [2, 2]), (0, 0, "broadcast")
    ),
    "all_to_all": Call(
        _fills(lambda out, rank: dist.all_to_all(out, _to_every_rank(rank))), ([[0], [10]], [[1], [11]]),
        (0, 0, "all_to_all_single"),
        _fills(lambda out, rank: torch_dist.all_to_all(out, _to_every_rank(rank))), (0, 0, "all_to_all"),
    ),
    "all_to_all, async": Call(
        _fills(lambda out, rank: dist.all_to_all(out, _to_every_rank(rank), async_op=True)),
        ([[0], [10]], [[1], [11]]), (0, 0, "all_to_all_single"),
    ),
    "all_gather of 4 B": Call(
        lambda rank: dist.all_gather(on(1 + rank)), ([[1], [2]], [[1], [2]]), (0, 0, "all_gather_into_tensor"),
        _fills(lambda out, rank: torch_dist.all_gather(out, on(1 + rank))), (0, 0, "all_gather"),
    ),
    "all_gather, filling": Call(
        _fills(lambda out, rank: dist.all_gather(out, on(1 + rank))), ([[1], [2]], [[1], [2]]),
        (0, 0, "all_gather"),
    ),
    "all_gather of 400 KB": Call(
        lambda rank: _last(dist.all_gather(_many(rank))), ([[1], [2]], [[1], [2]]), (0, 0, "all_gather_into_tensor"),
        _fills(lambda out, rank: torch_dist.all_gather(out, _many(rank)), LARGE, LARGE), (0, 0, "all_gather"),
    ),
    "all_gather of 400 KB, uneven=False": Call(
        lambda rank: _last(dist.all_gather(_many(rank), uneven=False)), ([[1], [2]], [[1], [2]]),
        (0, 0, "all_gather_into_tensor"),
    ),
    "all_gather, unequal": Call(
        lambda rank: _last(dist.all_gather(_many(rank, rank))), ([[1], [2]], [[1], [2]]), (0, 0, "coalesced"),
        _fills(lambda out, rank: torch_dist.all_gather(out, _many(rank, rank)), LARGE, LARGE + 1), (0, 0, "coalesced"),
    ),
    "all_gather, unequal, filling, async": Call(
        _fills(lambda out, rank: dist.all_gather(out, _many(rank, rank), async_op=True), LARGE, LARGE + 1),
        ([[1], [2]], [[1], [2]]), (0, 0, "coalesced"),
    ),
    "all_gather, sync_grads": Call(_gradients, ([4], [4]), (0, 0, "all_gather_into_tensor, reduce_scatter")),
    "all_gather, of the CPU": Call(
        lambda rank: dist.all_gather(torch.tensor([1.0 + rank])), ([[1], [2]], [[1], [2]]), (0, 0, "")
    ),
    "gather": Call(
        lambda rank: dist.gather(on(1 + rank), 1), ([], [[1], [2]]), (0, 0, "coalesced"),
        _fills(lambda out, rank: torch_dist.gather(on(1 + rank), out if rank == 1 else None, 1)), (0, 0, "gather"),
    ),
    "gather, unequal": Call(
        lambda rank: _last(dist.gather(_many(rank, rank), 1)), ([], [[1], [2]]), (0, 0, "coalesced")
    ),
    "scatter": Call(
        _scattered(dist.scatter), ([5], [6]), (0, 0, "coalesced"),
        _scattered(torch_dist.scatter), (0, 0, "scatter"),
    ),
    "scatter, async": Call(_scattered(dist.scatter, async_op=True), ([5], [6]), (0, 0, "coalesced")),
    "scatter of 400 KB": Call(_scattered(dist.scatter, LARGE), ([5], [6]), (0, 0, "coalesced")),
    "scatter, of a list on the CPU": Call(
        _scattered_from_cpu, ([5], [6]), (2, 0, "coalesced")
    ),
    "all_reduce_params": Call(
        _changes(lambda x: dist.all_reduce_params([x[:1], x[1:]])), ([3, 4], [3, 4]), (0, 0, "all_reduce")
    ),
    "all_reduce_dict of 20 scalars": Call(
        lambda rank: dist.all_reduce_dict(_scalars(rank))["7"], (3, 3), (0, 0, "all_reduce"),
        lambda rank: _each(_scalars(rank))["7"], (0, 0, "20 all_reduce"),
    ),
    "all_reduce_dict, also of numbers": Call(
        lambda rank: dist.all_reduce_dict({"a": on(1 + rank), "b": rank})["a"], ([3], [3]), (2, 2, "2 all_reduce")
    ),
    "all_reduce_dict, of the CPU": Call(
        lambda rank: dist.all_reduce_dict({"a": rank, "b": 1.0})["a"], (1, 1), (0, 0, "")
    ),
    "all_reduce_tree": Call(
        lambda rank: dist.all_reduce_tree([on(1 + rank), on(2)]), ([[3], [4]], [[3], [4]]), (0, 0, "all_reduce")
    ),
    "all_gather_tree": Call(
        lambda rank: dist.all_gather_tree([on(rank)]), ([[[0]], [[1]]], [[[0]], [[1]]]), (3, 3, "")
    ),
    "broadcast_tree": Call(lambda rank: dist.broadcast_tree([on(rank)], 1), ([[1]], [[1]]), (1, 1, "")),
    "all_gather_object": Call(
        lambda rank: dist.all_gather_object({"r": rank})[1]["r"], (1, 1), (0, 0, ""),
        lambda rank: _list_of_all(lambda rank: {"r": rank})(rank)[1]["r"], (0, 0, ""),
    ),
    "all_gather_object of 256 KiB": Call(
        lambda rank: [x["x"][-1:] for x in dist.all_gather_object({"x": torch.full((2**15,), rank)})],
        ([[0], [1]], [[0], [1]]), (0, 0, ""),
    ),
    "gather_object": Call(lambda rank: dist.gather_object("ab"[rank], 1), (None, ["a", "b"]), (0, 0, "")),
    "broadcast_object": Call(lambda rank: dist.broadcast_object("ab"[rank], 1), ("b", "b"), (0, 0, "")),
    "broadcast_object_list": Call(
        _broadcast_list(dist.broadcast_object_list), (["b"], ["b"]), (0, 0, ""),
        _broadcast_list(torch_dist.broadcast_object_list), (0, 0, ""),
    ),
    "collect_results": Call(
        lambda rank: dist.collect_results([rank, rank + 2], 3), ([0, 1, 2], None), (0, 0, "")
    ),
    "run_on_main": Call(lambda rank: dist.run_on_main(lambda: rank), (0, 0), (0, 0, "")),
    "sync_random_seed": Call(lambda rank: dist.sync_random_seed(7 + rank), (7, 7), (0, 0, "")),
    "barrier": Call(
        lambda rank: dist.barrier(), (None, None), (0, 0, ""),
        lambda rank: torch_dist.barrier(), (1, 1, "barrier"),
    ),
}  # fmt: skip


def table() -> str:
    """Return what calls cost, as a table: those that torch has, too, and those that wait."""
    lines = ["| call | waits | collectives | torch: waits | collectives |", "|---|--:|---|--:|---|"]
    for name, call in CALLS.items():
        if call.bare_cost is None and not any(call.cost[:2]):
            continue
        cells = [cell for cost in (call.cost, call.bare_cost) for cell in _in_words(cost)]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines) + "\n"


def _in_words(cost: Cost | None) -> tuple[str, str]:
    if cost is None:
        return "", ""
    first, second, collectives = cost
    return str(first) if first == second else f"{first}, {second}", collectives or "none"


if __name__ == "__main__":
    print(table(), end="")
