"""`InstanceData`: fields with one entry per instance."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, Self, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor

from mmengine.structures.base_data_element import (
    BaseDataElement,
    WrongIndexError,
    WrongTypeError,
    WrongValueError,
    describe,
    slice_at,
)

_INDEX = "a str, an int, a slice, or a list, tensor or array of ints or bools"
IndexType: TypeAlias = int | slice | Sequence[int] | Sequence[bool] | Tensor | Any
"""An index of instances: an int, a slice, or a list, tensor or array of ints or of one bool per instance."""


class InstanceData(BaseDataElement):
    """Fields with one entry per instance, such as the boxes and labels of the objects in an image.

    A field is anything that has a length and can be indexed: a tensor, an array, a list, tuple or string, or a user's
    own object. Indexing selects instances in all fields at once, and always returns an `InstanceData`.

    **Shapes**: [instances, ...] for each field.

    Example:
        >>> found = InstanceData(boxes=torch.rand(3, 4), labels=["cat", "dog", "cat"])
        >>> len(found), found[1].labels, found[[2, 0]].boxes.shape
        (3, ['dog'], torch.Size([2, 4]))
        >>> found[torch.tensor([True, False, True])].labels
        ['cat', 'cat']
        >>> len(InstanceData.cat([found, found[:1]]))
        4
    """

    def __len__(self) -> int:
        return len(next(iter(self._data.values()), ()))

    @overload
    def __getitem__(self, item: str) -> Any: ...
    @overload
    def __getitem__(self, item: IndexType) -> Self: ...
    def __getitem__(self, item: Any) -> Any:
        """Return a field by its name, or the instances that an index selects.

        Raises:
            IndexError: the index is out of range or not one-dimensional, or a mask has not one entry per instance.
            WrongTypeError: `item` is not a name or an index.
        """
        if isinstance(item, str):
            return super().__getitem__(item)
        index = _as_index(item, len(self))
        return self._with_data({name: _picked(value, index) for name, value in self._data.items()})

    @staticmethod
    def cat(instances_list: Sequence[InstanceData]) -> InstanceData:
        """Concatenate the instances of several elements; the metainfo is that of the first.

        Raises:
            WrongValueError: there are no elements, or they have different fields.
            WrongTypeError: an item is not an `InstanceData`, or the values of a field can't be concatenated.
        """
        if not instances_list:
            raise WrongValueError("`instances_list` must have at least one element, but has none")
        first = instances_list[0]
        for place, instances in enumerate(instances_list):
            if not isinstance(instances, InstanceData):
                raise WrongTypeError(f"`instances_list[{place}]` must be an InstanceData, but is {instances!r}")
            if set(instances.keys()) != set(first.keys()):
                raise WrongValueError(
                    f"`instances_list[{place}]` must have the fields of the first element, {sorted(first.keys())}, "
                    f"but has {sorted(instances.keys())}"
                )
        return first.tree_rebuild(
            {name: _joined(name, [instances._data[name] for instances in instances_list]) for name in first._data}
        )

    def _checked(self, name: str, value: Any) -> Any:
        if not isinstance(value, Sized) or (isinstance(value, Tensor) and value.dim() == 0):
            raise WrongTypeError(
                f"`{name}` must have one entry per instance, but is {describe(value)}, which has no length. "
                "What is said of the whole sample goes to set_metainfo()"
            )
        others = (len(other) for key, other in self._data.items() if key != name)
        expected = next(others, len(value))
        if len(value) != expected:
            raise WrongValueError(f"`{name}` must have {expected} entries as the other fields, but has {len(value)}")
        return value


def _as_index(item: Any, length: int) -> slice | Tensor:
    """Return a slice, or an int64 tensor of the indices that `item` selects."""
    if isinstance(item, list | tuple):
        item = _tensor_of(item)
    elif isinstance(item, np.ndarray):
        item = torch.from_numpy(item)
    if not isinstance(item, Tensor):
        return slice_at(item, length, "instances", _INDEX)
    if item.dim() != 1:
        raise WrongIndexError(f"an index of instances must have one dim, but is {describe(item)}")
    if item.dtype == torch.bool:
        if len(item) != length:
            raise WrongIndexError(f"a mask of instances must have {length} entries, one for each, but has {len(item)}")
        return item.nonzero().flatten()  # computed once, not for each field
    if item.dtype not in (torch.int64, torch.int32):
        raise WrongTypeError(f"an index of instances must hold bools or ints of 32 or 64 bits, but is {describe(item)}")
    return item.long()


def _tensor_of(items: Sequence[Any]) -> Tensor:
    if not items:
        return torch.empty(0, dtype=torch.int64)
    try:
        return torch.tensor(items)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WrongTypeError(f"an index of instances must hold ints or bools, but is {items!r}") from error


def _picked(value: Any, index: slice | Tensor) -> Any:
    if isinstance(index, slice):
        return value[index]
    if isinstance(value, Tensor):
        return value[index.to(value.device)]
    if isinstance(value, np.ndarray):
        return value[index.cpu().numpy()]
    if isinstance(value, list | tuple | str):
        entries = [value[number] for number in index.tolist()]
        return "".join(entries) if isinstance(value, str) else type(value)(entries)
    try:
        return value[index]
    except (TypeError, ValueError, IndexError):
        if not hasattr(value, "cat"):
            raise
        # It takes slices only, or arrays but no tensors of an accelerator.
        entries = [value[number : number + 1] for number in (index % len(value)).tolist()]
        return value.cat(entries) if entries else value[:0]


def _joined(name: str, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor) and all(isinstance(value, Tensor) for value in values):
        return torch.cat(values)
    if all(isinstance(value, np.ndarray) for value in values):
        return np.concatenate(values)
    if any(type(value) is not type(first) for value in values):
        kinds = sorted({type(value).__name__ for value in values})
        raise WrongTypeError(f"`{name}` must be of one type in all elements to be joined, but is of {', '.join(kinds)}")
    if isinstance(first, str):
        return "".join(values)
    if isinstance(first, list | tuple):
        return type(first)(entry for value in values for entry in value)
    if hasattr(first, "cat"):
        return first.cat(values)
    raise WrongTypeError(
        f"`{name}` must be a tensor, array, list, tuple, str or have a method `cat` to be joined, "
        f"but is of {type(first).__name__}"
    )
