"""A hook that finds replicas which are no longer equal."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from lockstep.dist import all_gather, all_gather_object
from lockstep.errors import ConfigError, DivergenceError, counted, listed, ranks_in_words, require_count, require_one_of
from lockstep.hooks.digests import digest_of, words_of
from lockstep.model.shards import is_dtensor, own_shard
from lockstep.registry import HOOKS
from lockstep.runner.hook import Hook
from lockstep.runner.run import TrainRun
from lockstep.strategy.native import NativeStrategy

if TYPE_CHECKING:  # it imports torch's DTensor, which takes half as long as importing torch
    from lockstep.hooks.replicas import Held

_BLOCK = 2**12


class _Difference(NamedTuple):
    """A tensor or value that is not the same on all ranks that hold it.

    Attributes:
        place: its place among those of the first rank that holds it.
        held: its name, and which part of it.
        usual: the ranks that agree, as most do.
        unusual: the other ranks.
        lacking: those of them that do not have it at all.
    """

    place: int
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
        self._told: set[tuple[str, str]] = set()

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
        from lockstep.hooks.replicas import held_by

        held = held_by(runner, self.ignore)
        digests = _digests(held)
        if not _differ(held, digests):
            self._equal_after = iteration
            return
        found = _differences(held, digests)
        new = [difference for difference in found if difference.held not in self._told]
        self._told.update(difference.held for difference in found)
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


def _differences(held: Sequence[Held], digests: Sequence[int]) -> list[_Difference]:
    """Return what differs, in order. **Collective**: every rank."""
    own = {(name, part): digest for (name, part, _), digest in zip(held, digests, strict=True)}
    everywhere: list[Mapping[tuple[str, str], int]] = all_gather_object(own)
    members: dict[str, list[int]] = {}  # the ranks that hold each part
    for rank, digest_by_name in enumerate(everywhere):
        for part in {part for _, part in digest_by_name}:
            members.setdefault(part, []).append(rank)
    found = []
    # In the order of the first rank that has it; a rank lacks it if it has other tensors of the same part.
    for place, key in enumerate(dict.fromkeys(key for each in everywhere for key in each)):
        by_digest: dict[int | None, list[int]] = {}
        for rank in members[key[1]]:
            by_digest.setdefault(everywhere[rank].get(key), []).append(rank)
        if len(by_digest) > 1:
            usual = max(by_digest.values(), key=len)  # of several, the one with the lowest rank
            unusual = sorted(rank for ranks in by_digest.values() if ranks is not usual for rank in ranks)
            found.append(_Difference(place, key, usual, unusual, by_digest.get(None, [])))
    return found


def _message(
    held: Sequence[Held], found: Sequence[_Difference], world_size: int, iteration: int, equal_after: int | None
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


def _detail(held: Sequence[Held], difference: _Difference) -> str:
    """Return the first element that differs between one usual and one unusual rank. **Collective**: every rank."""
    if difference.lacking:
        lacking = difference.lacking
        return f"{ranks_in_words(lacking).capitalize()} {'does' if len(lacking) == 1 else 'do'} not have it."
    one, other = difference.unusual[0], difference.usual[0]
    value = {(name, part): value for name, part, value in held}.get(difference.held)
    rank = torch.distributed.get_rank()
    is_asked = rank in (one, other)
    told: list[Any] = all_gather_object(_blocks(value) if is_asked else None)
    (form_one, blocks_one), (form_other, blocks_other) = told[one], told[other]
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
