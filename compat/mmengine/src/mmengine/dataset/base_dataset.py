"""`BaseDataset`: samples that an annotation file lists, loaded when they are first needed; and `Compose`."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from torch.utils.data import Dataset

from mmengine.fileio import join_path, list_from_file, load
from mmengine.logging import print_log
from mmengine.registry import TRANSFORMS
from mmengine.utils import is_abs

Transform = Callable[[Any], Any]
_Method = TypeVar("_Method", bound=Callable[..., Any])


class Compose:
    """A chain of transforms that are applied to a sample in order.

    Args:
        transforms: functions of a sample, or configs of such functions in the registry `TRANSFORMS`. If one returns
            None, the chain ends there: the sample is dropped.

    Example:
        >>> Compose([lambda sample: {**sample, "size": 3}])({"path": "a.png"})
        {'path': 'a.png', 'size': 3}
    """

    def __init__(self, transforms: Sequence[Transform | Mapping[str, Any]] | None) -> None:
        self.transforms: list[Transform] = []
        for item in transforms or ():
            transform = TRANSFORMS.build(item) if isinstance(item, Mapping) else item
            if not callable(transform):
                raise TypeError(f"`transforms` must hold functions and config dicts, but hold {transform!r}")
            self.transforms.append(transform)

    def __call__(self, data: Any) -> Any:
        """Return the transformed sample, or None if a transform returned None."""
        for transform in self.transforms:
            data = transform(data)
            if data is None:
                return None
        return data

    def __repr__(self) -> str:
        return "\n    ".join([f"{type(self).__name__}(", *map(str, self.transforms)]) + "\n)"


def force_full_init(old_func: _Method) -> _Method:
    """Make a method of a dataset call `full_init` first, if nobody has."""

    @functools.wraps(old_func)
    def initialised(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "full_init"):
            raise AttributeError(f"{type(self).__name__} must have a method `full_init`, but has none")
        if not getattr(self, "_fully_initialized", False):
            print_log(
                f"{type(self).__name__}.{old_func.__name__} needs the data, which `full_init` loads now",
                logger="current",
                level=logging.WARNING,
            )
            self.full_init()
            self._fully_initialized = True
        return old_func(self, *args, **kwargs)

    return initialised  # type: ignore[return-value]


class BaseDataset(Dataset[Any]):
    """Samples that an annotation file lists; base class.

    The file (JSON, YAML or pickle) holds a dict: `metainfo`, a dict of what is said of the whole dataset, and
    `data_list`, a list with one dict for each sample. A subclass may read files of other forms (`load_data_list`), make
    other samples of an entry (`parse_data_info`), or leave some out (`filter_data`).

    Args:
        ann_file: path of the annotation file, relative to `data_root`.
        metainfo: what is said of the dataset; a str that is the path of a file becomes the list of its lines. It comes
            before the class's `METAINFO` and the file's.
        data_root: the folder to which `ann_file` and `data_prefix` are relative.
        data_prefix: for entries of a sample, the folder to which they are relative.
        filter_cfg: for `filter_data`.
        indices: keep only the first samples, so many; the last, if negative; or those at these indices.
        serialize_data: keep the samples as one array of bytes, which the workers of a data loader share.
        pipeline: transforms of a sample; see `Compose`.
        test_mode: a pipeline that drops a sample is an error; otherwise another sample is taken at random.
        lazy_init: do not load now, but at `full_init`, which is called at the latest when data is needed.
        max_refetch: how many other samples are tried.

    Raises:
        TypeError: an argument, or what a method of a subclass returned, has a wrong type.
        ValueError: the annotation file lacks `metainfo` or `data_list`.
    """

    METAINFO: ClassVar[dict[str, Any]] = {}
    _fully_initialized: bool = False
    data_bytes: np.ndarray[Any, np.dtype[np.uint8]]
    data_address: np.ndarray[Any, np.dtype[np.int64]]

    def __init__(
        self,
        ann_file: str | None = "",
        metainfo: Mapping[str, Any] | None = None,
        data_root: str | None = "",
        data_prefix: Mapping[str, Any] = {"img_path": ""},
        filter_cfg: Mapping[str, Any] | None = None,
        indices: int | Sequence[int] | None = None,
        serialize_data: bool = True,
        pipeline: Sequence[Mapping[str, Any] | Callable[[Any], Any]] = (),
        test_mode: bool = False,
        lazy_init: bool = False,
        max_refetch: int = 1000,
    ) -> None:
        self.ann_file = ann_file
        self._metainfo = self._load_metainfo(copy.deepcopy(metainfo))
        self.data_root = data_root
        self.data_prefix: dict[str, Any] = dict(copy.copy(data_prefix))
        self.filter_cfg = copy.deepcopy(filter_cfg)
        self._indices = indices
        self.serialize_data = serialize_data
        self.test_mode = test_mode
        self.max_refetch = max_refetch
        self.data_list: list[dict[str, Any]] = []
        self._join_prefix()
        self.pipeline = Compose(pipeline)
        if not lazy_init:
            self.full_init()

    def full_init(self) -> None:
        """Load the samples, leave out those that `filter_data` and `indices` do, and serialise them; only once."""
        if self._fully_initialized:
            return
        self.data_list = self.load_data_list()
        self.data_list = self.filter_data()
        if self._indices is not None:
            self.data_list = self._get_unserialized_subset(self._indices)
        if self.serialize_data:
            self.data_bytes, self.data_address = self._serialize_data()
        self._fully_initialized = True

    def load_data_list(self) -> list[dict[str, Any]]:
        """Return the samples that the annotation file lists."""
        annotations = load(self.ann_file)
        if not isinstance(annotations, dict):
            raise TypeError(f"`{self.ann_file}` must hold a dict, but holds a {type(annotations).__name__}")
        if missing := {"metainfo", "data_list"} - set(annotations):
            lacking = ", ".join(sorted(missing))
            raise ValueError(f"`{self.ann_file}` must have the keys 'metainfo' and 'data_list', but lacks {lacking}")
        for name, value in annotations["metainfo"].items():
            self._metainfo.setdefault(name, value)
        data_list: list[dict[str, Any]] = []
        for raw in annotations["data_list"]:
            parsed = self.parse_data_info(raw)
            samples = parsed if isinstance(parsed, list) else [parsed]
            for sample in samples:
                if not isinstance(sample, dict):
                    raise TypeError(
                        f"`parse_data_info` must return a dict or a list of dicts, but returned {sample!r} of "
                        f"{type(sample).__name__}"
                    )
            data_list += samples
        return data_list

    def parse_data_info(self, raw_data_info: dict[str, Any]) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the sample, or the samples, of an entry of the annotation file; paths get their `data_prefix`."""
        for name, prefix in self.data_prefix.items():
            if name not in raw_data_info:
                raise AssertionError(
                    f"an entry of `{self.ann_file}` must have the key {name!r} of `data_prefix`, but has only "
                    f"{sorted(raw_data_info)}"
                )
            raw_data_info[name] = join_path(prefix, raw_data_info[name])
        return raw_data_info

    def filter_data(self) -> list[dict[str, Any]]:
        """Return the samples of `data_list` to keep; a subclass decides by `filter_cfg`."""
        return self.data_list

    @property
    def metainfo(self) -> dict[str, Any]:
        """A copy of what is said of the dataset."""
        return copy.deepcopy(self._metainfo)

    @force_full_init
    def get_data_info(self, idx: int) -> dict[str, Any]:
        """Return a copy of a sample's entry, with its index as `sample_idx`."""
        if not -len(self) <= idx < len(self):
            raise IndexError(f"`idx` must be from {-len(self)} to {len(self) - 1}, but is {idx}")
        if self.serialize_data:
            index = idx % len(self)
            begin = 0 if index == 0 else int(self.data_address[index - 1])
            data_info: dict[str, Any] = pickle.loads(self.data_bytes[begin : self.data_address[index]].data)
        else:
            data_info = copy.deepcopy(self.data_list[idx])
        data_info["sample_idx"] = idx if idx >= 0 else len(self) + idx
        return data_info

    def get_cat_ids(self, idx: int) -> list[int]:
        """Return the categories in a sample; for `ClassBalancedDataset`, and to be defined by subclasses."""
        raise NotImplementedError(f"{type(self).__name__} must define `get_cat_ids`")

    def prepare_data(self, idx: int) -> Any:
        """Return what the pipeline makes of a sample."""
        return self.pipeline(self.get_data_info(idx))

    def __getitem__(self, idx: int) -> Any:
        """Return what the pipeline makes of a sample, or of another one if it drops this one in training."""
        if not self._fully_initialized:
            print_log(
                f"{type(self).__name__} loads its data now, because of lazy_init=True. Call `full_init` before that",
                logger="current",
                level=logging.WARNING,
            )
            self.full_init()
        if self.test_mode:
            data = self.prepare_data(idx)
            if data is None:
                raise Exception(f"the pipeline must keep every sample in test mode, but dropped that at index {idx}")
            return data
        for _ in range(self.max_refetch + 1):
            data = self.prepare_data(idx)
            if data is not None:
                return data
            idx = self._rand_another()
        raise Exception(
            f"the pipeline has dropped sample {idx} and {self.max_refetch} others in a row. Look at the files and the "
            "pipeline"
        )

    @force_full_init
    def __len__(self) -> int:
        return len(self.data_address if self.serialize_data else self.data_list)

    @force_full_init
    def get_subset_(self, indices: Sequence[int] | int) -> None:
        """Keep only some samples, in place; `indices` as in the constructor."""
        if self.serialize_data:
            self.data_bytes, self.data_address = self._get_serialized_subset(indices)
        else:
            self.data_list = self._get_unserialized_subset(indices)

    @force_full_init
    def get_subset(self, indices: Sequence[int] | int) -> Self:
        """Return a dataset of some of the samples; `indices` as in the constructor."""
        subset = self._copy_without_annotation()
        if self.serialize_data:
            subset.data_bytes, subset.data_address = self._get_serialized_subset(indices)
            subset.data_list = []
        else:
            subset.data_list = copy.deepcopy(self._get_unserialized_subset(indices))
        return subset

    @classmethod
    def _load_metainfo(cls, metainfo: Any = None) -> dict[str, Any]:
        found = copy.deepcopy(cls.METAINFO)
        if metainfo is None:
            return found
        if not isinstance(metainfo, Mapping) and not hasattr(metainfo, "items"):
            raise TypeError(f"`metainfo` must be a dict or Config, but is {metainfo!r} of {type(metainfo).__name__}")
        for name, value in metainfo.items():
            found[name] = value
            if isinstance(value, str):
                try:
                    found[name] = list_from_file(value)
                except (TypeError, OSError):
                    print_log(
                        f"metainfo {name!r}: there is no file `{value}`, so the value is taken as it is",
                        logger="current",
                        level=logging.WARNING,
                    )
        return found

    def _join_prefix(self) -> None:
        """Put `data_root` before `ann_file` and before each `data_prefix`, if they are relative."""
        if self.ann_file and self.data_root and not is_abs(self.ann_file):
            self.ann_file = join_path(self.data_root, self.ann_file)
        for name, prefix in self.data_prefix.items():
            if not isinstance(prefix, str):
                raise TypeError(f"`data_prefix[{name!r}]` must be a str, but is {prefix!r} of {type(prefix).__name__}")
            if self.data_root and not is_abs(prefix):
                self.data_prefix[name] = join_path(self.data_root, prefix)

    def _rand_another(self) -> int:
        return int(np.random.randint(0, len(self)))

    def _serialize_data(self) -> tuple[Any, Any]:
        """Return all samples pickled into one array of bytes, and the ends of each; `data_list` is emptied."""
        items = [np.frombuffer(pickle.dumps(item, protocol=4), dtype=np.uint8) for item in self.data_list]
        self.data_list.clear()
        gc.collect()
        return _joined(items)

    def _get_serialized_subset(self, indices: Sequence[int] | int) -> tuple[Any, Any]:
        size = len(self.data_address)
        chosen = _chosen(indices)
        if isinstance(chosen, slice):
            if abs(int(indices)) > size:  # type: ignore[arg-type]
                raise AssertionError(f"`indices` must be from {-size} to {size}, but is {indices}")
            numbers: Sequence[int] = range(size)[chosen]
        else:
            numbers = chosen
        begins = np.concatenate([[0], self.data_address[:-1]]) if size else self.data_address
        items = []
        for number in numbers:
            if not -size <= number < size:
                raise AssertionError(f"`indices` must hold numbers from {-size} to {size - 1}, but hold {number}")
            items.append(self.data_bytes[begins[number] : self.data_address[number]])
        return _joined(items)

    def _get_unserialized_subset(self, indices: Sequence[int] | int) -> list[dict[str, Any]]:
        chosen = _chosen(indices)
        return self.data_list[chosen] if isinstance(chosen, slice) else [self.data_list[number] for number in chosen]

    def _copy_without_annotation(self, memo: dict[int, Any] | None = None) -> Self:
        """Return a deep copy but for the samples."""
        memo = {} if memo is None else memo
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            if name not in ("data_list", "data_address", "data_bytes"):
                setattr(twin, name, copy.deepcopy(value, memo))
        return twin


def _chosen(indices: Any) -> slice | Sequence[int]:
    if isinstance(indices, int):
        return slice(None, indices) if indices >= 0 else slice(indices, None)
    if isinstance(indices, Sequence) and not isinstance(indices, str):
        return indices
    raise TypeError(f"`indices` must be an int or a sequence of ints, but is {indices!r} of {type(indices).__name__}")


def _joined(items: list[Any]) -> tuple[Any, Any]:
    data = np.concatenate(items) if items else np.empty(0, dtype=np.uint8)
    return data, np.cumsum([len(item) for item in items], dtype=np.int64)
