"""Checks of what is to be drawn, colours, heat maps, and figures as arrays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor


def tensor2ndarray(value: Any) -> Any:
    """Return a tensor as an array on the CPU; anything else unchanged."""
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def value2list(value: Any, valid_type: type | tuple[type, ...], expand_dim: int) -> list[Any]:
    """Return a list of `expand_dim` times the value, if it is of `valid_type`; anything else unchanged."""
    return [value] * expand_dim if isinstance(value, valid_type) else value


def check_type(name: str, value: Any, valid_type: type | tuple[type, ...]) -> None:
    """Raise a TypeError if a value is not of a type."""
    if not isinstance(value, valid_type):
        raise TypeError(f"`{name}` must be of {valid_type}, but is of {type(value)}")


def check_length(name: str, value: Any, valid_length: int) -> None:
    """Raise an AssertionError if a list is shorter than what it is for."""
    if isinstance(value, list) and len(value) < valid_length:
        raise AssertionError(f"`{name}` must have at least {valid_length} entries, but has {len(value)}")


def check_type_and_length(name: str, value: Any, valid_type: type | tuple[type, ...], valid_length: int) -> None:
    """Raise an error if a value is not of a type, or is a list that is too short."""
    check_type(name, value, valid_type)
    check_length(name, value, valid_length)


def color_val_matplotlib(colors: Any) -> Any:
    """Return colours as matplotlib takes them: names unchanged, and tuples of 0 to 255 as tuples of 0 to 1.

    Example:
        >>> color_val_matplotlib(["r", (255, 0, 51)])
        ['r', (1.0, 0.0, 0.2)]
    """
    if isinstance(colors, str):
        return colors
    if isinstance(colors, tuple):
        return tuple(value / 255 for value in colors)
    if isinstance(colors, list):
        return [color_val_matplotlib(color) for color in colors]
    raise TypeError(f"a colour must be a str, a tuple or a list of those, but is {colors!r} of {type(colors).__name__}")


def color_str2rgb(color: str) -> tuple[int, ...]:
    """Return the red, green and blue of a colour that matplotlib knows by name, from 0 to 255.

    Example:
        >>> color_str2rgb("red"), color_str2rgb("g")
        ((255, 0, 0), (0, 127, 0))
    """
    from matplotlib.colors import to_rgb

    return tuple(int(value * 255) for value in to_rgb(color))


def convert_overlay_heatmap(feat_map: Any, img: Any = None, alpha: float = 0.5) -> Any:
    """Return a feature map in colours, blue for its least and red for its greatest value, perhaps over an image.

    Args:
        feat_map: the map.
        img: the image, in the size of the map.
        alpha: share of the colours in the result.

    **Shapes**: `feat_map` is [height, width] or [channels, height, width], of which the mean is shown; the image and
    the result are [height, width, 3].
    """
    values = tensor2ndarray(feat_map)
    if values.ndim not in (2, 3):
        raise AssertionError(f"`feat_map` must have 2 or 3 dims, but has {values.ndim}")
    if values.ndim == 3:
        values = values.mean(axis=0)
    scaled = cv2.normalize(values.astype(np.float32), None, 0, 255, cv2.NORM_MINMAX)
    colored = cv2.applyColorMap(np.asarray(scaled).astype(np.uint8), cv2.COLORMAP_JET)[..., ::-1]
    if img is None:
        return np.ascontiguousarray(colored)
    return cv2.addWeighted(np.ascontiguousarray(img), 1 - alpha, np.ascontiguousarray(colored), alpha, 0)


def img_from_canvas(canvas: Any) -> Any:
    """Return what a canvas of matplotlib's Agg shows, as an array [height, width, 3] of 0 to 255."""
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def wait_continue(figure: Any, timeout: float = 0, continue_key: str = " ") -> int:
    """Wait until a key is pressed in a figure's window.

    Args:
        figure: the figure.
        timeout: seconds to wait at most; 0 for no limit.
        continue_key: the key.

    Returns:
        0 for the key, 1 if the window was closed or the time is over.
    """
    pressed: list[str] = []
    closed: list[bool] = []
    handlers = [
        figure.canvas.mpl_connect("key_press_event", lambda event: pressed.append(event.key)),
        figure.canvas.mpl_connect("close_event", lambda event: closed.append(True)),
    ]
    end = time.monotonic() + timeout if timeout else float("inf")
    try:
        while not closed and continue_key not in pressed and time.monotonic() < end:
            figure.canvas.start_event_loop(0.05)
    finally:
        for handler in handlers:
            figure.canvas.mpl_disconnect(handler)
    return 0 if continue_key in pressed else 1


def featmap_channels(featmap: Tensor, reduction: str | None, topk: int) -> tuple[Tensor, list[int]]:
    """Return the channels of a feature map to show, and their numbers; none if they are one image.

    **Shapes**: [channels, height, width] -> [shown, height, width].
    """
    channels = featmap.shape[0]
    if reduction == "squeeze_mean":
        return featmap.mean(dim=0, keepdim=True), []
    if reduction == "select_max":
        best = int(featmap.flatten(1).sum(dim=1).argmax())
        return featmap[best : best + 1], []
    if reduction is not None:
        raise AssertionError(f"`channel_reduction` must be 'squeeze_mean', 'select_max' or None, but is {reduction!r}")
    if topk <= 0:
        if channels not in (1, 3):
            raise AssertionError(
                f"`featmap` must have 1 or 3 channels to be shown as they are (topk={topk}), but has {channels}. "
                "Choose a `channel_reduction`, or how many channels to show by `topk`"
            )
        return featmap, []
    _, chosen = featmap.flatten(1).mean(dim=1).topk(min(topk, channels))
    return featmap[chosen], chosen.tolist()


def resized(values: Any, size: Sequence[int]) -> Any:
    """Return an image or map in the size (height, width)."""
    return cv2.resize(np.ascontiguousarray(values), (int(size[1]), int(size[0])), interpolation=cv2.INTER_LINEAR)


def as_uint8_image(image: Any) -> Any:
    """Return an image of dtype uint8 as a contiguous array; other dtypes are cut off at 0 and 255."""
    values = tensor2ndarray(image)
    if not isinstance(values, np.ndarray) or values.ndim not in (2, 3):
        raise AssertionError(f"`image` must be an array [height, width, 3], but is of {type(values).__name__}")
    return np.ascontiguousarray(values if values.dtype == np.uint8 else values.clip(0, 255).astype(np.uint8))


def as_float(value: Any) -> Any:
    """Return a number of torch or numpy as Python's."""
    if isinstance(value, Tensor | np.ndarray | np.number):
        if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
            value = value.float()
        return value.item()
    return value
