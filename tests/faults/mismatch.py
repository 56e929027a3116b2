"""Calls that do not match, by name: what rank 1 does, and the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as torch_dist

from lockstep.dist import (
    all_gather,
    all_reduce,
    all_reduce_dict,
    all_reduce_params,
    all_to_all,
    barrier,
    broadcast,
    destroy_dist,
    gather,
    get_rank,
    get_world_size,
    main_process_first,
    reduce,
    reduce_scatter,
)
from lockstep.transport.handles import Handle


def ones(number: int = 40, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(number, dtype=dtype)


def enter() -> None:
    with main_process_first():
        pass


def sum_parts(number: int) -> None:
    reduce_scatter(ones(number), [ones(number)] * get_world_size())


def finished(handle: Handle) -> None:
    handle.wait()


def exchange(number: int) -> None:
    all_to_all([ones(number) for _ in range(get_world_size())], [ones(number)] * get_world_size())


def usual() -> None:
    all_reduce(ones())
    broadcast(ones())
    reduce(ones(2))
    all_reduce(ones(), "max")


# What rank 1 does, and what the others do.
CASES = {
    "op": (lambda: all_reduce(ones(), "max"), lambda: all_reduce(ones())),
    "small-op": (lambda: all_reduce(ones(1), "max"), lambda: all_reduce(ones(1))),
    "dtype": (lambda: all_reduce(ones(dtype=torch.int32)), lambda: all_reduce(ones())),
    "shape": (lambda: all_reduce(ones(41)), lambda: all_reduce(ones())),
    "small-shape": (lambda: all_reduce(ones(3)), lambda: all_reduce(ones(2))),
    "broadcast-shape": (lambda: broadcast(ones().view(2, 20)), lambda: broadcast(ones())),
    "root": (lambda: broadcast(ones(), 1), lambda: broadcast(ones())),
    "order": (
        lambda: (broadcast(ones()), all_reduce(ones())),
        lambda: (all_reduce(ones()), broadcast(ones())),
    ),
    "left-out": (lambda: broadcast(ones()), lambda: (all_reduce(ones()), broadcast(ones()))),
    "last-left-out": (lambda: None, lambda: all_reduce(ones())),
    "keys": (lambda: all_reduce_dict({"b": 1}), lambda: all_reduce_dict({"a": 1})),
    "gather": (lambda: gather(ones()), lambda: all_gather(ones())),
    "first": (enter, lambda: all_reduce(ones())),
    "torch's all_reduce": (lambda: torch_dist.all_reduce(ones(4000)), lambda: all_reduce(ones(4000))),
    "middle-shape": (lambda: all_reduce(ones(3000)), lambda: all_reduce(ones(2000))),
    "sizes": (lambda: all_reduce(ones(2000)), lambda: all_reduce(ones())),
    "large-shape": (lambda: all_reduce(ones(50_000)), lambda: all_reduce(ones(40_000))),
    "large-op": (lambda: all_reduce(ones(40_000), "max"), lambda: all_reduce(ones(40_000))),
    "large-and-small": (lambda: all_reduce(ones(40_000)), lambda: all_reduce(ones())),
    "large-broadcast-shape": (lambda: broadcast(ones(50_000)), lambda: broadcast(ones(40_000))),
    "large-root": (lambda: broadcast(ones(40_000), 1), lambda: broadcast(ones(40_000))),
    "params": (
        lambda: all_reduce_params([ones(40_000), ones(3)]),
        lambda: all_reduce_params([ones(40_000), ones(4)]),
    ),
    # Asynchronous ones; the largest are not messages of lockstep's own on any number of ranks.
    "async-shape": (
        lambda: finished(all_reduce(ones(50_000), async_op=True)),
        lambda: finished(all_reduce(ones(40_000), async_op=True)),
    ),
    "async-largest-shape": (
        lambda: finished(all_reduce(ones(1_200_000), async_op=True)),
        lambda: finished(all_reduce(ones(1_100_000), async_op=True)),
    ),
    "async-broadcast-shape": (
        lambda: finished(broadcast(ones(50_000), 1, async_op=True)),
        lambda: finished(broadcast(ones(40_000), 1, async_op=True)),
    ),
    "largest-broadcast-shape": (lambda: broadcast(ones(1_200_000)), lambda: broadcast(ones(1_100_000))),
    "large-reduce-shape": (lambda: reduce(ones(50_000), 1), lambda: reduce(ones(40_000), 1)),
    "large-reduce-scatter-shape": (lambda: sum_parts(30_000), lambda: sum_parts(25_000)),
    "reduce-or-broadcast": (lambda: reduce(ones(40_000), 1), lambda: broadcast(ones(40_000), 1)),
    "reduce-shape": (lambda: reduce(ones(3)), lambda: reduce(ones(2))),
    "reduce-root": (lambda: reduce(ones(2), 1), lambda: reduce(ones(2))),
    "reduce-scatter-shape": (lambda: sum_parts(3), lambda: sum_parts(2)),
    "barrier": (barrier, lambda: all_reduce(ones())),
    "to-all": (lambda: exchange(2), lambda: all_gather(ones(2))),
}


def run(
    case: str,
    rounds: int,
    before: Callable[[], object] = lambda: None,
    *,
    knows: bool = False,
    who: Sequence[int] = (1,),
) -> None:
    """Make some rounds of calls, then, after `before`, one that does not match, and end the group.

    Args:
        case: name of the call.
        rounds: number of rounds.
        before: called before the call that does not match.
        knows: the rounds contain both calls, on every rank.
        who: the ranks that make the first of them.
    """
    of_one, of_others = CASES[case]
    for number in range(rounds):
        usual()
        if knows:
            of_one()
            of_others()
        if number == 0 and case == "order":
            all_reduce(ones())
    before()
    (of_one if get_rank() in who else of_others)()
    destroy_dist()
