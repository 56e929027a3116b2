"""The warning where a collective ends or bends a gradient without being told to."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lockstep.dist import (
    all_gather,
    all_gather_tree,
    all_reduce,
    all_reduce_dict,
    all_reduce_params,
    all_reduce_tree,
    all_to_all,
    broadcast,
    broadcast_tree,
    gather,
    get_rank,
    get_world_size,
    reduce,
    reduce_scatter,
    scatter,
)
from lockstep.hooks.buffers import average_buffers
from lockstep.model import parse_losses
from lockstep.testing import ranks

# Each call on a tensor in a graph, and what the warning says of its gradient. One line each, as it warns once a line.
ENDS, STAYS = "its gradient ends here", "its gradient stays that of this rank's own value"
CALLS: dict[str, tuple[Callable[[Tensor, list[Tensor]], object], str]] = {
    "all_gather": (lambda data, room: all_gather(data), ENDS),
    "all_gather into a list": (lambda data, room: all_gather(room, data), ENDS),
    "gather": (lambda data, room: gather(data), ENDS),
    "all_reduce": (lambda data, room: all_reduce(data), STAYS),
    "reduce": (lambda data, room: reduce(data), STAYS),
    "broadcast": (lambda data, room: broadcast(data), STAYS),
    "reduce_scatter": (lambda data, room: reduce_scatter(room[0], [data] * len(room)), ENDS),
    "all_to_all": (lambda data, room: all_to_all(room, [data] * len(room)), ENDS),
    "scatter": (lambda data, room: scatter(data, room if get_rank() == 0 else None), ENDS),
    "all_reduce_dict": (lambda data, room: all_reduce_dict({"loss": data, "samples": 1}), STAYS),
    "all_reduce_params": (lambda data, room: all_reduce_params([data]), STAYS),
    "all_reduce_tree": (lambda data, room: all_reduce_tree([{"loss": data}]), ENDS),
    "all_gather_tree": (lambda data, room: all_gather_tree([{"loss": data}]), ENDS),
    "broadcast_tree": (lambda data, room: [broadcast_tree({"loss": data}, src) for src in range(len(room))], ENDS),
}


def in_a_graph() -> Tensor:
    return torch.ones(2, requires_grad=True) * 2


def told(call: Callable[[Tensor, list[Tensor]], object], data: Tensor) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(data, [torch.zeros(2) for _ in range(get_world_size())])
    return caught


def warn_once_for_each_line() -> None:
    for name, (call, outcome) in CALLS.items():
        with torch.no_grad():
            assert not told(call, in_a_graph()), name
        assert not told(call, in_a_graph().detach()), name
        (warning,) = told(call, in_a_graph())
        line = call.__code__.co_firstlineno
        assert (warning.filename, warning.lineno) == (__file__, line), name
        text = str(warning.message)
        assert text.startswith(f"{name.split()[0]} at {__file__}:{line} is given a tensor that requires grad"), text
        assert outcome in text, text
        assert "sync_grads=True" in text, text
        assert ".detach()" in text, text
        assert not told(call, in_a_graph()), name


@ranks(1, 2, fresh=True)
def test_each_calling_line_is_told_once_what_becomes_of_its_gradient() -> None:
    warn_once_for_each_line()


@ranks(2)
def test_a_leaf_that_requires_grad_is_overwritten_as_under_no_grad() -> None:
    weight = torch.full((2,), 1.0 + get_rank(), requires_grad=True)
    broadcast(weight)
    assert weight.tolist() == [1.0, 1.0]
    all_reduce(weight)
    all_reduce(weight[0].detach())
    assert weight.tolist() == [4.0, 2.0]
    all_reduce_params([weight], op="mean")
    reduce(weight, dst=1)
    all_reduce_dict({"weight": weight})
    scatter(weight, [torch.zeros(2), torch.ones(2)] if get_rank() == 0 else None)
    assert weight.tolist() == [get_rank()] * 2
    (weight * 3).sum().backward()
    assert weight.grad.tolist() == [3.0, 3.0]


@ranks(2)
def test_what_lockstep_itself_reduces_warns_nobody() -> None:
    weight = torch.ones(1, requires_grad=True)
    loss, log_vars = parse_losses({"loss": weight * 2, "acc": torch.tensor(0.5)})
    assert loss.requires_grad
    assert not any(x.requires_grad for x in log_vars.values())
    average_buffers([weight * (1 + get_rank())])


@ranks(2)
def test_the_gradient_is_what_the_warning_says() -> None:
    weight = torch.ones(1, requires_grad=True)
    loss = weight * (get_rank() + 1)
    with pytest.warns(UserWarning, match="all_reduce at .*stays that of this rank's own value"):
        all_reduce(loss)
    assert loss.tolist() == [3.0]
    loss.sum().backward()
    assert weight.grad.tolist() == [1.0 + get_rank()]
