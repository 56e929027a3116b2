"""Base class of the strategies that use PyTorch only.

The modules for states (DTensor, `torch.distributed.checkpoint`) are imported by the first method that reads or writes a
state: the import takes half as long as that of torch, and a run without checkpoints never needs it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.device import get_device
from lockstep.errors import ConfigError
from lockstep.groups import this_rank
from lockstep.model import is_model_wrapper, unwrap_model
from lockstep.optim import OptimWrapper, build_optim_wrapper
from lockstep.strategy.base import ModelState, OptimLike, OptimState, Prepared, Strategy


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
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if tensor.is_meta:
                raise ConfigError(
                    f"`{name}` must have values, but is on the meta device ({this_rank()}). Use strategy 'fsdp', which "
                    "materializes such a model part by part, or make it on a device"
                )
        with _parameters_kept(torch.device(get_device())) as device:
            return model.to(device)

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Return `model`, which is on this rank's device, distributed over the ranks."""

    def parallelize(self, model: nn.Module, optim_wrapper: OptimLike | None = None) -> Prepared:
        """Move the model to this rank's device, wrap it, then build its optimizer."""
        known = {id(parameter) for parameter in model.parameters()}  # by id, so that a model that is sharded is freed
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

        from lockstep.strategy.optim_state import write_optim_state
        from lockstep.strategy.resharding import reshard_as

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


@contextmanager
def _parameters_kept(device: torch.device) -> Iterator[torch.device]:
    """Let a move to a device keep the parameters, which an optimizer may hold, and several modules may share.

    torch replaces them where a device's tensors are of another kind than the CPU's, as on many third-party devices.
    """
    former = torch.__future__.get_swap_module_params_on_conversion()
    probe = nn.Module()  # without initial values, for which a layer would draw random numbers
    probe.weight = weight = nn.Parameter(torch.empty(1))
    torch.__future__.set_swap_module_params_on_conversion(former or probe.to(device).weight is not weight)
    try:
        yield device
    finally:
        torch.__future__.set_swap_module_params_on_conversion(former)


def _check_updates(optimizer: Optimizer, known: Collection[int]) -> None:
    """Refuse an optimizer of another model, which would train nothing; `known` has the ids of the parameters."""
    if not any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
        kind = type(optimizer).__name__
        raise ConfigError(
            f"`optimizer` must update parameters of the model, but {kind} updates none of them. Make it from "
            f"model.parameters() of the model that you hand in, or give its config, as in dict(type='{kind}', lr=...)"
        )
