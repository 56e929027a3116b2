"""Samples in files: one order for all ranks and workers, in which each of them reads its own files once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lockstep.dataset import FileDataset, FileSampler, batches_from, build_dataloader, global_order_of, set_epoch
from lockstep.dataset.files import FileOrder
from lockstep.dataset.position import Position
from lockstep.dist import get_rank
from lockstep.errors import ConfigError
from lockstep.testing import ranks, run_ranks

FILES, EACH = 16, 10
SAMPLES = FILES * EACH


def read(log: Path, file: int) -> Iterator[int]:
    """Yield the numbers in a file, and note each one with the process that reads it."""
    for number in range(EACH * file, EACH * file + EACH):
        with log.open("a") as lines:
            lines.write(f"{os.getpid()} {number}\n")
        yield number


def loader_of(log: Path, size: int, workers: int = 0) -> Any:
    """Return a loader that splits a global batch of 8."""
    dataset = FileDataset(range(FILES), [EACH] * FILES, partial(read, log))
    sampler = {"type": "FileSampler", "ranks": 4, "workers": 2, "global_batch": 8}
    more = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    return build_dataloader({"dataset": dataset, "sampler": sampler, "batch_size": 8 // size, **more}, seed=1)


def batches_of(log: Path, size: int, workers: int, epoch: int, position: int) -> list[list[int]]:
    loader = loader_of(log, size, workers)
    set_epoch(loader, epoch)
    assert global_order_of(loader).total == SAMPLES
    return [batch.tolist() for batch in batches_from(loader, Position(items=position))]


def global_batches(parts: list[list[list[int]]]) -> list[list[int]]:
    return [list(chain.from_iterable(zip(*batches, strict=True))) for batches in zip(*parts, strict=True)]


@pytest.mark.parametrize(("size", "workers"), [(1, 0), (2, 2), (4, 1)])
@pytest.mark.parametrize("position", [0, 56, 152])
def test_the_order_is_one_for_all_ranks_and_workers_and_each_file_is_read_once(size, workers, position, tmp_path):
    alone = batches_of(tmp_path / "alone", 1, 0, 1, 0)
    assert sorted(chain(*alone)) == list(range(SAMPLES))
    assert alone != batches_of(tmp_path / "alone", 1, 0, 0, 0)
    log = tmp_path / "log"
    parts = run_ranks(size, batches_of, log, size, workers, 1, position)
    assert global_batches(parts) == alone[position // 8 :]
    read_by = [line.split() for line in log.read_text().splitlines()]
    if position == 0:
        assert Counter(int(number) for _, number in read_by) == Counter(range(SAMPLES))
        files_of = {process: {int(number) // EACH for by, number in read_by if by == process} for process, _ in read_by}
        assert len(files_of) == size * max(1, workers)
        assert sum(map(len, files_of.values())) == FILES
    else:  # some files are begun, and read up to there
        assert len(read_by) < SAMPLES - position + 8 * EACH


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    ranks=st.integers(1, 4),
    workers=st.integers(1, 3),
    share=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_each_sample_comes_once_whatever_the_lengths(lengths, ranks, workers, share, seed):
    files = np.random.default_rng(seed).permutation(len(lengths))
    order = FileOrder(np.array(lengths), files, ranks, workers, share * ranks)
    assert sorted(order(np.arange(sum(lengths))).tolist()) == list(range(sum(lengths)))


def test_samples_are_found_in_any_order():
    opened: list[str] = []

    def letters(file: str) -> Iterator[str]:
        opened.append(file)
        return iter(file)

    dataset = FileDataset(["abc", "", "defgh"], [3, 0, 5], letters)
    assert [dataset[index] for index in (3, 5, 0, 4, 6, 1)] == list("dfaegb")
    assert opened == ["defgh", "abc", "defgh"]  # which was past the fourth
    assert list(dataset) == list("abcdefgh")
    with pytest.raises(IndexError, match="at least 0 and below 8, but is -1"):
        dataset[-1]


def lines_in(path: Path) -> Iterator[str]:
    with path.open() as lines:
        yield from lines


def test_a_worker_does_not_read_on_where_its_parent_was(tmp_path):
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_text("".join(f"{path.name}{line}\n" for line in range(5000)))  # more than is read at once
    dataset = FileDataset(paths, [5000, 5000], lines_in)
    assert dataset[10] == "a10\n"
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert list(loader) == [dataset[index] for index in range(10_000)]


def test_files_that_are_shorter_than_said_are_named():
    dataset = FileDataset(["abc", "de"], [3, 3], iter)
    with pytest.raises(ValueError, match="'de' must have 3 samples, but has at most 2"):
        dataset[5]
    with pytest.raises(ConfigError, match="a number for each of the 2 files, but has 1"):
        FileDataset(["abc", "de"], [3], iter)


@ranks(2)
@pytest.mark.parametrize(("all_ranks", "global_batch"), [(3, 6), (2, 5)])
def test_an_order_that_no_ranks_can_share_is_refused(all_ranks, global_batch):
    dataset = FileDataset(range(4), [3] * 4, range)
    with pytest.raises(ConfigError, match=r"must be a multiple of `ranks`, and that of 2 ranks.*\(rank \d of 2\)"):
        FileSampler(dataset, all_ranks, 1, global_batch, seed=0)


@ranks(2)
def test_ranks_must_have_the_same_files():
    dataset = FileDataset(["ab", "c"], [2, 1] if get_rank() else [1, 2], iter)
    sampler = {"type": "FileSampler", "ranks": 2, "workers": 1, "global_batch": 2}
    with pytest.raises(ConfigError, match="the `lengths` of the dataset differ"):
        build_dataloader({"dataset": dataset, "sampler": sampler}, seed=0)
