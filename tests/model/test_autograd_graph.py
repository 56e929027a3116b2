"""What is hooked to the autograd graph of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.model.autograd_graph import leaves_of, on_backward, reaches_none


class Queries(nn.Module):
    """Returns its own parameter, and a value of each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.weight, 2 * self.weight


def test_each_backward_pass_is_told_once_of_each_output_also_of_a_parameter_that_is_returned():
    model, told = Queries(), list[list[float]]()
    on_backward(model, lambda gradient: told.append(gradient.tolist()))
    for _ in range(3):
        told.clear()
        own, made = model()
        (3 * own + made).sum().backward()
        assert sorted(told) == [[1.0, 1.0], [5.0, 5.0]]


def test_a_loss_that_is_a_parameter_reaches_it():
    loss = nn.Parameter(torch.ones(()))
    assert leaves_of(loss) == {loss}
    assert not reaches_none(loss, {id(loss)})
    assert leaves_of(loss.detach()) == set()


class Noting(torch.autograd.Function):
    """Keeps what it likes in its node, under a name that nodes of torch have."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, noted: list[Any]) -> Tensor:
        [ctx.variable] = noted
        return data.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def test_what_a_node_of_the_users_own_keeps_is_no_leaf():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    for noted in (unused, ["a list, which has no hash"]):
        loss = Noting.apply(used, [noted]).sum()
        assert leaves_of(loss) == {used}
        assert reaches_none(loss, {id(unused)})
