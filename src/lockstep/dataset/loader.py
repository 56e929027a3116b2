"""From a config, or from a user's own `DataLoader`, to one that feeds this rank its share."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    default_collate,
    default_convert,
)

from lockstep.dataset.endless import InfiniteSampler
from lockstep.dataset.sampler import DefaultSampler
from lockstep.dataset.stream import StreamShare, check_split
from lockstep.dataset.stream_loader import StreamLoader
from lockstep.dataset.worker_seeds import WorkerSeeds
from lockstep.dist import get_dist_info
from lockstep.errors import ConfigError
from lockstep.registry import DATA_SAMPLERS, DATASETS, FUNCTIONS
from lockstep.registry.signatures import Arguments

_logger = logging.getLogger(__name__)

# What a DataLoader was given, and what is handed on when its sampler is replaced.
_KEPT = (
    "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout",
    "worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor",
    "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip


def build_dataloader(
    loader: DataLoader[Any] | Mapping[str, Any],
    *,
    seed: int,
    evaluation: bool = False,
    share: tuple[int, int] | None = None,
) -> DataLoader[Any]:
    """Return a data loader that yields this rank's share of the data.

    A `DataLoader` is taken as it is on one process. On several, one that goes through its data set in order or at
    random would show every rank everything: its sampler is replaced by a `DefaultSampler`, which is logged. Loaders
    with any other sampler, batch sampler or an iterable data set are left alone, as their author knows better.

    Args:
        loader: a `DataLoader` or any iterable of batches, or a config dict with the keys `dataset` (an object or a
            config), `batch_size` (per rank), optionally `sampler` (an object, a config, or replaced by `shuffle`),
            `collate_fn` (a function, or one in the registry `FUNCTIONS`, such as `default_collate` and
            `pseudo_collate`, by name or config), `num_batch_per_epoch` (to see only so many batches, for a trial), and
            further arguments of `torch.utils.data.DataLoader`. An `IterableDataset` is split over ranks and workers
            (see `StreamShare`), unless `split=False` says that it deals itself out.
        seed: of the order of samples, the same on every rank.
        evaluation: by default keep the order, and show each sample exactly once.
        share: which of how many shares of the data is this rank's; by default its rank, of the world size.

    Raises:
        ConfigError: the config has no data set, something in it does not fit, or a sampler deals out other shares.
    """
    share = share or get_dist_info()
    if isinstance(loader, Mapping):
        return _from_config(loader, seed, evaluation, share)
    if not hasattr(loader, "__iter__"):
        raise TypeError(
            "a data loader must be a torch DataLoader, an iterable of batches or a config dict, "
            f"but is {loader!r} of type {type(loader).__name__}"
        )
    _, shares = share
    if get_dist_info()[1] == 1:
        return loader
    shuffle = _replaceable_order(loader)
    if shuffle is None:
        _check_share(getattr(loader, "sampler", None), share)
        _logger.info(
            "%s is left as it is: each of the %d ranks takes from it what its own sampler says",
            _describe(loader), shares,
        )  # fmt: skip
        return loader
    kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    sampler = DefaultSampler(loader.dataset, shuffle, seed, round_up=not evaluation, share=share)  # type: ignore[arg-type]
    _logger.info(
        "%s: its %d samples are dealt out to %d ranks, %s to each in batches of %s "
        "(DefaultSampler in place of %s; a sampler of your own would be left alone)",
        _describe(loader), len(loader.dataset), shares, len(sampler), loader.batch_size,  # type: ignore[arg-type]
        type(loader.sampler).__name__,
    )  # fmt: skip
    return DataLoader(loader.dataset, sampler=sampler, **kept)


def pseudo_collate(batch: list[Any]) -> Any:
    """Turn a list of samples into one sample of lists, stacking nothing.

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


def _from_config(cfg: Mapping[str, Any], seed: int, evaluation: bool, share: tuple[int, int]) -> DataLoader[Any]:
    arguments = dict(cfg)
    dataset = arguments.pop("dataset", None)
    if dataset is None:
        raise ConfigError(f"a data loader's config must have the key 'dataset', but has only {sorted(cfg)}")
    if isinstance(dataset, Mapping):
        dataset = DATASETS.build(dataset)
        if callable(getattr(dataset, "full_init", None)):  # what MMEngine's data sets put off until they are built
            dataset.full_init()
    if (batches := arguments.pop("num_batch_per_epoch", None)) is not None:
        dataset = _first_samples(dataset, batches * arguments.get("batch_size", 1) * share[1])
    in_batches = arguments.get("batch_size", 1) is not None or arguments.get("batch_sampler") is not None
    arguments["collate_fn"] = _collate_fn(arguments.get("collate_fn"), in_batches)
    arguments.setdefault("generator", WorkerSeeds(seed, share[0]))
    if isinstance(dataset, IterableDataset):
        return _stream_loader(dataset, arguments, share)
    if "split" in arguments:
        raise ConfigError(f"`split` is for iterable data sets, but {type(dataset).__name__} is none")
    batch_sampler = arguments.get("batch_sampler")
    if batch_sampler is None or isinstance(batch_sampler, Mapping):
        arguments["sampler"] = _sampler(arguments, dataset, seed, evaluation, share)
    arguments.pop("shuffle", None)
    if isinstance(batch_sampler, Mapping):
        inner = {"sampler": arguments.pop("sampler"), "batch_size": arguments.pop("batch_size", 1)}
        arguments["batch_sampler"] = DATA_SAMPLERS.build(batch_sampler, **inner)
    try:
        return DataLoader(dataset, **arguments)
    except TypeError as error:
        raise ConfigError(f"a data loader's config does not fit: {error}") from error


