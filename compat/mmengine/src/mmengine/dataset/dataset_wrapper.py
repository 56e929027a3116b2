"""Datasets made of others: joined, repeated, and with rare categories repeated."""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch.utils.data import ConcatDataset as _TorchConcatDataset
from torch.utils.data import Dataset

from mmengine.dataset.base_dataset import BaseDataset, force_full_init
from mmengine.registry import DATASETS


def _built(dataset: Any) -> BaseDataset:
    if isinstance(dataset, Mapping):
        return DATASETS.build(dataset)  # type: ignore[no-any-return]
    if not isinstance(dataset, BaseDataset | ConcatDataset | _Wrapper):
        raise TypeError(f"a dataset must be a BaseDataset or its config, but is of {type(dataset).__name__}")
    return dataset  # type: ignore[return-value]


class _MadeOfOthers:
    """What all datasets have that are made of others."""

    _metainfo: Mapping[str, Any]

    @property
    def metainfo(self) -> dict[str, Any]:
        """A copy of the metainfo of the dataset within, or of the first one."""
        return copy.deepcopy(dict(self._metainfo))

    def get_subset_(self, indices: Sequence[int] | int) -> NoReturn:
        """Not supported."""
        raise NotImplementedError(
            f"{type(self).__name__} has no subsets, as it is not clear whose samples they would be. Take the subset of "
            "the dataset within, or give that one `indices`"
        )

    get_subset = get_subset_


@DATASETS.register_module()
class ConcatDataset(_MadeOfOthers, _TorchConcatDataset[Any]):
    """Several datasets, one after the other.

    Args:
        datasets: the datasets, or their configs; their metainfo must be equal.
        lazy_init: do not load the data yet; see `BaseDataset`.
        ignore_keys: what may differ in the metainfo; that of the first dataset counts.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the metainfo differs.
    """

    def __init__(
        self,
        datasets: Sequence[BaseDataset | Mapping[str, Any]],
        lazy_init: bool = False,
        ignore_keys: str | list[str] | None = None,
    ) -> None:
        if isinstance(ignore_keys, str):
            ignore_keys = [ignore_keys]
        if ignore_keys is not None and not isinstance(ignore_keys, list):
            raise TypeError(f"`ignore_keys` must be a str or a list of str, but is {ignore_keys!r}")
        self.ignore_keys = ignore_keys or []
        self.datasets: list[Any] = [_built(dataset) for dataset in datasets]
        if not self.datasets:
            raise IndexError("`datasets` must have at least one dataset, but has none")
        self._metainfo = self.datasets[0].metainfo
        for number, dataset in enumerate(self.datasets[1:], 1):
            self._check_metainfo(number, dataset.metainfo)
        self._fully_initialized = False
        if not lazy_init:
            self.full_init()

    def full_init(self) -> None:
        """Load the data of all datasets."""
        if self._fully_initialized:
            return
        for dataset in self.datasets:
            dataset.full_init()
        super().__init__(self.datasets)
        self._fully_initialized = True

    @force_full_init
    def get_data_info(self, idx: int) -> dict[str, Any]:
        """Return a sample's entry, whose `sample_idx` is its index in its own dataset."""
        number, own = self._get_ori_dataset_idx(idx)
        info: dict[str, Any] = self.datasets[number].get_data_info(own)
        return info

    @force_full_init
    def __len__(self) -> int:
        return super().__len__()

    @force_full_init
    def __getitem__(self, idx: int) -> Any:
        """Return a sample of one of the datasets."""
        number, own = self._get_ori_dataset_idx(idx)
        return self.datasets[number][own]

    @force_full_init
    def _get_ori_dataset_idx(self, idx: int) -> tuple[int, int]:
        """Return the number of the dataset that has a sample, and the sample's index there."""
        size = self.cumulative_sizes[-1]
        if not -size <= idx < size:
            raise IndexError(f"`idx` must be from {-size} to {size - 1}, but is {idx}")
        number = bisect_right(self.cumulative_sizes, idx % size)
        return number, idx % size - (self.cumulative_sizes[number - 1] if number else 0)

    def _check_metainfo(self, number: int, other: Mapping[str, Any]) -> None:
        own = self._metainfo
        for key in {**own, **other}:
            if key not in self.ignore_keys and (key not in own or key not in other or _differ(own[key], other[key])):
                raise ValueError(
                    f"all datasets must have equal metainfo, but {key!r} of dataset {number} is {other.get(key)!r} "
                    f"and that of dataset 0 {own.get(key)!r}. Make them equal, or name it in `ignore_keys`"
                )


