from __future__ import annotations

import csv
import json
import struct
import zlib
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from lockstep.visualization.files import CsvVisualizer, LocalVisualizer, as_picture, png_bytes


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


@pytest.mark.parametrize("kind", [LocalVisualizer, CsvVisualizer])
def test_a_second_run_has_its_own_files(tmp_path: Path, kind):
    visualizer = kind()
    for run in ("first", "second"):
        visualizer.open(tmp_path / run)
        visualizer.add_scalars({"loss": 1.0})
        visualizer.close()
    first, second = ([path.read_text() for path in (tmp_path / run).iterdir()] for run in ("first", "second"))
    assert first == second
    assert len(first) == 1


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_files(tmp_path: Path):
    table = CsvVisualizer()
    table.open(tmp_path)
    table.add_scalars({"train/loss": 2.0, "train/lr": 0.5}, step=10)
    table.add_scalars({"train/loss": 1.0, "val/accuracy": 75.0}, step=20)
    table.close()
    assert read_table(tmp_path / "train.csv") == [
        {"step": "10", "loss": "2.0", "lr": "0.5"},
        {"step": "20", "loss": "1.0", "lr": ""},
    ]
    assert read_table(tmp_path / "val.csv") == [{"step": "20", "accuracy": "75.0"}]


def test_a_value_of_the_name_of_a_step_does_not_replace_it(tmp_path: Path):
    for shown in (CsvVisualizer(), LocalVisualizer()):
        shown.open(tmp_path)
        with pytest.warns(UserWarning, match="'step_'") if isinstance(shown, CsvVisualizer) else nullcontext():
            shown.add_scalars({"train/step": 2.0, "train/loss": 3.0}, step=10)
        shown.close()
    assert read_table(tmp_path / "train.csv") == [{"step": "10", "step_": "2.0", "loss": "3.0"}]
    assert json.loads((tmp_path / "scalars.jsonl").read_text()) == {"step": 10, "train/step": 2.0, "train/loss": 3.0}


def test_a_line_of_scalars_has_the_step_that_they_say_as_with_mmengine(tmp_path: Path):
    shown = LocalVisualizer()
    shown.open(tmp_path)
    shown.add_scalars({"loss": 3.0, "step": 7})
    shown.close()
    assert json.loads((tmp_path / "scalars.jsonl").read_text()) == {"step": 7, "loss": 3.0}


def test_a_late_name_adds_a_column_to_a_csv_file(tmp_path: Path):
    table = CsvVisualizer(save_dir=tmp_path / "tables")
    table.open(tmp_path)
    table.add_scalars({"a": 1.0}, step=1)
    table.add_scalars({"a": 2.0, "b, c": 3.0}, step=2)
    table.close()
    table.add_scalars({"d": 4.0}, step=3)  # goes on with what is there
    table.close()
    assert read_table(tmp_path / "tables" / "scalars.csv") == [
        {"step": "1", "a": "1.0", "b, c": "", "d": ""},
        {"step": "2", "a": "2.0", "b, c": "3.0", "d": ""},
        {"step": "3", "a": "", "b, c": "", "d": "4.0"},
    ]
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["scalars.csv"]


@pytest.mark.parametrize("torn", [b"2,0.", b"2,0.25,", b"\x00\x00"])
def test_a_row_that_a_full_disk_has_cut_takes_no_other_row_with_it(tmp_path: Path, torn: bytes):
    table = CsvVisualizer()
    table.open(tmp_path)
    table.add_scalars({"loss": 0.5, "lr": 0.1}, step=1)
    path = tmp_path / "scalars.csv"
    path.write_bytes(path.read_bytes() + torn)
    table.add_scalars({"loss": 0.125, "lr": 0.1}, step=3)
    table.add_scalars({"loss": 0.0625, "lr": 0.1, "norm": 2.0}, step=4)
    assert read_table(path) == [
        {"step": "1", "loss": "0.5", "lr": "0.1", "norm": ""},
        {"step": "3", "loss": "0.125", "lr": "0.1", "norm": ""},
        {"step": "4", "loss": "0.0625", "lr": "0.1", "norm": "2.0"},
    ]


def test_a_table_whose_first_row_was_cut_begins_anew(tmp_path: Path):
    table = CsvVisualizer()
    table.open(tmp_path)
    (tmp_path / "scalars.csv").write_bytes(b"step,lo")
    table.add_scalars({"loss": 0.5}, step=1)
    assert read_table(tmp_path / "scalars.csv") == [{"step": "1", "loss": "0.5"}]


def test_a_text_that_was_cut_takes_no_other_line_with_it(tmp_path: Path):
    (tmp_path / "texts.jsonl").write_text('{"step": 1, "answer": "one"}\n{"step": 2, "ans')
    local = LocalVisualizer()
    local.open(tmp_path)
    local.add_text("answer", "three", step=3)
    local.close()
    lines = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "answer": "one"}, {"step": 3, "answer": "three"}]
