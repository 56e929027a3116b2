"""Measurement of the time that a rank spends only on exchanging gradients."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_NANOSECONDS = 1e-9
_FIRST = 10  # DDP always measures the first ten exchanges


class ExchangeTimer:
    """Reads the times that DDP measures for its exchange of gradients.

    The exchange overlaps with the backward pass. Only the part after the backward pass is counted, when this rank has
    nothing else to do: the communication itself, and waiting for slower ranks. So the slowest rank has the smallest
    value.

    On the CPU, every exchange is measured. On an accelerator, measuring has to synchronise with the device, so only one
    exchange in `interval` is measured.

    Args:
        model: a model; only its modules wrapped by DDP are measured.
        interval: number of iterations from one reading to the next.

    **Cost**: 0.1 ms per reading.

    **Source**: `DDPLoggingData` of torch 2.13: means since the beginning over the first ten exchanges and then over
    every n-th. `DistributedDataParallel` provides it through private methods; without them nothing is measured.
    """

    def __init__(self, model: nn.Module, interval: int) -> None:
        wrapped: list[Any] = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        modules = [module for module in wrapped if hasattr(module, "_get_ddp_logging_data")]
        self._meters = [_Meter(module, 1 if module.device_type == "cpu" else interval) for module in modules]

    def mean_seconds(self, iters: int) -> float | None:
        """Return the seconds per iteration, or None if nothing has been measured yet.

        Args:
            iters: iterations since the last call. Some of them may not exchange gradients.
        """
        means = [mean for meter in self._meters if (mean := meter.mean_seconds(iters)) is not None]
        return sum(means) if means else None


class _Meter:
    """The measured exchange of one module."""

    def __init__(self, module: Any, rate: int) -> None:
        module._set_ddp_runtime_logging_sample_rate(rate)
        self._module = module
        self._rate = rate
        self._exchanges = 0
        self._total = 0.0
        self._iters = 0
        self._mean: float | None = None

    def mean_seconds(self, iters: int) -> float | None:
        self._iters += iters
        data = self._module._get_ddp_logging_data()
        exchanges = data.get("iteration", 0)
        if exchanges > self._exchanges:
            samples = self._samples(exchanges)
            hidden = data.get("avg_backward_compute_comm_overlap_time", 0)
            total = (data.get("avg_backward_comm_time", 0) - hidden) * _NANOSECONDS * samples
            mean = (total - self._total) / (samples - self._samples(self._exchanges))
            fraction = min(1.0, (exchanges - self._exchanges) / self._iters)
            self._mean = max(0.0, mean) * fraction
            self._exchanges, self._total, self._iters = exchanges, total, 0
        return self._mean

    def _samples(self, exchanges: int) -> int:
        """Return how many of the first `exchanges` have been measured."""
        return min(exchanges, _FIRST) + max(0, exchanges // self._rate - _FIRST // self._rate)
