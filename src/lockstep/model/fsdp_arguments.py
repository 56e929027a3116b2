"""Translating the arguments of torch's older FSDP class for `fully_shard`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from lockstep.device import get_device
from lockstep.dist import is_main_process
from lockstep.errors import did_you_mean, require_known, wrong_type

_logger = logging.getLogger("lockstep.model.fsdp")

Precision: TypeAlias = MixedPrecision | MixedPrecisionPolicy | Mapping[str, Any] | str | torch.dtype
Offload: TypeAlias = bool | CPUOffload | OffloadPolicy

_DTYPES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16,
    "half": torch.float16, "fp32": torch.float32, "float32": torch.float32, "float": torch.float32,
}  # fmt: skip


class Sharding(NamedTuple):
    """What a sharding strategy means.

    Attributes:
        hybrid: shard over one axis of a mesh and replicate over the other; None if the mesh decides.
        replicated: keep all parameters on every rank.
        reshard_after_forward: as for `fully_shard`; None frees all units but the outermost.
    """

    hybrid: bool | None
    replicated: bool
    reshard_after_forward: bool | int | None


_SHARDINGS = {
    ShardingStrategy.FULL_SHARD: Sharding(False, False, None),
    ShardingStrategy.SHARD_GRAD_OP: Sharding(False, False, False),
    ShardingStrategy.NO_SHARD: Sharding(None, True, False),
    ShardingStrategy.HYBRID_SHARD: Sharding(True, False, None),
    ShardingStrategy._HYBRID_SHARD_ZERO2: Sharding(True, False, False),  # its only name, which configs give
}


def read_sharding(strategy: Any, reshard_after_forward: bool | int | None) -> Sharding:
    """Return what `sharding_strategy` (an enum, its name, or None) and `reshard_after_forward` mean."""
    if strategy is None:
        return Sharding(None, False, reshard_after_forward)
    if reshard_after_forward is not None:
        raise ValueError(
            "`sharding_strategy` and `reshard_after_forward` must not be given both, but are "
            f"{strategy!r} and {reshard_after_forward!r}: the first implies the second"
        )
    if isinstance(strategy, str):
        names = {kind.name.strip("_").lower(): kind for kind in ShardingStrategy}
        name = strategy.strip("_").lower()
        if name not in names:
            raise ValueError(
                f"`sharding_strategy` must name a member of ShardingStrategy, but is {strategy!r}"
                + did_you_mean(strategy, (kind.name for kind in ShardingStrategy))
            )
        strategy = names[name]
    if not isinstance(strategy, ShardingStrategy):
        raise wrong_type("sharding_strategy", "a ShardingStrategy, its name or None", strategy)
    return _SHARDINGS[strategy]


def read_precision(precision: Precision | None) -> MixedPrecisionPolicy:
    """Return the policy for a policy, an older `MixedPrecision`, a dict of their arguments, or one dtype.

    One dtype is used for parameters and activations; gradients are then reduced in float32.
    """
    if precision is None:
        return MixedPrecisionPolicy()
    if isinstance(precision, MixedPrecisionPolicy):
        return precision
    if isinstance(precision, str | torch.dtype):
        return MixedPrecisionPolicy(param_dtype=_dtype("mixed_precision", precision), reduce_dtype=torch.float32)
    if isinstance(precision, Mapping):
        return _precision_of(precision)
    if not isinstance(precision, MixedPrecision):
        raise wrong_type(
            "mixed_precision", "a MixedPrecisionPolicy, a MixedPrecision, a dict, a dtype or None", precision
        )
    if precision.buffer_dtype is not None:
        _warn_of_no_meaning("mixed_precision.buffer_dtype", precision.buffer_dtype, "buffers keep the dtype they have")
    if precision.keep_low_precision_grads:
        _warn_of_no_meaning("mixed_precision.keep_low_precision_grads", True, "gradients have the parameters' dtype")
    return MixedPrecisionPolicy(
        param_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype,
        cast_forward_inputs=precision.cast_forward_inputs or precision.cast_root_forward_inputs,
    )


def read_offload(offload: Offload | None, device_type: str) -> OffloadPolicy:
    """Return the policy for a policy, an older `CPUOffload`, or a bool."""
    if isinstance(offload, CPUOffload):
        offload = offload.offload_params
    if isinstance(offload, bool) or offload is None:
        offload = CPUOffloadPolicy() if offload else OffloadPolicy()
    if not isinstance(offload, OffloadPolicy):
        raise wrong_type("cpu_offload", "a bool, a CPUOffload, an OffloadPolicy or None", offload)
    if isinstance(offload, CPUOffloadPolicy) and device_type == "cpu":
        # Without an accelerator memory can't be pinned; torch would raise.
        return CPUOffloadPolicy(pin_memory=False)
    return offload


def check_meaningless(backward_prefetch: Any, limit_all_gathers: bool, use_orig_params: bool) -> None:
    """Check the arguments that have no effect on `fully_shard`, and warn about values that it can't follow.

    Raises:
        TypeError: `backward_prefetch` has an unknown type.
        ValueError: `backward_prefetch` is an unknown name.
    """
    if isinstance(backward_prefetch, str):
        name = f"BACKWARD_{backward_prefetch.upper().removeprefix('BACKWARD_')}"
        if name not in BackwardPrefetch.__members__:
            raise ValueError(
                f"`backward_prefetch` must be 'pre', 'post', a BackwardPrefetch or None, but is {backward_prefetch!r}"
            )
        backward_prefetch = BackwardPrefetch[name]
    if backward_prefetch is not None and not isinstance(backward_prefetch, BackwardPrefetch):
        raise wrong_type("backward_prefetch", "'pre', 'post', a BackwardPrefetch or None", backward_prefetch)
    if backward_prefetch is BackwardPrefetch.BACKWARD_POST:
        _warn_of_no_meaning("backward_prefetch", "post", "the next part is gathered before the present one's gradients")
    if not limit_all_gathers:
        _warn_of_no_meaning("limit_all_gathers", False, "the memory of gathered parameters is always limited")
    if not use_orig_params:
        _warn_of_no_meaning("use_orig_params", False, "parameters always keep their names and shapes")


def read_device(device_id: Any, module: nn.Module) -> torch.device:
    """Return the device to train on: `device_id` if given, else that of the module's parameters."""
    if device_id is None:
        first = next(module.parameters(), None)
        return torch.device(get_device()) if first is None or first.is_meta else torch.device(first.device.type)
    if isinstance(device_id, bool) or not isinstance(device_id, int | str | torch.device):
        raise wrong_type("device_id", "an int, a torch.device or None", device_id)
    if isinstance(device_id, int):
        # As DDP's device_ids: a script for accelerators also runs without one.
        device_id = torch.device(get_device(), device_id) if torch.accelerator.is_available() else "cpu"
    try:
        device = torch.device(device_id)
    except RuntimeError as error:
        raise ValueError(f"`device_id` must be a device that torch knows, but is {device_id!r}") from error
    if device.type == "cpu":
        return device
    here = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
    if device.type != get_device() or device.index not in (None, here):
        current = get_device() if here is None else f"{get_device()}:{here}"
        raise ValueError(
            f"`device_id` must be this process's current device, {current}, but is {device}. init_dist makes each "
            "rank's own device the current one"
        )
    return device


