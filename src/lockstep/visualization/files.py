"""A visualizer that writes files of its own: JSON Lines and PNG."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.logging import JsonLinesSink
from lockstep.logging.sinks import placed
from lockstep.registry import VISUALIZERS


@VISUALIZERS.register_module(name=["LocalVisualizer", "LocalVisBackend"])
class LocalVisualizer:
    """Writes scalars to `scalars.jsonl` and texts to `texts.jsonl`, with their step; images to `images/NAME_STEP.png`.

    A Runner always writes its records to `metrics.jsonl` and its config to `config.py`; this visualizer also writes
    what hooks show themselves.

    Args:
        save_dir: the folder of the files, by default the run's folder.
        img_save_dir: folder of the images in it.
        scalar_save_file: name of the file of scalars in it.
        config_save_file: from MMEngine; has no effect, because a run writes its config.
    """

    def __init__(
        self,
        save_dir: str | Path | None = None,
        img_save_dir: str = "images",
        scalar_save_file: str = "scalars.jsonl",
        config_save_file: str = "config.py",
    ) -> None:
        self._save_dir = None if save_dir is None else Path(save_dir)
        self._run_dir: Path | None = None
        self._img_save_dir = img_save_dir
        self._scalar_save_file = scalar_save_file
        self._files: dict[Path, JsonLinesSink] = {}

    def open(self, run_dir: Path) -> None:
        """Set and create the folder; files are created when first written."""
        self._run_dir = run_dir
        self._folder().mkdir(parents=True, exist_ok=True)

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Append a line. As with MMEngine, a value called `step` is its step."""
        self._write(self._scalar_save_file, {"step": step, **scalar_dict})

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Write a PNG file; a slash in the name creates a folder."""
        path = self._folder() / self._img_save_dir / f"{name}_{step}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png_bytes(as_picture(image)))

    def add_text(self, name: str, text: str, step: int = 0) -> None:
        """Append a line to `texts.jsonl`."""
        self._write("texts.jsonl", placed({"step": step}, {name: text}))

    def close(self) -> None:
        """Close the files of lines."""
        for file in self._files.values():
            file.close()

    def _folder(self) -> Path:
        folder = self._save_dir or self._run_dir
        if folder is None:
            raise RuntimeError(f"{type(self).__name__} must be opened before it is used, or be given a `save_dir`")
        return folder

    def _write(self, name: str, record: dict[str, Any]) -> None:
        path = self._folder() / name
        if path not in self._files:
            self._files[path] = JsonLinesSink(path)
        self._files[path].write(record)


def as_picture(image: Any) -> Tensor:
    """Return an image as a uint8 tensor on the CPU.

    Args:
        image: a tensor, or anything that `torch.as_tensor` accepts, of dtype uint8.

    **Shapes**: `image` is [height, width], [height, width, 1] or [height, width, 3]; the result [height, width, 3].
    """
    picture = torch.as_tensor(image).detach().cpu()
    if picture.dtype != torch.uint8:
        raise TypeError(
            f"`image` must be of dtype uint8, but is of {picture.dtype}; "
            "for values from 0 to 1 use (image * 255).to(torch.uint8)"
        )
    shape = tuple(picture.shape)
    if picture.dim() == 2:
        picture = picture.unsqueeze(2)
    if picture.dim() != 3 or picture.shape[2] not in (1, 3) or not picture.numel():
        raise ValueError(f"`image` must have the shape [height, width] or [height, width, 3], but has {list(shape)}")
    return picture.expand(-1, -1, 3).contiguous()


def png_bytes(picture: Tensor) -> bytes:
    """Return an image as the bytes of a PNG file.

    **Shapes**: [height, width, 3].

    **Source**: ISO/IEC 15948, with colour type 2 and the filter "none" on each line.
    """
    height, width, _ = picture.shape
    filters = torch.zeros(height, 1, dtype=torch.uint8, device="cpu")
    lines = torch.cat([filters, picture.reshape(height, 3 * width)], dim=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(lines.numpy().tobytes())
    chunks = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
