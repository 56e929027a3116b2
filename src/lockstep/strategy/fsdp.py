"""The FSDP strategy: a shard of the model on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lockstep.dataset.random_state import sync_random_state
from lockstep.device import get_device
from lockstep.errors import ConfigError, require_key, require_known, wrong_type
from lockstep.groups import this_rank
from lockstep.model import ModelWrapper, checkpoint_activations, unwrap_model
from lockstep.model.fsdp import MMFullyShardedDataParallel
from lockstep.model.fsdp.units import choose_units
from lockstep.model.shards import reshard
from lockstep.registry import MODEL_WRAPPERS, STRATEGIES
from lockstep.strategy.base import OptimLike, Prepared
from lockstep.strategy.native import NativeStrategy
from lockstep.strategy.optimizer_trial import check_by_trial


@STRATEGIES.register_module(name=["FSDPStrategy", "fsdp"])
class FSDPStrategy(NativeStrategy):
    """Keep a shard of the parameters, their gradients and the optimizer's state on every rank.

    Blocks that the model repeats, such as the layers of a transformer, are detected; each is gathered only while it
    computes. All ranks start with the parameters of rank 0. A model on the meta device is materialized block by block.

    Args:
        model_wrapper: config of the wrapper, `MMFullyShardedDataParallel` by default.
        activation_checkpointing: which parts keep only their inputs for the backward pass: a function of a module,
            classes or names of classes; or `dict(check_fn=...)` with one of these, and `context_fn` if not all of a
            part is to be computed again; see `lockstep.model.checkpoint_activations`. By default, and with False, none.
        state_dict_cfg: from MMEngine; has no effect, because all states have one form.
        skip_init_weights: from MMEngine; has no effect.
        **kwargs: arguments of the wrapper: `mixed_precision="bf16"`, `cpu_offload=True`, `device_mesh=(2, 4)` for
            two replicas of four shards each, `sharding_strategy`, `auto_wrap_policy`, `param_init_fn` and so on.
            `tensor_parallel=2`, or `dict(degree=2, plan={"*.attn.q": "colwise", "*.attn.o": "rowwise"})`, lets two
            neighbouring ranks compute some modules together; they process the same samples and draw the same random
            numbers.

    **Source**: `torch.distributed.fsdp.fully_shard` (2.13).
    """

    def __init__(
        self,
        model_wrapper: Mapping[str, Any] | None = None,
        activation_checkpointing: Any = None,
        state_dict_cfg: Any = None,
        skip_init_weights: bool = False,
        **kwargs: Any,
    ) -> None:
        given = {**(model_wrapper or {}), **kwargs}
        if "fsdp_auto_wrap_policy" not in given:
            given.setdefault("auto_wrap_policy", "repeated_blocks")
        self._wrapper = {"type": "MMFullyShardedDataParallel", "sync_module_states": True, **given}
        self._recomputed = _read_recomputed(activation_checkpointing)

    def parallelize(self, model: nn.Module, optim_wrapper: OptimLike | None = None) -> Prepared:
        """Shard the model, then build its optimizer.

        An optimizer given as an object holds the original parameters; they are replaced by the sharded ones. This
        happens after sharding and before any forward pass: after a forward pass, the outermost parameters stay
        unsharded for a while, and an optimizer that received those would train tensors that are not used.

        Raises:
            ConfigError: the given optimizer already has a state, or has parameters of another model, or cannot update
                shards correctly; see `check_by_trial`. Or the model is wrapped by DDP.
        """
        if isinstance(model, DistributedDataParallel):
            raise ConfigError(
                f"`model` must not be wrapped in {type(model).__name__} under FSDPStrategy, which would then shard "
                f"nothing ({this_rank()}). Hand in the module itself"
            )
        # By id: references to the tensors would keep the whole model in memory while it is sharded.
        names = {id(parameter): name for name, parameter in unwrap_model(model).named_parameters()}
        model, wrapper = super().parallelize(model, optim_wrapper)
        if wrapper is not None:
            for optimizer in wrapper.optimizers:
                _hand_over(optimizer, self.core(), names)
                check_by_trial(optimizer)
        if isinstance(model, MMFullyShardedDataParallel) and model.tensor_mesh is not None:
            sync_random_state(model.tensor_mesh)
        return model, wrapper

    def compiled_parts(self, model: nn.Module) -> list[nn.Module]:
        """Return the parts that are gathered one by one, so that no communication is compiled; else the whole model.

        A model that is wrapped already has been cut by its own policy, but is compiled by that of the strategy.
        """
        policy = self._wrapper.get("auto_wrap_policy") or self._wrapper.get("fsdp_auto_wrap_policy")
        core = unwrap_model(model)
        units = choose_units(core, policy)
        inner = {part for unit in units for part in unit.modules() if part is not unit}
        return [unit for unit in units if unit not in inner] or [core]

    @property
    def data_shard(self) -> tuple[int, int]:
        """This rank's shard of the data and the number of shards; ranks of one tensor-parallel group share a shard."""
        model = self._prepared_model()
        shard = model.data_shard if isinstance(model, ModelWrapper) else None
        return super().data_shard if shard is None else shard

    def to_device(self, model: nn.Module) -> nn.Module:
        """Return the model unchanged: each part is moved to the device when it is sharded."""
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard the model, in a group of one rank if there is no process group."""
        if self._recomputed is not None:
            checkpoint_activations(model, *self._recomputed)
        wrapped: nn.Module = MODEL_WRAPPERS.build(self._wrapper, module=model, device_id=get_device())
        return wrapped

    def core(self) -> nn.Module:
        """Return the user's own module with its parameters resharded: the parameters that the optimizer holds."""
        core = super().core()
        reshard(core)
        return core


def _read_recomputed(activation_checkpointing: Any) -> list[Any] | None:
    """Return the arguments of `checkpoint_activations` after the model, or None."""
    if not isinstance(activation_checkpointing, Mapping):
        activation_checkpointing = {"check_fn": activation_checkpointing}
    require_key("activation_checkpointing", activation_checkpointing, "check_fn")
    require_known("activation_checkpointing", activation_checkpointing, ("check_fn", "context_fn"))
    check, context_fn = activation_checkpointing["check_fn"], activation_checkpointing.get("context_fn")
    if context_fn is not None and not callable(context_fn):
        raise wrong_type("activation_checkpointing.context_fn", "a function without arguments", context_fn)
    given = [check] if context_fn is None else [check, context_fn]
    return None if check is None or check is False else given


def _hand_over(optimizer: Optimizer, core: nn.Module, names: Mapping[int, str]) -> None:
    """Replace an optimizer's original parameters by the sharded ones."""
    present = dict(core.named_parameters())
    known = set(present.values())
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if parameter in known:
                continue
            # The optimizer has kept this tensor alive, so no other tensor has its id.
            name = names.get(id(parameter))
            # Schedule-free optimizers leave an empty state where their `train` looks for one.
            if name is None or optimizer.state.get(parameter):
                what = "parameters of another model" if name is None else "a state already"
                raise ConfigError(
                    f"`optimizer` must be new and made for the model that is sharded, but {type(optimizer).__name__} "
                    f"has {what}. Give its config instead, as in dict(type='{type(optimizer).__name__}', lr=...)"
                )
            optimizer.state.pop(parameter, None)
            group["params"][index] = present[name]