def read_ignored(modules: Any, model: nn.Module) -> set[nn.Module]:
    """Return the modules that FSDP must ignore, with all modules inside them."""
    if modules is None:
        return set()
    if isinstance(modules, str | nn.Module) or not isinstance(modules, Iterable):
        raise wrong_type("ignored_modules", "a list of modules or None", modules)
    ignored, inside = list(modules), set(model.modules())
    for module in ignored:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"`ignored_modules` must hold modules, but holds {module!r} of type {type(module).__name__}"
            )
        if module not in inside or module is model:
            raise ValueError(
                f"`ignored_modules` must hold modules inside {type(model).__name__}, but holds a "
                f"{type(module).__name__} that is not inside it"
            )
    return {part for module in ignored for part in module.modules()}


def _warn_of_no_meaning(name: str, value: object, instead: str) -> None:
    """Warn, on rank 0, that an argument no longer has an effect."""
    if is_main_process():
        _logger.warning("`%s` is %r, which has no meaning any more: %s", name, value, instead)


def _precision_of(arguments: Mapping[str, Any]) -> MixedPrecisionPolicy:
    options: dict[str, Any] = {key: value for key, value in arguments.items() if key != "type"}
    known = MixedPrecisionPolicy.__dataclass_fields__.keys() | MixedPrecision.__dataclass_fields__.keys()
    require_known("mixed_precision", options, known)
    for key, value in options.items():
        if key.endswith("_dtype") and value is not None:
            options[key] = _dtype(f"mixed_precision[{key!r}]", value)
    if options.keys() <= MixedPrecisionPolicy.__dataclass_fields__.keys():
        return MixedPrecisionPolicy(**options)
    output_dtype = options.pop("output_dtype", None)
    return replace(read_precision(MixedPrecision(**options)), output_dtype=output_dtype)


def _dtype(name: str, value: Any) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str):
        raise wrong_type(name, "a torch.dtype or the name of one", value)
    key = value.removeprefix("torch.")
    if key not in _DTYPES:
        raise ValueError(f"`{name}` must name a floating dtype, but is {value!r}" + did_you_mean(key, _DTYPES))
    return _DTYPES[key]
