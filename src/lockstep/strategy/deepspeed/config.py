"""Merges the arguments of `DeepSpeedStrategy` and of an optim wrapper into one DeepSpeed config, and checks it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, nearest
from lockstep.strategy.engine_parameters import max_norm_of

MICRO_BATCH = "train_micro_batch_size_per_gpu"
BATCH = "train_batch_size"
ACCUMULATION = "gradient_accumulation_steps"
CLIPPING = "gradient_clipping"

# Enough of DeepSpeed's keys to detect a misspelt one, which DeepSpeed itself ignores silently.
_KNOWN = (
    BATCH, MICRO_BATCH, ACCUMULATION, CLIPPING, "zero_optimization", "fp16", "bf16",
    "torch_autocast", "data_types", "activation_checkpointing", "aio", "steps_per_print", "communication_data_type",
    "prescale_gradients", "gradient_predivide_factor", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "wall_clock_breakdown", "timers", "memory_breakdown", "dump_state", "flops_profiler", "comms_logger", "checkpoint",
    "tensor_parallel", "compile", "log_level",
)  # fmt: skip
_BFLOAT16 = ("bfloat16", "bf16", "torch.bfloat16")
_REFUSED = {
    "optimizer": "give it as optim_wrapper=dict(optimizer=dict(type='AdamW', lr=1e-3)), and leave it out",
    "scheduler": "give a `param_scheduler`, which steps with every batch if by_epoch=False, and leave it out",
    "amp": "DeepSpeed 0.19 has no Apex any more; use fp16=..., bf16=... or torch_autocast=dict(enabled=True, "
    "dtype='bfloat16')",
    "managed_gradient_accumulation": "the optim wrapper says where a window of accumulation ends; leave it out",
}


def read_config(config: str | Path | Mapping[str, Any] | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return one DeepSpeed config, merged from a file or a dict and from arguments with DeepSpeed's names.

    Args:
        config: path of a JSON file, or its content. A value of `"auto"` means that the key is not given.
        arguments: further keys, with None for those not given; also `stage` and `offload`, which set parts of
            `zero_optimization`. `fp16` and `bf16` may be True.

    Raises:
        ConfigError: two settings contradict each other, a key is misspelt, or DeepSpeed does not support a setting
            correctly.
    """
    merged = _without_auto(_read(config))
    given = {name: value for name, value in arguments.items() if value is not None}
    stage, offload = given.pop("stage", None), given.pop("offload", False)
    for name, value in given.items():
        if isinstance(value, bool) and name in ("fp16", "bf16", "torch_autocast"):
            section = merged.get(name) or {}
            merged[name] = {**section, "enabled": _agreed(f"{name}.enabled", section.get("enabled"), value)}
        else:
            merged[name] = _agreed(name, merged.get(name), value)
    for name in merged:
        if name in _REFUSED and merged[name]:
            raise ConfigError(f"`{name}` must not be given to DeepSpeedStrategy: {_REFUSED[name]}")
        if name not in _KNOWN and (meant := nearest(name, _KNOWN)) is not None:
            raise ConfigError(f"`{name}` is no key of a DeepSpeed config: did you mean `{meant}`?")
    autocast = merged.get("torch_autocast")
    dtype = autocast.get("dtype") if isinstance(autocast, Mapping) else None
    if is_on(merged, "torch_autocast") and str(dtype) not in _BFLOAT16:
        raise ConfigError(
            f"`torch_autocast.dtype` must be 'bfloat16', but is {dtype!r}: DeepSpeed 0.19 clips gradients of float16 "
            "while they have the loss scale, which each rank finds by itself. Use fp16=True, or strategy 'ddp' or "
            "'fsdp' with an AmpOptimWrapper"
        )
    zero = dict(merged.get("zero_optimization") or {})
    if stage is not None:
        zero["stage"] = _agreed("zero_optimization.stage", zero.get("stage"), stage)
    if zero.setdefault("stage", 1) not in (1, 2, 3):
        raise ConfigError(
            f"`zero_optimization.stage` must be 1, 2 or 3, but is {zero['stage']!r}. Use strategy 'ddp' for what "
            "DeepSpeed does at stage 0"
        )
    offloaded = ("offload_optimizer", "offload_param") if zero["stage"] == 3 else ("offload_optimizer",)
    for name in offloaded if offload else ():
        zero[name] = {"device": "cpu", **(zero.get(name) or {})}
        if zero[name]["device"] not in ("cpu", "nvme"):
            _agreed(f"zero_optimization.{name}.device", zero[name]["device"], "cpu", "by offload=True")
    merged["zero_optimization"] = zero
    return merged


def is_on(config: Mapping[str, Any], section: str) -> bool:
    """Return whether a section such as `bf16` is present and enabled."""
    given = config.get(section) or {}
    return bool(given.get("enabled", False)) if isinstance(given, Mapping) else bool(given)


def offloads_optimizer(config: Mapping[str, Any]) -> bool:
    """Return whether the optimizer's state is kept in CPU memory or on disk."""
    offload = config["zero_optimization"].get("offload_optimizer") or {}
    return offload.get("device", "none") in ("cpu", "nvme")


def complete_config(
    config: Mapping[str, Any], *, counts: int | None, clip_grad: Mapping[str, Any] | None, world_size: int
) -> dict[str, Any]:
    """Return the config with accumulation, clipping and a batch size filled in, in agreement with the optim wrapper.

    Args:
        config: from `read_config`.
        counts: the optim wrapper's `accumulative_counts`; None if not given.
        clip_grad: its `clip_grad`; None if not given.
        world_size: number of ranks.

    Raises:
        ConfigError: the optim wrapper and the config contradict each other.
    """
    full = deepcopy(dict(config))
    full[ACCUMULATION] = _accumulation(full, counts, world_size)
    max_norm = max_norm_of(clip_grad, "DeepSpeed")
    full[CLIPPING] = float(_agreed(CLIPPING, full.get(CLIPPING), max_norm, "in `clip_grad` of the optim wrapper") or 0)
    if BATCH not in full:
        # DeepSpeed only counts samples with it; the data loader determines the batch size.
        full.setdefault(MICRO_BATCH, 1)
    # Its measurement of samples per second waits for the device before and after each batch.
    full.setdefault("timers", {"throughput": {"enabled": False}})
    return full


def _read(config: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    if config is None or isinstance(config, Mapping):
        return deepcopy(dict(config or {}))
    path = Path(config)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"`config` must be a DeepSpeed config or the path of one in JSON, but {path}: {error}"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"`config` must hold one JSON object, but {path} holds {type(content).__name__}")
    return content


def _without_auto(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value != "auto"
    }


def _agreed(key: str, stated: Any, given: Any, place: str = "as an argument") -> Any:
    """Return what the DeepSpeed config states, or what is given in another place."""
    if given is not None and stated is not None and given != stated:
        raise ConfigError(
            f"`{key}` must be given once, but is {stated!r} in the DeepSpeed config and {given!r} {place}. "
            "Leave out one"
        )
    return stated if given is None else given


def _accumulation(config: Mapping[str, Any], counts: int | None, world_size: int) -> int:
    stated: int | None = config.get(ACCUMULATION)
    if stated is None and config.get(BATCH) is not None and config.get(MICRO_BATCH) is not None:
        stated = max(1, config[BATCH] // (config[MICRO_BATCH] * world_size))
    return _agreed(ACCUMULATION, stated, counts, "as `accumulative_counts` of the optim wrapper") or 1
