"""How long a rank does nothing but exchange gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_NANOSECONDS = 1e-9


class ExchangeTimer:
    """Reads what DDP measures of its own exchange of gradients, now and then.

    The exchange runs beside the backward pass. What is counted is the part that goes on after it, while this rank has
    nothing else to do: the messages themselves, and waiting for ranks that are slower. So the slowest rank shows
    the least.

    Args:
        model: a model; only what DDP wraps in it is measured.
        interval: number of exchanges from one that is measured to the next.

    **Cost**: 0.1 ms per reading; on an accelerator one event is waited for in each exchange that is measured.

    **Source**: `DDPLoggingData` of torch 2.13. `DistributedDataParallel` hands it out by methods that are not public;
    without them nothing is measured.
    """

    def __init__(self, model: nn.Module, interval: int) -> None:
        wrapped: list[Any] = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._modules = [module for module in wrapped if hasattr(module, "_get_ddp_logging_data")]
        for module in self._modules:
            module._set_ddp_runtime_logging_sample_rate(interval)
        self._exchanges = 0
        self._iters = 0
        self._share = 1.0

    def mean_seconds(self, iters: int) -> float | None:
        """Return the seconds per iteration, or None where nothing has been measured yet.

        Args:
            iters: iterations since the last call. Not each of them need exchange gradients.
        """
        measured = [module._get_ddp_logging_data() for module in self._modules]
        self._iters += iters
        exchanges = max((int(data.get("iteration", 0)) for data in measured), default=0)
        if exchanges == 0:
            return None
        if exchanges > self._exchanges:
            self._share = min(1.0, (exchanges - self._exchanges) / self._iters)
            self._exchanges, self._iters = exchanges, 0
        return self._share * sum(_exposed_seconds(data) for data in measured)


def _exposed_seconds(data: Mapping[str, int]) -> float:
    exchange = data.get("backward_comm_time", 0)
    hidden = data.get("backward_compute_comm_overlap_time", 0)
    return max(0.0, (exchange - hidden) * _NANOSECONDS)
