"""`DeepSpeedOptimWrapper`, and the registration of DeepSpeed's optimizers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.device import get_device
from lockstep.dist import all_reduce, get_rank
from lockstep.engines import load_engine
from lockstep.errors import ConfigError, listed
from lockstep.groups import this_rank
from lockstep.registry import OPTIM_WRAPPERS, OPTIMIZERS
from lockstep.strategy.deepspeed.engine import autocast_of
from lockstep.strategy.engine_parameters import MasterWeights
from lockstep.strategy.engine_wrappers import EngineOptimWrapper
from lockstep.strategy.gradient_flow import GradientFlow

_logger = logging.getLogger(__name__)

_HOMES = {
    "DeepSpeedCPUAdam": "deepspeed.ops.adam",
    "FusedAdam": "deepspeed.ops.adam",
    "DeepSpeedCPUAdagrad": "deepspeed.ops.adagrad",
    "FusedLamb": "deepspeed.ops.lamb",
    "DeepSpeedCPULion": "deepspeed.ops.lion",
    "FusedLion": "deepspeed.ops.lion",
}


def _register(name: str, home: str) -> None:
    def make(params: Any, **options: Any) -> Optimizer:
        optimizer: Optimizer = getattr(load_engine(home), name)(params, **options)
        return optimizer

    make.__qualname__ = name
    OPTIMIZERS.register_module(name=name, module=make)


for _name, _home in _HOMES.items():
    _register(_name, _home)


@OPTIM_WRAPPERS.register_module()
class DeepSpeedOptimWrapper(EngineOptimWrapper):
    """An optim wrapper whose backward passes and updates are run by a DeepSpeed engine.

    The engine averages gradients over ranks and clips them. This wrapper determines where a window of accumulation ends
    and by how much a loss is divided, so that the last window, which may be shorter, is divided correctly. `optimizer`
    is the one that the engine uses: a scheduler that changes its learning rates changes the update.

    Args:
        optimizer: as for `OptimWrapper`.
        accumulative_counts: as for `OptimWrapper`.
        clip_grad: `dict(max_norm=...)`.
        accumulate_across_epochs: as for `OptimWrapper`.
    """

    engine_name = "DeepSpeed"
    half_option = "the strategy bf16=True, fp16=True or torch_autocast=dict(enabled=True, dtype='bfloat16')"
    _ran_backward = False  # since the last call of `step`
    _holds_gradients = False  # of a backward pass since the last update
    _has_synced = False  # ZeRO has summed gradients over the ranks since the last update
    _has_skipped = False  # the engine has left out the last update, whose float16 gradients were not finite
    # Indices of the parameters in `_flow` that losses of the first window have reached; None after that window.
    _reached: set[int] | None = None

    def attach_engine(self, engine: Any, masters: MasterWeights, groups: Sequence[Sequence[str]]) -> None:
        """Set the engine that this wrapper controls, its master weights, and the names in each parameter group."""
        self._stage: int = engine.zero_optimization_stage()
        self._reached, self._groups = set(), groups
        self.attach(engine, engine.module, masters, replicated=self._stage < 3)

    def optim_context(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the autocast of the engine's config; `backward` tells the engine when ranks synchronise."""
        return autocast_of(self.engine)

    def step(self, **kwargs: Any) -> None:
        """Let the engine update the parameters if a window ends here, and clear the gradients.

        Raises:
            RuntimeError: this wrapper has run no backward pass since the last call.
        """
        _ = self.engine  # raises where there is none yet
        if not self._ran_backward:
            raise RuntimeError(
                "`step` must follow `update_params` or `backward` of the optim wrapper, but neither was called: under "
                "DeepSpeed gradients of a `loss.backward()` are lost. Call "
                "optim_wrapper.backward(optim_wrapper.scale_loss(loss))"
            )
        self._ran_backward = False
        if self.should_update():
            self._holds_gradients = self._has_synced = False
            super().step(**kwargs)

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients. After an update, the engine does so automatically.

        Raises:
            ConfigError: ZeRO holds gradients of batches since the last update, which it would not clear.
        """
        if self._holds_gradients:
            raise ConfigError(
                "`zero_grad` must not be called between a backward pass and the update under DeepSpeed's ZeRO, which "
                f"would keep the gradients ({this_rank()}), and no training must begin there. For a batch that is to "
                "change nothing, pass a loss times 0; or use strategy 'ddp' or 'fsdp'"
            )
        self.engine.optimizer.zero_grad(**kwargs)

    def _run_backward(self, loss: Tensor, **kwargs: Any) -> None:
        if self._has_synced and self._stage < 3:
            raise ConfigError(
                "`backward` must be called once before `step` under DeepSpeed's stages 1 and 2, which keep the last "
                f"gradients only, but was called again ({this_rank()}). Add the losses and call it once, or use stage=3"
            )
        ends = self.should_sync()
        self.engine.set_gradient_accumulation_boundary(ends)
        loss = self._reconciled(loss, ends=ends)
        self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        self._ran_backward = self._holds_gradients = True
        self._has_synced |= ends
        if not ends:
            self.engine.step()  # which counts the batch

    @property
    def has_skipped(self) -> bool:
        """Whether the last update was skipped."""
        return self._has_skipped

    def _run_step(self, **kwargs: Any) -> None:
        skipped = self.engine.skipped_steps
        self.engine.step(**kwargs)
        self._has_skipped = self.engine.skipped_steps > skipped
        if self.clip_grad is not None and not self._has_skipped:
            self._grad_norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32)

    def _reconciled(self, loss: Tensor, *, ends: bool) -> Tensor:
        """Return the loss, changed or checked so that ZeRO, which sums gradients by position, sums matching ones."""
        flow = self._flow
        if self._reached is not None:
            self._reached.update(flow.arrivals(loss))
            if ends:
                _warn_of_unreached(flow, self._reached, self.optimizer, self._groups)
                self._reached = None
        if self._stage == 2 or (self._stage == 1 and self.engine.zero_overlap_comm()):
            # ZeRO averages what this pass reaches, and would take the rest as earlier batches left it on this rank.
            loss = flow.reach_held(loss) if ends else loss
            flow.check_order(loss, "Use stage=1 with overlap_comm=False, or strategy 'ddp'")
        elif self._stage == 1 and ends:
            # DeepSpeed also treats a gradient that is missing on all ranks as 0.
            return flow.reach(loss, sorted(set(range(len(flow.names))) - set(flow.arrivals(loss))))
        return loss

    def _multiply_gradients(self, factor: float) -> None:
        zero = self.engine.optimizer
        if self._stage < 3 and self.engine.zero_cpu_offload():
            if get_device() != "cpu":  # they may still be on their way, if that memory is pinned
                torch.accelerator.synchronize()
            # In flat buffers in CPU memory, where DeepSpeed's function does not change them (0.19).
            for gradient in [flat.grad for flat in zero.single_partition_of_fp32_groups if flat.grad is not None]:
                gradient.mul_(factor)
        else:
            parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
            load_engine("deepspeed.utils").safe_update_full_grad_vectorized(
                parameters, lambda gradient, _: gradient * factor
            )
        # With offloading, DeepSpeed has taken the norms when the gradients came.
        for norm in getattr(zero, "norm_for_param_grads", {}).values():
            norm.mul_(factor)


def _warn_of_unreached(
    flow: GradientFlow, reached: Iterable[int], optimizer: Optimizer, groups: Sequence[Sequence[str]]
) -> None:
    """Warn on rank 0 of parameters that got no gradient in the first update, and that DeepSpeed may move all the same.

    Args:
        flow: the parameters.
        reached: indices of those that a loss of this rank has reached.
        optimizer: the one that updates them.
        groups: the names of the parameters in each of its groups.

    **Collective**: every rank.
    """
    anywhere = torch.zeros(len(flow.names), dtype=torch.uint8, device="cpu")
    anywhere[sorted(reached)] = 1
    all_reduce(anywhere, op="max")
    unreached = {flow.names[index] for index in (anywhere == 0).nonzero().flatten().tolist()}
    moved, by = [], set()
    for names, group in zip(groups, optimizer.param_groups, strict=True):
        movers = {"weight decay": group.get("weight_decay"), "momentum": group.get("betas") or group.get("momentum")}
        if (own := [name for name in names if name in unreached]) and any(movers.values()):
            moved += own
            by |= {what for what, value in movers.items() if value}
    if moved and flow.sees_all and get_rank() == 0:
        _logger.warning(
            "the loss reaches none of these %d parameters in the first update: %s. DeepSpeed takes their gradients for "
            "0, where other strategies leave such parameters alone: %s moves them by its %s all the same. Freeze them "
            "with requires_grad_(False)%s, or use strategy 'ddp' or 'fsdp'",
            len(moved), listed(moved, most=10), type(optimizer).__name__,
            " and ".join(sorted(by, reverse=True)),
            ", give them decay_mult=0 by paramwise_cfg" if "weight decay" in by else "",
        )  # fmt: skip
