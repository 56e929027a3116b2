"""Results that go over a shared disk: they arrive, nothing stays behind, and a bad disk is an error everywhere."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.dist import PeerError, all_reduce, collect_results, get_rank, get_world_size
from lockstep.testing import ranks

from .drawn_objects import assert_same
from .reference import assert_group_works


def result_of(rank: int, place: int) -> dict[str, Any]:
    """Return a result with small and, now and then, large data."""
    large = torch.full((2**14,), place, dtype=torch.int32) if place % 100 == 7 else None
    return {"rank": rank, "score": torch.tensor([place * 0.5]), "mask": large, "box": np.full((2, 2), place)}


@ranks(1, 3)
def test_more_results_than_are_written_at_once_arrive_and_leave_nothing_behind(tmp_path: Path) -> None:
    rank, size = get_rank(), get_world_size()
    counts = [600, 0, 257][:size]
    part = [result_of(rank, place) for place in range(counts[rank])]
    with torch.device("meta"):  # which is for tensors of the user alone
        collected = collect_results(part, sum(counts), tmpdir=tmp_path)
    if collected is not None:
        dealt = [result_of(r, place) for place in range(600) for r in range(size) if place < counts[r]]
        assert_same(collected, dealt)
    assert list(tmp_path.iterdir()) == []


@ranks(2)
def test_a_relative_folder_is_that_of_rank_0(tmp_path: Path) -> None:
    mine = tmp_path / f"cwd{get_rank()}"
    mine.mkdir()
    os.chdir(mine)
    assert collect_results([get_rank()], 2, tmpdir="deep/spill") == ([0, 1] if get_rank() == 0 else None)
    all_reduce(torch.ones(1))  # until both have looked
    assert (tmp_path / "cwd0/deep/spill").is_dir()
    assert list((tmp_path / "cwd1").iterdir()) == []


@ranks(2)
def test_what_else_lies_in_the_folder_stays(tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("mine")
    all_reduce(torch.ones(1))
    collect_results([get_rank()], 2, tmpdir=str(tmp_path))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


@ranks(3)
def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(tmp_path: Path) -> None:
    file = tmp_path / f"file of rank {get_rank()}"
    file.touch()
    # What counts is rank 0's path; that of the others would do.
    tmpdir = file / "spill" if get_rank() == 0 else tmp_path
    with pytest.raises((NotADirectoryError, PeerError), match="Not a directory") as caught:
        collect_results([1], 3, tmpdir=tmpdir)
    assert isinstance(caught.value, NotADirectoryError if get_rank() == 0 else PeerError)
    assert_group_works()


@ranks(3)
def test_a_disk_that_is_full_for_one_rank_is_an_error_on_every_rank(tmp_path: Path) -> None:
    part = [torch.ones(2**14) for _ in range(4)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if get_rank() == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with pytest.raises((OSError, PeerError), match="File too large") as caught:
            collect_results(part, 12, tmpdir=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(caught.value, OSError if get_rank() == 2 else PeerError)
    assert_group_works()
    assert list(tmp_path.iterdir()) == []


class Removes:
    """Takes away, when it is pickled, what stands in a folder, as if the writer had not shared it with the reader."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self.folder, self.pattern = folder, pattern

    def __reduce__(self) -> Any:
        for path in self.folder.glob(self.pattern):
            path.unlink()
        return str, ()


@ranks(2)
def test_a_folder_that_is_not_shared_is_an_error_on_every_rank_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        (FileNotFoundError, PeerError), match=r"the file of rank 1 is not at .* Leave `tmpdir` out"
    ) as caught:
        collect_results([Removes(tmp_path, "*/1")], 2, tmpdir=tmp_path)
    assert isinstance(caught.value, FileNotFoundError if get_rank() == 0 else PeerError)
    assert_group_works()
    assert list(tmp_path.iterdir()) == []
