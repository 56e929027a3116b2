"""Streams of the webdataset package, which has stages that split them over ranks and over workers."""

from __future__ import annotations

import io
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds

from lockstep.dataset import build_dataloader
from lockstep.dist import all_gather_object, get_rank
from lockstep.errors import ConfigError
from lockstep.runner.uneven_inputs import EvenBatches
from lockstep.testing import ranks


def number_in(sample: Any) -> int:
    return int(sample["txt"])


def stream(folder: Path, **splitters: Any) -> Any:
    """Return the numbers from 0 to 15, in four tar files. Each rank writes its own: none reads what another writes."""
    folder = folder / f"rank_{get_rank()}"
    folder.mkdir(exist_ok=True)
    for shard in range(4):
        with tarfile.open(folder / f"{shard}.tar", "w") as file:
            for number in range(shard * 4, shard * 4 + 4):
                entry = tarfile.TarInfo(f"{number:04d}.txt")
                entry.size = len(str(number))
                file.addfile(entry, io.BytesIO(str(number).encode()))
    paths = [str(folder / f"{shard}.tar") for shard in range(4)]
    return wds.WebDataset(paths, shardshuffle=False, seed=0, **splitters).map(number_in)


def forked(workers: int) -> dict[str, Any]:
    return {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}


def seen(dataset: Any, workers: int, **options: Any) -> list[int]:
    """Return what all ranks see in one pass."""
    loader = build_dataloader({"dataset": dataset, **forked(workers), **options}, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its files to the garbage collector
        parts = all_gather_object([int(one) for one in loader])
    return sorted(one for part in parts for one in part)


@ranks(2)
@pytest.mark.parametrize("workers", [0, 2])
def test_split_by_node_is_refused_unless_the_config_says_that_it_splits(workers, tmp_path):
    dataset = stream(tmp_path, nodesplitter=wds.split_by_node)
    if workers:  # else the error would hold the file that is open
        with pytest.raises(ConfigError, match=r"WebDataset must yield the same samples.*`split=False`"):
            list(EvenBatches(build_dataloader({"dataset": dataset, **forked(workers)}, seed=0)).iterate())
    assert seen(dataset, workers, split=False) == list(range(16))


@ranks(1, 2)
@pytest.mark.parametrize("workers", [0, 2])
def test_without_its_splitters_it_is_split(workers, tmp_path):
    dataset = stream(tmp_path, nodesplitter=None, workersplitter=None)
    assert seen(dataset, workers) == list(range(16))


def test_in_one_process_its_workers_split_it_if_the_config_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"WebDataset must yield the same samples.*between its workers"):
        seen(stream(tmp_path), workers=2)
    assert seen(stream(tmp_path), workers=2, split=False) == list(range(16))
