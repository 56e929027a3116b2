"""Building a loader that yields this rank's shard, from a config or from a user's own `DataLoader`."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    default_collate,
    default_convert,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lockstep.dataset.rank_aware import differing_parts, is_rank_aware, parts_of
from lockstep.dataset.sampler import (
    DefaultSampler,
    InfiniteSampler,
    ShardedSampler,
    ShardingSampler,
    WorkerSeeds,
    length_of,
)
from lockstep.dataset.stream import StreamLoader, StreamShard
from lockstep.device import can_pin_memory
from lockstep.dist import agreement, get_dist_info, get_rank, get_world_size
from lockstep.errors import ConfigError, counted, lacks_key, listed, require_count, require_known
from lockstep.registry import DATA_SAMPLERS, DATASETS, FUNCTIONS, in_default_scope
from lockstep.registry.registry import SCOPE
from lockstep.registry.signatures import Arguments

_logger = logging.getLogger(__name__)

_Loader = TypeVar("_Loader", bound=DataLoader[Any])
_HOW_TO_SAY = "if it shards by itself, an attribute `rank` says so"


def build_dataloader(
    loader: DataLoader[Any] | Mapping[str, Any],
    *,
    seed: int,
    evaluation: bool = False,
    shard: tuple[int, int] | None = None,
) -> DataLoader[Any]:
    """Return a data loader that yields this rank's shard of the data.

    All ranks draw the same global order, which depends only on `seed` and the epoch. Rank r of n gets the items at
    positions r, r + n, r + 2n ... of that order:

    * Torch's `RandomSampler` and `SequentialSampler`, if they go through all samples once, become a `DefaultSampler`.
    * Any other sampler, of torch or of the user, is wrapped in a `ShardedSampler`. In training, samples from the
      beginning are repeated until every rank has equally many; in evaluation each sample is seen once.
    * A batch sampler is wrapped in the same way: its batches are split over the ranks, and none is repeated.
    * A sampler that knows of ranks (see `is_rank_aware`), such as torch's `DistributedSampler`, shards the data itself
      and is not changed. If a sampler does so in a way that can't be detected, give it an attribute `rank`, or set
      `split=False` in the config.

    The same applies to one process, so that training can resume inside an epoch and sees the same global batches on
    any number of ranks. A Runner and a Session say the epoch; before each pass through a loader of your own, call
    `loader.sampler.set_epoch(epoch)`, or each has the same order. On one process two kinds of loaders are not changed:
    loaders in the dataset's own order in evaluation, and subclasses of `DataLoader` that override `__iter__`, but in
    training those with `load_state_dict`.

    A loader that can't be sharded is not changed: an iterable of batches that isn't a `DataLoader`, a `DataLoader` of
    an `IterableDataset` (given as a config, it is split), or one that has begun to read. Where every rank would see the
    same data, there is a warning; of an iterable, a training looks at its first batches instead.

    Args:
        loader: a `DataLoader` or any iterable of batches, or a config dict with the keys `dataset` (an object or a
            config), `batch_size` (per rank) or `global_batch_size` (of all ranks together), optionally `sampler` (an
            object, a config, or replaced by `shuffle`), `batch_sampler` (an object or a config), `collate_fn` (a
            function, or one in the registry `FUNCTIONS`, such as `default_collate` and `pseudo_collate`, by name or
            config), `num_batch_per_epoch` (the number of batches of a shortened epoch, for a trial), and further
            arguments of `torch.utils.data.DataLoader`, of which `pin_memory` is True by default where there are an
            accelerator and workers. An `IterableDataset` is split over ranks and workers (see `StreamShard`).
            `split=False` says that the dataset or the sampler already splits the data itself; `split="ranks"` that an
            iterable dataset does so over its workers, but not over the ranks; `split=True` that a sampler does not,
            even if it has an attribute such as `rank`.
        seed: seed of the order of samples, the same on every rank.
        evaluation: by default keep the order, and yield each sample exactly once.
        shard: this rank's shard and the number of shards; by default its rank and the world size.

    **Collective**: every rank. **Cost**: one all_gather of a few hundred bytes, to check that all have the same data.

    Raises:
        ConfigError: the config has no dataset or is not valid, the ranks have different data, or a sampler splits the
            data into other shards.
        TypeError: `loader` is none of these, as a dataset.
    """
    shard = shard or get_dist_info()
    if isinstance(loader, Mapping):
        return _from_config(loader, seed, evaluation, shard)
    # A data set of HuggingFace's can be iterated over, too: it has samples, which DataLoader gets by `__getitems__`.
    if hasattr(loader, "__getitems__") or not hasattr(loader, "__iter__"):
        what = "None" if loader is None else f"{loader!r} of type {type(loader).__name__}"
        remedy = ""
        if hasattr(loader, "__getitem__"):
            remedy = ". Wrap the dataset: DataLoader(dataset, batch_size=...), or dict(dataset=..., batch_size=...)"
        elif hasattr(loader, "train_dataloader"):  # Lightning's data module
            remedy = ". Hand in its loaders: call prepare_data() and setup('fit'), then what train_dataloader() returns"
        raise TypeError(
            f"a data loader must be a torch DataLoader, an iterable of batches or a config dict, but is {what}{remedy}"
        )
    return _shard_loader(loader, seed, evaluation, shard)  # type: ignore[no-any-return]


def pseudo_collate(batch: list[Any]) -> Any:
    """Turn a list of samples into one sample of lists, without stacking.

    Example:
        >>> pseudo_collate([{"img": 1, "label": 2}, {"img": 3, "label": 4}])
        {'img': [1, 3], 'label': [2, 4]}
    """
    first = batch[0]
    if isinstance(first, Mapping):
        return {key: pseudo_collate([sample[key] for sample in batch]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(pseudo_collate, map(list, zip(*batch, strict=True))))
    if isinstance(first, list | tuple):
        return type(first)(map(pseudo_collate, map(list, zip(*batch, strict=True))))
    return batch


FUNCTIONS.register_module(module=pseudo_collate)
FUNCTIONS.register_module(module=default_collate)


def _from_config(cfg: Mapping[str, Any], seed: int, evaluation: bool, shard: tuple[int, int]) -> DataLoader[Any]:
    arguments = dict(cfg)
    if (size := arguments.pop("global_batch_size", None)) is not None:
        arguments["batch_size"] = _share_of_batch(size, arguments, shard[1])
    dataset = arguments.pop("dataset", None)
    if dataset is None:
        raise ConfigError(f"a data loader's config {lacks_key(cfg, 'dataset')}")
    if isinstance(dataset, Mapping):
        dataset = DATASETS.build(dataset)
        if callable(getattr(dataset, "full_init", None)):  # MMEngine's datasets may delay their loading
            dataset.full_init()
    is_stream = isinstance(dataset, IterableDataset)
    if not is_stream and (batches := arguments.pop("num_batch_per_epoch", None)) is not None:
        require_count("num_batch_per_epoch", batches)
        dataset = _first_samples(dataset, batches * _samples_in_batch(arguments) * shard[1])
    in_batches = arguments.get("batch_size", 1) is not None or arguments.get("batch_sampler") is not None
    arguments["collate_fn"] = _collate_fn(arguments.get("collate_fn"), in_batches)
    if "generator" not in arguments or arguments["generator"] is not None:  # None: from torch's global one, as torch
        arguments["generator"] = WorkerSeeds(seed, shard[0])
    # Without workers, samples may be on the accelerator already, which torch's loader can't pin.
    arguments.setdefault("pin_memory", can_pin_memory() and arguments.get("num_workers", 0) > 0)
    split = arguments.pop("split", None)
    if split is not None and not isinstance(split, bool) and (split != "ranks" or not is_stream):
        raise ConfigError(f"`split` must be True, False or None, or 'ranks' for an iterable dataset, but is {split!r}")
    if is_stream:
        return _stream_loader(dataset, arguments, seed, shard, split)
    if "shuffle" in arguments and arguments.get("sampler") is not None:
        raise ConfigError("a data loader's config has both 'sampler' and 'shuffle'; leave out one")
    builder = _SamplerBuilder(dataset, seed, evaluation, shard, split)
    default = {"shuffle": arguments.pop("shuffle", not evaluation)}
    if arguments.get("batch_sampler") is not None:
        arguments["batch_sampler"] = builder.batch_sampler(arguments["batch_sampler"], arguments, default)
    else:
        sampler = arguments.get("sampler")
        arguments["sampler"] = builder.sampler(default if sampler is None else sampler, arguments.get("batch_size", 1))
    return _made(DataLoader, dataset, arguments)


def _made(kind: type[_Loader], dataset: Any, arguments: Mapping[str, Any]) -> _Loader:
    require_known("dataloader", arguments, inspect.signature(DataLoader).parameters)
    return kind(dataset, **arguments)


def _share_of_batch(size: int, cfg: Mapping[str, Any], shards: int) -> int:
    """Return how many samples of a global batch are for each shard."""
    if taken := [name for name in ("batch_size", "batch_sampler") if cfg.get(name) is not None]:
        raise ConfigError(f"`global_batch_size` and `{taken[0]}` both set the size of batches; leave out one")
    require_count("global_batch_size", size)
    if size % shards:
        raise ConfigError(
            f"`global_batch_size` must be a multiple of the number of ranks that share the data, {shards}, but is "
            f"{size}. For 1 to 4 ranks choose a multiple of 12, for 1 to 8 one of 840"
        )
    return size // shards


def _samples_in_batch(cfg: Mapping[str, Any]) -> int:
    """Return how many samples a batch of a shortened epoch takes."""
    batch_sampler = cfg.get("batch_sampler")
    inner = batch_sampler if isinstance(batch_sampler, Mapping) else {}
    for name, given in (("batch_sampler", batch_sampler), ("sampler", inner.get("sampler", cfg.get("sampler")))):
        if given is not None and not isinstance(given, Mapping):
            raise ConfigError(
                f"`num_batch_per_epoch` shortens the dataset, but `{name}`, a {type(given).__name__}, draws from all "
                "of it. Give a config, as dict(type=...), or a dataset that is short"
            )
    return inner.get("batch_size", cfg.get("batch_size", 1)) or 1


def _first_samples(dataset: Any, count: int) -> Any:
    shortened: Any = Subset(dataset, range(min(count, len(dataset))))
    shortened.metainfo = getattr(dataset, "metainfo", None)
    return shortened


def _stream_loader(
    dataset: Any, arguments: dict[str, Any], seed: int, shard: tuple[int, int], split: bool | str | None
) -> StreamLoader:
    order = {name: arguments.pop(name, None) for name in ("sampler", "batch_sampler", "num_batch_per_epoch", "shuffle")}
    if given := [f"`{name}`" for name, value in order.items() if value is not None and value is not False]:
        raise ConfigError(
            f"a stream has an order and an end of its own, so that {' and '.join(given)} can't be given beside "
            f"{type(dataset).__name__}. Shuffle within it, by a fixed seed and the epoch, which its `set_epoch(epoch)` "
            "gets; train_cfg=dict(by_epoch=False, max_iters=...) says how long it is trained on"
        )
    workers = max(1, arguments.get("num_workers", 0))
    batch_size = arguments.setdefault("batch_size", 1) or 1
    stream = StreamShard(dataset, shard, batch_size, split=True if split is None else split, seed=seed)
    if (parts := shard[1] * workers) > 1:
        by = " by itself" if split is False else ""
        _logger.info("%s is split over %d ranks and workers%s", type(dataset).__name__, parts, by)
    return _made(StreamLoader, stream, arguments)


class _SamplerBuilder(NamedTuple):
    """Builds the samplers of a config, from what they are offered as arguments."""

    dataset: Any
    seed: int
    evaluation: bool
    shard: tuple[int, int]
    split: bool | None

    def sampler(self, sampler: Any, batch_size: int | None) -> Any:
        """Return a sampler of this rank's samples from an object or a config."""
        if isinstance(sampler, Mapping):
            sampler = self._built(sampler, _kind_of(sampler, DefaultSampler))
        round_up = not self.evaluation and batch_size is not None
        return self._sharded(sampler, round_up=round_up, batch_size=batch_size or 1)

    def batch_sampler(self, batch_sampler: Any, arguments: dict[str, Any], default: Mapping[str, Any]) -> Any:
        """Return a sampler of this rank's batches from an object or a config; remove what it uses from `arguments`."""
        if not isinstance(batch_sampler, Mapping):
            return self._sharded(batch_sampler, round_up=False)
        kind = _kind_of(batch_sampler, BatchSampler)
        takes = Arguments.of(kind).named
        batch_size = arguments.pop("batch_size", 1)
        if "sampler" not in takes or isinstance(batch_sampler.get("sampler"), Sampler):
            offered = {"batch_size": batch_size} if "batch_size" in takes else {}
            return self._sharded(self._built({**offered, **batch_sampler}, kind), round_up=False)
        # It makes its batches from this rank's samples.
        given = arguments.pop("sampler", None)
        given = batch_sampler.get("sampler", default if given is None else given)
        sampler = self.sampler(given, batch_size)
        return DATA_SAMPLERS.build({"batch_size": batch_size, **batch_sampler, "type": kind, "sampler": sampler})

    def _built(self, cfg: Mapping[str, Any], kind: Any) -> Any:
        made = kind if isinstance(kind, type) else object  # a function may return any sampler
        is_ours = issubclass(made, DefaultSampler | InfiniteSampler)
        rank, size = shard = (0, 1) if is_ours and self.split is False else self.shard
        offered: dict[str, Any] = {"seed": self.seed, "shard": shard, "rank": rank}
        offered |= dict.fromkeys(("dataset", "data_source"), self.dataset)
        offered |= dict.fromkeys(("num_replicas", "world_size"), size)
        if issubclass(made, DefaultSampler):
            offered |= {"shuffle": not self.evaluation, "round_up": not self.evaluation}
        takes = Arguments.of(kind)
        taken = {name: value for name, value in offered.items() if name in takes.named}
        if takes.takes_others and "data_source" not in taken:
            taken["dataset"] = self.dataset
        return DATA_SAMPLERS.build({**taken, **cfg, "type": kind})

    def _sharded(self, sampler: Any, *, round_up: bool, batch_size: int = 1) -> Any:
        if self.split is False:
            return sampler
        if self.evaluation:
            sampler = _without_padding(sampler)
        if isinstance(sampler, ShardingSampler):
            self._check_alike(None)
            _check_one_order(sampler)
        elif self.split is True or not is_rank_aware(sampler):
            self._check_alike(sampler)
            return _shard_sampler(sampler, self.seed, self.shard, round_up=round_up, batch_size=batch_size)
        _check_shard(sampler, self.shard, self.dataset)
        return sampler

    def _check_alike(self, sampler: Any) -> None:
        if get_world_size() > 1 and (differing := differing_parts(self.dataset, sampler)):
            raise _parts_differ(differing, "say `split=False`")


