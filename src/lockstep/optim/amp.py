"""`AmpOptimWrapper`: half-precision forward passes; in float16 with a scaled loss, with one scale on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lockstep.dist import all_reduce
from lockstep.errors import ConfigError, did_you_mean, require_known
from lockstep.model.shards import is_dtensor
from lockstep.optim.wrapper import OptimWrapper
from lockstep.registry import OPTIM_WRAPPERS

_logger = logging.getLogger(__name__)
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_SCALER_KEYS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
_STATE = "loss_scaler"
# Number of updates between two checks of how many were skipped; each check waits for the device.
PATIENCE = 100


@OPTIM_WRAPPERS.register_module()
class AmpOptimWrapper(OptimWrapper):
    """An `OptimWrapper` that runs forward passes in half precision where that is safe (`torch.autocast`).

    Parameters, gradients and the optimizer's state keep their dtype. In float16 the loss is scaled, so that small
    gradients do not vanish; gradients are unscaled before they are clipped. If gradients are not finite, all ranks skip
    the update and lower the scale. bfloat16 has the range of float32 and needs no scale.

    Args:
        loss_scale: `"dynamic"` for a scale that adapts, in float16 only; a number for a fixed scale; a dict of
            arguments of `torch.amp.GradScaler` for a dynamic scale in any dtype.
        dtype: `"float16"`, `"bfloat16"` or the torch dtype; by default float16 on accelerators and bfloat16 on the
            CPU.
        use_fsdp: for compatibility with MMEngine; ignored, because sharded gradients are detected.
        optimizer: as for `OptimWrapper`.
        accumulative_counts: as for `OptimWrapper`.
        clip_grad: as for `OptimWrapper`; `error_if_nonfinite` must not be set.
        accumulate_across_epochs: as for `OptimWrapper`.

    **Collective**: under FSDP every rank calls `step`. **Cost**: see `LossScaler`.

    Raises:
        FloatingPointError: on every rank, when all of the last 100 updates were skipped (checked every 100 updates).

    Example:
        >>> model = nn.Linear(2, 1)
        >>> wrapper = AmpOptimWrapper(optimizer=torch.optim.SGD(model.parameters(), lr=0.1), dtype="float16")
        >>> with wrapper.optim_context(model):
        ...     loss = model(torch.ones(2)).mean()
        >>> loss.dtype, wrapper.loss_scale
        (torch.float16, 65536.0)
        >>> wrapper.update_params(loss)
    """

    def __init__(
        self,
        loss_scale: Literal["dynamic"] | float | Mapping[str, Any] = "dynamic",
        dtype: Literal["float16", "bfloat16"] | torch.dtype | None = None,
        use_fsdp: bool = False,
        *,
        optimizer: Optimizer,
        accumulative_counts: int = 1,
        clip_grad: Mapping[str, Any] | None = None,
        accumulate_across_epochs: bool = True,
    ) -> None:
        super().__init__(optimizer, accumulative_counts, clip_grad, accumulate_across_epochs)
        self._given_dtype = half_dtype(dtype)
        self._scaler_kwargs = _checked_scale(loss_scale)
        self._only_float16 = loss_scale == "dynamic"
        self._has_autocast = False  # whether a forward pass has been in half precision, or was told not to be
        if self.clip_grad is not None and self.clip_grad.get("error_if_nonfinite"):
            raise ValueError(
                "`clip_grad['error_if_nonfinite']` must be False for an AmpOptimWrapper, but is True: gradients that "
                "overflow are part of the search for a scale, and are skipped"
            )

    @cached_property
    def device_type(self) -> str:
        """Type of the device on which the model runs."""
        # Read late: the optimizer may have been created before the model was moved. Offloaded shards are on the CPU,
        # but their mesh tells where the model runs.
        param = self.param_groups[0]["params"][0]
        mesh = getattr(param, "device_mesh", None)
        return str(param.device.type if mesh is None else mesh.device_type)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype in which autocast computes."""
        default = torch.bfloat16 if self.device_type == "cpu" else torch.float16
        return self._given_dtype or default

    @cached_property
    def _scaler(self) -> LossScaler | None:
        if self._only_float16 and self.dtype != torch.float16:
            return None
        return LossScaler(self.device_type, **self._scaler_kwargs)

    @property
    def loss_scale(self) -> float:
        """The current factor for losses. Reading it waits for the device."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    @property
    def has_skipped(self) -> bool:
        """Whether the last update was skipped. Reading it may wait for the device."""
        return self._scaler is not None and self._scaler.has_skipped

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Enter `torch.autocast` for the forward pass, and `no_sync` if no update follows."""
        with super().optim_context(model), self.autocast():
            yield

    def autocast(self) -> torch.autocast:
        """Return the context of half precision alone, for a part of the model that is called by itself."""
        self._has_autocast = True
        return torch.autocast(self.device_type, self.dtype)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Multiply the loss by the scale, add its gradients, and count the batch."""
        if not self._has_autocast:
            self._has_autocast = True
            _logger.warning(
                "mixed precision: the first loss was computed outside of the optim wrapper's context, thus in the "
                "weights' own precision, unless the model enters torch.autocast itself. Compute it in `with "
                "optim_wrapper.optim_context(self):`, in a `train_step` of the model's own, or in a Session, where "
                "parts of a model are called by themselves, in `with session.forward_context():`"
            )
        super().backward(loss if self._scaler is None else self._scaler.scale(loss), **kwargs)

    def step(self, **kwargs: Any) -> None:
        """Unscale and clip the gradients; if they are finite, let the optimizer update the parameters."""
        if self._scaler is None:
            super().step(**kwargs)
            return
        self._even_out()
        self._scaler.unscale_(self.optimizer)
        former = self._grad_norm
        self._clip_grad()
        if (norm := self._grad_norm) is not None:  # of an update that is made; nothing is read from the device
            former = torch.zeros_like(norm) if former is None else former
            self._grad_norm = torch.where(norm.isfinite(), norm, former)
        self._update(self._scaler.step, self.optimizer, **kwargs)
        self._scaler.update()

    def extra_state(self) -> dict[str, Any]:
        """Return the counts of the accumulation, and the state of the scale."""
        return {**super().extra_state(), **self._state_of_scale()}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what was saved. A fixed scale, and the factors of a dynamic one, come from the arguments instead."""
        super().load_extra_state(state)
        self._load_scale(state)

    def _state_of_scale(self) -> dict[str, Any]:
        return {} if self._scaler is None else {_STATE: self._scaler.state_dict()}

    def _load_scale(self, state: Mapping[str, Any]) -> None:
        if self._scaler is None or not self._scaler.is_enabled() or "fixed_scale" in self._scaler_kwargs:
            return
        saved = state.get(_STATE)
        if not saved:
            _logger.warning("no loss scale was saved: it begins with %g", self.loss_scale)
            return
        moving = {name: saved[name] for name in ("scale", "_growth_tracker")}
        self._scaler.load_state_dict({**self._scaler.state_dict(), **moving})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer and of the scale."""
        return {**super().state_dict(), **self._state_of_scale()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict({name: value for name, value in state_dict.items() if name != _STATE})
        self._load_scale(state_dict)


def half_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the half precision of a name or a `torch.dtype`; None for None."""
    name = str(dtype).removeprefix("torch.")
    if dtype is None or name in _DTYPES:
        return _DTYPES.get(name)
    raise ConfigError(
        f"`dtype` must be 'float16', 'bfloat16', such a torch.dtype or None, but is {dtype!r}"
        + did_you_mean(name, _DTYPES)
    )


