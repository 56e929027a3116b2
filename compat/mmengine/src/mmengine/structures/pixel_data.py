"""`PixelData`: per-pixel maps of one image."""

from __future__ import annotations

from typing import Any

import lockstep.structures
from mmengine.structures.base_data_element import BaseDataElement, also_assertion


class PixelData(lockstep.structures.PixelData, BaseDataElement):
    """Tensors or arrays over the same pixels; see `lockstep.structures.PixelData`."""

    @also_assertion
    def __getitem__(self, item: Any) -> Any:
        """Return a field by its name, or the crop that two ints or slices select: rows, columns."""
        return super().__getitem__(item)
