"""Calls that do not match, by name: what rank 1 does, and the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as torch_dist

from lockstep.dist import (
    all_gather,
    all_reduce,
    all_reduce_dict,
    broadcast,
    destroy_dist,
    gather,
    get_rank,
    main_process_first,
    reduce,
)


def ones(number: int = 40, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(number, dtype=dtype)


def enter() -> None:
    with main_process_first():
        pass


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
}


def run(case: str, rounds: int, before: Callable[[], object] = lambda: None) -> None:
    """Make some rounds of calls, then, after `before`, one that does not match, and end the group."""
    for number in range(rounds):
        usual()
        if number == 0 and case == "order":
            all_reduce(ones())
    before()
    of_one, of_others = CASES[case]
    (of_one if get_rank() == 1 else of_others)()
    destroy_dist()
