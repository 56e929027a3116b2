"""What a rank holds of a training that other ranks hold too, and must be the same there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.device import get_device
from lockstep.model import ModelWrapper
from lockstep.model.averaged import BaseAveragedModel
from lockstep.model.norm import BATCH_NORMS, INSTANCE_NORMS, is_synced
from lockstep.runner.run import TrainRun
from lockstep.strategy.native import NativeStrategy
from lockstep.strategy.optim_state import named_parameters, options_of


class Held(NamedTuple):
    """A tensor or a value that a rank holds.

    Attributes:
        name: its name in messages.
        part: which part of it this is, in words; ranks that hold the same part must hold the same values.
        value: a tensor, a DTensor, or something that `repr` shows completely.
    """

    name: str
    part: str
    value: Any


def held_by(run: TrainRun, ignore: Iterable[str] = ()) -> list[Held]:
    """Return what this rank holds and must hold as others do, in an order that is the same on all ranks.

    Parameters, buffers, the optimizer's state and options, the loss scale, averages of weights; and with tensor
    parallelism the state of torch's random generators. Left out are the running statistics of a BatchNorm that
    normalises on each rank by itself, and parameters whose gradients are not averaged.

    Args:
        run: the run; its strategy is a `NativeStrategy`.
        ignore: patterns for names that are left out; that of a parameter also leaves out its optimizer state.
    """
    strategy = run.strategy
    assert isinstance(strategy, NativeStrategy)
    core, group = strategy.core(), _group_of(run.model)
    parameters = named_parameters(core)
    names = {parameter: name for name, parameter in parameters.items()}
    own = _not_averaged(run.model, parameters)
    patterns = tuple(ignore)
    found = [
        *(Held(name, _part_of(parameter, group), parameter) for name, parameter in parameters.items()),
        *_buffers(run, core, group),
        *_optimizer_state(run, names, group),
        *_averages(run, group),
        *_random_state(run),
    ]
    return [
        held
        for held in found
        if (owner := held.name.rpartition(" of ")[2]) not in own
        and not any(fnmatchcase(held.name, each) or fnmatchcase(owner, each) for each in patterns)
    ]


def _group_of(model: nn.Module) -> str:
    """Return a name for the ranks that are replicas of each other; empty if these are all ranks."""
    if not isinstance(model, DistributedDataParallel):
        return ""
    ranks = get_process_group_ranks(model.process_group)
    return "" if len(ranks) == torch.distributed.get_world_size() else f"ranks {ranks}"


def _part_of(tensor: Any, group: str) -> str:
    """Return which part of a tensor a rank holds: its coordinates along the axes over which it is sharded."""
    if not isinstance(tensor, DTensor):
        return group
    mesh = tensor.device_mesh
    axes = mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(mesh.ndim))
    coordinates = mesh.get_coordinate() or ()
    along = zip(axes, coordinates, tensor.placements, strict=True)
    return ", ".join(f"{axis} {place}" for axis, place, placement in along if not placement.is_replicate())


def _not_averaged(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """Return the names of parameters that each rank trains by itself."""
    if isinstance(model, DistributedDataParallel):
        return set(model.parameters_to_ignore)
    if not any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        return set()
    # FSDP shards all parameters but those of dimension 0, which it averages, and those that it was told to ignore.
    return {
        name for name, own in parameters.items() if own.requires_grad and own.dim() and not isinstance(own, DTensor)
    }


def _buffers(run: TrainRun, core: nn.Module, group: str) -> Iterator[Held]:
    lengths = run.train_loop.even_batches.lengths
    # A rank that has run out of batches does not update its statistics while it waits for the others.
    are_even = lengths is not None and min(lengths) == max(lengths)
    left_out = {
        id(buffer)
        for module in core.modules()
        if isinstance(module, BATCH_NORMS + INSTANCE_NORMS) and not (is_synced(module) and are_even)
        for buffer in module.buffers(recurse=False)
    }
    for name, buffer in core.named_buffers():
        if id(buffer) not in left_out and buffer.layout is torch.strided:
            yield Held(name, _part_of(buffer, group), buffer)


def _optimizer_state(run: TrainRun, names: Mapping[nn.Parameter, str], group: str) -> Iterator[Held]:
    for optimizer in run.optim_wrapper.optimizers:
        kind = type(optimizer).__name__
        for number, options in enumerate(optimizer.param_groups):
            for key, value in options_of(options).items():
                yield Held(f"{key} of parameter group {number} of {kind}", group, value)
            for place, parameter in enumerate(options["params"]):
                name = names.get(parameter, f"parameter {place} of group {number} of {kind}")
                for key, value in optimizer.state.get(parameter, {}).items():
                    for suffix, entry in _entries(value):
                        # The number of steps is the same for all shards.
                        shared = isinstance(entry, DTensor) or key == "step"
                        part = _part_of(entry if shared else parameter, group)
                        yield Held(f"{key}{suffix} of {name}", part, entry)
    if extra := run.optim_wrapper.extra_state():
        yield Held("state of the optim wrapper", group, extra)


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and numbers in an entry of an optimizer's state, with what tells them apart."""
    if isinstance(value, list | tuple):
        for index, each in enumerate(value):
            for suffix, entry in _entries(each):
                yield f"[{index}]{suffix}", entry
    elif isinstance(value, Tensor | bool | int | float | str) and not (
        isinstance(value, Tensor) and value.layout is not torch.strided
    ):
        yield "", value


def _averages(run: TrainRun, group: str) -> Iterator[Held]:
    for hook in run.hooks:
        averaged = vars(hook).get("ema_model")
        if isinstance(averaged, BaseAveragedModel):
            for name, parameter in averaged.module.named_parameters():
                yield Held(f"average of {name}", _part_of(parameter, group), parameter)


def _random_state(run: TrainRun) -> Iterator[Held]:
    """Yield the states of torch's generators, if ranks compute on the same samples and must draw the same numbers."""
    if not isinstance(run.model, ModelWrapper) or run.model.data_shard is None:
        return
    part = f"data shard {run.data_shard.rank}"
    yield Held("torch's random state", part, torch.get_rng_state())
    if get_device() != "cpu":
        yield Held("random state of the device", part, torch.get_device_module(get_device()).get_rng_state())
