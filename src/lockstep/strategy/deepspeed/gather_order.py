"""Whether all ranks call the same layers at ZeRO stage 3, where each call gathers parameters from all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.dist import all_gather
from lockstep.dist.guard import check_mode
from lockstep.errors import ConfigError, PeerError

# Of the forward passes, those that are compared: the first, and a share of the others.
_FIRST, _EVERY = 3, 50
_END, _FAILED = -1, -2


class GatherOrder:
    """Compares over ranks which layers a forward pass calls.

    DeepSpeed gathers parameters by collectives that carry no names: ranks that call different layers get a mixture of
    both, or wait for each other forever. In a forward pass that is compared, each call of a layer with parameters, and
    the end, is preceded by one and the same small collective, so that ranks which part ways meet there.

    The first three passes are compared, and every fiftieth; all of them after `check_collectives("always")`.

    Args:
        module: the user's own module, which DeepSpeed has laid out.

    **Cost**: of a pass that is compared, four bytes from every rank to every rank for each layer.

    **Source**: `deepspeed.runtime.zero.partitioned_param_coordinator` (0.19), which compares the order afterwards, and
    raises on some ranks alone.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names: list[str] = []
        self._passes = 0
        self._is_due = False
        self._last = ""
        for name, part in module.named_modules():
            if any(hasattr(parameter, "ds_id") for parameter in part.parameters(recurse=False)):
                part.register_forward_pre_hook(self._hook(len(self._names)), prepend=True)
                self._names.append(name)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compare the layers that are called inside, if it is time to.

        **Collective**: every rank.

        Raises:
            ConfigError: on every rank, if other ranks call other layers.
            PeerError: if another rank failed inside.
        """
        self._is_due = self._passes < _FIRST or self._passes % _EVERY == 0 or check_mode() == "always"
        self._passes += 1
        self._last = ""
        try:
            yield
            self._meet(_END)
        except BaseException:
            self._meet(_FAILED)
            raise
        finally:
            self._is_due = False

    def _hook(self, index: int) -> Any:
        def before(_: nn.Module, __: Any) -> None:
            self._meet(index)

        return before

    def _meet(self, event: int) -> None:
        if not self._is_due:
            return
        events = torch.cat(all_gather(torch.tensor([event], dtype=torch.int32))).tolist()
        if all(other == event for other in events):
            self._last = self._names[event] if event >= 0 else ""
            return
        self._is_due = False
        if event == _FAILED:  # with an error of its own, which is on its way already
            return
        if _FAILED in events:
            rank = events.index(_FAILED)
            raise PeerError(
                f"this rank can't go on, because rank {rank} failed in the forward pass: see its own error",
                rank=rank,
                cause="an error in the forward pass",
            )
        calls = {other: f"calls `{self._names[other]}`" if other >= 0 else "ends" for other in events}
        told = " and ".join(
            f"{what} on rank {', '.join(str(rank) for rank, other in enumerate(events) if other == number)}"
            for number, what in calls.items()
        )
        raise ConfigError(
            "every rank must call the same layers in the same order at ZeRO stage 3, which gathers their parameters "
            f"from all, but the forward pass {told}{f' after `{self._last}`' if self._last else ''}. Let every rank "
            "call all of them, or use stage=1"
        )
