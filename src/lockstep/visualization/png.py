"""Conversion of images to tensors and PNG files.

Writing a PNG file needs only zlib and struct; Pillow would be a further dependency.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import torch
from torch import Tensor


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
    filters = torch.zeros(height, 1, dtype=torch.uint8)
    lines = torch.cat([filters, picture.reshape(height, 3 * width)], dim=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(lines.flatten().tolist()))
    chunks = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
