from __future__ import annotations

import struct
import zlib

import pytest
import torch

from lockstep.visualization.png import as_picture, png_bytes


def decode(png: bytes) -> torch.Tensor:
    """Read a PNG file of three bytes per pixel without line filters."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + data),)
        chunks[kind] = data
        at += 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, colour, list(chunks)) == (8, 2, [b"IHDR", b"IDAT", b"IEND"])
    lines = torch.frombuffer(bytearray(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8).reshape(height, -1)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, 3)


def test_a_picture_survives():
    picture = torch.randint(0, 256, (7, 3, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(decode(png_bytes(as_picture(picture))), picture)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 1)])
def test_grey_becomes_colour(shape: tuple[int, ...]):
    grey = torch.arange(6, dtype=torch.uint8).reshape(shape)
    assert torch.equal(as_picture(grey), grey.reshape(2, 3, 1).repeat(1, 1, 3))


def test_arrays_and_lists_are_pictures():
    assert as_picture(torch.ones(2, 2, 3, dtype=torch.uint8).numpy()).shape == (2, 2, 3)


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (0, 3, 3), (3, 2, 3, 1)])
def test_other_shapes_are_named(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"`image` must have the shape \[height, width\]") as raised:
        as_picture(torch.zeros(shape, dtype=torch.uint8))
    assert str(list(shape)) in str(raised.value)


def test_other_dtypes_are_named():
    with pytest.raises(TypeError, match=r"must be of dtype uint8, but is of torch.float32; for values"):
        as_picture(torch.zeros(2, 2))
