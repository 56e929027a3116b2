"""`LossScaler`: torch's gradient scaler, with the same scale on all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lockstep.dist import all_reduce
from lockstep.optim.clipping import is_sharded

# Number of updates between two checks of how many were skipped; each check waits for the device.
PATIENCE = 100


class LossScaler(GradScaler):
    """Scale losses so that half-precision gradients do not vanish, and skip updates whose gradients overflow.

    With sharded gradients, an overflow in the shard of one rank makes all ranks skip the update and shrink the scale.
    Gradients that every rank holds whole are averaged already, so they overflow on all ranks or on none.

    Args:
        device: type of the device on which losses are computed.
        fixed_scale: a scale that never changes, instead of one that shrinks and grows.
        **kwargs: `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`, `enabled` of torch's scaler.

    **Collective**: every rank calls `unscale_` and `update`. **Cost**: with sharded gradients an all_reduce of 4 bytes
    per update; torch's own scaler sends as much for each dtype, but refuses a mixture of sharded and whole gradients.

    **Source**: `torch.amp.GradScaler` (torch 2.13). Torch's `ShardedGradScaler` also overrides `_unscale_grads_`.
    """

    def __init__(self, device: str, *, fixed_scale: float | None = None, **kwargs: Any) -> None:
        if fixed_scale is not None:
            kwargs["init_scale"] = fixed_scale
        super().__init__(device, **kwargs)
        self._fixed_scale = fixed_scale
        self._updates = 0
        self._skipped: Tensor | None = None  # on the device: count since the last check

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Shrink or grow the scale after an update.

        Raises:
            FloatingPointError: on every rank, when all of the last 100 updates were skipped (a check every 100).
        """
        super().update(self._fixed_scale if new_scale is None else new_scale)
        self._updates += 1
        if self._updates % PATIENCE == 0:
            self._look()

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        held: Any = SimpleNamespace(param_groups=[{"params": [_own_part(param) for param in params]}])
        found = super()._unscale_grads_(held, inv_scale, found_inf, allow_fp16)
        if not found:  # the optimizer has no gradients: nothing to skip
            found = {found_inf.device: found_inf}
        sharded = any(is_sharded(param.grad) for param in params)
        for flag in found.values():
            if sharded:
                all_reduce(flag, op="max")
            if self._skipped is None:
                self._skipped = torch.zeros_like(flag)
            self._skipped += flag.to(self._skipped.device, non_blocking=True)
        return found

    def _look(self) -> None:
        if self._skipped is None:  # a scaler that is not enabled
            return
        if self._skipped.item() >= PATIENCE:
            raise FloatingPointError(
                f"the gradients must be finite, but were not in any of the last {PATIENCE} updates, which were all "
                f"skipped; the loss is scaled by {self.get_scale():g}. The parameters no longer change. Find "
                "the first operation that is not finite with torch.autograd.set_detect_anomaly(True), or train in "
                "bfloat16, which needs no scaling"
            )
        self._skipped.zero_()


def _own_part(param: Any) -> Any:
    """Return this rank's part of a parameter, with its gradient, in the same memory."""
    if not is_sharded(param.grad):
        return param
    with torch.no_grad():
        own = param.to_local().detach()
        own.grad = param.grad.to_local()
    return own
