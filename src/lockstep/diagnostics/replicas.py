"""A hook that finds replicas which are no longer equal: what ranks must hold alike, and digests of it."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks
from torch.nn.parallel import DistributedDataParallel

from lockstep.device import get_device
from lockstep.dist import all_gather_object, broadcast_object, gather_object
from lockstep.errors import ConfigError, DivergenceError, listed, ranks_in_words, require_count
from lockstep.model import ModelWrapper
from lockstep.model.averaged import BaseAveragedModel
from lockstep.model.norm import BATCH_NORMS, INSTANCE_NORMS, is_synced
from lockstep.model.shards import digest_of, is_dtensor, words_of
from lockstep.optim import OptimWrapperDict
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.options import as_text
from lockstep.runner.run import TrainRun
from lockstep.strategy.native import NativeStrategy
from lockstep.tree import tree_items

_Key: TypeAlias = tuple[str, str]  # the name of what is held, and which part of it


class Held(NamedTuple):
    """A tensor or a value that a rank holds.

    Attributes:
        name: its name in messages.
        part: which part of it this is, in words; ranks that hold the same part must hold the same values.
        value: a tensor, a DTensor, or something that `repr` shows completely, and alike in every process.
    """

    name: str
    part: str
    value: Any


class _Difference(NamedTuple):
    """A tensor or value that is not the same on all ranks that hold it.

    Attributes:
        key: its name, and which part of it.
        usual: the ranks that agree, as most do.
        unusual: the other ranks.
        lacking: the ranks that do not have it at all.
    """

    key: _Key
    usual: list[int]
    unusual: list[int]
    lacking: list[int]


@HOOKS.register_module()
@dataclass(eq=False, repr=False)
class ReplicaCheckHook(Hook):
    """Find replicas that are no longer equal, to the bit, and name the first tensor that differs and its ranks.

    Nothing else notices when the replicas of a model drift apart: after a bit flip in a device's memory, a kernel that
    computes differently on one rank, or an update on some ranks only. Each rank goes on with its own weights, and the
    averaged gradients fit none of them.

    What is compared: parameters; buffers; the optimizer's state, such as moments and numbers of steps; its options,
    such as learning rates; the loss scale; the average of `EMAHook`. Which ranks are compared:

    * `ddp`: all.
    * `fsdp` with replicas, as with `device_mesh=(replicas, shards)`: those that hold the same shard.
    * `fsdp` otherwise: each shard exists once, so only what is whole on every rank can be compared: buffers, parameters
      of dimension 0, numbers of steps, and options. A bit flip in a shard is not found.
    * `tensor_parallel`: what all ranks of a group hold in full, such as the weights of norms, within each group and
      over groups; and the state of torch's random generators within each group.

    Not compared, because they differ by design: the running statistics of a BatchNorm, which each rank collects from
    its own samples until `SyncBuffersHook` averages them; parameters whose gradients are not averaged; random state,
    except as said above.

    Args:
        interval: number of iterations from one check to the next. Each checkpoint also makes one, before it is written.
        ignore: patterns, as for `fnmatch`, for the names of parameters and buffers that are meant to differ.

    **Collective**: every rank. **Cost**: per check one pass over what is compared, one read from the device, and one
    exchange of 256 bytes between the hosts. On two ranks of one CPU core each a check takes at most as long as a
    training step with AdamW, even a step on one sample: at the default interval 0.1 to 0.5 % of the time (`python -m
    benchmarks.divergence`). If replicas differ, the name of each tensor and 8 bytes are sent to rank 0 as well.

    Raises:
        ConfigError: an argument is wrong; or an engine (DeepSpeed, ColossalAI) holds the parameters.
        DivergenceError: the same on every rank: replicas differ.
    """

    priority = "LOW"

    interval: int = 200
    ignore: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        require_count("interval", self.interval)
        self.ignore = (self.ignore,) if isinstance(self.ignore, str) else tuple(self.ignore)
        self._equal_after: int | None = None

    def before_train(self, runner: TrainRun) -> None:
        """Refuse what can't be checked, then check what training starts from."""
        if not isinstance(runner.strategy, NativeStrategy):
            raise ConfigError(
                "ReplicaCheckHook must be used with a subclass of NativeStrategy, such as 'single', 'ddp' or 'fsdp', "
                "because an engine lays out the parameters in its own way, but the strategy is "
                f"{type(runner.strategy).__name__}"
            )
        self._equal_after = None
        self._check(runner, runner.iter)

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Check when it is time."""
        if self.every_n_train_iters(runner, self.interval):
            self._check(runner, runner.iter + 1)

    def before_save_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Check before anything is written: a checkpoint would hold the values of one rank, perhaps the wrong ones."""
        self._check(runner, checkpoint["meta"].get("iter", runner.iter))

    def _check(self, runner: TrainRun, iteration: int) -> None:
        if runner.world_size == 1 or self._equal_after == iteration:
            return
        found = _differences(_digests(held_by(runner, self.ignore)))
        if not found:
            self._equal_after = iteration
            return
        message = _message(found, runner.world_size, iteration, self._equal_after)
        raise DivergenceError(message, name=found[0].key[0], ranks=found[0].unusual, iteration=iteration)


