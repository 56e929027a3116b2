"""`PixelData`: per-pixel maps of one image."""

from __future__ import annotations

from typing import Any, Self, TypeAlias, overload

import numpy as np
from torch import Tensor

from mmengine.structures.base_data_element import (
    BaseDataElement,
    WrongIndexError,
    WrongTypeError,
    WrongValueError,
    describe,
    slice_at,
)

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
            WrongIndexError: an int is out of range, or the index does not have two parts.
            WrongTypeError: a part is neither an int nor a slice.
        """
        if isinstance(item, str):
            return super().__getitem__(item)
        if not isinstance(item, tuple) or len(item) != 2:
            raise WrongIndexError(f"an index of pixels must be one of rows and one of columns, but is {item!r}")
        shape = self.shape or (0, 0)
        rows, columns = (slice_at(part, size, "pixels") for part, size in zip(item, shape, strict=True))
        return self._with_data({name: value[..., rows, columns] for name, value in self._data.items()})

    def _checked(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor | np.ndarray):
            raise WrongTypeError(f"`{name}` must be a tensor or an array, but is {describe(value)}")
        if value.ndim < 2:
            raise WrongValueError(f"`{name}` must have the shape [..., height, width], but is {describe(value)}")
        others = (tuple(other.shape[-2:]) for key, other in self._data.items() if key != name)
        expected = next(others, tuple(value.shape[-2:]))
        if tuple(value.shape[-2:]) != expected:
            raise WrongValueError(
                f"`{name}` must end in the height and width {expected} as the other fields, but is {describe(value)}"
            )
        return value[None] if value.ndim == 2 else value