def _checked_scale(loss_scale: Any) -> dict[str, Any]:
    """Return the arguments of a `LossScaler`."""
    if loss_scale == "dynamic":
        return {}
    if isinstance(loss_scale, Mapping):
        require_known("loss_scale", loss_scale, _SCALER_KEYS)
        return dict(loss_scale)
    if isinstance(loss_scale, bool) or not isinstance(loss_scale, int | float):
        raise TypeError(
            "`loss_scale` must be 'dynamic', a number or a dict of arguments of torch.amp.GradScaler, but is "
            f"{loss_scale!r}"
        )
    if not loss_scale > 0:
        raise ValueError(f"`loss_scale` must be above 0, but is {loss_scale}")
    return {"fixed_scale": float(loss_scale)}


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
    With gradients in CPU memory, the host waits for the device; so it does in `step`, to know whether to skip, but for
    fused optimizers, which read that on the device.

    **Source**: `torch.amp.GradScaler` (torch 2.13). Torch's `ShardedGradScaler` also overrides `_unscale_grads_`.
    """

    def __init__(self, device: str, *, fixed_scale: float | None = None, **kwargs: Any) -> None:
        if fixed_scale is not None:
            kwargs["init_scale"] = fixed_scale
        super().__init__(device, **kwargs)
        self._fixed_scale = fixed_scale
        self._updates = 0
        self._skipped: Tensor | None = None  # on the device: count since the last check
        self._flags: list[Tensor] = []  # of the last update: whether it was not finite

    @property
    def has_skipped(self) -> bool:
        """Whether the last update was skipped. Reading it waits for the device."""
        return any(bool(flag.item()) for flag in self._flags)

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
        if any(param.grad.device.type == "cpu" for param in params):
            # Offloaded shards. torch would read its copies of these on the host before they have arrived (2.13).
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        held: Any = SimpleNamespace(param_groups=[{"params": [_own_part(param) for param in params]}])
        found = super()._unscale_grads_(held, inv_scale, found_inf, allow_fp16)
        if not found:  # the optimizer has no gradients: nothing to skip
            found = {found_inf.device: found_inf}
        self._flags = list(found.values())
        sharded = any(is_dtensor(param.grad) for param in params)
        skips: Tensor | None = None  # one for all devices
        for flag in self._flags:
            if sharded:
                all_reduce(flag, op="max")
            skips = flag if skips is None else skips.maximum(flag.to(skips.device, non_blocking=not skips.is_cpu))
        assert skips is not None
        if self._skipped is None:
            self._skipped = torch.zeros_like(skips)
        self._skipped += skips.to(self._skipped.device, non_blocking=not self._skipped.is_cpu)
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
    if not is_dtensor(param.grad):
        return param
    with torch.no_grad():
        own = param.to_local().detach()
        own.grad = param.grad.to_local()
    return own