def _first_samples(dataset: Any, count: int) -> Any:
    if isinstance(dataset, IterableDataset) or count < 1:
        raise ConfigError(
            f"`num_batch_per_epoch` must be at least 1, of a data set with a length, but is for {count} samples of "
            f"{type(dataset).__name__}"
        )
    shortened: Any = Subset(dataset, range(min(count, len(dataset))))
    shortened.metainfo = getattr(dataset, "metainfo", None)
    return shortened


def _stream_loader(dataset: Any, arguments: dict[str, Any], share: tuple[int, int]) -> StreamLoader:
    split = arguments.pop("split", None)
    if split is not None and not isinstance(split, bool):
        raise ConfigError(f"`split` must be True, False or None, but is {split!r}")
    if arguments.pop("shuffle", None) or any(arguments.get(key) is not None for key in ("sampler", "batch_sampler")):
        raise ConfigError(
            f"an iterable data set has an order of its own, which no sampler can change; but beside "
            f"{type(dataset).__name__} there is a `shuffle` or a sampler. Leave it out"
        )
    parts = share[1] * max(1, arguments.get("num_workers", 0))
    deals = check_split(dataset, split, parts, share[1])
    stream = StreamShare(dataset, share, arguments.setdefault("batch_size", 1) or 1, split=deals)
    if parts > 1:
        _logger.info("%s is split over %d ranks and workers: %s", type(dataset).__name__, parts, stream.how)
    try:
        return StreamLoader(stream, **arguments)
    except TypeError as error:
        raise ConfigError(f"a data loader's config does not fit: {error}") from error


def _sampler(
    arguments: dict[str, Any], dataset: Any, seed: int, evaluation: bool, share: tuple[int, int]
) -> Sampler[int]:
    sampler = arguments.pop("sampler", None)
    if sampler is not None and "shuffle" in arguments:
        raise ConfigError("a data loader's config has both 'sampler' and 'shuffle'; leave out one")
    if sampler is None:
        sampler = {"shuffle": arguments.get("shuffle", not evaluation)}
    if not isinstance(sampler, Mapping):
        _check_share(sampler, share)
        return sampler  # type: ignore[no-any-return]
    kind = sampler.get("type", DefaultSampler)
    if isinstance(kind, str):
        kind = DATA_SAMPLERS[kind]
    if "share" in Arguments.of(kind).named:
        sampler = {"share": share, **sampler}
    if kind is InfiniteSampler:
        sampler = {"seed": seed, **sampler}
    if not issubclass(kind, DefaultSampler):
        key = "data_source" if kind.__module__.startswith("torch.utils.data") else "dataset"
        built: Sampler[int] = DATA_SAMPLERS.build({**sampler, "type": kind, key: dataset})
        _check_share(built, share)
        return built
    cfg = {"seed": seed, "shuffle": not evaluation, "round_up": not evaluation, **sampler}
    return DATA_SAMPLERS.build({**cfg, "type": kind, "dataset": dataset})  # type: ignore[no-any-return]


def _check_share(sampler: Any, share: tuple[int, int]) -> None:
    """Refuse a sampler that deals out to all ranks where some of them must see the same samples."""
    size = getattr(sampler, "num_replicas", getattr(sampler, "world_size", None))
    dealt = getattr(sampler, "rank", None), size
    if share != get_dist_info() and size is not None and dealt != share:
        raise ConfigError(
            f"`sampler` must deal out {share[1]} shares, and this rank be given number {share[0]}, because the "
            f"strategy lets several ranks compute on the same samples; but {type(sampler).__name__} deals out {size}, "
            f"and gives it number {dealt[0]}. Leave the sampler out, or give it the strategy's `data_share`"
        )


def _collate_fn(collate_fn: Any, in_batches: bool = True) -> Callable[[Any], Any]:
    if collate_fn is None:
        return default_collate if in_batches else default_convert
    if isinstance(collate_fn, Mapping):
        arguments = {key: value for key, value in collate_fn.items() if key != "type"}
        function = _collate_fn(collate_fn.get("type"))
        if isinstance(function, type):
            built: Callable[[Any], Any] = function(**arguments)
            return built
        return functools.partial(function, **arguments) if arguments else function
    if isinstance(collate_fn, str):
        found = FUNCTIONS.get(collate_fn)
        if found is None:
            raise ConfigError(f"`collate_fn` must be a function or the name of one {FUNCTIONS.suggest(collate_fn)}")
        return found
    return collate_fn  # type: ignore[no-any-return]


def _replaceable_order(loader: Any) -> bool | None:
    """Return whether `loader` shuffles, or None where its order is its author's own."""
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return None
    if type(loader.batch_sampler) is not BatchSampler:
        return None
    sampler = loader.sampler
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is RandomSampler and not sampler.replacement:
        return True if sampler.num_samples == len(loader.dataset) else None  # type: ignore[arg-type]
    return None


def _describe(loader: Any) -> str:
    dataset = getattr(loader, "dataset", None)
    name = type(loader).__name__
    return name if dataset is None else f"{name} of {type(dataset).__name__}"
