"""A share of the model on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.device import get_device
from lockstep.errors import ConfigError
from lockstep.model import checkpoint_activations, is_model_wrapper, unwrap_model
from lockstep.model.fsdp_policies import choose_units
from lockstep.model.full_params import reshard
from lockstep.optim import OptimWrapper
from lockstep.registry import MODEL_WRAPPERS, STRATEGIES
from lockstep.strategy.base import OptimLike
from lockstep.strategy.fsdp_refusals import check_optimizer
from lockstep.strategy.native import NativeStrategy
from lockstep.strategy.random_state import share_random_state


@STRATEGIES.register_module(name=["FSDPStrategy", "fsdp"])
class FSDPStrategy(NativeStrategy):
    """Keep a share of the parameters, their gradients and the optimizer's state on every rank.

    Blocks that the model repeats, such as the layers of a transformer, are found and gathered one by one, while they
    compute. All ranks begin with the parameters of rank 0. A model on the meta device is made block by block.

    Args:
        model_wrapper: config of the wrapper, `MMFullyShardedDataParallel` by default.
        activation_checkpointing: which parts keep only their inputs for the backward pass: a function of a module,
            classes or names of classes, or `dict(check_fn=...)`; see `lockstep.model.checkpoint_activations`.
        state_dict_cfg: MMEngine's; means nothing here, where all states have one form.
        skip_init_weights: MMEngine's; means nothing here.
        **kwargs: arguments of the wrapper: `mixed_precision="bf16"`, `cpu_offload=True`, `device_mesh=(2, 4)` for
            two replicas of four shards each, `sharding_strategy`, `auto_wrap_policy`, `param_init_fn` and so on.
            `tensor_parallel=2`, or `dict(degree=2, plan={"*.attn.q": "colwise", "*.attn.o": "rowwise"})`, lets two
            neighbouring ranks compute some modules together; they see the same samples, and draw the same random
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
        super().__init__()
        given = {**(model_wrapper or {}), **kwargs}
        if "fsdp_auto_wrap_policy" not in given:
            given.setdefault("auto_wrap_policy", "repeated_blocks")
        self._wrapper = {"type": "MMFullyShardedDataParallel", "sync_module_states": True, **given}
        self._recomputed = _read_check(activation_checkpointing)

    def lay_out(
        self, model: nn.Module, optim_wrapper: OptimLike | None = None
    ) -> tuple[nn.Module, OptimWrapper | None]:
        """Shard the model, then build its optimizer.

        An optimizer that is given as an object holds the parameters as they were; it gets the sharded ones. In this
        order and before any forward pass, because after one the outermost parameters are whole for a while, and an
        optimizer that got hold of those would train tensors that nobody uses.

        Raises:
            ConfigError: an optimizer that is given has a state already, or parameters of another model; or it fails or
                goes wrong over shards, see `lockstep.strategy.fsdp_refusals`.
        """
        # By id: holding on to the tensors would keep the whole model in memory while it is sharded.
        names = {id(parameter): name for name, parameter in unwrap_model(model).named_parameters()}
        model, wrapper = super().lay_out(model, optim_wrapper)
        if wrapper is not None:
            for optimizer in wrapper.optimizers:
                _hand_over(optimizer, self.core(), names)
                check_optimizer(optimizer, self.core())
        if (tensor_mesh := getattr(model, "tensor_mesh", None)) is not None:
            share_random_state(tensor_mesh)
        return model, wrapper

    def compiled_parts(self, model: nn.Module) -> list[nn.Module]:
        """Return the parts that are gathered one by one; else the whole. What compiles is free of communication."""
        policy = self._wrapper.get("auto_wrap_policy") or self._wrapper.get("fsdp_auto_wrap_policy")
        units = [] if is_model_wrapper(model) else choose_units(model, policy)
        inner = {part for unit in units for part in unit.modules() if part is not unit}
        return [unit for unit in units if unit not in inner] or [model]

    @property
    def data_share(self) -> tuple[int, int]:
        """The share of this rank's group, where ranks compute together."""
        model = self._prepared_model()
        share: tuple[int, int] | None = getattr(model, "data_share", None)
        return super().data_share if share is None else share

    def place(self, model: nn.Module) -> nn.Module:
        """Return the model where it is: each part goes to the device when it is sharded."""
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard the model, in a group of one if there is no other."""
        if self._recomputed is not None:
            checkpoint_activations(model, self._recomputed)
        wrapped: nn.Module = MODEL_WRAPPERS.build(self._wrapper, module=model, device_id=get_device())
        return wrapped

    def core(self) -> nn.Module:
        """Return the user's own module, its parameters in shards, as those that the optimizer knows."""
        core = super().core()
        reshard(core)
        return core


def _read_check(activation_checkpointing: Any) -> Any:
    if not isinstance(activation_checkpointing, Mapping):
        return activation_checkpointing
    if activation_checkpointing.keys() != {"check_fn"}:
        raise ConfigError(
            f"`activation_checkpointing` must have the key 'check_fn' alone, but has {sorted(activation_checkpointing)}"
        )
    return activation_checkpointing["check_fn"]


def _hand_over(optimizer: Optimizer, core: nn.Module, names: Mapping[int, str]) -> None:
    """Give the sharded parameters to an optimizer that holds those which they were made of."""
    present = dict(core.named_parameters())
    known = set(present.values())
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if parameter in known:
                continue
            # The optimizer has kept this tensor alive, so that its id is still its own.
            name = names.get(id(parameter))
            if name is None or parameter in optimizer.state:
                what = "parameters of another model" if name is None else "a state already"
                raise ConfigError(
                    f"`optimizer` must be new and made for the model that is sharded, but {type(optimizer).__name__} "
                    f"has {what}. Give its config instead, as in dict(type='{type(optimizer).__name__}', lr=...)"
                )
            group["params"][index] = present[name]
