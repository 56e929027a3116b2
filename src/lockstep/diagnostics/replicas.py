"""A hook that finds replicas which are no longer equal: what ranks must hold alike, and digests of it."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks
from torch.nn.parallel import DistributedDataParallel

from lockstep.device import get_device
from lockstep.dist import all_gather, all_gather_object
from lockstep.errors import ConfigError, DivergenceError, counted, listed, ranks_in_words, require_count, require_one_of
from lockstep.model import ModelWrapper
from lockstep.model.averaged import BaseAveragedModel
from lockstep.model.norm import BATCH_NORMS, INSTANCE_NORMS, is_synced
from lockstep.model.shards import digest_of, is_dtensor, own_shard, words_of
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import TrainRun
from lockstep.strategy.native import NativeStrategy

# Words of a tensor in a block; the first block that differs is sent.
_BLOCK = 2**12


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


class _BitDifference(NamedTuple):
    """A tensor or value that is not the same on all ranks that hold it.

    Attributes:
        held: its name, and which part of it.
        usual: the ranks that agree, as most do.
        unusual: the other ranks.
        lacking: those of them that do not have it at all.
    """

    held: tuple[str, str]
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
        on_divergence: `"raise"` to end the training on all ranks; `"warn"` to log it, once for each tensor.
        ignore: patterns, as for `fnmatch`, for the names of parameters and buffers that are meant to differ.

    **Collective**: every rank. **Cost**: per check one pass over what is compared, and one all_gather of 512 bytes.
    On two ranks of one CPU core each a check takes at most as long as a training step with AdamW, even a step on one
    sample: at the default interval 0.1 to 0.5 % of the time (`python -m benchmarks.divergence`). If replicas differ,
    the digest of each tensor is sent as well, and 16 KiB of the first one that differs.

    Raises:
        ConfigError: an argument is wrong; or an engine (DeepSpeed, ColossalAI) holds the parameters.
        DivergenceError: the same on every rank: replicas differ, and `on_divergence` is `"raise"`.
    """

    priority = "LOW"

    interval: int = 200
    on_divergence: Literal["raise", "warn"] = "raise"
    ignore: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        require_count("interval", self.interval)
        require_one_of("on_divergence", self.on_divergence, ("raise", "warn"))
        self.ignore = (self.ignore,) if isinstance(self.ignore, str) else tuple(self.ignore)
        self._equal_after: int | None = None
        self._named: set[tuple[str, str]] = set()

    def before_train(self, runner: TrainRun) -> None:
        """Refuse what can't be checked, then check what training starts from."""
        if not isinstance(runner.strategy, NativeStrategy):
            raise ConfigError(
                "ReplicaCheckHook must be used with the strategies 'single', 'ddp' or 'fsdp', because an engine lays "
                f"out the parameters in its own way, but the strategy is {type(runner.strategy).__name__}"
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
        held = held_by(runner, self.ignore)
        digests = _digests(held)
        if not _differ(held, digests):
            self._equal_after = iteration
            return
        found = _differences(held, digests)
        new = [difference for difference in found if difference.held not in self._named]
        self._named.update(difference.held for difference in found)
        if self.on_divergence == "raise" or new:
            message = _message(held, found, runner.world_size, iteration, self._equal_after)
            if self.on_divergence == "raise":
                first = found[0]
                raise DivergenceError(message, name=first.held[0], ranks=first.unusual, iteration=iteration)
            runner.logger.warning("%s", message)


def _digests(held: Iterable[Held]) -> list[int]:
    """Return the digest of each value, with one read from each device."""
    numbers: dict[int, int] = {}
    waiting: dict[torch.device, dict[int, Tensor]] = {}
    for place, (_, _, value) in enumerate(held):
        if isinstance(value, Tensor):
            digest = digest_of(words_of(value))
            waiting.setdefault(digest.device, {})[place] = digest
        else:
            numbers[place] = _hashed(repr(value))
    for digests in waiting.values():
        numbers.update(zip(digests, torch.stack([*digests.values()]).tolist(), strict=True))
    return [number for _, number in sorted(numbers.items())]


def _differ(held: Sequence[Held], digests: Sequence[int]) -> bool:
    """Return whether any two ranks that hold the same parts have different digests. **Collective**: every rank."""
    by_part: dict[str, list[Any]] = {}
    for (name, part, value), digest in zip(held, digests, strict=True):
        shape = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
        by_part.setdefault(part, []).append((name, shape, digest))
    own = torch.tensor([[_hashed(part), _hashed(repr(each))] for part, each in by_part.items()]).view(-1, 2)
    seen: dict[int, int] = {}
    pairs = [pair for gathered in all_gather(own) for pair in gathered.tolist()]
    return any(seen.setdefault(part, digest) != digest for part, digest in pairs)


def _differences(held: Sequence[Held], digests: Sequence[int]) -> list[_BitDifference]:
    """Return what differs, in order. **Collective**: every rank."""
    own = {(name, part): digest for (name, part, _), digest in zip(held, digests, strict=True)}
    everywhere: list[Mapping[tuple[str, str], int]] = all_gather_object(own)
    members: dict[str, list[int]] = {}  # the ranks that hold each part
    for rank, digest_by_name in enumerate(everywhere):
        for part in {part for _, part in digest_by_name}:
            members.setdefault(part, []).append(rank)
    found = []
    # In the order of the first rank that has it; a rank lacks it if it has other tensors of the same part.
    for key in dict.fromkeys(key for each in everywhere for key in each):
        by_digest: dict[int | None, list[int]] = {}
        for rank in members[key[1]]:
            by_digest.setdefault(everywhere[rank].get(key), []).append(rank)
        if len(by_digest) > 1:
            usual = max(by_digest.values(), key=len)  # of several, the one with the lowest rank
            unusual = sorted(rank for ranks in by_digest.values() if ranks is not usual for rank in ranks)
            found.append(_BitDifference(key, usual, unusual, by_digest.get(None, [])))
    return found


def _message(
    held: Sequence[Held], found: Sequence[_BitDifference], world_size: int, iteration: int, equal_after: int | None
) -> str:
    """Return the same text on every rank. **Collective**: every rank."""
    first = found[0]
    hosts: list[str] = all_gather_object(socket.gethostname())
    detail = _detail(held, first)
    on = ", ".join(dict.fromkeys(hosts[rank] for rank in first.unusual))
    others = [_quoted(*each.held) for each in found[1:]]
    also = f" So do {counted(len(others), 'further value')}: {listed(others)}." if others else ""
    since = "It did so at the first check." if equal_after is None else f"All was equal after iteration {equal_after}."
    return (
        f"{_quoted(*first.held)} differs between ranks that must hold the same values: "
        f"{ranks_in_words(first.unusual)} of {world_size} (on {on}) against {', '.join(map(str, first.usual))}, after "
        f"iteration {iteration}. {detail}{also} {since} "
        "The memory or the device of one of them may be faulty, or code changes values on some ranks only. "
        + ("Resume from a checkpoint of that iteration or before. " if equal_after else "")
        + "What is meant to differ can be named: ReplicaCheckHook(ignore=[...])"
    )


def _detail(held: Sequence[Held], difference: _BitDifference) -> str:
    """Return the first element that differs between one usual and one unusual rank. **Collective**: every rank."""
    if difference.lacking:
        lacking = difference.lacking
        return f"{ranks_in_words(lacking).capitalize()} {'does' if len(lacking) == 1 else 'do'} not have it."
    one, other = difference.unusual[0], difference.usual[0]
    value = {(name, part): value for name, part, value in held}.get(difference.held)
    rank = torch.distributed.get_rank()
    is_asked = rank in (one, other)
    by_rank: list[Any] = all_gather_object(_blocks(value) if is_asked else None)
    (form_one, blocks_one), (form_other, blocks_other) = by_rank[one], by_rank[other]
    if blocks_one is None or blocks_other is None or form_one != form_other:
        return f"It is {form_one} on rank {one}, and {form_other} on rank {other}."
    pairs = zip(blocks_one, blocks_other, strict=True)
    block = next(place for place, (ours, theirs) in enumerate(pairs) if ours != theirs)
    elements: list[Any] = all_gather_object(_elements(value, block) if is_asked and value is not None else None)
    ours, theirs = elements[one], elements[other]
    index = int((_as_bytes(ours) != _as_bytes(theirs)).any(1).nonzero()[0])
    bits = [int.from_bytes(bytes(_as_bytes(each)[index].tolist()), "little") for each in (ours, theirs)]
    flipped = bits[0] ^ bits[1]
    which = f"bit {flipped.bit_length() - 1}" if flipped.bit_count() == 1 else f"{flipped.bit_count()} bits"
    digits = 2 * ours.element_size()
    place = block * _elements_per_block(ours) + index
    return (
        f"Element {place} of {form_one} is {ours[index].item()!r} (0x{bits[0]:0{digits}x}) on rank {one}, and "
        f"{theirs[index].item()!r} (0x{bits[1]:0{digits}x}) on rank {other}: {which} of it differ"
        f"{'s' if flipped.bit_count() == 1 else ''}."
    )


def _blocks(value: Any) -> tuple[str, list[int] | None]:
    """Return a value in words, and the digests of a tensor's blocks."""
    if not isinstance(value, Tensor):
        return repr(value), None
    words = words_of(value)
    sums = torch.stack([digest_of(block) for block in torch.split(words, _BLOCK)]) if len(words) else words
    part = "this rank's part, " if is_dtensor(value) else ""
    return f"{part}{value.dtype} {list(own_shard(value).shape)}", sums.tolist()


def _elements(value: Tensor, block: int) -> Tensor:
    flat, count = own_shard(value).detach().contiguous().view(-1), _elements_per_block(value)
    return flat[block * count : (block + 1) * count].cpu()


def _elements_per_block(value: Tensor) -> int:
    return _BLOCK * min(4, value.element_size()) // value.element_size()


def _as_bytes(elements: Tensor) -> Tensor:
    return elements.view(torch.uint8).view(len(elements), -1)


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


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
    if not isinstance(model, DistributedDataParallel):
        return ""
    ranks = get_process_group_ranks(model.process_group)
    return "" if len(ranks) == torch.distributed.get_world_size() else f"ranks {ranks}"


def _part_of(tensor: Any, group: str) -> str:
    """Return which part of a tensor a rank holds: its coordinates along the axes over which it is sharded."""
    if not is_dtensor(tensor):
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
                        shared = is_dtensor(entry) or key == "step"
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
