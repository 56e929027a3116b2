"""Master weights: what an engine's optimizer updates, beside the weights that the model computes with.

An engine overwrites the model's weights by their masters at each update. What a model, a hook or a loop has written
into the weights since the last one, as by a clamp, would be lost, so it is written into the masters, too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.groups import this_rank

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Masters:
    """The masters of this rank.

    Args:
        engine: name of the engine.
        named: the parameters, which are now where the engine keeps them.
        pairs: the masters, each with the weights that it belongs to, of the same shape.
        offloads: whether the masters are in CPU memory. Then they are written only if a sum over the bits of the
            weights has changed since the last update.

    **Cost**: per update, one copy of this rank's part of the weights on its device, or one comparison of it in half
    precision. With `offloads`, a sum over it, which the host reads: such an engine waits for the device anyway.
    """

    def __init__(
        self,
        engine: str,
        named: Iterable[tuple[str, nn.Parameter]],
        pairs: Iterable[tuple[Tensor, Tensor]],
        *,
        offloads: bool = False,
    ) -> None:
        self._engine = engine
        self._homes = [(name, parameter, parameter.data) for name, parameter in named]
        pairs = [(master.detach(), weights.detach()) for master, weights in pairs]
        pairs = [pair for pair in pairs if pair[0].data_ptr() != pair[1].data_ptr()]
        self._copies = [pair for pair in pairs if pair[0].dtype == pair[1].dtype]
        self._rounded = [pair for pair in pairs if pair[0].dtype != pair[1].dtype]
        self._offloads = offloads and bool(pairs)
        self._sums: Tensor | None = None
        self.record()

    def record(self) -> None:
        """Note that the masters and the weights are equal, as after an update."""
        if self._offloads:
            self._sums = self._sums_of_weights()

    @torch.no_grad()
    def follow(self) -> None:
        """Write into the masters what has been written into the model's weights.

        Raises:
            ConfigError: the `data` of a parameter was replaced by a tensor of another shape or dtype.
        """
        for name, parameter, home in self._homes:
            if parameter.data_ptr() != home.data_ptr():
                self._bring_home(name, parameter, home)
        if self._sums is not None and torch.equal(self._sums_of_weights(), self._sums):
            return
        for master, weights in self._rounded:
            master.copy_(newer(master, weights))
        for master, source in self._copies:
            master.copy_(source)

    def check(self) -> None:
        """Refuse parameters that the engine can't use.

        Raises:
            ConfigError: the `data` of a parameter was replaced by a tensor of another shape or dtype.
        """
        for name, parameter, home in self._homes:
            self._check_form(name, parameter, home)

    def _bring_home(self, name: str, parameter: nn.Parameter, home: Tensor) -> None:
        """Copy a parameter whose `data` was replaced into the engine's memory, which the parameter uses again."""
        self._check_form(name, parameter, home)
        home.copy_(parameter.data)
        parameter.data = home

    def _check_form(self, name: str, parameter: nn.Parameter, home: Tensor) -> None:
        if parameter.shape != home.shape or parameter.dtype != home.dtype:
            raise ConfigError(
                f"`{name}.data` must keep its shape and dtype under {self._engine}, which has laid it out in a buffer, "
                f"but was replaced by {tuple(parameter.shape)} in {parameter.dtype} where {tuple(home.shape)} in "
                f"{home.dtype} had been ({this_rank()}). Use strategy 'ddp'"
            )

    def _sums_of_weights(self) -> Tensor:
        weights = [own for _, own in self._copies + self._rounded]
        return torch.stack([own.view(_BITS[own.element_size()]).sum() for own in weights])


def newer(master: Tensor, weights: Tensor) -> Tensor:
    """Return a master, with the weights in place of those elements that are not a rounded master any more."""
    master = master.to(weights.device)
    return torch.where(master.to(weights.dtype) == weights, master, weights.to(master.dtype))
