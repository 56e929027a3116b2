"""Which parameters a loss reaches, and in which order: ZeRO assumes that both are the same on every rank.

ZeRO concatenates gradients in the order in which they arrive, and sums them over ranks by position. If the losses of
the ranks reach different parameters, as with experts chosen by the data, or the same ones in a different order, ZeRO
sums gradients of different parameters, or hangs, without an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.dist import all_reduce
from lockstep.dist.agreement import differing
from lockstep.errors import ConfigError
from lockstep.groups import this_rank
from lockstep.model.autograd_graph import hides_leaves, leaf_of, nodes_of


class GradientFlow:
    """The trainable parameters of a model, and which of them a loss reaches.

    Args:
        core: the user's own module.

    Attributes:
        names: names of the parameters, by index.
        parameters: the parameters.
        sees_all: whether no loss so far contained a reentrant checkpoint, which hides parameters.

    **Cost**: one walk over the autograd graph per loss, which takes about a microsecond per node.
    """

    def __init__(self, core: nn.Module) -> None:
        trained = [(name, parameter) for name, parameter in core.named_parameters() if parameter.requires_grad]
        self.names = [name for name, _ in trained]
        self.parameters = [parameter for _, parameter in trained]
        self.sees_all = True
        self._indices = {id(parameter): index for index, parameter in enumerate(self.parameters)}

    def arrivals(self, loss: Tensor) -> list[int]:
        """Return the indices of the parameters that a loss reaches, in the order in which their gradients will come.

        Parameters inside a reentrant checkpoint are not found; see `sees_all`.
        """
        # A gradient is complete after the backward pass of the earliest created node that contributes to it.
        earliest: dict[int, int] = {}
        for node in nodes_of(loss):
            self.sees_all &= not hides_leaves(node)
            for parent, _ in node.next_functions:
                leaf = leaf_of(parent)
                if leaf is not None and (index := self._indices.get(id(leaf))) is not None:
                    number = node._sequence_nr()
                    earliest[index] = min(number, earliest.get(index, number))
        return sorted(earliest, key=lambda index: (-earliest[index], index))

    def reached(self, loss: Tensor) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that a loss reaches, with their names."""
        return [(self.names[index], self.parameters[index]) for index in self.arrivals(loss)]

    def reach(self, loss: Tensor, indices: Iterable[int]) -> Tensor:
        """Return the loss, changed so that its backward pass gives these parameters gradients of 0."""
        parameters = [self.parameters[index] for index in indices]
        if not parameters:
            return loss
        reached: Tensor = _Reach.apply(loss, *parameters)  # type: ignore[no-untyped-call]
        return reached

    def reach_held(self, loss: Tensor) -> Tensor:
        """Return the loss, changed so that it also reaches every parameter that has a gradient, of a batch before."""
        held = self._held()
        return self.reach(loss, sorted(held.difference(self.arrivals(loss)))) if held else loss

    def reach_alike(self, loss: Tensor) -> Tensor:
        """Return the loss, changed so that it reaches every parameter that the loss of any rank reaches.

        Parameters that have a gradient already count as reached. **Collective**: every rank.
        """
        own = torch.zeros(len(self.parameters), dtype=torch.uint8, device="cpu")
        own[self.arrivals(loss)] = 1
        own[list(self._held())] = 1
        anywhere = own.clone()
        all_reduce(anywhere, op="max")
        return self.reach(loss, (anywhere > own).nonzero().flatten().tolist())

    def _held(self) -> set[int]:
        return {index for index, parameter in enumerate(self.parameters) if parameter.grad is not None}

    def check_order(self, loss: Tensor, advice: str) -> None:
        """Raise an error if gradients, or their order, differ from those of other ranks.

        **Collective**: every rank.

        Raises:
            ConfigError: on every rank, if they differ.

        **Cost**: one exchange between the hosts. Every loss is compared: of one that is not, ZeRO would add up wrong
        gradients without an error.
        """
        order = self.arrivals(loss)
        by_rank = differing(order)
        if by_rank is None:
            return
        anywhere = set().union(*by_rank)
        missing = [self.names[index] for index in sorted(anywhere.difference(order))]
        raise ConfigError(
            "the loss must reach the same parameters on every rank, in the same order, because gradients are "
            "concatenated in the order in which they arrive, but here it does not reach "
            f"{missing[:5] or 'them in the order of another rank'} ({this_rank()}). {advice}"
        )


class _Reach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.likes = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.likes]
        return (*gradients, *zeros)
