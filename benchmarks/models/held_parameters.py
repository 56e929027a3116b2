"""Parameters that something holds on to besides their module: hooks, lists, and a tie that no module knows of."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, silu

from benchmarks.models import data
from benchmarks.models.data import CLASSES
from benchmarks.models.own import WIDTH, Classifier, Perceptron
from benchmarks.models.row import PERCEPTRON, Row


class Slowed(Perceptron):
    """A perceptron whose first layer gets a tenth of its gradient, by a hook on the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up.weight.register_hook(lambda gradient: 0.1 * gradient)


class SlowedLate(Perceptron):
    """The same by a hook that runs when the gradient has been added up."""

    def __init__(self) -> None:
        super().__init__()
        self.up.weight.register_post_accumulate_grad_hook(_slow)


def _slow(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.1)


class Penalized(Perceptron):
    """A perceptron that keeps its weights in a list, for a penalty on them."""

    def __init__(self) -> None:
        super().__init__()
        self.penalized = [self.up.weight, self.down.weight]

    def forward(self, inputs: Tensor, labels: Tensor | None = None, mode: str = "tensor") -> Any:
        scores = self.scores(inputs)
        if mode != "loss":
            return scores
        return {"loss": cross_entropy(scores, labels) + 0.01 * sum(own.square().sum() for own in self.penalized)}


class TiedByList(Classifier):
    """A network that uses a weight twice, the second time from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, CLASSES)
        self.tied = [self.middle.weight]

    def scores(self, inputs: Tensor) -> Tensor:
        return self.down(silu(linear(silu(self.middle(silu(self.up(inputs)))), self.tied[0])))


ROWS = (
    Row(
        "hook on a parameter",
        Slowed,
        data.vector_columns,
        plan=PERCEPTRON,
        note="`weight.register_hook(lambda gradient: 0.1 * gradient)`.",
    ),
    Row(
        "hook after accumulation",
        SlowedLate,
        data.vector_columns,
        plan=PERCEPTRON,
        note="`weight.register_post_accumulate_grad_hook(...)`, which multiplies `weight.grad` by 0.1.",
    ),
    Row(
        "list of parameters",
        Penalized,
        data.vector_columns,
        plan=PERCEPTRON,
        note="the model keeps `[self.up.weight, self.down.weight]`, and adds their squares to the loss.",
    ),
    Row(
        "tied by a list",
        TiedByList,
        data.vector_columns,
        plan=PERCEPTRON,
        note="the model keeps `[self.middle.weight]`, and multiplies by it once more.",
    ),
)