def _without_padding(sampler: Any) -> Any:
    """Return what draws in an evaluation: in place of torch's sampler that repeats samples to fill up, all, once."""
    return SequentialSampler(sampler.dataset) if is_torchs(sampler, DistributedSampler) else sampler


def _parts_differ(names: list[str], how_to_say: str) -> ConfigError:
    return ConfigError(
        f"`dataset` and `sampler` must be the same on all ranks, which split them, but {' and '.join(names)} differ "
        f"(rank {get_rank()} of {get_world_size()}). Make them the same: give a random split a seed, as by "
        "random_split(data, lengths, generator=torch.Generator().manual_seed(0)). If each rank is to have a part of "
        f"its own, {how_to_say}"
    )


def _kind_of(cfg: Mapping[str, Any], default: type) -> Any:
    kind = cfg.get("type", default)
    with in_default_scope(cfg.get(SCOPE)):
        return DATA_SAMPLERS[kind] if isinstance(kind, str) else kind


def _collate_fn(collate_fn: Any, in_batches: bool = True) -> Callable[[Any], Any]:
    if collate_fn is None:
        return default_collate if in_batches else default_convert
    if isinstance(collate_fn, Mapping):
        arguments = {key: value for key, value in collate_fn.items() if key not in ("type", SCOPE)}
        with in_default_scope(collate_fn.get(SCOPE)):
            function = _collate_fn(collate_fn.get("type"))
        if isinstance(function, type):
            return function(**arguments)  # type: ignore[no-any-return]
        return functools.partial(function, **arguments) if arguments else function
    if isinstance(collate_fn, str):
        found = FUNCTIONS.get(collate_fn)
        if found is None:
            raise ConfigError(f"`collate_fn` must be a function or the name of one {FUNCTIONS.suggest(collate_fn)}")
        return found
    return collate_fn  # type: ignore[no-any-return]


