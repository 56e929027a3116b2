"""Strategies that use PyTorch only: their base class, a single device, and replicas with averaged gradients.

The modules for states (DTensor, `torch.distributed.checkpoint`) are imported by the first method that reads or writes a
state: the import takes half as long as that of torch, and a run without checkpoints never needs it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.device import get_device
from lockstep.dist import get_world_size, is_distributed
from lockstep.errors import ConfigError, require_known
from lockstep.groups import this_rank
from lockstep.model import MMDistributedDataParallel, is_model_wrapper, unwrap_model
from lockstep.optim import JoinedOptimizer, OptimWrapper, build_optim_wrapper
from lockstep.registry import MODEL_WRAPPERS, STRATEGIES
from lockstep.registry.signatures import accepted
from lockstep.strategy.base import ModelState, OptimLike, OptimState, Prepared, Strategy, refuse_meta


class NativeStrategy(Strategy):
    """A strategy whose states PyTorch can convert to canonical form and back.

    A subclass defines how a module that is on its device is wrapped.

    **Source**: `torch.distributed.checkpoint.state_dict` (2.13).
    """

    _model: nn.Module | None = None
    _optim_wrapper: OptimWrapper | None = None

    def to_device(self, model: nn.Module) -> nn.Module:
        """Return `model` on this rank's device.

        Raises:
            ConfigError: a parameter or buffer is on the meta device.
        """
        refuse_meta(model)
        return _moved(model, torch.device(get_device()))

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Return `model`, which is on this rank's device, distributed over the ranks."""

    def parallelize(self, model: nn.Module, optim_wrapper: OptimLike | None = None) -> Prepared:
        """Move the model to this rank's device, wrap it, then build its optimizer."""
        # The optimizer may hold the parameters from before or after wrapping. Ids keep no replaced parameter alive.
        known = {id(parameter) for parameter in model.parameters()}
        if not is_model_wrapper(model):
            model = self.wrap(self.to_device(model))
        self._model = model
        if optim_wrapper is not None:
            self._optim_wrapper = build_optim_wrapper(model, optim_wrapper)
            known.update(map(id, model.parameters()))
            for optimizer in self._optim_wrapper.optimizers:
                _check_updates(optimizer, known)
        return model, self._optim_wrapper

    def model_state(self) -> ModelState:
        """Return the model's state by canonical names; the tensors are the model's own."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        state: ModelState = get_model_state_dict(self.core())
        return state

    def optim_state(self) -> OptimState:
        """Return `{"state": {parameter name: ...}, "param_groups": [...]}`; the tensors are the optimizer's own.

        The optimizer is not changed: a parameter that has had no update has no entry.
        """
        from lockstep.strategy.optim_state import read_optim_state

        return read_optim_state(self.core(), self._prepared_optim().optimizers)

    def load_state(self, model_state: ModelState | None = None, optim_state: OptimState | None = None) -> None:
        """Load states by canonical names.

        The model's state must be complete. A parameter without an entry in the optimizer's state has none afterwards,
        and starts as in a new optimizer; entries of frozen parameters that the optimizer does not hold are ignored. A
        tensor may be sharded in any way, or be whole on every rank. **Collective**: every rank.

        Raises:
            ConfigError: on every rank, if the optimizer's state belongs to other parameters or another optimizer.
        """
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        from lockstep.model.shards import reshard_as
        from lockstep.strategy.optim_state import write_optim_state

        if model_state is not None:
            set_model_state_dict(self.core(), reshard_as(model_state, self.model_state()))
        if optim_state is not None:
            write_optim_state(self.core(), self._prepared_optim().optimizers, optim_state)

    def core(self) -> nn.Module:
        """Return the user's own module, whose names for parameters are the canonical ones."""
        return unwrap_model(self._prepared_model())

    def _prepared_model(self) -> nn.Module:
        if self._model is None:
            raise RuntimeError(f"{type(self).__name__}.prepare() must be called first")
        return self._model

    def _prepared_optim(self) -> OptimWrapper:
        if self._optim_wrapper is None:
            raise RuntimeError(f"{type(self).__name__}.prepare() must be called with an optim wrapper first")
        return self._optim_wrapper


