"""What a run leaves in its folder beside checkpoints: records, times by rank, environment, visualizers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.dist import barrier, get_rank
from lockstep.errors import ConfigError, PeerError, Preempted
from lockstep.evaluator import Accuracy
from lockstep.hooks import Hook
from lockstep.report.contents import charts_of
from lockstep.report.records import read_run
from lockstep.runner import Runner, resume_from
from lockstep.runner.start import join_ranks
from lockstep.testing import ranks
from lockstep.version import __version__
from lockstep.visualization.library import LibraryVisualizer


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, labels: Tensor, mode: str = "loss") -> Any:
        scores = self.linear(x)
        return nn.functional.cross_entropy(scores, labels) if mode == "loss" else (scores, labels)


def make(work_dir: Path, **changes: Any) -> Runner:
    data = TensorDataset(torch.randn(24, 2, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2)
    arguments = {
        "model": Classifier(),
        "work_dir": work_dir / "work",
        "train_dataloader": DataLoader(data, batch_size=2),
        "val_dataloader": DataLoader(data, batch_size=2),
        "val_evaluator": Accuracy(),
        "train_cfg": {"by_epoch": True, "max_epochs": 2},
        "default_hooks": {"logger": {"interval": 4}, "checkpoint": None},
        "cfg": {"seed": 1, "lr": 0.5},
        **changes,
    }
    return Runner(**arguments)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Shows(Hook):
    """Shows something of its own, on every rank, as hooks written for other engines do."""

    def after_train_epoch(self, runner: Any) -> None:
        runner.visualizer.add_scalar("own/rank", runner.rank, step=runner.iter)
        runner.visualizer.add_image("own", torch.zeros(2, 2, dtype=torch.uint8), step=runner.iter)


class Broken:
    def open(self, run_dir: Path) -> None:
        raise OSError("the server does not answer")

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        raise AssertionError("was not opened")


@pytest.mark.parametrize("world_size", ["1", "2"])
def test_ranks_that_train_alone_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, world_size: str
):
    numbers = {"RANK": "0", "WORLD_SIZE": world_size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": world_size}
    for name, value in numbers.items():
        monkeypatch.setenv(name, value)
    join_ranks("none", None)
    said = [record.getMessage() for record in caplog.records]
    assert [one.partition(";")[0] for one in said] == [
        "launcher='none' lets this process train alone, on all data, though it was started as rank 0 of 2"
    ] * (world_size == "2")


@pytest.mark.parametrize(("tasks", "given"), [("1", {}), ("8", {}), ("8", {"SLURM_PTY_PORT": "40000"})])
def test_a_slurm_job_of_several_tasks_that_trains_in_the_body_of_its_script_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tasks: str, given: dict[str, str]
):
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": tasks, **given}.items():
        monkeypatch.setenv(name, value)
    join_ranks(None, None)
    said = [record.getMessage() for record in caplog.records]
    assert [one.partition(":")[0] for one in said] == [
        "Slurm has given this job 8 tasks, but srun has not started this process"
    ] * (tasks == "8" and not given)


@ranks(2)
def test_the_environment_is_written_down(tmp_path: Path):
    runner = make(tmp_path)
    runner.train()
    known = json.loads((runner.run_dir / "environment.json").read_text())
    assert known["world_size"] == 2
    assert known["backend"] == "gloo"
    assert known["model"].startswith("Classifier, 6 parameters")
    assert (known["lockstep"], known["torch"]) == (__version__, torch.__version__)
    assert known["units"] == {"accuracy": "%"}
    assert [rank["device"] for rank in known["ranks"]] == ["cpu", "cpu"]
    assert known["started"][:2] == "20"
    assert known["arguments"] == {}  # the config has them


SLURM = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "1", "SLURM_JOB_NODELIST": "n[1-2]"}
POD = {"POD_NAME": "pod", "HOSTNAME": "pod-0"}


@pytest.mark.parametrize(
    ("job", "others"),
    [
        ({}, {"HOSTNAME": "host", "SLURM_JWT": "secret"}),
        (SLURM, {"SLURM_JWT": "secret"}),
        ({"PBS_JOBID": "7.head"}, {}),
        ({"LSB_JOBID": "7"}, {}),
        (POD, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}),
    ],
    ids=["none", "slurm", "pbs", "lsf", "kubernetes"],
)
def test_what_the_scheduler_calls_the_job_is_written_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, job: dict[str, str], others: dict[str, str]
):
    for name in (*SLURM, *POD, "SLURM_ARRAY_JOB_ID", "PBS_JOBID", "LSB_JOBID", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**job, **others}.items():
        monkeypatch.setenv(name, value)
    runner = make(tmp_path)
    runner.val()
    assert json.loads((runner.run_dir / "environment.json").read_text())["job"] == job


@pytest.mark.parametrize(("count", "unit"), [(None, "samples"), (lambda batch: 2 * len(batch[0]), "units")])
def test_the_report_says_what_batches_are_counted_in(tmp_path: Path, count: Any, unit: str):
    runner = make(tmp_path, train_cfg={"max_epochs": 1, "batch_size_of": count})
    runner.train()
    titles = [f"{chart.title} {chart.unit}" for chart in charts_of(read_run(runner.run_dir))]
    assert f"Throughput {unit}/s" in titles


@ranks(2)
def test_each_record_has_times_and_memory(tmp_path: Path):
    runner = make(tmp_path)
    runner.train()
    barrier()
    train = [record for record in lines_of(runner.run_dir / "metrics.jsonl") if record["mode"] == "train"]
    assert [record["iter"] for record in train] == [4, 6, 8, 12]
    for record in train:
        assert 0 < record["data_time"] < record["time"]
        assert {"comm_time", "memory_mib"} <= record.keys()


@ranks(2)
def test_several_visualizers_show_what_rank_0_records(tmp_path: Path):
    backends = [{"type": "LocalVisBackend"}, {"type": "TensorboardVisBackend"}]
    other = {"type": "LocalVisualizer", "scalar_save_file": "other.jsonl"}
    visualizer = [{"type": "Visualizer", "vis_backends": backends}, other]
    runner = make(tmp_path, visualizer=visualizer, custom_hooks=[Shows()])
    runner.train()
    assert len(runner.visualizer.parts) == (2 if get_rank() == 0 else 0)
    barrier()
    shown = lines_of(runner.run_dir / "scalars.jsonl")
    assert [line["step"] for line in shown if "train/loss" in line] == [4, 6, 8, 12]
    assert [line["step"] for line in shown if "val/accuracy" in line] == [6, 12]
    assert [line for line in shown if "own/rank" in line] == [{"step": step, "own/rank": 0} for step in (6, 12)]
    assert {path.name for path in (runner.run_dir / "images").iterdir()} == {"own_6.png", "own_12.png"}
    assert lines_of(runner.run_dir / "other.jsonl") == shown
    assert len(list((runner.run_dir / "tensorboard").iterdir())) == 1


@ranks(2)
def test_a_visualizer_that_cannot_open_ends_all_ranks_before_training(tmp_path: Path):
    runner = make(tmp_path, visualizer=Broken())
    with pytest.raises(OSError if get_rank() == 0 else PeerError, match="the server does not answer") as caught:
        runner.train()
    if get_rank() == 0:
        assert "while opening the visualizer Broken" in caught.value.__notes__
    assert runner.iter == 0


class Dying:
    """Shows the first record, and none after that."""

    def __init__(self) -> None:
        self.calls = 0

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        self.calls += 1
        if self.calls > 1:
            raise OSError("the server does not answer")


@ranks(2)
def test_a_visualizer_that_fails_in_a_run_is_warned_of_once_on_rank_0(tmp_path: Path):
    dying = Dying()
    runner = make(tmp_path, visualizer=[dying, {"type": "LocalVisualizer"}])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        runner.train()
    told = [str(warning.message) for warning in warned if "Dying" in str(warning.message)]
    if get_rank() == 0:
        assert len(told) == 1
        assert told[0].startswith("the visualizer Dying has failed: OSError: the server does not answer")
        assert 2 <= dying.calls <= 6  # it rests for longer where its failing call has taken long
        assert sum("train/loss" in line for line in lines_of(runner.run_dir / "scalars.jsonl")) == 4
    else:
        assert told == []
    assert runner.iter == 12


class Tracker(LibraryVisualizer):
    """Notes what a tracker is told."""

    package = "torch"

    def __init__(self) -> None:
        super().__init__()
        self.configs: list[Any] = []
        self.failed: list[bool] = []

    def open(self, run_dir: Path) -> None:
        self._opened = run_dir

    def add_config(self, config: Any) -> None:
        self.configs.append(config)

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        pass

    def _end(self, held: Any, *, failed: bool) -> None:
        self.failed.append(failed)


class Fails(Hook):
    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        raise MemoryError("too large")


def test_a_tracker_has_the_config_of_each_run_and_hears_which_one_has_failed(tmp_path: Path):
    first, second = Tracker(), Tracker()
    try:
        make(tmp_path, visualizer=first, custom_hooks=[Fails()]).train()
    except MemoryError:
        runner = make(tmp_path, visualizer=second, cfg=None)
        runner.val()
        runner.train()
    assert (first.failed, second.failed) == ([True], [False, False])
    assert first.configs == [{"seed": 1, "lr": 0.5}]
    assert len(second.configs) == 2
    given = {"dataset": "TensorDataset", "batch_size": 2, "num_workers": 0}
    assert second.configs[1]["train_dataloader"] == given  # without a config, the arguments
    written = json.loads((runner.run_dir / "environment.json").read_text())
    assert written["arguments"]["train_dataloader"] == given


class Stops(Hook):
    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        raise Preempted("the machine is taken away")


class FailsAtTheEnd(Tracker):
    def _end(self, held: Any, *, failed: bool) -> None:
        super()._end(held, failed=failed)
        raise OSError("no network")


@pytest.mark.parametrize("kind", [Tracker, FailsAtTheEnd])
def test_a_run_that_is_stopped_has_not_failed(tmp_path: Path, kind: type[Tracker]):
    tracker = kind()
    with pytest.raises(Preempted):
        make(tmp_path, visualizer=tracker, custom_hooks=[Stops()]).train()
    assert tracker.failed == [False]


def test_arguments_are_written_down_without_the_data_in_them(tmp_path: Path):
    samples = [(torch.ones(2), 0)] * 4
    optimizer = {"type": "SGD", "lr": 0.25}
    options = {"train_cfg": {"by_epoch": False, "max_iters": 1}, "val_dataloader": None, "val_evaluator": None}
    data = {"dataset": samples, "batch_size": 2}
    runner = make(tmp_path, cfg=None, train_dataloader=data, optim_wrapper={"optimizer": optimizer}, **options)
    runner.train()
    written = json.loads((runner.run_dir / "environment.json").read_text())["arguments"]
    assert written["train_dataloader"] == {"dataset": "list", "batch_size": 2}
    assert written["optim_wrapper"] == {"optimizer": optimizer}
    assert written["train_cfg"] == options["train_cfg"]


@ranks(2)
def test_a_missing_library_is_told_on_all_ranks_before_training(tmp_path: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)
        runner = make(tmp_path, visualizer={"type": "WandbVisBackend"})
        with pytest.raises(ConfigError, match=r"pip install 'lockstep-engine\[wandb\]'"):
            runner.train()
    assert runner.iter == 0


def test_validating_after_training_goes_on_in_the_same_places(tmp_path: Path):
    runner = make(tmp_path, visualizer=[{"type": "LocalVisualizer"}, {"type": "TensorBoardVisualizer"}])
    runner.train()
    written = (runner.run_dir / "environment.json").read_text()
    runner.val()
    steps = [line["step"] for line in lines_of(runner.run_dir / "scalars.jsonl") if "val/accuracy" in line]
    assert steps == [12, 24, 24]
    assert (runner.run_dir / "environment.json").read_text() == written


@ranks(2)
def test_a_work_dir_on_a_disk_of_each_ranks_own_is_refused_before_the_training(tmp_path: Path):
    context = pytest.MonkeyPatch.context()
    context.__enter__().setattr(resume_from, "_SECONDS_TO_SEE", 1.0)
    mine = tmp_path / str(get_rank())
    mine.mkdir()
    opened = os.open(mine, os.O_RDONLY)
    os.dup2(opened, 200)
    try:
        own = Path("/proc/self/fd/200")  # one name, and another folder on each rank
        with pytest.raises(
            (ConfigError, PeerError), match=r"disk that all ranks share.* rank 1 of 2 does not find .*fd/"
        ):
            make(own, default_hooks={}).train()
        make(own, train_cfg={"by_epoch": True, "max_epochs": 1}).train()  # saves nothing
    finally:
        context.__exit__(None, None, None)
        os.close(opened)
        os.close(200)


@ranks(2)
def test_a_folder_that_a_network_disk_shows_late_is_awaited(tmp_path: Path):
    looks: list[Path] = []
    is_seen = resume_from._is_seen

    def is_seen_late(place: Path) -> bool:
        looks.append(place)
        return is_seen(place) and (get_rank() == 0 or len(looks) == 3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume_from, "_is_seen", is_seen_late)
        resume_from.check_shared(tmp_path)
    assert len(looks) == (3 if get_rank() else 1)


def test_a_link_to_nothing_is_no_folder_for_runs(tmp_path: Path):
    (tmp_path / "work").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"`work_dir` must be a folder that can be created .* File exists"):
        make(tmp_path).train()


@pytest.mark.parametrize("name", ["config.py", "environment.json"])
def test_a_disk_that_takes_no_more_is_named_before_the_training(tmp_path: Path, name: str):
    script = (
        "import resource, sys, torch\n"
        "from lockstep.config import Config\n"
        "from lockstep.runner import Runner\n"
        "parts = dict(model=torch.nn.Linear(2, 2), train_dataloader=[(torch.ones(1, 2), torch.ones(1, 2))])\n"
        "cfg = Config({}) if sys.argv[2] == 'config.py' else None\n"
        "runner = Runner(**parts, work_dir=sys.argv[1], loss=torch.nn.MSELoss(), cfg=cfg)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))\n"
        "runner.train()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), name]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert "must take the files of the run, but does not: [Errno 27] File too large. A file would be" in ended.stderr
    (written,) = tmp_path.glob(f"*/{name}")
    assert written.stat().st_size == 16