def drawn_from(loader: Any) -> tuple[Any, int]:
    """Return what a loader draws from, and how many drawn items make a batch.

    That is a sampler of indices if torch's own `BatchSampler` makes the batches; otherwise a sampler of batches.
    """
    batches = getattr(loader, "batch_sampler", None)
    if is_torchs(batches, BatchSampler):
        return batches.sampler, batches.batch_size  # type: ignore[union-attr]
    return getattr(loader, "sampler", None) if batches is None else batches, 1


def is_torchs(part: Any, kind: type) -> bool:
    """Return whether a part of a loader is of a class of torch, and not of a subclass; torchdata's variant counts."""
    own = type(part)
    return own is kind or (own.__name__ == kind.__name__ and own.__module__.partition(".")[0] == "torchdata")


def with_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """Return a copy of a loader that draws from another sampler instead of the one that `drawn_from` returns."""
    batches: Any = loader.batch_sampler
    if is_torchs(batches, BatchSampler):
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
        return with_parts(loader, sampler=sampler, batch_sampler=batches)
    return with_parts(loader, **{"sampler" if batches is None else "batch_sampler": sampler})


def with_parts(loader: DataLoader[Any], **parts: Any) -> DataLoader[Any]:
    """Return a copy of a loader with other parts and workers of its own; all else in it, or its subclass, is kept."""
    changed = copy.copy(loader)
    vars(changed).update(parts, _iterator=None)
    return changed


