"""Data preprocessors: lockstep's, with the attributes that subclasses of MMEngine's read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

import lockstep.model
from lockstep.model import BaseDataPreprocessor
from lockstep.model.preprocessor import move_to_device
from mmengine.registry import MODELS

__all__ = ["BaseDataPreprocessor", "ImgDataPreprocessor", "move_to_device"]


@MODELS.register_module(force=True)
class ImgDataPreprocessor(lockstep.model.ImgDataPreprocessor):
    """lockstep's `ImgDataPreprocessor`; `mean` and `std` are buffers that are not saved, as subclasses expect."""

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        pad_size_divisor: int = 1,
        pad_value: float = 0,
        bgr_to_rgb: bool = False,
        rgb_to_bgr: bool = False,
        non_blocking: bool | None = True,
    ) -> None:
        super().__init__(mean, std, pad_size_divisor, pad_value, bgr_to_rgb, rgb_to_bgr, bool(non_blocking))
        self._enable_normalize = self.mean is not None
        self._channel_conversion = self.channel_conversion
        for name in ("mean", "std"):
            if vars(self)[name] is not None:
                self.register_buffer(name, vars(self).pop(name), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ImgDataPreprocessor:
        lockstep.model.BaseDataPreprocessor._apply(self, fn, recurse)
        return self
