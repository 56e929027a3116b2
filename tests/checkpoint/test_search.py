"""Which checkpoints are found, in which order, and what it takes to find them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from lockstep.checkpoint import find_checkpoints

_opened: list[Any] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None:
        _opened.append(arguments[0])


sys.addaudithook(_note)  # can't be taken away again


def folder(path: Path, time: float) -> Path:
    """Make a folder that is a checkpoint by its names alone."""
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{")
    os.utime(path / "manifest.json", (time, time))
    return path


def test_checkpoints_are_listed_without_opening_a_file(tmp_path: Path):
    global _opened
    made = [folder(tmp_path / f"run_{n % 3}" / f"iter_{n}", 1e9 + n) for n in range(60)]
    _opened = []
    try:
        found = find_checkpoints([tmp_path])
        opened = [name for name in _opened if str(name).startswith(str(tmp_path))]
    finally:
        _opened = None
    assert found == made[::-1]
    assert opened == []


def test_of_those_written_at_one_time_the_larger_number_is_the_newer_one(tmp_path: Path):
    made = [folder(tmp_path / f"epoch_{n}", 1e9) for n in (2, 9, 10, 11, 100)]
    assert find_checkpoints([tmp_path]) == made[::-1]


def test_what_is_left_of_a_checkpoint_is_found_at_any_depth_but_not_by_a_link(tmp_path: Path):
    left = tmp_path / "runs" / "run" / "epoch_1"
    left.mkdir(parents=True)
    (left / "rank_0.safetensors").write_bytes(b"")
    (tmp_path / "runs" / "link").symlink_to(left.parent)
    (tmp_path / "runs" / ".hidden").mkdir()
    for root in (tmp_path / "runs", left.parent, left):
        assert find_checkpoints([root, root]) == [left]