def _shard_loader(loader: Any, seed: int, evaluation: bool, shard: tuple[int, int]) -> Any:
    """Return a loader like `loader` that yields this rank's shard, or `loader` itself if it must not be changed.

    The decision and its reason are logged.

    **Collective**: every rank.
    """
    sampler, batch_size = drawn_from(loader)
    if evaluation and isinstance(loader, DataLoader) and (plain := _without_padding(sampler)) is not sampler:
        _logger.info("%s: its DistributedSampler, which repeats samples to fill up, does not draw", _describe(loader))
        loader, sampler = with_sampler(loader, plain), plain
    if (left := _reason_to_leave(loader, sampler, evaluation, shard)) is not None:
        level, why = left
        if get_world_size() > 1:
            _logger.log(level, "%s is left as it is: %s", _describe(loader), why)
        return loader
    in_samples = is_torchs(loader.batch_sampler, BatchSampler)
    # Batches are not repeated to give each rank equally many: `EvenBatches` handles unequal numbers of batches.
    split = _shard_sampler(sampler, seed, shard, round_up=in_samples and not evaluation, batch_size=batch_size)
    sharded = with_sampler(loader, split)
    # Also in the place of one that the user has seeded: it gave the workers of all ranks the same seeds.
    sharded.generator = WorkerSeeds(seed, shard[0])
    _log_split(loader, sampler, split, "samples" if in_samples else "batches", shard[1])
    return sharded


