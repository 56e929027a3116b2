"""`ImgDataPreprocessor`: combines images as they are stored into one normalised batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import require_count
from lockstep.model.preprocessor import BaseDataPreprocessor
from lockstep.registry import MODELS


@MODELS.register_module()
class ImgDataPreprocessor(BaseDataPreprocessor):
    """Move images to the model's device, order their channels, normalise them, and stack them into one batch.

    The images are the entry `inputs` of a dict, or the first entry of a list or tuple; other entries are only moved.
    They are a tensor, or a list of tensors whose sizes may differ.

    Args:
        mean: mean of each channel, or one for all; in the units of the images, and in the final order of channels.
        std: standard deviation, likewise; must be given together with `mean`.
        pad_size_divisor: height and width of the batch are rounded up to multiples of it.
        pad_value: value of the padding to the right of and below the images, which is not normalised.
        bgr_to_rgb: reverse the order of the three channels.
        rgb_to_bgr: the same, for RGB images.
        non_blocking: let the host go on while a batch is copied to an accelerator.

    **Shapes**: [images, channels, height, width], or a list of [channels, height, width], of any dtype -> [images,
    channels, greatest height, greatest width] in float32.

    Raises:
        ValueError: arguments contradict each other, or images have a wrong number of dims or channels.

    Example:
        >>> preprocessor = ImgDataPreprocessor(mean=[127.5], std=[127.5], pad_size_divisor=4)
        >>> images = [torch.full((3, 5, 4), 255, dtype=torch.uint8), torch.zeros(3, 2, 6, dtype=torch.uint8)]
        >>> batch = preprocessor({"inputs": images, "labels": [0, 1]})
        >>> batch["inputs"].shape, batch["inputs"][0, 0, 0].tolist()
        (torch.Size([2, 3, 8, 8]), [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    """

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        pad_size_divisor: int = 1,
        pad_value: float = 0,
        bgr_to_rgb: bool = False,
        rgb_to_bgr: bool = False,
        non_blocking: bool = True,
    ) -> None:
        super().__init__(non_blocking)
        if bgr_to_rgb and rgb_to_bgr:
            raise ValueError("`bgr_to_rgb` and `rgb_to_bgr` must not both be True, as one would undo the other")
        if (mean is None) != (std is None):
            raise ValueError(f"`mean` and `std` must be given together, but are {mean!r} and {std!r}")
        require_count("pad_size_divisor", pad_size_divisor)
        # Plain tensors: buffers would be broadcast and averaged over ranks like learned values.
        self.mean = None if mean is None else _per_channel("mean", mean)
        self.std = None if std is None else _per_channel("std", std)
        self.pad_size_divisor = pad_size_divisor
        self.pad_value = pad_value
        self.channel_conversion = bgr_to_rgb or rgb_to_bgr

    def forward(self, data: Any, training: bool = False) -> Any:
        """Return the batch with its images as one tensor."""
        data = self.cast_data(data)
        if isinstance(data, Mapping):
            if "inputs" not in data:
                raise ValueError(f"a batch must have its images in the entry 'inputs', but has only {sorted(data)}")
            return {**data, "inputs": self._batch(data["inputs"])}
        if isinstance(data, list | tuple):
            if not data:
                raise ValueError("a batch must have its images in first place, but is empty")
            first, *others = data
            parts = (self._batch(first), *others)
            return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
        return self._batch(data)

    def _batch(self, images: Any) -> Tensor:
        if isinstance(images, Tensor) and images.dim() == 4:
            height, width = images.shape[-2:]
        elif isinstance(images, list | tuple) and images and all(map(_is_image, images)):
            height, width = (max(image.shape[dim] for image in images) for dim in (-2, -1))
        else:
            raise ValueError(
                "the images of a batch must be a tensor [images, channels, height, width] or a list of tensors "
                f"[channels, height, width], but are {_describe(images)}"
            )
        channels = {images.shape[1]} if isinstance(images, Tensor) else {image.shape[0] for image in images}
        if len(channels) > 1:
            raise ValueError(f"the images of a batch must have equally many channels, but have {sorted(channels)}")
        self._check_channels(next(iter(channels)))
        batch = torch.full(
            (len(images), *channels, self._rounded(height), self._rounded(width)),
            float(self.pad_value),
            dtype=torch.float32,
            device=images.device if isinstance(images, Tensor) else images[0].device,
        )
        if isinstance(images, Tensor):
            self._write(images, batch[..., :height, :width])
        else:
            for index, image in enumerate(images):  # views of a loop over `batch` could not be written with gradients
                self._write(image, batch[index, :, : image.shape[-2], : image.shape[-1]])
        return batch

    def _write(self, images: Tensor, region: Tensor) -> None:
        """Write images, normalised, into their region of the batch."""
        region.copy_(images.flip(-3) if self.channel_conversion else images)
        if self.mean is not None and self.std is not None:
            region.sub_(self.mean).div_(self.std)

    def _check_channels(self, channels: int) -> None:
        if self.channel_conversion and channels != 3:
            raise ValueError(f"images must have 3 channels to turn their order around, but have {channels}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and values.numel() not in (1, channels):
                raise ValueError(f"`{name}` must have 1 value or {channels}, as images have, but has {values.numel()}")

    def _rounded(self, size: int) -> int:
        return -(-size // self.pad_size_divisor) * self.pad_size_divisor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ImgDataPreprocessor:
        super()._apply(fn, recurse)
        # Move only the device, not the dtype: half precision could not distinguish 255 levels.
        self.mean = None if self.mean is None else self.mean.to(self.device)
        self.std = None if self.std is None else self.std.to(self.device)
        return self


def _per_channel(name: str, values: Sequence[float]) -> Tensor:
    if not isinstance(values, Sequence) or not values:
        raise ValueError(f"`{name}` must be a list with a number for each channel, but is {values!r}")
    # On the CPU also of a model that is made on the meta device.
    channels = torch.tensor(values, dtype=torch.float32, device="cpu").view(-1, 1, 1)
    if name == "std" and not bool((channels > 0).all()):
        raise ValueError(f"`std` must be above 0, but is {values!r}")
    return channels


def _is_image(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3


def _describe(images: Any) -> str:
    if isinstance(images, list | tuple):
        return f"a {type(images).__name__} of {', '.join(map(_describe, images)) or 'nothing'}"
    return f"a tensor {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
