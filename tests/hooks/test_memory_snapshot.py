"""When snapshots are written, with torch's allocator replaced; tests/gpu has the true one."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.dist import get_rank
from lockstep.errors import ConfigError
from lockstep.hooks import Hook, MemorySnapshotHook, memory_snapshot
from lockstep.testing import ranks

from .runs import Net, make_runner


@pytest.fixture
def recording(monkeypatch) -> list[Any]:
    """Replace the parts of torch that need CUDA; return the calls that begin and end recording."""
    return replace_torch(monkeypatch)


def replace_torch(monkeypatch: Any) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(memory_snapshot, "get_device", lambda: "cuda")
    record = lambda enabled="all", max_entries=None: calls.append((enabled, max_entries))  # noqa: E731
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(pickle.dumps({})))
    return calls


def written(runner: Any) -> list[str]:
    return sorted(path.name for path in (runner.run_dir / "memory").glob("*"))


def test_other_devices_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"must run on a CUDA device, .*'cpu'.* ProfilerHook\(profile_memory=True"):
        make_runner(tmp_path, [MemorySnapshotHook()]).train()
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_after_given_iterations(tmp_path: Path, recording):
    runner = make_runner(tmp_path, [MemorySnapshotHook(iterations=[2, 5], max_entries=7)])
    runner.train()
    assert written(runner) == ["snapshot_rank0_iter2.pickle", "snapshot_rank0_iter5.pickle"]
    assert recording == [("all", 7), (None, None)]


class Signal(Hook):
    """Sends the signal in the third iteration."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        if runner.iter == 2:
            os.kill(os.getpid(), self.number)


@ranks(2)
def test_each_rank_writes_one_when_it_gets_the_signal(tmp_path: Path):
    before = signal.getsignal(signal.SIGUSR2)
    hooks = [MemorySnapshotHook(on_signal="SIGUSR2"), Signal(signal.SIGUSR2)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        replace_torch(monkeypatch)
        runner = make_runner(tmp_path, hooks)
        runner.train()
    assert f"snapshot_rank{get_rank()}_iter3.pickle" in written(runner)
    assert signal.getsignal(signal.SIGUSR2) == before


class RunsOut(Net):
    error: type[Exception] = torch.OutOfMemoryError

    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor"):
        raise self.error("out of memory")


class Wrapped(RunsOut):
    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor"):
        try:
            super().forward(x, y)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("no step") from error


class Fails(RunsOut):
    error = RuntimeError


@pytest.mark.parametrize(("kind", "names"), [(RunsOut, 1), (Wrapped, 1), (Fails, 0)])
def test_when_memory_runs_out(tmp_path: Path, recording, kind, names):
    runner = make_runner(tmp_path, [MemorySnapshotHook()], kind=kind)
    with pytest.raises(RuntimeError):
        runner.train()
    assert written(runner) == ["snapshot_rank0_iter0_out_of_memory.pickle"] * names
    assert recording[-1] == (None, None)
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_a_full_disk_ends_no_training(tmp_path: Path, recording, monkeypatch):
    def fail(path: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", fail)
    runner = make_runner(tmp_path, [MemorySnapshotHook(iterations=[1])])
    runner.train()
    assert "no memory snapshot can be written to" in (runner.run_dir / "log.txt").read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_signal": "USR1"}, "`on_signal` must be the name of a signal, such as 'SIGUSR2', but is 'USR1'"),
        ({"on_signal": 10}, "but is 10"),
        ({"iterations": 5}, "`iterations` must be a list of numbers of iterations, but is 5"),
        ({"iterations": "10"}, "but is '10'"),
        ({"max_entries": 0}, "`max_entries` must be an int of at least 1, but is 0"),
    ],
)
def test_wrong_options_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        MemorySnapshotHook(**options)
