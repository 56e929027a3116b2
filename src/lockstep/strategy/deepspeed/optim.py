"""`DeepSpeedOptimWrapper`, and the registration of DeepSpeed's optimizers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.dist import all_reduce, get_rank
from lockstep.engines import load_engine
from lockstep.errors import ConfigError, listed
from lockstep.groups import this_rank
from lockstep.model.written import BY_RANK, DriftCheck
from lockstep.optim import OptimWrapper, OptimWrapperDict, build_optim_wrapper
from lockstep.optim.clipping import gradient_norm
from lockstep.registry import OPTIM_WRAPPERS, OPTIMIZERS
from lockstep.strategy.deepspeed.engine import autocast_of
from lockstep.strategy.engine_parameters import GradientPlaceholders
from lockstep.strategy.gradient_flow import GradientFlow

if TYPE_CHECKING:
    from lockstep.strategy.deepspeed.state import DeepSpeedState
    from lockstep.strategy.engine_parameters import MasterWeights

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
class DeepSpeedOptimWrapper(OptimWrapper):
    """An optim wrapper whose backward passes and updates are run by a DeepSpeed engine.

    The engine averages gradients over ranks and clips them. This wrapper determines where a window of accumulation ends
    and by how much a loss is divided, so that the last window, which may be shorter, is divided correctly. `optimizer`
    is the one that the engine uses: a scheduler that changes its learning rates changes the update.

    Args:
        optimizer: as for `OptimWrapper`.
        accumulative_counts: as for `OptimWrapper`.
        clip_grad: `dict(max_norm=...)`.
    """

    _engine: Any = None
    _state: DeepSpeedState | None = None
    _masters: MasterWeights | None = None
    _drift: DriftCheck | None = None  # None where ranks hold no replicas
    _went_back = False
    _holds = False  # gradients since the last update
    _is_summed = False  # over the ranks, since the last update
    _goes_on = False  # to the update, without code of the user's between
    _flow: GradientFlow | None = None
    # Indices in the flow of the parameters reached in the first window; None after that window.
    _reached: set[int] | None = None

    def attach(self, engine: Any, state: DeepSpeedState) -> None:
        """Set the engine that this wrapper controls, and the view of its state."""
        self._engine = engine
        self._state = state
        self._masters = state.masters
        self._flow, self._reached = GradientFlow(engine.module), set()
        self._held = GradientPlaceholders("DeepSpeed")
        if engine.zero_optimization_stage() < 3:
            self._drift = DriftCheck(lambda: list(engine.module.named_parameters()), None, BY_RANK)

    def initialize_count_status(self, model: nn.Module, init_counts: int = 0, max_counts: int | None = None) -> None:
        """Set how many batches there have been and will be; a scheduler of DeepSpeed's config continues from there."""
        super().initialize_count_status(model, init_counts, max_counts)
        schedule = self.engine.lr_scheduler
        updates = self._windows.updates
        if schedule is None or updates == 0:
            return
        for group in self.param_groups:
            group["lr"] = group.get("initial_lr", group["lr"])
        with warnings.catch_warnings():
            # torch's schedules warn because they did not see the optimizer's steps of the previous run.
            warnings.filterwarnings("ignore", message=r".*lr_scheduler\.step\(\)")
            for _ in range(updates):
                schedule.step()

    def optim_context(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the autocast of the engine's config; `backward` tells the engine when ranks synchronise."""
        return autocast_of(self.engine)

    def update_params(
        self, loss: Tensor, step_kwargs: Mapping[str, Any] | None = None, zero_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Run the backward pass; at the end of a window, update the parameters and clear the gradients.

        Args:
            loss: the scalar loss of one batch, not divided by anything.
            step_kwargs: passed on to the engine's `step`.
            zero_kwargs: have no effect; the engine clears gradients.

        **Collective**: every rank.
        """
        self._goes_on = True
        try:
            self.backward(self.scale_loss(loss))
        finally:
            self._goes_on = False
        self.step(**(step_kwargs or {}))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of a scaled loss, and count the batch.

        **Collective**: every rank, whenever gradients are sent: at the end of a window; at stage 2, with every batch.

        Raises:
            ConfigError: at stage 2, or at stage 1 with `overlap_comm`, the ranks' losses reach different parameters, or
                the same ones in a different order; or the gradients of an earlier pass were changed, or can't be added
                to.
        """
        ends = self.should_sync()
        self._held.release()
        self.engine.set_gradient_accumulation_boundary(ends)
        reached = [] if self._goes_on or self._flow is None or not self._by_zero else self._flow.reached(loss)
        loss = self._reconciled(loss, ends=ends)
        earlier = self._summed()
        try:
            self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        except Exception:
            if self._masters is not None:
                self._masters.check()  # of other shapes and dtypes, DeepSpeed fails with errors of its own
            raise
        self._add(earlier)
        self._windows.add()
        self._went_back = self._holds = True
        self._is_summed |= ends
        self._held.hold(reached)

    def step(self, **kwargs: Any) -> None:
        """Let the engine update the parameters if a window ends here, and clear the gradients.

        Raises:
            DivergenceError: on every rank, if below stage 3 ranks have written other values into parameters.
            RuntimeError: this wrapper has run no backward pass since the last call.
        """
        if not self._went_back:
            raise RuntimeError(
                "`step` must follow `update_params` or `backward` of the optim wrapper, but neither was called: under "
                "DeepSpeed gradients of a `loss.backward()` are lost. Call optim_wrapper.backward(loss)"
            )
        self._held.release()
        self._went_back = False
        ends = self.should_update()
        if ends:
            self._holds = self._is_summed = False
            self._even_out()
        wants_norm = ends and self.clip_grad is not None
        by_engine = self._by_zero
        if wants_norm and not by_engine:  # at stage 0 the engine clips but does not report the norm
            self._grad_norm = gradient_norm([p.grad for p in self.engine.module.parameters() if p.grad is not None])
        if ends and self._drift is not None:
            self._drift.before_update()
        if ends and self._masters is not None:
            self._masters.follow()
        self.engine.step(**kwargs)
        if ends and self._masters is not None:
            self._masters.record()
        if wants_norm and by_engine:
            self._grad_norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32)

    def zero_grad(self, **kwargs: Any) -> None:
        """Clear the gradients. After an update, the engine does so automatically.

        Raises:
            ConfigError: ZeRO holds gradients of batches since the last update, which it would not clear.
        """
        if self._holds and self._by_zero:
            raise ConfigError(
                "`zero_grad` must not be called between a backward pass and the update under DeepSpeed's ZeRO, which "
                f"would keep the gradients ({this_rank()}). For a batch that is to change nothing, pass a loss times "
                "0; or use strategy 'ddp' or 'fsdp'"
            )
        self.engine.optimizer.zero_grad(**kwargs)

    def left_out(self, model: nn.Module) -> list[str]:
        """Return an empty list: the engine holds other tensors, and refuses parameters that it does not train."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state in canonical form. **Collective**: every rank."""
        return self._attached_state().optim_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state in canonical form. **Collective**: every rank."""
        self._attached_state().load_optim(state_dict)

    @property
    def engine(self) -> Any:
        """The DeepSpeed engine.

        Raises:
            RuntimeError: there is none yet.
        """
        if self._engine is None:
            raise RuntimeError(
                "DeepSpeedOptimWrapper must be given an engine, but has none. Give it to a Runner with "
                "strategy='deepspeed', or to DeepSpeedStrategy.prepare, and use the one that comes back"
            )
        return self._engine

    @property
    def _by_zero(self) -> bool:
        """Whether ZeRO holds the gradients in pieces."""
        return bool(self.engine.zero_optimization_stage() > 0)

    def _summed(self) -> dict[int, list[Tensor]]:
        """Return the gradients that have been summed over the ranks since the last update.

        **Source**: `DeepSpeedZeroOptimizer` (0.19), of stages 1 and 2, which replaces them at the end of a window.

        Raises:
            ConfigError: they are in CPU memory, where nothing can be added to them.
        """
        if not self._is_summed or self.engine.zero_optimization_stage() not in (1, 2):
            return {}
        if self.engine.zero_cpu_offload():
            raise ConfigError(
                "`backward` must be called once before `step` under DeepSpeed's stages 1 and 2 with `offload`, which "
                f"keep the last gradients only, but was called again ({this_rank()}). Add the losses and call it once, "
                "or use stage=3"
            )
        summed = getattr(self.engine.optimizer, "averaged_gradients", {})  # BF16_Optimizer adds by itself
        return {index: held for index, held in summed.items() if held is not None}

    def _add(self, earlier: dict[int, list[Tensor]]) -> None:
        """Add gradients of earlier backward passes to those that have replaced them."""
        for index, gradients in earlier.items():
            held = self.engine.optimizer.averaged_gradients[index]
            if held is not gradients:
                for gradient, other in zip(held, gradients, strict=True):
                    gradient.add_(other)

    def _attached_state(self) -> DeepSpeedState:
        _ = self.engine
        assert self._state is not None  # comes with the engine
        return self._state

    def _reconciled(self, loss: Tensor, *, ends: bool) -> Tensor:
        """Return the loss, changed or checked so that ZeRO, which sums gradients by position, sums matching ones."""
        flow, stage = self._flow, self.engine.zero_optimization_stage()
        assert flow is not None  # comes with the engine
        if self._reached is not None:
            self._reached.update(flow.arrivals(loss))
            if ends:
                warn_of_unreached(flow, self._reached, self.optimizer)
                self._reached = None
        if stage == 2 or (stage == 1 and self.engine.zero_overlap_comm()):
            flow.check_order(loss, "Use stage=1 with overlap_comm=False, or strategy 'ddp'")
        elif stage == 1 and ends:
            # DeepSpeed also treats a gradient that is missing on all ranks as 0.
            return flow.reach(loss, sorted(set(range(len(flow.names))) - set(flow.arrivals(loss))))
        return loss

    def _multiply_gradients(self, factor: float) -> None:
        parameters = [parameter for parameter in self.engine.module.parameters() if parameter.requires_grad]
        load_engine("deepspeed.utils").safe_update_full_grad_vectorized(
            parameters, lambda gradient, _: gradient * factor
        )


def read_optim(
    model: nn.Module, optim_wrapper: Any, *, has_own: bool
) -> tuple[Optimizer | None, int | None, Mapping[str, Any] | None]:
    """Read the optimizer and its settings from an optim wrapper, an optimizer or a config.

    Return the optimizer (None if DeepSpeed is to build the one in its config), the number of batches per update, and
    `clip_grad` (each None if not given).

    Args:
        model: the model, not wrapped yet.
        optim_wrapper: as for `Strategy.prepare`.
        has_own: whether DeepSpeed's config names an optimizer.

    Raises:
        ConfigError: `optim_wrapper` is of a kind that DeepSpeed cannot replace, or there are two optimizers.
    """
    cfg = optim_wrapper if isinstance(optim_wrapper, Mapping) else {}
    if has_own:
        if not isinstance(optim_wrapper, Mapping) or cfg.keys() - {"type", "accumulative_counts", "clip_grad"}:
            raise ConfigError(
                "`optimizer` must be given once, but is in the DeepSpeed config and in `optim_wrapper`. Leave out one"
            )
        return None, cfg.get("accumulative_counts"), cfg.get("clip_grad")
    built = build_optim_wrapper(model, optim_wrapper)
    if type(built) not in (OptimWrapper, DeepSpeedOptimWrapper):
        raise ConfigError(_not_wanted(built))
    counts = cfg.get("accumulative_counts", None if built.accumulative_counts == 1 else built.accumulative_counts)
    return built.optimizer, counts, built.clip_grad


def warn_of_unreached(flow: GradientFlow, reached: Iterable[int], optimizer: Optimizer) -> None:
    """Warn on rank 0 of parameters that got no gradient in the first update, and say how DeepSpeed treats them.

    **Collective**: every rank.
    """
    anywhere = torch.zeros(len(flow.names), dtype=torch.uint8)
    anywhere[sorted(reached)] = 1
    all_reduce(anywhere, op="max")
    names = [flow.names[index] for index in (anywhere == 0).nonzero().flatten().tolist()]
    decays = any(group.get("weight_decay") for group in optimizer.param_groups)
    if names and flow.sees_all and get_rank() == 0:
        _logger.warning(
            "the loss reaches none of these %d parameters in the first update: %s. DeepSpeed takes their gradients for "
            "0, where other strategies leave such parameters alone: %s moves them by its %s all the same. Freeze them "
            "with requires_grad_(False)%s, or use strategy 'ddp' or 'fsdp'",
            len(names), listed(names, most=10), type(optimizer).__name__,
            "weight decay and momentum" if decays else "momentum",
            ", give them decay_mult=0 by paramwise_cfg" if decays else "",
        )  # fmt: skip


def _not_wanted(built: OptimWrapper) -> str:
    if isinstance(built, OptimWrapperDict):
        return (
            "`optim_wrapper` must have one optimizer under DeepSpeed, whose engine drives a single one, but has those "
            f"of {', '.join(built)}. Use strategy 'ddp' with MMSeparateDistributedDataParallel, or 'fsdp'"
        )
    return (
        f"`optim_wrapper` must be an OptimWrapper or a DeepSpeedOptimWrapper under DeepSpeed, but is of type "
        f"{type(built).__name__}. For mixed precision give the strategy bf16=True, fp16=True or "
        "torch_autocast=dict(enabled=True, dtype='bfloat16')"
    )
