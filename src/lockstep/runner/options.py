"""Options of optimizers and schedules, which must be the same on every rank: replicas and shards need equal ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from lockstep.dist.agreement import differing
from lockstep.errors import ConfigError, listed
from lockstep.optim import OptimWrapperDict, ParamScheduler
from lockstep.runner.run import TrainRun

IMPLEMENTATION_KEYS = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})
"""Keys of a parameter group that are no options, or choose an implementation, which may depend on a rank's device."""


def check_same_options(run: TrainRun) -> None:
    """Compare what each rank updates its weights by: options of the optimizer, schedules, accumulation, clipping.

    **Collective**: every rank. **Cost**: one exchange between the hosts.

    Raises:
        ConfigError: on every rank, naming what differs and its values.
    """
    if not run.distributed:
        return
    if by_rank := differing({**optimizer_options(run, reads_device=True), **dict(_schedules(run))}):
        name, values = first_difference(by_rank)
        raise ConfigError(
            f"{name} must be the same on all ranks, because each rank updates its own weights by it, but is {values}. "
            "Set it in the same way on every rank"
        )


def first_difference(by_rank: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """Return the name of the first option that is not the same on all ranks, and in words what it is on each."""
    names = dict.fromkeys(name for options in by_rank for name in options)
    name = next(name for name in names if len({options.get(name) for options in by_rank}) > 1)
    values = [f"{options.get(name, 'missing')} on rank {rank}" for rank, options in enumerate(by_rank)]
    return name, listed(values, most=8)


def optimizer_options(run: TrainRun, *, reads_device: bool) -> dict[str, str]:
    """Return the options of all optimizers as text, by names for messages.

    Args:
        run: the run.
        reads_device: also read options that are tensors on a device, and wait for it.
    """
    found: dict[str, str] = {}
    wrapper = run.optim_wrapper
    for name, part in wrapper.items() if isinstance(wrapper, OptimWrapperDict) else [("", wrapper)]:
        kind = type(part.optimizer).__name__ + (f" `{name}`" if name else "")
        found[f"`accumulative_counts` of the wrapper of {kind}"] = str(part.accumulative_counts)
        found[f"`clip_grad` of the wrapper of {kind}"] = as_text(part.clip_grad, reads_device)
        for number, group in enumerate(part.param_groups):
            for key, value in group.items():
                if key not in IMPLEMENTATION_KEYS:
                    found[f"`{key}` of parameter group {number} of {kind}"] = as_text(value, reads_device)
    return found


def digest_of(options: Mapping[str, str]) -> int:
    """Return a number of 63 bits that depends on all options."""
    digest = hashlib.blake2b(repr([*options.items()]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _schedules(run: TrainRun) -> Iterator[tuple[str, str]]:
    for number, schedule in enumerate(run.param_schedulers):
        if isinstance(schedule, ParamScheduler):
            for key, value in vars(schedule).items():
                name = f"`{key.strip('_')}` of schedule {number}, {type(schedule).__name__},"
                yield name, as_text(value, reads_device=False)


def as_text(value: Any, reads_device: bool) -> str:
    """Return a value as text that is the same in every process; of an object, only its class."""
    if isinstance(value, Tensor):
        return repr(value.tolist()) if reads_device or value.device.type == "cpu" else "a tensor"
    if isinstance(value, Mapping):
        return repr({key: as_text(item, reads_device) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return repr([as_text(item, reads_device) for item in value])
    return repr(value) if isinstance(value, Real | str | None) else type(value).__name__
