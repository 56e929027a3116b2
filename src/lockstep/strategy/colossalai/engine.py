"""All that lockstep uses from the package colossalai, which is imported when first needed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from lockstep.dist import all_gather
from lockstep.engines import load_engine
from lockstep.errors import ConfigError, DistError, did_you_mean
from lockstep.model.tensor_parallel_plan import check_layer, read_plan, split_of
from lockstep.registry.signatures import Arguments

# Ignores warnings that users cannot act on: about optional parts, and about names that torch has deprecated.
_QUIET = partial(warnings.catch_warnings, action="ignore")


# The replacement of a linear layer: the name of a class in `colossalai.shardformer.layer`, and its options.
Replacement: TypeAlias = tuple[str, dict[str, Any]]


def require_engine() -> None:
    """Import the package, and give it a stand-in for an accelerator if this machine has none.

    Raises:
        ConfigError: it is not installed or cannot be imported.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # ColossalAI imports it, but lockstep does not use it
    try:
        with _QUIET():
            accelerator = load_engine("colossalai.accelerator")
            load_engine("colossalai.booster")
    except DistError as error:
        raise ConfigError(
            f"the strategy 'colossalai' needs ColossalAI 0.5.0, but importing it failed: {error.__cause__ or error}. "
            "docs/strategies.md has the recipe to install it, or use the strategy 'ddp' or 'fsdp'"
        ) from error
    logging.getLogger("colossalai").setLevel(logging.WARNING)
    # Its ZeRO uses these at every step; torch has deprecated them (2.13).
    name = r"torch\.distributed\.(all_gather_into|reduce_scatter)_tensor"
    warnings.filterwarnings("ignore", f"`{name}` is deprecated", FutureWarning)
    if type(accelerator.get_accelerator()) is accelerator.CpuAccelerator:
        accelerator.set_accelerator(_host_accelerator())


def make_plugin(name: str, options: Mapping[str, Any]) -> Any:
    """Return a plugin of the named class with the options.

    **Collective**: every rank.

    Raises:
        ConfigError: the class has no such option.
    """
    from colossalai.booster import plugin

    kind = getattr(plugin, name)
    takes = Arguments.of(kind)
    for unknown in takes.unknown(options):
        raise ConfigError(f"{name} takes no option `{unknown}`{did_you_mean(unknown, takes.named)}")
    return kind(**options)


def boost(plugin: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any, Any]:
    """Return ColossalAI's booster, model and optimizer. **Collective**: every rank."""
    from colossalai.booster import Booster

    with _QUIET():
        booster = Booster(plugin=plugin)
        boosted, engine, *_ = booster.boost(model, optimizer)
    return booster, boosted, engine


def replacements(model: nn.Module, plan: Mapping[str, Any] | None, tp_size: int) -> dict[str, Replacement]:
    """Return the replacements of a model's layers according to a plan, by layer name.

    Args:
        model: the model that has the layers.
        plan: see `lockstep.model.tensor_parallel_plan.read_plan`; None is the model's own `_tp_plan`.
        tp_size: number of ranks that share a replica.

    Raises:
        ConfigError: the plan does not fit the model, or has a style that ColossalAI has no layer for.
    """
    found: dict[str, Replacement] = {}
    for name, style in read_plan(model, plan).items():
        layer = model.get_submodule(name)
        if not isinstance(layer, nn.Linear) or not isinstance(style, ColwiseParallel | RowwiseParallel):
            raise ConfigError(
                f"`tensor_parallel` must split linear layers 'colwise' or 'rowwise' under the strategy 'colossalai', "
                f"but `{name}` is a {type(layer).__name__} with {type(style).__name__}. Leave it out, give the plugin "
                "a `custom_policy`, or use strategy='fsdp'"
            )
        check_layer(model, name, split_of(style), tp_size)
        if isinstance(style, ColwiseParallel):
            found[name] = "Linear1D_Col", {"gather_output": _is_replicated(style.output_layouts)}
        else:
            found[name] = "Linear1D_Row", {"parallel_input": not _is_replicated(style.input_layouts)}
    return found


def replacing_policy(found: Mapping[str, Replacement]) -> Any:
    """Return a sharding policy that replaces the layers with these names, and leaves the rest unchanged."""
    from colossalai.shardformer import layer
    from colossalai.shardformer.policies import base_policy as base

    class ReplacingPolicy(base.Policy):  # type: ignore[misc]
        """Replaces the layers in `found`."""

        def config_sanity_check(self) -> None:
            return None

        def preprocess(self) -> nn.Module:
            model: nn.Module = self.model
            return model

        def postprocess(self) -> nn.Module:
            # So far these are views of the whole weight, which would keep it in memory, with its strides.
            for param in self.model.parameters():
                if is_split(param):
                    param.data = param.data.clone(memory_format=torch.contiguous_format)
            return self.preprocess()

        def module_policy(self) -> dict[Any, Any]:
            replaced = [
                base.SubModuleReplacementDescription(name, getattr(layer, kind), options)
                for name, (kind, options) in found.items()
            ]
            return {type(self.model): base.ModulePolicyDescription(sub_module_replacement=replaced)} if replaced else {}

    return ReplacingPolicy()


