from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import pytest
import torch

from lockstep.visualization.files import LocalVisualizer, as_picture, png_bytes


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


def test_local_files(tmp_path: Path):
    local = LocalVisualizer()
    local.open(tmp_path)
    local.add_scalars({"train/loss": 2.0, "train/lr": 0.5}, step=10)
    local.add_scalars({"train/loss": 1.0, "val/accuracy": 75.0}, step=20)
    local.add_image("digits/seven", torch.zeros(4, 5, 3, dtype=torch.uint8), step=20)
    local.add_text("answer", "forty-\ntwo", step=20)
    local.close()
    local.close()
    lines = [json.loads(line) for line in (tmp_path / "scalars.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 10, "train/loss": 2.0, "train/lr": 0.5},
        {"step": 20, "train/loss": 1.0, "val/accuracy": 75.0},
    ]
    assert json.loads((tmp_path / "texts.jsonl").read_text()) == {"step": 20, "answer": "forty-\ntwo"}
    assert (tmp_path / "images" / "digits" / "seven_20.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_run_has_its_own_files(tmp_path: Path):
    visualizer = LocalVisualizer()
    for run in ("first", "second"):
        visualizer.open(tmp_path / run)
        visualizer.add_scalars({"loss": 1.0})
        visualizer.close()
    first, second = ([path.read_text() for path in (tmp_path / run).iterdir()] for run in ("first", "second"))
    assert first == second
    assert len(first) == 1


def test_a_line_of_scalars_has_the_step_that_they_say_as_with_mmengine(tmp_path: Path):
    shown = LocalVisualizer()
    shown.open(tmp_path)
    shown.add_scalars({"loss": 3.0, "step": 7})
    shown.close()
    assert json.loads((tmp_path / "scalars.jsonl").read_text()) == {"step": 7, "loss": 3.0}


def test_a_text_that_was_cut_takes_no_other_line_with_it(tmp_path: Path):
    (tmp_path / "texts.jsonl").write_text('{"step": 1, "answer": "one"}\n{"step": 2, "ans')
    local = LocalVisualizer()
    local.open(tmp_path)
    local.add_text("answer", "three", step=3)
    local.close()
    lines = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "answer": "one"}, {"step": 3, "answer": "three"}]
