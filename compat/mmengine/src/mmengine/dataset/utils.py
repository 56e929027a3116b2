"""How samples become a batch, and the seeds of a data loader's workers."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import default_collate as torch_default_collate

from mmengine.registry import FUNCTIONS
from mmengine.structures import BaseDataElement

COLLATE_FUNCTIONS = FUNCTIONS

__all__ = ["COLLATE_FUNCTIONS", "default_collate", "pseudo_collate", "worker_init_fn"]


def worker_init_fn(
    worker_id: int, num_workers: int, rank: int, seed: int, disable_subprocess_warning: bool = False
) -> None:
    """Seed the random generators of a data loader's worker: by ``num_workers * rank + worker_id + seed``.

    Args:
        worker_id: the worker's number, from 0.
        num_workers: the number of workers on each rank.
        rank: this process's rank.
        seed: the run's seed.
        disable_subprocess_warning: let all workers but the first ignore warnings.
    """
    own = num_workers * rank + worker_id + seed
    random.seed(own)
    numpy.random.seed(own)
    torch.manual_seed(own)
    if disable_subprocess_warning and worker_id != 0:
        warnings.simplefilter("ignore")


@FUNCTIONS.register_module()
def pseudo_collate(data_batch: Sequence[Any]) -> Any:
    """Turn a list of samples into one sample of lists; nothing is stacked.

    Dicts, named tuples, tuples and lists are taken apart; of a sequence, each entry becomes a tuple.

    Raises:
        RuntimeError: sequences have different lengths.

    Example:
        >>> pseudo_collate([{"inputs": torch.zeros(1), "id": 3}, {"inputs": torch.ones(1), "id": 4}])
        {'inputs': [tensor([0.]), tensor([1.])], 'id': [3, 4]}
    """
    first = data_batch[0]
    if isinstance(first, Mapping):
        return _mapping(first, {key: pseudo_collate([sample[key] for sample in data_batch]) for key in first})
    if isinstance(first, str | bytes) or not isinstance(first, Sequence):
        return data_batch
    entries = [pseudo_collate(entry) for entry in _entries(data_batch)]
    if hasattr(first, "_fields"):
        return type(first)(*entries)
    return _sequence(first, entries)


@FUNCTIONS.register_module()
def default_collate(data_batch: Sequence[Any]) -> Any:
    """Stack the tensors, arrays and numbers of samples; strings and data elements are kept in lists.

    Raises:
        RuntimeError: sequences have different lengths, or tensors different shapes.

    Example:
        >>> batch = default_collate([{"img": torch.ones(3), "name": "a"}, {"img": torch.zeros(3), "name": "b"}])
        >>> batch["img"].shape, batch["name"]
        (torch.Size([2, 3]), ['a', 'b'])
    """
    first = data_batch[0]
    if isinstance(first, BaseDataElement | str | bytes):
        return data_batch
    if isinstance(first, Mapping):
        return _mapping(first, {key: default_collate([sample[key] for sample in data_batch]) for key in first})
    if not isinstance(first, Sequence):
        return torch_default_collate(list(data_batch))
    entries = [default_collate(entry) for entry in _entries(data_batch)]
    if hasattr(first, "_fields"):
        return type(first)(*entries)
    return _sequence(first, entries)


def _entries(samples: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    lengths = {len(sample) for sample in samples}
    if len(lengths) > 1:
        raise RuntimeError(f"the sequences of a batch must be equally long, but have the lengths {sorted(lengths)}")
    return list(zip(*samples, strict=True))


def _mapping(like: Mapping[str, Any], entries: dict[str, Any]) -> Any:
    return entries if type(like) is dict else type(like)(entries)  # type: ignore[call-arg]


def _sequence(like: Sequence[Any], entries: list[Any]) -> Any:
    if isinstance(like, tuple):  # MMEngine's batches are lists
        return entries
    try:
        return type(like)(entries)  # type: ignore[call-arg]
    except TypeError:  # as a range, which can't hold them
        return entries