def _moved(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device, and keep its parameters, which an optimizer may hold, and several modules may share.

    torch replaces them where a device's tensors are of another kind than the CPU's, as on many third-party devices.
    """
    former = torch.__future__.get_swap_module_params_on_conversion()
    probe = nn.Module()  # A bare module: a layer would draw random numbers and so change the seed's sequence.
    probe.weight = weight = nn.Parameter(torch.empty(1, device="cpu"))
    swaps = former or probe.to(device).weight is not weight
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(former)
    for parameter in model.parameters() if swaps else ():
        # It still has its hooks in Python, but autograd no longer calls them (torch 2.13). To set them anew, which no
        # public function does, tells it.
        parameter._backward_hooks = parameter._backward_hooks
        parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    return model


def _check_updates(optimizer: Optimizer, known: Collection[int]) -> None:
    """Refuse an optimizer of another model, which would train nothing; `known` has the ids of the parameters."""
    for part in optimizer.parts if isinstance(optimizer, JoinedOptimizer) else [optimizer]:
        if not any(id(parameter) in known for group in part.param_groups for parameter in group["params"]):
            kind = type(part).__name__
            raise ConfigError(
                f"`optimizer` must update parameters of the model, but {kind} updates none of them. Make it from "
                "model.parameters() of the model that you hand in, or give its config, as in "
                f"dict(type='{kind}', lr=...)"
            )


_WRAPPER = "MMDistributedDataParallel"


@STRATEGIES.register_module(name=["SingleDeviceStrategy", "single"])
class SingleDeviceStrategy(NativeStrategy):
    """Train on one device of one process."""

    keeps_memory_format = True

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model unchanged.

        Raises:
            ConfigError: there are several ranks, which would train independently of each other.
        """
        if get_world_size() > 1:
            raise ConfigError(
                f"`strategy` must lay the model over all ranks, but is 'single' ({this_rank()}). Use 'ddp', or start "
                "one process"
            )
        return model


@STRATEGIES.register_module(name=["DDPStrategy", "ddp"])
class DDPStrategy(NativeStrategy):
    """Train a replica of the model on every rank, with averaged gradients.

    Buffers, such as the running statistics of BatchNorm, stay each rank's own during an epoch.

    Args:
        model_wrapper: config of the wrapper, `MMDistributedDataParallel` by default.
        **kwargs: arguments of the wrapper, such as `find_unused_parameters`.

    Raises:
        ConfigError: the wrapper has no such argument.
    """

    keeps_memory_format = True

    def __init__(self, model_wrapper: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._wrapper = {"type": _WRAPPER, "broadcast_buffers": False, **(model_wrapper or {}), **kwargs}
        if self._wrapper["type"] == _WRAPPER:  # also where one rank alone needs no wrapper
            known = accepted(MMDistributedDataParallel) | {"type", "model_wrapper"}
            require_known("strategy", self._wrapper, known - {"self", "module"})

    def parallelize(self, model: nn.Module, optim_wrapper: OptimLike | None = None) -> Prepared:
        """Wrap the model, then build its optimizer.

        Raises:
            ConfigError: several ranks are to train a model that has nothing to train yet, which DDP can't wrap.
        """
        prepared, wrapper = super().parallelize(model, optim_wrapper)
        if optim_wrapper is not None and get_world_size() > 1 and not is_model_wrapper(prepared):
            raise ConfigError(
                f"the model must have parameters that require a gradient when DDP wraps it, but {type(model).__name__} "
                f"has none ({this_rank()}), and gradients of what is unfrozen later would not be averaged over ranks. "
                "Let what trains later require one until then, and freeze it afterwards, as in `before_train` of a hook"
            )
        return prepared, wrapper

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the model, if there is a process group, and something to train."""
        trainable = any(parameter.requires_grad for parameter in model.parameters())
        if not is_distributed() or not trainable:
            return model
        wrapped: nn.Module = MODEL_WRAPPERS.build(self._wrapper, module=model)
        return wrapped