def _digests(held: Sequence[Held]) -> dict[_Key, list[str]]:
    """Return what is compared of each value, with one read from each device; several values may have the same name."""
    tensors: dict[torch.device, dict[int, Tensor]] = {}
    numbers: dict[int, int] = {}
    for place, (_, _, value) in enumerate(held):
        if isinstance(value, Tensor):
            digest = digest_of(words_of(value))
            tensors.setdefault(digest.device, {})[place] = digest
    for by_place in tensors.values():
        numbers.update(zip(by_place, torch.stack([*by_place.values()]).tolist(), strict=True))
    digests: dict[_Key, list[str]] = {}
    for place, (name, part, value) in enumerate(held):
        shown = f"{value.dtype} {list(value.shape)} {numbers[place]}" if place in numbers else repr(value)
        digests.setdefault((name, part), []).append(shown)
    return digests


def _differences(digests: Mapping[_Key, list[str]]) -> list[_Difference]:
    """Return what differs between ranks that hold the same parts, in order. **Collective**: every rank.

    **Cost**: one exchange of 8 bytes for each part; if one differs, its names and 8 bytes for each of its values go to
    rank 0, which sends to all what it finds.
    """
    by_part: dict[str, list[Any]] = {}
    for (name, part), shown in sorted(digests.items()):
        by_part.setdefault(part, []).append((name, shown))
    members: dict[str, dict[int, bytes]] = {}  # the ranks that hold each part
    for rank, own in enumerate(all_gather_object({part: _hashed(repr(each)) for part, each in by_part.items()})):
        for part, digest in own.items():
            members.setdefault(part, {})[rank] = digest
    unequal = {part: ranks for part, ranks in members.items() if len({*ranks.values()}) > 1}
    if not unequal:
        return []
    hashes = {key: _hashed(repr(shown)) for key, shown in digests.items() if key[1] in unequal}
    by_rank = gather_object(hashes) or []  # on rank 0
    found: list[_Difference] = []
    # In the order of the first rank that has it; a rank lacks it if it has other tensors of the same part.
    for key in dict.fromkeys(key for each in by_rank for key in each):
        by_digest: dict[bytes, list[int]] = {}
        for rank in unequal[key[1]]:
            by_digest.setdefault(by_rank[rank].get(key, b""), []).append(rank)
        if len(by_digest) > 1:
            usual = max(by_digest.values(), key=len)  # of several, the one with the lowest rank
            unusual = sorted(rank for ranks in by_digest.values() if ranks is not usual for rank in ranks)
            found.append(_Difference(key, usual, unusual, by_digest.get(b"", [])))
    return broadcast_object(found)


def _message(found: Sequence[_Difference], world_size: int, iteration: int, equal_after: int | None) -> str:
    """Return the same text on every rank. **Collective**: every rank."""
    first = found[0]
    hosts: list[str] = all_gather_object(socket.gethostname())
    on = listed(dict.fromkeys(hosts[rank] for rank in first.unusual))
    lacking = f" It is missing on {ranks_in_words(first.lacking)}." if first.lacking else ""
    also = f" So do others: {listed(_quoted(*each.key) for each in found[1:])}." if found[1:] else ""
    since = "It did so at the first check." if equal_after is None else f"All was equal after iteration {equal_after}."
    return (
        f"{_quoted(*first.key)} differs between ranks that must hold the same values: "
        f"{ranks_in_words(first.unusual)} of {world_size} (on {on}) against {ranks_in_words(first.usual)}, after "
        f"iteration {iteration}.{lacking}{also} {since} "
        "The memory or the device of one of them may be faulty, or code changes values on some ranks only. "
        + ("Resume from a checkpoint of that iteration or before. " if equal_after else "")
        + "What is meant to differ can be named: ReplicaCheckHook(ignore=[...])"
    )


