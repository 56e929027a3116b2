"""`PixelData`, per-pixel maps of one image, and `LabelData`, the classes of one sample."""

from __future__ import annotations

from typing import Any, Self, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import wrong_type
from lockstep.structures.element import BaseDataElement, describe, slice_at

Step: TypeAlias = int | slice


class PixelData(BaseDataElement):
    """Tensors or arrays over the same pixels, such as a segmentation and its scores.

    Indexing crops all fields at once, and always returns a `PixelData`.

    **Shapes**: [..., height, width] for each field, with the same height and width; a 2-D field gets a first dim of 1.

    Example:
        >>> maps = PixelData(segments=torch.zeros(4, 6), scores=torch.rand(2, 4, 6))
        >>> maps.shape, maps.segments.shape
        ((4, 6), torch.Size([1, 4, 6]))
        >>> maps[1:3, 0].scores.shape
        torch.Size([2, 2, 1])
    """

    @property
    def shape(self) -> tuple[int, int] | None:
        """Height and width, or None if there are no fields."""
        return next((tuple(value.shape[-2:]) for value in self._data.values()), None)

    @overload
    def __getitem__(self, item: str) -> Any: ...
    @overload
    def __getitem__(self, item: tuple[Step, Step]) -> Self: ...
    def __getitem__(self, item: Any) -> Any:
        """Return a field by its name, or the crop that two ints or slices select: rows, columns.

        Raises:
            IndexError: an int is out of range, or the index does not have two parts.
            TypeError: a part is neither an int nor a slice.
        """
        if isinstance(item, str):
            return super().__getitem__(item)
        if not isinstance(item, tuple) or len(item) != 2:
            raise IndexError(f"an index of pixels must be one of rows and one of columns, but is {item!r}")
        shape = self.shape or (0, 0)
        rows, columns = (slice_at(part, size, "pixels") for part, size in zip(item, shape, strict=True))
        return self._twin({name: value[..., rows, columns] for name, value in self._data.items()})

    def _admit(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor | np.ndarray):
            raise TypeError(f"`{name}` must be a tensor or an array, but is {describe(value)}")
        if value.ndim < 2:
            raise ValueError(f"`{name}` must have the shape [..., height, width], but is {describe(value)}")
        others = (tuple(other.shape[-2:]) for key, other in self._data.items() if key != name)
        expected = next(others, tuple(value.shape[-2:]))
        if tuple(value.shape[-2:]) != expected:
            raise ValueError(
                f"`{name}` must end in the height and width {expected} as the other fields, but is {describe(value)}"
            )
        return value[None] if value.ndim == 2 else value


class LabelData(BaseDataElement):
    """Labels of a whole sample, in one of two forms: class numbers, or a 0 or 1 for each class (one-hot).

    Example:
        >>> LabelData.label_to_onehot(torch.tensor([2, 0]), num_classes=4)
        tensor([1, 0, 1, 0])
        >>> LabelData.onehot_to_label(torch.tensor([1, 0, 1, 0]))
        tensor([0, 2])
    """

    @staticmethod
    def onehot_to_label(onehot: Tensor) -> Tensor:
        """Return the numbers of the classes that are present, in ascending order.

        Args:
            onehot: 0 or 1 for each class, of any dtype.

        **Shapes**: [classes] -> [present classes].

        Raises:
            ValueError: `onehot` is not one-dimensional, or has other values.
            TypeError: `onehot` is not a tensor.
        """
        _require_vector("onehot", onehot)
        if not bool(((onehot == 0) | (onehot == 1)).all()):
            raise ValueError(f"`onehot` must hold only 0 and 1, but holds {sorted(set(onehot.tolist()))}")
        return onehot.nonzero().flatten()

    @staticmethod
    def label_to_onehot(label: Tensor, num_classes: int) -> Tensor:
        """Return a tensor with 1 for each class in `label` and 0 for the others.

        Args:
            label: class numbers.
            num_classes: the number of classes.

        **Shapes**: [present classes] -> [num_classes].

        Raises:
            ValueError: `label` is not one-dimensional, or a label is not from 0 to `num_classes` - 1.
            TypeError: `label` is not a tensor of ints.
        """
        _require_vector("label", label)
        if label.is_floating_point() or label.is_complex() or label.dtype == torch.bool:
            raise TypeError(f"`label` must hold ints, but is {describe(label)}")
        if label.numel() and not 0 <= int(label.min()) <= int(label.max()) < num_classes:
            raise ValueError(f"`label` must be from 0 to {num_classes - 1}, but holds {label.tolist()}")
        return label.new_zeros(num_classes).index_fill_(0, label.long(), 1)


def _require_vector(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise wrong_type(name, "a tensor", value)
    if value.dim() != 1:
        raise ValueError(f"`{name}` must have one dim, but is {describe(value)}")