def _reason_to_leave(loader: Any, sampler: Any, evaluation: bool, shard: tuple[int, int]) -> tuple[int, str] | None:
    """Return the log level and the reason if a loader must not be changed; None if it is to be sharded."""
    differing = differing_parts(getattr(loader, "dataset", loader), sampler) if get_world_size() > 1 else []
    is_map_style = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if is_rank_aware(loader):
        _check_shard(sampler, shard, None if hasattr(loader, "rank") else getattr(loader, "dataset", loader))
        return logging.INFO, "it knows of ranks, and gives each of them its own part"
    if differing and not is_map_style:
        return logging.INFO, "it holds other data on each rank"
    if not is_map_style:
        advice = "Give a DataLoader of map-style data, or on each rank batches of its own"
        if isinstance(loader, DataLoader):
            advice = "The config dict(dataset=..., batch_size=...) splits an iterable dataset"
        # A training finds the same first batches on its ranks, but not data that each rank shuffles for itself.
        return logging.WARNING if evaluation or hasattr(loader, "dataset") else logging.INFO, (
            f"each of the {get_world_size()} ranks goes through all that it yields, which is the same on every rank "
            f"unless it shards by itself. {advice}; {_HOW_TO_SAY}"
        )
    if differing:
        raise _parts_differ(
            differing, "say so by an attribute `rank` of the loader or its sampler, or by `split=False` in a config"
        )
    # A subclass that only collates otherwise, as torch_geometric's, draws in one process what it would draw on several.
    is_plain = type(loader).__iter__ is DataLoader.__iter__ or (not evaluation and hasattr(loader, "load_state_dict"))
    if get_world_size() == 1 and (not is_plain or (evaluation and is_torchs(sampler, SequentialSampler))):
        return logging.INFO, "one process sees all of it"
    # No public class is that of a loader's iterators; `_iterator` is where the loader itself keeps persistent workers.
    if any(isinstance(value, _BaseDataLoaderIter) for name, value in vars(loader).items() if name != "_iterator"):
        return logging.WARNING, "it has begun to read before the training, so that every rank sees all samples"
    return None


