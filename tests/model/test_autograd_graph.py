"""What is hooked to the autograd graph of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.model.autograd_graph import on_backward


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
