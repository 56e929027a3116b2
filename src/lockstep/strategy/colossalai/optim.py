"""`ColossalAIOptimWrapper`: from a loss to updated parameters, by an engine that does part of it itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.optim import OptimWrapper
from lockstep.registry import OPTIM_WRAPPERS
from lockstep.strategy.gradient_flow import GradientFlow


class Drive(NamedTuple):
    """What an update is made by.

    Attributes:
        engine: ColossalAI's optimizer.
        gradients: yields those that its next step will use.
        clips: whether it clips by itself.
        in_pipeline: whether forward and backward passes are one, so that there is no loss to begin from.
        flow: how losses reach the model's parameters; needed with ZeRO.
        sends_as_they_come: whether ZeRO sends gradients during the backward pass, in the order of their coming.
    """

    engine: Any
    gradients: Callable[[], Iterator[Tensor]]
    clips: bool
    in_pipeline: bool
    flow: GradientFlow | None
    sends_as_they_come: bool


@OPTIM_WRAPPERS.register_module()
class ColossalAIOptimWrapper(OptimWrapper):
    """An optimizer that `ColossalAIStrategy` has laid over the ranks; means what `OptimWrapper` means.

    Its `optimizer` is the one that was configured, whose learning rates are the ones in use, also where the engine has
    given it shards to update.

    Args:
        optimizer: the optimizer.
        accumulative_counts: number of batches whose gradients are averaged into one update.
        clip_grad: `dict(max_norm=...)`; with the plugin `ddp` also what else `OptimWrapper` takes.
    """

    _drive: Drive | None = None

    @classmethod
    def of(cls, wrapper: OptimWrapper) -> ColossalAIOptimWrapper:
        """Return a wrapper of this class with another one's optimizer and settings.

        Raises:
            ConfigError: it does more than an `OptimWrapper`.
        """
        if isinstance(wrapper, cls):
            return wrapper
        if type(wrapper) is not OptimWrapper:
            raise ConfigError(
                "`optim_wrapper` must be an OptimWrapper with one optimizer under the strategy 'colossalai', but is of "
                f"type {type(wrapper).__name__}. For half precision give the plugin precision='bf16', or use "
                "plugin='ddp'; for several optimizers use strategy='ddp'"
            )
        return cls(wrapper.optimizer, wrapper.accumulative_counts, wrapper.clip_grad)

    def max_norm_for_engine(self) -> float | None:
        """Return the norm that an engine is to clip to, which knows no other clipping.

        Raises:
            ConfigError: the clipping that is wanted is another one.
        """
        if self.clip_grad is None:
            return None
        unknown = {
            name: value
            for name, value in self.clip_grad.items()
            if not (name in ("type", "max_norm") or (name == "norm_type" and value == 2))
            if name == "norm_type" or value
        }
        if self.clip_grad["type"] != "norm" or unknown:
            raise ConfigError(
                "`clip_grad` must be dict(max_norm=...) with this plugin, whose optimizer clips to the 2-norm alone, "
                f"but is {self.clip_grad}. Use plugin='ddp', or strategy='fsdp'"
            )
        max_norm = float(self.clip_grad["max_norm"])
        if not max_norm > 0:
            raise ConfigError(f"`clip_grad['max_norm']` must be above 0, but is {max_norm}")
        return max_norm

    def attach(self, drive: Drive) -> None:
        """Take over ColossalAI's optimizer, made around this one's."""
        self._drive = drive

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of a scaled loss, and count the batch.

        **Collective**: every rank, unless inside `no_sync`.

        Raises:
            ConfigError: where ZeRO sends gradients as they come, the ranks' losses reach different parameters, or in
                another order.
            RuntimeError: the model is in stages, of which none has a loss to begin from; call `train_step`.
        """
        drive = self._attached()
        if drive.in_pipeline:
            raise RuntimeError(
                "a model with `pp_size` above 1 must be trained by its `train_step`, because forward and backward "
                "passes of its stages are one, but `update_params` or `backward` was called"
            )
        if drive.flow is not None and drive.engine.require_grad_sync:
            if drive.sends_as_they_come:
                drive.flow.check_order(loss, "Use stage=1 with overlap_communication=False, or strategy 'ddp'")
            else:
                loss = drive.flow.reach_alike(loss)
        drive.engine.backward(loss, **kwargs)
        self._inner_count += 1

    def update_by(self, model: nn.Module, run: Callable[[float], None]) -> None:
        """Do as `update_params` does where forward and backward passes are one.

        Args:
            model: the wrapper, for its `no_sync`.
            run: makes both, and adds the gradients of the loss times its argument.
        """
        factor = float(self.scale_loss(torch.ones((), dtype=torch.float64)))
        with self.optim_context(model):
            run(factor)
        self._no_sync = None
        self._inner_count += 1
        if self.should_update():
            self._even_out()
            self.step()
            self.zero_grad()

    def step(self, **kwargs: Any) -> None:
        """Clip the gradients, then let the optimizer update the parameters."""
        drive = self._attached()
        if self.clip_grad is not None and not drive.clips:
            self._clip_grad()
        drive.engine.step(**kwargs)
        if self.clip_grad is not None and drive.clips:
            self._grad_norm = torch.tensor(float(drive.engine.get_grad_norm()))

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients."""
        self._attached().engine.zero_grad(**kwargs)

    def left_out(self, model: nn.Module) -> list[str]:
        """Return no names: the engine holds other tensors than the model's, and refuses what it does not train."""
        return []

    def _even_out(self) -> None:
        factor = self._sample_weights.correction()
        if factor != 1:
            for gradient in self._attached().gradients():
                gradient.mul_(factor)

    def _attached(self) -> Drive:
        if self._drive is None:
            raise RuntimeError(
                "a ColossalAIOptimWrapper must be given to ColossalAIStrategy.prepare() before it is used"
            )
        return self._drive