def _shard_sampler(
    sampler: Any, seed: int, shard: tuple[int, int], *, round_up: bool, batch_size: int = 1
) -> DefaultSampler | ShardedSampler:
    """Return a sampler that splits over the ranks what `sampler`, which does not know of ranks, draws.

    It is a `DefaultSampler` if `sampler` is torch's and goes through all samples once; otherwise a `ShardedSampler`.
    """
    shuffles = is_torchs(sampler, RandomSampler)
    is_permutation = shuffles and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    if is_permutation or is_torchs(sampler, SequentialSampler):
        return DefaultSampler(range(len(sampler)), shuffles, seed, round_up, shard)
    return ShardedSampler(sampler, seed, round_up, shard, batch_size)


def _check_shard(sampler: Any, shard: tuple[int, int], dataset: Any) -> None:
    """Raise a `ConfigError` if a sampler splits the data otherwise than the ranks train on it.

    So it is if it splits them over all ranks although some must see the same samples, if it splits the order of another
    seed on each rank, or if torch's has numbers by which ranks share a shard of `dataset` (unless that is None), or
    leave one out.

    **Collective**: every rank.
    """
    _check_one_order(sampler)
    size = getattr(sampler, "num_replicas", getattr(sampler, "world_size", None))
    given = getattr(sampler, "rank", None), size
    if shard != get_dist_info() and size is not None and given != shard:
        raise ConfigError(
            f"`sampler` must split the data into {shard[1]} shards, of which this rank takes number {shard[0]}, "
            f"because several ranks compute on the same samples; but {type(sampler).__name__} splits it into {size}, "
            f"of which this rank takes number {given[0]}. Leave the sampler out, or give it the strategy's `data_shard`"
        )
    if shard != get_dist_info():
        return
    own = [(part.rank, part.num_replicas) for part in parts_of(sampler) if isinstance(part, DistributedSampler)]
    taken = agreement.from_all(own[:1])
    if dataset is None or not all(taken):
        return
    shards = [f"rank={one[0][0]}, num_replicas={one[0][1]} on rank {rank}" for rank, one in enumerate(taken)]
    is_split = sorted(taken) == [[(rank, len(taken))] for rank in range(len(taken))]
    if not is_split and not differing_parts(dataset, None):
        raise ConfigError(
            f"`sampler` must give each rank of {len(taken)} a shard of its own, and together all data, but "
            f"DistributedSampler has {listed(shards, most=8)}. Leave the sampler out, or its arguments; if each node "
            "has data of its own, give the loader an attribute `rank`, or say `split=False`"
        )


def _check_one_order(sampler: Any) -> None:
    kinds: tuple[Any, ...] = (ShardingSampler, DistributedSampler)
    seeds = [part.seed for part in parts_of(sampler) if isinstance(part, kinds) and hasattr(part, "seed")]
    if by_rank := agreement.differing(seeds):
        raise ConfigError(
            f"`seed` of {type(sampler).__name__} must be the same on all ranks, each of which takes its part of one "
            f"order, but is {listed([f'{seeds[0]} on rank {rank}' for rank, seeds in enumerate(by_rank)], most=8)}. "
            "Give all ranks one seed"
        )


def _log_split(loader: Any, sampler: Any, split: DefaultSampler | ShardedSampler, items: str, shards: int) -> None:
    """Log what is drawn, in which order, and how many items each rank gets."""
    whole = length_of(sampler)
    count = items if whole is None else f"{whole} {items}"
    if get_world_size() > 1:
        each = "" if whole is None else f"{length_of(split)} "
        if whole is not None and whole % shards and not split.round_up:
            each = f"{whole // shards} or {whole // shards + 1} "
        count += f", {each}on each of {counted(shards, 'rank')}"
        if whole is not None and whole % shards and split.round_up:
            count += f", {-whole % shards} repeated"
    if whole is not None and not split.round_up and getattr(loader, "drop_last", False):
        sizes = [whole // shards + (shard < whole % shards) for shard in range(shards)]
        if left_out := sum(size % (loader.batch_size or 1) for size in sizes):
            count += f", of which drop_last leaves out {left_out}"
    if isinstance(split, ShardedSampler):
        count += f", in the order of {type(sampler).__name__}"
        count += "" if shards == 1 else f", of which each takes its share ({_HOW_TO_SAY})"
    _logger.info("%s: %s", _describe(loader), count)


def _describe(loader: Any) -> str:
    dataset = getattr(loader, "dataset", None)
    name = type(loader).__name__
    return name if dataset is None else f"{name} of {type(dataset).__name__}"
