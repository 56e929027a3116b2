"""The search for a batch size: which sizes are tried, and what a trial makes of each error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ConfigError, TopologyError
from lockstep.runner import find_batch_size
from lockstep.runner.batch_size_finder import Trial, search_sizes
from lockstep.runner.batch_size_trial import out_of_memory_message

pytestmark = pytest.mark.jobs


@given(
    memory=st.integers(1, 500),
    samples=st.integers(1, 500),
    most=st.none() | st.integers(1, 500),
    start=st.integers(1, 500),
    bisect=st.booleans(),
    drops=st.booleans(),
)
def test_the_size_that_is_found_is_the_largest_that_was_seen_to_fit(memory, samples, most, start, bisect, drops):
    def try_size(size: int) -> Trial:
        if min(size, samples) > memory and not (drops and size > samples):
            return Trial(size, "out of memory")
        return Trial(size, "fits") if size <= samples else Trial(0 if drops else samples, "too few samples")

    found = search_sizes(try_size, start, most, bisect=bisect)
    size = found.batch_size
    limit = min(samples, 501 if most is None else most)
    assert size == max(trial.batch_size for trial in found.trials if trial.outcome == "fits")
    assert size <= min(memory, limit)
    assert len(found.trials) < 24
    if drops:  # `drop_last`: too large a size has no batch at all
        assert found.ended_by != "samples" or memory >= size
        return
    if memory >= limit:
        assert size == limit or samples < start
        assert size * 2 > limit or bisect
    elif bisect:
        assert size + max(1, size // 16) >= memory
    else:
        assert 2 * size >= memory  # half of 3 is 1, and 2 is not tried


def test_the_sizes_in_their_order():
    def try_size(size: int) -> Trial:
        return Trial(size, "fits" if size <= 23 else "out of memory")

    tried = search_sizes(try_size, 4, None, bisect=True).trials
    assert [trial.batch_size for trial in tried] == [4, 8, 16, 32, 24, 20, 22, 23]
    tried = search_sizes(try_size, 100, None, bisect=False).trials
    assert [trial.batch_size for trial in tried] == [100, 50, 25, 12]
    found = search_sizes(try_size, 4, 12, bisect=False)
    assert ([trial.batch_size for trial in found.trials], found.ended_by) == ([4, 8, 12], "limit")


def test_a_size_without_a_batch_is_not_taken_for_one_that_does_not_fit():
    def try_size(size: int) -> Trial:
        return Trial(size, "fits") if size <= 40 else Trial(0, "too few samples")

    for start in (64, 4):
        found = search_sizes(try_size, start, None, bisect=True)
        assert 38 <= found.batch_size <= 40
        assert found.ended_by == "samples"
    with pytest.raises(ConfigError, match="has none even of a size of 1"):
        search_sizes(lambda size: Trial(0, "too few samples"), 4, None, bisect=True)


def test_where_nothing_fits():
    with pytest.raises(ConfigError, match="not even 1 fits: CUDA out of memory"):
        search_sizes(lambda size: Trial(size, "out of memory", message="CUDA out of memory"), 4, None, bisect=True)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("DataLoader worker (pid 4) is killed by signal: Killed. "),
        OSError(12, "Cannot allocate memory"),
        caused(RuntimeError("the step failed"), torch.OutOfMemoryError("CUDA out of memory")),
    ],
)
def test_errors_that_are_about_memory(error):
    assert out_of_memory_message(error)


def test_errors_that_are_not_about_memory():
    assert out_of_memory_message(ValueError("shapes (3, 4) and (5, 6)")) is None
    assert out_of_memory_message(caused(RuntimeError("a"), KeyError("memory"))) is None


def never(batch_size: int) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("make_runner", "options", "says"),
    [
        (never, {"nproc": 0}, "`nproc` must be an int of at least 1, but is 0"),
        (never, {"updates": 1}, "`updates` must be an int of at least 2, but is 1"),
        (never, {"start": 0}, "`start` must be an int of at least 1, but is 0"),
        (never, {"max_batch_size": True}, "`max_batch_size` must be an int of at least 1, but is True"),
        (never, {"memory": 0}, "`memory` must be an int of at least 1, but is 0"),
        (lambda size: None, {}, "`make_runner` must be a function of a module, which ranks can import"),
        ({}, {}, "`train_dataloader` must be a config with a batch_size to be searched, but is None"),
        ({"train_dataloader": [1]}, {}, "must be a config with a batch_size to be searched, but is a list"),
        (
            {"train_dataloader": {"batch_size": None}},
            {},
            "`train_dataloader.batch_size` must be an int of at least 1, but is None",
        ),
        ({"train_dataloader": {"batch_sampler": {}}}, {}, "must set the size of batches .* but `batch_sampler` does"),
    ],
)
def test_bad_input(make_runner, options, says):
    with pytest.raises(ConfigError, match=says):
        find_batch_size(make_runner, **options)


def test_a_rank_can_search_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TopologyError, match=r"must be started once, .* but this process is a rank itself \(pytorch\)"):
        find_batch_size(never)


SCRIPT = """
    import os
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from lockstep.runner import Runner, find_batch_size

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x, y):
            return (self.layer(x) - y).square().mean()

    class Failing(torch.autograd.Function):
        '''Runs out of memory in the backward pass, while other ranks wait for its gradients.'''

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    class FailsOnRank1(Net):
        def forward(self, x, y):
            loss = super().forward(x, y)
            return Failing.apply(loss) if os.environ["RANK"] == "1" and len(x) > 5 else loss

    def make_runner(batch_size):
        data = TensorDataset(torch.ones(200, 3), torch.ones(200, 1))
        loader = DataLoader(data, batch_size=batch_size)
        return Runner(FailsOnRank1(), "runs", train_dataloader=loader, strategy="ddp")

    def search():
        found = find_batch_size(make_runner, nproc=2, start=4, bisect=True)
        print([(trial.batch_size, trial.outcome) for trial in found.trials], found.batch_size, found.ended_by)
"""


def run_script(folder: Path, end: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(dedent(SCRIPT) + dedent(end))
    words = [sys.executable, "script.py"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_function_of_a_script_and_a_rank_that_runs_out_of_memory_in_its_backward_pass(tmp_path):
    done = run_script(tmp_path, "if __name__ == '__main__':\n    search()\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[(4, 'fits'), (8, 'out of memory'), (6, 'out of memory'), (5, 'fits')] 5 memory\n"
    assert not (tmp_path / "runs").exists(), "a trial leaves nothing behind"


def test_a_script_without_the_guard_is_told_so(tmp_path):
    done = run_script(tmp_path, "search()\n")
    assert done.returncode == 1
    assert "Call it under `if __name__ == '__main__':`" in done.stderr
