"""A user's own `DataLoader`, sharded over the ranks."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lockstep.dataset.rank_aware import asks_for_rank, differing_parts, is_rank_aware, overlapping_parts
from lockstep.dataset.sampler import DefaultSampler, WorkerSeeds
from lockstep.dataset.sharded import ShardedSampler, drawn_from, is_torchs, length_of, with_sampler
from lockstep.dist import get_dist_info, get_rank, get_world_size
from lockstep.errors import ConfigError, counted

_logger = logging.getLogger(__name__)

_HOW_TO_SAY = "if it shards by itself, an attribute `rank` says so"


def shard_loader(loader: Any, seed: int, evaluation: bool, shard: tuple[int, int]) -> Any:
    """Return a loader like `loader` that yields this rank's shard, or `loader` itself if it must not be changed.

    The decision and its reason are logged.

    **Collective**: every rank.
    """
    left = _reason_to_leave(loader, evaluation, shard)
    if left is None:
        return _sharded(loader, seed, evaluation, shard)
    level, why = left
    if get_world_size() > 1:
        _logger.log(level, "%s is left as it is: %s", _describe(loader), why)
    return loader


def _reason_to_leave(loader: Any, evaluation: bool, shard: tuple[int, int]) -> tuple[int, str] | None:
    """Return the log level and the reason if a loader must not be changed; None if it is to be sharded."""
    sampler, _ = drawn_from(loader)
    differing = differing_parts(getattr(loader, "dataset", loader), sampler) if get_world_size() > 1 else []
    is_map_style = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if is_rank_aware(loader) or (not is_map_style and asks_for_rank(getattr(loader, "dataset", None))):
        check_shard(sampler, shard)
        return logging.INFO, "it knows of ranks, and gives each of them its own part"
    if differing and not is_map_style:
        return logging.INFO, "it holds other data on each rank"
    if not is_map_style:
        advice = "Give a DataLoader of map-style data, or on each rank batches of its own"
        if isinstance(loader, DataLoader):
            advice = "The config dict(dataset=..., batch_size=...) splits an iterable dataset"
        return logging.WARNING, (
            f"each of the {get_world_size()} ranks goes through all that it yields, which is the same on every rank "
            f"unless it shards by itself. {advice}; {_HOW_TO_SAY}"
        )
    if differing and overlapping_parts(loader.dataset, sampler):
        raise ConfigError(
            f"{_describe(loader)} must have the same data on all ranks, which split them, or on each rank a part of "
            f"its own; but {' and '.join(differing)} differ, and overlap. So it is after a random split that each rank "
            "has drawn for itself: samples that one rank validates are trained on by another (rank "
            f"{get_rank()} of {get_world_size()}). Give the split a seed, as by random_split(data, lengths, "
            "generator=torch.Generator().manual_seed(0)), or draw it on rank 0 and broadcast it"
        )
    if differing:
        return logging.WARNING, (
            f"{' and '.join(differing)} differ between ranks, as if each rank had data of its own. If that is by "
            "accident, as after a random split without a seed, all ranks must make them alike"
        )
    is_plain = type(loader) is DataLoader or (not evaluation and hasattr(loader, "load_state_dict"))
    if get_world_size() == 1 and (not is_plain or (evaluation and _is_sequential(sampler))):
        return logging.INFO, "one process sees all of it"
    # No public class is that of a loader's iterators; `_iterator` is where the loader itself keeps persistent workers.
    if any(isinstance(value, _BaseDataLoaderIter) for name, value in vars(loader).items() if name != "_iterator"):
        return logging.WARNING, "it has begun to read before the training, so that every rank sees all samples"
    return None


def shard_sampler(
    sampler: Any, seed: int, shard: tuple[int, int], *, round_up: bool, batch_size: int = 1
) -> DefaultSampler | ShardedSampler:
    """Return a sampler that splits over the ranks what `sampler`, which does not know of ranks, draws.

    It is a `DefaultSampler` if `sampler` is torch's and goes through all samples once; otherwise a `ShardedSampler`.
    """
    if _is_sequential(sampler) or _is_permutation(sampler):
        return DefaultSampler(range(len(sampler)), not _is_sequential(sampler), seed, round_up, shard)
    return ShardedSampler(sampler, seed, round_up, shard, batch_size)


def check_shard(sampler: Any, shard: tuple[int, int]) -> None:
    """Raise a `ConfigError` if a sampler splits over all ranks although some of them must see the same samples."""
    size = getattr(sampler, "num_replicas", getattr(sampler, "world_size", None))
    given = getattr(sampler, "rank", None), size
    if shard != get_dist_info() and size is not None and given != shard:
        raise ConfigError(
            f"`sampler` must split the data into {shard[1]} shards, of which this rank takes number {shard[0]}, "
            f"because several ranks compute on the same samples; but {type(sampler).__name__} splits it into {size}, "
            f"of which this rank takes number {given[0]}. Leave the sampler out, or give it the strategy's `data_shard`"
        )


def _sharded(loader: DataLoader[Any], seed: int, evaluation: bool, shard: tuple[int, int]) -> DataLoader[Any]:
    sampler, batch_size = drawn_from(loader)
    in_samples = is_torchs(loader.batch_sampler, BatchSampler)
    # Batches are not repeated to give each rank equally many: `Passes` handles unequal numbers of batches.
    split = shard_sampler(sampler, seed, shard, round_up=in_samples and not evaluation, batch_size=batch_size)
    sharded = with_sampler(loader, split)
    if loader.generator is None:
        sharded.generator = WorkerSeeds(seed, shard[0])
    _log_split(loader, sampler, split, "samples" if in_samples else "batches", shard[1])
    return sharded


def _is_sequential(sampler: Any) -> bool:
    return is_torchs(sampler, SequentialSampler)


def _is_permutation(sampler: Any) -> bool:
    if not is_torchs(sampler, RandomSampler) or sampler.replacement:
        return False
    return bool(sampler.num_samples == len(sampler.data_source))


def _log_split(loader: Any, sampler: Any, split: DefaultSampler | ShardedSampler, items: str, shards: int) -> None:
    """Log what is drawn, in which order, and how many items each rank gets."""
    whole = length_of(sampler)
    count = items if whole is None else f"{whole} {items}"
    if get_world_size() > 1:
        each = "" if whole is None else f"{length_of(split)} "
        if whole is not None and whole % shards and not split.round_up:
            each = f"{whole // shards} or {whole // shards + 1} "
        count += f", {each}on each of {counted(shards, 'rank')}"
    if isinstance(split, ShardedSampler):
        count += f" (ShardedSampler in place of {type(sampler).__name__}; {_HOW_TO_SAY})"
    _logger.info("%s: %s", _describe(loader), count)


def _describe(loader: Any) -> str:
    dataset = getattr(loader, "dataset", None)
    name = type(loader).__name__
    return name if dataset is None else f"{name} of {type(dataset).__name__}"
