"""Traces of operators, one for each rank; snapshots of memory, with torch's allocator replaced (tests/gpu has it)."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import signal
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lockstep.diagnostics import profiling
from lockstep.dist import barrier, get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.hooks import EmptyCacheHook, Hook, MemorySnapshotHook, ProfilerHook
from lockstep.testing import ranks

from ..hooks.runs import Net, make_runner


def backward_passes(trace: Path) -> int:
    """Return how many backward passes of the linear layer are in a trace."""
    text = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    names = [event["name"] for event in json.loads(text)["traceEvents"] if event.get("cat") == "cpu_op"]
    return names.count("AddmmBackward0")


def profiled(work_dir: Path, **options: Any) -> dict[str, int]:
    """Train for two epochs of four iterations; return how many iterations are in each trace of this rank."""
    runner = make_runner(work_dir, [{"type": "ProfilerHook", **options}], default_hooks={"checkpoint": None})
    runner.train()
    assert not [one for one in warnings.filters if "Profiler clears events" in str(one)]
    barrier()
    mine = sorted(runner.run_dir.glob(f"**/*rank{get_rank()}*"))
    assert len(list(runner.run_dir.glob("**/*rank[01]_*"))) == len(mine) * get_world_size()
    return {str(path.relative_to(runner.run_dir)): backward_passes(path) for path in mine}


@ranks(1, 2)
@pytest.mark.parametrize(
    ("options", "traces"),
    [
        ({}, {"profile/trace_rank{}_iter4.json": 4}),
        ({"profile_times": 9}, {"profile/trace_rank{}_iter8.json": 8}),
        ({"by_epoch": False, "profile_times": 3}, {"profile/trace_rank{}_iter3.json": 3}),
        (
            {"profile_times": 2, "schedule": {"wait": 1, "warmup": 1, "active": 2, "repeat": 2}},
            {"profile/trace_rank{}_iter4.json": 2, "profile/trace_rank{}_iter8.json": 2},
        ),
        (  # the second cycle has come to its beginning
            {"by_epoch": False, "profile_times": 5, "schedule": {"wait": 1, "warmup": 1, "active": 1}},
            {"profile/trace_rank{}_iter3.json": 1},
        ),
        ({"json_trace_path": None}, {"profile/trace_rank{}_iter4.json": 4}),
        ({"json_trace_path": "t.json.gz"}, {"t_rank{}_iter4.json.gz": 4}),
    ],
)
def test_each_rank_writes_its_traces(tmp_path: Path, options, traces):
    assert profiled(tmp_path, **options) == {name.format(get_rank()): count for name, count in traces.items()}


class Fail(Hook):
    priority = "LOWEST"

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter == 1:
            raise RuntimeError("no")


def test_a_cycle_that_ends_with_the_profiling_keeps_its_trace(tmp_path: Path):
    with pytest.warns(UserWarning, match="won't be using warmup"):
        hook = ProfilerHook(schedule={"wait": 0, "warmup": 0, "active": 2, "repeat": 0})
    traces = sorted((run_dir_of(tmp_path, [hook]) / "profile").iterdir())
    assert {path.name: backward_passes(path) for path in traces} == {
        "trace_rank0_iter2.json": 2,
        "trace_rank0_iter4.json": 2,
    }


def test_a_failure_leaves_the_trace_until_then(tmp_path: Path):
    runner = make_runner(tmp_path, [ProfilerHook(), Fail()])
    with pytest.raises(RuntimeError, match="no"):
        runner.train()
    assert backward_passes(runner.run_dir / "profile" / "trace_rank0_iter2.json") == 2


def test_a_trace_that_cannot_be_written_does_not_hide_why_the_run_failed(tmp_path: Path):
    runner = make_runner(tmp_path, [ProfilerHook(json_trace_path="log.txt/trace.json"), Fail()])
    with pytest.raises(RuntimeError, match="no"):
        runner.train()
    assert "the trace of operators can't be written: " in (runner.run_dir / "log.txt").read_text()


def test_traces_go_elsewhere_if_asked(tmp_path: Path):
    seen: list[int] = []
    run_dir = run_dir_of(tmp_path, [ProfilerHook(on_trace_ready=lambda profiler: seen.append(len(profiler.events())))])
    assert not (run_dir / "profile").exists()
    assert seen[0] > 0
    run_dir = run_dir_of(tmp_path, [ProfilerHook(on_trace_ready={"type": "log_trace", "row_limit": 3})])
    assert "Self CPU time total" in (run_dir / "log.txt").read_text()
    run_dir = run_dir_of(tmp_path, [ProfilerHook(on_trace_ready={"type": "log_trace", "sort_by": "bogus"})])
    assert "can't be written: AttributeError: 'FunctionEventAvg' object has no" in (run_dir / "log.txt").read_text()
    run_dir = run_dir_of(tmp_path, [ProfilerHook(on_trace_ready={"type": "tb_trace", "dir_name": "tb"})])
    assert [path.name.split(".")[0] for path in (run_dir / "tb").iterdir()] == ["rank0"]


@ranks(2)
def test_a_table_is_made_on_rank_0_alone(tmp_path: Path):
    with patch.object(profiling.profile, "key_averages") as made:
        make_runner(tmp_path, [ProfilerHook(on_trace_ready={"type": "log_trace"})]).train()
    assert made.called == (get_rank() == 0)


def run_dir_of(work_dir: Path, hooks: list[Hook]) -> Path:
    runner = make_runner(work_dir, hooks)
    runner.train()
    return runner.run_dir


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"profile_times": 0}, "`profile_times` must be an int of at least 1, but is 0"),
        ({"on_trace_ready": {"type": "print"}}, "must be 'log_trace' or 'tb_trace', but is 'print'"),
        ({"on_trace_ready": {"type": "log_trace", "bogus": 1}}, "on_trace_ready.*bogus"),
        ({"on_trace_ready": {"type": "tb_trace", "bogus": 1}}, "on_trace_ready.*bogus"),
        ({"on_trace_ready": "x"}, "`on_trace_ready` must be a function or a dict with a 'type', but is 'x'"),
        ({"schedule": {"activ": 2}}, "argument `schedule`: unknown argument `activ`: did you mean `active`.*missing"),
        ({"activity_with_cpu": False, "activity_with_cuda": False}, "`activity_with_cpu` must be True"),
    ],
)
def test_wrong_options_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        ProfilerHook(**options)


def test_epochs_need_epochs(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"ProfilerHook\(by_epoch=False"):
        make_runner(tmp_path, [ProfilerHook()], train_cfg={"max_iters": 2}).train()


def test_an_empty_cache_is_nothing_without_an_accelerator(tmp_path: Path):
    hook = EmptyCacheHook(before_epoch=True, after_epoch=True, after_iter=True)
    runner = make_runner(tmp_path, [hook])
    runner.train()
    assert runner.iter == 8


@pytest.fixture
def recording(monkeypatch) -> list[Any]:
    """Replace the parts of torch that need CUDA; return the calls that begin and end recording."""
    return replace_torch(monkeypatch)


def replace_torch(monkeypatch: Any) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(profiling, "get_device", lambda: "cuda")
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
        ({"on_signal": "USR1"}, "`on_signal` must name signals, such as SIGTERM, but names 'USR1'"),
        ({"on_signal": 10}, "but names 10"),
        ({"iterations": 5}, "`iterations` must be a list of numbers of iterations, but is 5"),
        ({"iterations": "10"}, "but is '10'"),
        ({"max_entries": 0}, "`max_entries` must be an int of at least 1, but is 0"),
    ],
)
def test_wrong_options_of_snapshots_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        MemorySnapshotHook(**options)
