"""Workers of data loaders that fail, and scripts that workers import."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lockstep import Runner
from lockstep.dataset import build_dataloader, set_epoch
from lockstep.dist import all_gather_object
from lockstep.evaluator import Accuracy
from lockstep.runner.data_workers import prepare_workers
from lockstep.testing import ranks

BEGIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from lockstep import Runner


class Broken(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index == 9:
            raise ValueError("picture 9 is broken")
        return torch.ones(4), torch.tensor(0)


good = TensorDataset(torch.ones(16, 4), torch.zeros(16, dtype=torch.int64))
options = dict(loss=nn.CrossEntropyLoss(), train_cfg=dict(max_epochs=1))
options["optim_wrapper"] = dict(optimizer=dict(type="SGD", lr=0.1))
"""


def run(folder: Path, lines: str, *words: str, guarded: bool) -> subprocess.CompletedProcess[str]:
    body = dedent(lines)
    if guarded:
        body = "if __name__ == '__main__':\n" + indent(body, "    ")
    (folder / "script.py").write_text(BEGIN + body)
    return subprocess.run(
        [sys.executable, *words, "script.py"],
        cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


class IgnoredSignals(Dataset):
    """Says of some signals whether the worker ignores them."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> list[bool]:
        return [signal.getsignal(number) is signal.SIG_IGN for number in (signal.SIGUSR1, signal.SIGUSR2)]


def test_a_loader_that_another_runner_has_had_has_the_signals_of_the_last_one() -> None:
    called = []
    loader = DataLoader(IgnoredSignals(), batch_size=None, num_workers=1, worker_init_fn=called.append)
    for names, ignored in (["SIGUSR1"], [True, False]), (["SIGUSR2"], [False, True]), ([], [False, False]):
        prepare_workers(loader, names)
        assert list(loader) == [ignored]
    assert called == []  # in this process


class Flips:
    """Draws from a generator of its own, as a `Compose` of albumentations does."""

    def __init__(self) -> None:
        self.random_generator = numpy.random.default_rng(5)

    def set_random_seed(self, seed: int) -> None:
        self.random_generator = numpy.random.default_rng(seed)

    def __call__(self) -> float:
        return self.random_generator.random()


class Crops(Flips):
    """Is seeded as transforms of MONAI are."""

    set_random_seed = None

    def set_random_state(self, seed: int | None = None, state: object = None) -> None:
        self.random_generator = numpy.random.default_rng(seed)


class Augmented(Dataset[float]):
    def __init__(self, transform: Flips) -> None:
        self.pipeline = {"train": [("name", transform)]}
        self.set_random_seed = 3  # no method

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return self.pipeline["train"][0][1]()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("transform", [Flips, Crops])
@ranks(1, 2)
def test_transforms_with_generators_of_their_own_draw_anew_in_each_worker_and_epoch(transform, num_workers) -> None:
    def drawn(*epochs: int) -> list[list[float]]:
        data = ConcatDataset([Subset(Augmented(transform()), range(12))])
        loader = build_dataloader(DataLoader(data, batch_size=None, num_workers=num_workers), seed=0)
        prepare_workers(loader, [])
        found = []
        for epoch in epochs:
            set_epoch(loader, epoch)
            found.append([float(x) for x in loader])
        return found

    first, second = drawn(0, 1)
    on_ranks = all_gather_object(first + second)
    numbers = [number for own in on_ranks for number in own]
    assert len({*numbers}) == len(numbers) == 24
    assert drawn(1) == [second]  # as a run draws that resumes after an epoch


LAUNCHED = ("-m", "lockstep", "launch", "--nproc", "2")


@pytest.mark.jobs
def test_a_rank_whose_worker_fails_in_a_validation_ends_by_itself(tmp_path: Path):
    done = run(
        tmp_path,
        """
        loaders = dict(
            train_dataloader=DataLoader(good, batch_size=4),
            val_dataloader=DataLoader(Broken(), batch_size=4, num_workers=2),
        )
        Runner(nn.Linear(4, 2), "work", **loaders, **options).train()
        """,
        *LAUNCHED,
        guarded=True,
    )
    assert done.returncode == 1
    assert "picture 9 is broken" in done.stderr
    assert "It did not end by itself" not in done.stderr


TRAINING = """
loader = DataLoader(good, batch_size=4, num_workers=1, multiprocessing_context="{}")
Runner(nn.Linear(4, 2), "work", train_dataloader=loader, **options).train()
"""


def test_a_script_that_workers_import_must_train_under_a_guard(tmp_path: Path):
    done = run(tmp_path, TRAINING.format("spawn"), guarded=False)
    assert done.returncode == 1
    assert "training must begin under `if __name__ == '__main__':`, but begins while" in done.stderr
    assert len(list((tmp_path / "work").iterdir())) == 1  # the worker has begun no run of its own


@pytest.mark.jobs
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_job_says_what_must_be_under_a_guard(tmp_path: Path, method: str):
    done = run(tmp_path, TRAINING.format(method), *LAUNCHED, guarded=False)
    assert done.returncode == 1
    assert "training must begin under `if __name__ == '__main__':`, but begins while" in done.stderr
    assert len(list((tmp_path / "work").iterdir())) == 1


@pytest.mark.jobs
def test_a_guarded_script_trains_with_spawned_workers(tmp_path: Path):
    done = run(tmp_path, TRAINING.format("spawn"), *LAUNCHED, guarded=True)
    assert done.returncode == 0, done.stderr


def test_workers_that_a_loader_keeps_end_with_the_run(tmp_path: Path):
    workers = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    data = TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
    loaders = [DataLoader(data, batch_size=4, **workers) for _ in range(2)]
    runner = Runner(
        nn.Linear(4, 2), tmp_path, train_dataloader=loaders[0], val_dataloader=loaders[1], loss=nn.CrossEntropyLoss(),
        train_cfg={"max_epochs": 2}, default_hooks={"progress": None}, log_level="WARNING", visualizer=[],
    )  # fmt: skip
    before = set(multiprocessing.active_children())  # the ranks of other tests
    runner.train()
    assert set(multiprocessing.active_children()) <= before
    assert runner.val()["loss"] > 0  # with new ones
    assert set(multiprocessing.active_children()) <= before


class Repaired(TensorDataset):
    """Has wrong labels, and a sample that can't be read, as long as a file is there."""

    def __init__(self, broken: Path) -> None:
        super().__init__(torch.eye(4), torch.arange(4))
        self.broken = broken

    def __getitem__(self, index: int) -> Any:
        x, label = super().__getitem__(index)
        if not self.broken.exists():
            return x, label
        if index == 3:
            raise ValueError("sample 3 is broken")
        return x, label + 1


def test_a_validation_that_failed_leaves_no_results_and_a_loader_with_its_workers(tmp_path: Path):
    (tmp_path / "broken").touch()
    workers = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader = DataLoader(Repaired(tmp_path / "broken"), **workers)
    runner = Runner(
        nn.Identity(), tmp_path, val_dataloader=loader, loss=nn.CrossEntropyLoss(), log_level="WARNING", visualizer=[],
        val_evaluator=[Accuracy(), MulticlassAccuracy(num_classes=4, average="micro")],
    )  # fmt: skip
    with pytest.raises(ValueError, match="sample 3 is broken"):
        runner.val()
    (tmp_path / "broken").unlink()
    assert {**runner.val(), "loss": 0} == {"accuracy": 100.0, "MulticlassAccuracy": 1.0, "loss": 0}


class Ignored:
    """A dataset of whether the process that reads it ignores SIGUSR2."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN)])


class Sees(nn.Linear):
    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        assert seen.all()
        return super().forward(seen).mean()


def test_workers_outlive_the_signals_at_which_the_training_stops(tmp_path: Path):
    loader = {"dataset": Ignored(), "batch_size": 2, "num_workers": 1, "multiprocessing_context": "fork"}
    Runner(Sees(1, 1), tmp_path, train_dataloader=loader, train_cfg={"max_epochs": 1}, stop_signals=["SIGUSR2"]).train()
