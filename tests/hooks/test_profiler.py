"""Traces of operators, one for each rank."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.dist import barrier, get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.hooks import EmptyCacheHook, Hook, ProfilerHook
from lockstep.testing import ranks

from .runs import make_runner


def backward_passes(trace: Path) -> int:
    """Return how many backward passes of the linear layer are in a trace."""
    text = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    names = [event["name"] for event in json.loads(text)["traceEvents"] if event.get("cat") == "cpu_op"]
    return names.count("AddmmBackward0")


def profiled(work_dir: Path, **options: Any) -> dict[str, int]:
    """Train for two epochs of four iterations; return how many iterations are in each trace of this rank."""
    runner = make_runner(work_dir, [{"type": "ProfilerHook", **options}], default_hooks={"checkpoint": None})
    runner.train()
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


def test_a_failure_leaves_the_trace_until_then(tmp_path: Path):
    runner = make_runner(tmp_path, [ProfilerHook(), Fail()])
    with pytest.raises(RuntimeError, match="no"):
        runner.train()
    assert backward_passes(runner.run_dir / "profile" / "trace_rank0_iter2.json") == 2


def test_traces_go_elsewhere_if_asked(tmp_path: Path):
    seen: list[int] = []
    run_dir = run_dir_of(tmp_path, [ProfilerHook(on_trace_ready=lambda profiler: seen.append(len(profiler.events())))])
    assert not (run_dir / "profile").exists()
    assert seen[0] > 0
    run_dir = run_dir_of(tmp_path, [ProfilerHook(on_trace_ready={"type": "log_trace", "row_limit": 3})])
    assert "Self CPU time total" in (run_dir / "log.txt").read_text()
    run_dir = run_dir_of(tmp_path, [ProfilerHook(on_trace_ready={"type": "tb_trace", "dir_name": "tb"})])
    assert [path.name.split(".")[0] for path in (run_dir / "tb").iterdir()] == ["rank0"]


def run_dir_of(work_dir: Path, hooks: list[Hook]) -> Path:
    runner = make_runner(work_dir, hooks)
    runner.train()
    return runner.run_dir


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"profile_times": 0}, "`profile_times` must be an int of at least 1, but is 0"),
        ({"on_trace_ready": {"type": "print"}}, "must be 'log_trace' or 'tb_trace', but is 'print'"),
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