class _Wrapper(_MadeOfOthers, Dataset[Any]):
    """A dataset whose samples are those of another one, some of them several times."""

    def __init__(self, dataset: BaseDataset | Mapping[str, Any], lazy_init: bool) -> None:
        self.dataset = _built(dataset)
        self._metainfo = self.dataset.metainfo
        self._fully_initialized = False
        if not lazy_init:
            self.full_init()

    def full_init(self) -> None:
        """Load the data."""
        if not self._fully_initialized:
            self.dataset.full_init()
            self._prepare()
            self._fully_initialized = True

    @force_full_init
    def get_data_info(self, idx: int) -> dict[str, Any]:
        """Return a sample's entry, whose `sample_idx` is its index in the dataset."""
        return self.dataset.get_data_info(self._get_ori_dataset_idx(idx))

    @force_full_init
    def __getitem__(self, idx: int) -> Any:
        """Return a sample.

        Raises:
            IndexError: `idx` is out of range.
        """
        if idx >= len(self):
            raise IndexError(f"`idx` must be below {len(self)}, but is {idx}")
        return self.dataset[self._get_ori_dataset_idx(idx)]

    def __len__(self) -> int:
        raise NotImplementedError

    def _prepare(self) -> None:
        """Compute what is needed once the data is loaded."""

    def _get_ori_dataset_idx(self, idx: int) -> int:
        raise NotImplementedError


@DATASETS.register_module()
class RepeatDataset(_Wrapper):
    """A dataset several times in a row, so that a small one makes long epochs.

    Args:
        dataset: the dataset, or its config.
        times: how often.
        lazy_init: do not load the data yet; see `BaseDataset`.
    """

    def __init__(self, dataset: BaseDataset | Mapping[str, Any], times: int, lazy_init: bool = False) -> None:
        self.times = times
        super().__init__(dataset, lazy_init)

    @force_full_init
    def __len__(self) -> int:
        return self.times * self._ori_len

    def _prepare(self) -> None:
        self._ori_len = len(self.dataset)

    @force_full_init
    def _get_ori_dataset_idx(self, idx: int) -> int:
        return idx % self._ori_len


@DATASETS.register_module()
class ClassBalancedDataset(_Wrapper):
    """A dataset in which samples of rare categories are repeated.

    A category that is in the share f of the samples repeats those by ``max(1, sqrt(oversample_thr / f))``; a sample is
    repeated as its rarest category asks, rounded up. The dataset must define `get_cat_ids`.

    Args:
        dataset: the dataset, or its config.
        oversample_thr: the share below which a category is rare.
        lazy_init: do not load the data yet; see `BaseDataset`.

    **Source**: "repeat factor sampling" in Gupta et al., LVIS: A Dataset for Large Vocabulary Instance Segmentation
    (2019).
    """

    def __init__(
        self, dataset: BaseDataset | Mapping[str, Any], oversample_thr: float, lazy_init: bool = False
    ) -> None:
        if isinstance(dataset, BaseDataset) and type(dataset).get_cat_ids is BaseDataset.get_cat_ids:
            raise NotImplementedError(f"{type(dataset).__name__} must define `get_cat_ids`")
        self.oversample_thr = oversample_thr
        super().__init__(dataset, lazy_init)

    @force_full_init
    def get_cat_ids(self, idx: int) -> list[int]:
        """Return the categories in a sample."""
        return self.dataset.get_cat_ids(self._get_ori_dataset_idx(idx))

    @force_full_init
    def __len__(self) -> int:
        return len(self.repeat_indices)

    def _prepare(self) -> None:
        factors = self._get_repeat_factors(self.dataset, self.oversample_thr)
        self.repeat_indices = [index for index, factor in enumerate(factors) for _ in range(math.ceil(factor))]

    def _get_repeat_factors(self, dataset: BaseDataset, repeat_thr: float) -> list[float]:
        """Return for each sample how often it is to be repeated, not rounded."""
        categories = [set(dataset.get_cat_ids(index)) for index in range(len(dataset))]
        counts = Counter(category for present in categories for category in present)
        rarity = {
            category: max(1.0, math.sqrt(repeat_thr / (count / len(categories)))) for category, count in counts.items()
        }
        return [max((rarity[category] for category in present), default=1.0) for present in categories]

    @force_full_init
    def _get_ori_dataset_idx(self, idx: int) -> int:
        return self.repeat_indices[idx]


def _differ(one: Any, other: Any) -> bool:
    equal = one == other
    return not (equal.all() if hasattr(equal, "all") else equal)