def has_policy(model: nn.Module) -> bool:
    """Return whether ColossalAI has a sharding policy of its own for the model."""
    from colossalai.shardformer.policies.auto_policy import get_autopolicy

    try:
        get_autopolicy(model)
    except NotImplementedError:
        return False
    return True


def gradients_of(engine: Any, model: nn.Module) -> Iterator[Tensor]:
    """Yield the gradients that the next step will use and that this rank holds."""
    if hasattr(engine, "get_working_grads_by_group_id"):  # ZeRO has moved them from the parameters
        for index in range(len(engine.param_groups)):
            yield from engine.get_working_grads_by_group_id(index)
        return
    for param in model.parameters():
        if param.grad is not None:
            yield param.grad


def check_splits(model: nn.Module) -> None:
    """Refuse parameters with a customised split, such as queries, keys and values in one matrix.

    Raises:
        ConfigError: there is such a parameter.
    """
    from colossalai.tensor.d_tensor import is_customized_distributed_tensor

    for name, param in model.named_parameters():
        if is_customized_distributed_tensor(param):
            raise ConfigError(
                f"the policy must split each parameter along one dim, but splits {name!r} in a way of its own, whose "
                "gradient ColossalAI 0.5.0 counts too little in the norm, and which it can only gather on CUDA. "
                "Use strategy='fsdp' with tensor_parallel"
            )


def predict_whole_vocabulary(model: nn.Module) -> None:
    """Let the last layer of a HuggingFace model gather its ranks' predictions, each for a part of the vocabulary."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if hasattr(head, "gather_output"):
        head.gather_output = True


def is_split(param: Tensor) -> bool:
    """Return whether tensor parallelism has changed the shape of the parameter."""
    from colossalai.tensor.d_tensor import is_distributed_tensor

    return bool(is_distributed_tensor(param)) or hasattr(param, "_padding_dim")


def full_numel(param: Any) -> int:
    """Return the number of elements that a parameter has in the user's model."""
    from colossalai.tensor.d_tensor import is_distributed_tensor

    count: int = param.dist_layout.global_shape.numel() if is_distributed_tensor(param) else param.numel()
    return count


def gather_like(tensor: Tensor, param: Any, tp_group: Any) -> Tensor:
    """Return the whole tensor of one that is split over the ranks like `param`.

    **Collective**: every rank of `tp_group`.
    """
    from colossalai.tensor.d_tensor.api import get_shard_dim_1d, is_distributed_tensor

    if is_distributed_tensor(param):
        tensor = torch.cat(all_gather(tensor, group=tp_group), dim=get_shard_dim_1d(param))
    if hasattr(param, "_padding_dim"):  # a vocabulary that was padded so that it can be split
        tensor = tensor.narrow(param._padding_dim, 0, param._origin_length)
    return tensor


def split_like(whole: Tensor, param: Any, tp_group: Any) -> Tensor:
    """Return this rank's part of a whole tensor, split like `param`. Nothing is sent."""
    from colossalai.tensor.d_tensor.api import get_shard_dim_1d, is_distributed_tensor

    if hasattr(param, "_padding_dim"):
        shape = list(whole.shape)
        shape[param._padding_dim] = param._current_length - shape[param._padding_dim]
        whole = torch.cat([whole, whole.new_zeros(shape)], dim=param._padding_dim)
    if is_distributed_tensor(param):
        whole = whole.chunk(tp_group.size(), dim=get_shard_dim_1d(param))[tp_group.rank()]
    return whole


def _is_replicated(layouts: Any) -> bool:
    return all(layout.is_replicate() for layout in layouts)


def _host_accelerator() -> Any:
    from colossalai.accelerator import CpuAccelerator

    class HostAccelerator(CpuAccelerator):  # type: ignore[misc]
        """The CPU as an accelerator, with the methods that ColossalAI calls on every accelerator.

        **Source**: `colossalai.accelerator.CpuAccelerator` (0.5.0), most of whose methods raise an error. Work on a CPU
        is complete when a call returns, so streams have nothing to order.
        """

        @property
        def name(self) -> str:
            return "cuda"  # LowLevelZeroOptimizer only checks for a name that it knows

        def Stream(self, *_: Any, **__: Any) -> object:  # noqa: N802 - their name
            return object()

        def current_stream(self, *_: Any) -> object:
            return object()

        def stream(self, stream_: object) -> AbstractContextManager[None]:
            return nullcontext()

        def synchronize(self, *_: Any) -> None:
            return None

        def device_count(self) -> int:
            return 1

        def get_rng_state(self, *_: Any) -> Tensor:
            return torch.get_rng_state()

        def set_rng_state(self, new_state: Tensor, *_: Any) -> None:
            torch.set_rng_state(new_state)

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

    return HostAccelerator()
