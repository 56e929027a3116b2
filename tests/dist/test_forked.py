"""Collectives in a process that was forked from a rank, as a data loader's workers are."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lockstep import dist, groups
from lockstep.errors import DistError
from lockstep.testing import ranks

ONE = torch.ones(1)
CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(ONE.clone()),
    "all_gather": lambda: dist.all_gather(ONE),
    "gather": lambda: dist.gather(ONE),
    "broadcast": lambda: dist.broadcast(ONE.clone()),
    "reduce": lambda: dist.reduce(ONE.clone()),
    "barrier": dist.barrier,
    "all_gather_object": lambda: dist.all_gather_object("x"),
    "gather_object": lambda: dist.gather_object("x"),
    "broadcast_object_list": lambda: dist.broadcast_object_list(["x"]),
    "all_reduce_dict": lambda: dist.all_reduce_dict({"x": 1}),
    "all_reduce_params": lambda: dist.all_reduce_params([ONE.clone()]),
    "all_reduce_tree": lambda: dist.all_reduce_tree([1]),
    "collect_results": lambda: dist.collect_results([1], dist.get_world_size()),
    "sync_random_seed": dist.sync_random_seed,
    "main_process_first": lambda: dist.main_process_first().__enter__(),
    "run_on_main": lambda: dist.run_on_main(int),
}


def in_a_fork(call: Callable[[], Any]) -> str:
    """Return the last line of what a call raises in a forked process; "" if it raises nothing."""
    receiver, sender = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            call()
        except BaseException:
            os.write(sender, traceback.format_exc().encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as said:
        lines = said.read().splitlines()
    os.waitpid(pid, 0)
    return lines[-1] if lines else ""


@pytest.mark.parametrize("name", CALLS)
@ranks(2)
def test_a_collective_raises_at_once_and_the_rank_goes_on(name: str):
    said = in_a_fork(CALLS[name])
    rank = dist.get_rank()
    assert said.startswith("lockstep.errors.DistError: collectives must be called by the rank itself, but this process")
    assert f"was forked from rank {rank} of 2, as workers of a data loader are" in said
    assert dist.all_gather_object(rank) == [0, 1]


@ranks(2)
def test_so_does_one_in_a_group_that_has_not_been_used():
    group = torch.distributed.new_group([0, 1])
    assert "was forked from rank" in in_a_fork(lambda: dist.barrier(group))


@ranks(2)
def test_a_forked_process_knows_its_rank():
    rank = dist.get_rank()
    assert in_a_fork(lambda: None if dist.get_rank() == rank else 1 / 0) == ""


@pytest.mark.parametrize("name", CALLS)
@ranks(1)
def test_a_rank_alone_needs_no_others(name: str):
    CALLS[name]()
    assert in_a_fork(CALLS[name]) == ""


class Reducing(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        value = torch.ones(1)
        dist.all_reduce(value)
        return value


@ranks(2)
def test_a_worker_of_a_data_loader_says_so():
    batches = iter(DataLoader(Reducing(), num_workers=1, multiprocessing_context=get_context("fork")))
    try:
        next(batches)
    except DistError as error:
        said = str(error)
        # Its frames hold the iterator until a garbage collection, at which the worker ends only after 5 seconds.
        traceback.clear_frames(error.__traceback__)
    assert "Let the worker return what it has" in said


SCRIPT = """
import os, sys
from torch.distributed import FileStore
from lockstep import dist, groups

for rank in range(2):
    if os.fork() == 0:
        break
else:
    sys.exit(any(os.wait()[1] for _ in range(2)))
os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
dist.init_dist("pytorch", store=FileStore(sys.argv[1], 2))
if (pid := os.fork()) == 0:
    sys.exit(0)  # which ends what this process has registered
assert os.waitpid(pid, 0)[1] == 0
assert dist.all_gather_object(dist.get_rank()) == [0, 1]
print("went on")
"""


def test_a_forked_process_may_end_as_usual(tmp_path: Path):
    words = [sys.executable, "-c", SCRIPT, str(tmp_path / "store")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("went on") == 2


@ranks(1, 2)
def test_a_fork_waits_until_threads_of_the_last_collective_have_left_python() -> None:
    pauses: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups.time, "sleep", pauses.append)
        dist.all_gather_object(dist.get_rank())
        child = os.fork()
        if child == 0:
            os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert sum(pauses) == (0.005 if dist.get_world_size() > 1 else 0)