def _hashed(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _quoted(name: str, part: str) -> str:
    named = " of ".join(f"`{each}`" for each in name.split(" of "))
    return f"{named} ({part})" if part else named


def held_by(run: TrainRun, ignore: Iterable[str] = ()) -> list[Held]:
    """Return what this rank holds and must hold as others do, in an order that is the same on all ranks.

    Parameters, buffers, the optimizer's state and options, the loss scale, averages of weights; and with tensor
    parallelism the state of torch's random generators. Left out are the running statistics of a BatchNorm that
    normalises on each rank by itself, and parameters whose gradients are not averaged.

    Args:
        run: the run; its strategy is a `NativeStrategy`.
        ignore: patterns for names that are left out; that of a parameter also leaves out its optimizer state.
    """
    from lockstep.strategy.optim_state import named_parameters  # with DTensor, half as slow to import as torch

    strategy = run.strategy
    assert isinstance(strategy, NativeStrategy)
    core, group = strategy.core(), _group_of(run.model)
    parameters = named_parameters(core)
    names = {parameter: name for name, parameter in parameters.items()}
    not_averaged = _not_averaged(run.model, parameters)
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
        if (owner := held.name.rpartition(" of ")[2]) not in not_averaged
        and not any(fnmatchcase(held.name, each) or fnmatchcase(owner, each) for each in patterns)
    ]


def _group_of(model: nn.Module) -> str:
    """Return a name for the ranks that are replicas of each other; empty if these are all ranks."""
    group = getattr(model, "process_group", None)
    if group is None:
        return ""
    ranks = get_process_group_ranks(group)
    return "" if len(ranks) == torch.distributed.get_world_size() else f"ranks {ranks}"


def _part_of(tensor: Any, group: str) -> str:
    """Return which part of a tensor a rank holds: its coordinates along the axes over which it is sharded."""
    if not is_dtensor(tensor):
        return group
    mesh = tensor.device_mesh
    axes = mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(mesh.ndim))
    coordinates = mesh.get_coordinate() or ()
    along = zip(axes, coordinates, tensor.placements, strict=True)
    places = [f"{axis} {place}" for axis, place, placement in along if not placement.is_replicate()]
    return ", ".join([group, *places] if group else places)


def _not_averaged(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """Return the names of parameters that each rank trains by itself."""
    if isinstance(model, DistributedDataParallel):
        return set(model.parameters_to_ignore)
    if not any(is_dtensor(parameter) for parameter in parameters.values()):
        return set()
    # FSDP shards all parameters but those of dimension 0, which it averages, and those that it was told to ignore.
    return {name for name, own in parameters.items() if own.requires_grad and own.dim() and not is_dtensor(own)}


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
    from lockstep.strategy.optim_state import options_of

    wrapper = run.optim_wrapper
    names_of_several = list(wrapper) if isinstance(wrapper, OptimWrapperDict) else []
    for index, optimizer in enumerate(wrapper.optimizers):
        kind = type(optimizer).__name__ + (f" {names_of_several[index]!r}" if names_of_several else "")
        for number, options in enumerate(optimizer.param_groups):
            for key, value in options_of(options).items():
                shown = value if isinstance(value, Tensor) else as_text(value, reads_device=True)
                yield Held(f"{key} of parameter group {number} of {kind}", group, shown)
            for place, parameter in enumerate(options["params"]):
                name = names.get(parameter, f"parameter {place} of group {number} of {kind}")
                for key, value in optimizer.state.get(parameter, {}).items():
                    # A dict may hold what an optimizer has dealt out to ranks.
                    for path, entry in () if isinstance(value, Mapping) else tree_items(value, key):
                        # The number of steps is the same for all shards.
                        part = _part_of(entry if is_dtensor(entry) or key == "step" else parameter, group)
                        is_dense = isinstance(entry, Tensor) and entry.layout is torch.strided
                        if is_dense or isinstance(entry, bool | int | float | str):
                            yield Held(f"{path} of {name}", part, entry)
    if extra := wrapper.extra_state():
        yield Held("state of the optim wrapper", group, as_text(extra, reads_device=True))


def _averages(run: TrainRun, group: str) -> Iterator[Held]:
    averages = [model for hook in run.hooks if isinstance(model := vars(hook).get("ema_model"), BaseAveragedModel)]
    for number, averaged in enumerate(averages, start=1):
        which = f"average {number}" if len(averages) > 1 else "average"
        for name, parameter in averaged.module.named_parameters():
            yield Held(f"{which} of {name}", _part_of(parameter, group), parameter)


def _random_state(run: TrainRun) -> Iterator[Held]:
    """Yield the states of torch's generators, if ranks compute on the same samples and must draw the same numbers."""
    if not isinstance(run.model, ModelWrapper) or run.model.data_shard is None:
        return
    part = f"data shard {run.data_shard.rank}"
    yield Held("torch's random state", part, torch.get_rng_state())
    if get_device() != "cpu":
        yield Held("random state of the device", part, torch.get_device_module(get_device()).get_rng_state())
