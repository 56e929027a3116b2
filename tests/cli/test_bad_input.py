"""Bad input, on two real ranks: an error that names key, file, rank and remedy, and nobody left waiting.

Most of it runs in the pool, where a rank that waited for another would be reported as hung.
"""

from __future__ import annotations

from textwrap import dedent

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.config import Config
from lockstep.dist import all_gather_object, get_rank, get_world_size
from lockstep.errors import ConfigError, PeerError
from lockstep.evaluator import BaseMetric
from lockstep.hooks import Hook
from lockstep.runner import Runner
from lockstep.testing import RankFailure, ranks, run_ranks


class Line(nn.Module):
    """Its loss is what `fault` makes of it, on rank 1 alone where that matters."""

    def __init__(self, fault=None):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.fault = fault

    def forward(self, x, y, mode="tensor"):
        out = self.layer(x)
        if mode == "predict":
            return out, y
        loss = (out - y).square()
        if self.fault == "vector":
            return loss
        if self.fault == "nan" and get_rank() == 1:
            return loss.mean() * torch.nan
        return loss.mean()


class Silent(BaseMetric):
    """Appends results or does not, and computes nothing from them."""

    def __init__(self, appends):
        super().__init__()
        self.appends = appends

    def process(self, data_batch, data_samples):
        self.results += [1] * self.appends

    def compute_metrics(self, results):
        return None


class Trip(Hook):
    """Raises on rank 1, in the middle of training."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.rank == 1 and batch_idx == 1:
            raise RuntimeError("tripped over the hook")


def points(count=8):
    return TensorDataset(torch.arange(float(count)).unsqueeze(1), torch.ones(count, 1))


def make(folder, **changes):
    return Runner(
        **{
            "model": Line(),
            "work_dir": folder,
            "train_dataloader": {"dataset": points(), "batch_size": 2},
            "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.01}},
            "train_cfg": {"max_epochs": 1},
            "visualizer": [],
            "cfg": Config({}, filename="line.py"),
            **changes,
        }
    )


def told(error):
    """Return an error with its notes, from this rank and from the others."""
    return all_gather_object("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))


@ranks(2)
def test_a_dataset_shorter_than_the_world_size(tmp_path):
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, train_dataloader={"dataset": points(1), "batch_size": 2}).train()
    for rank, text in enumerate(told(caught.value)):
        assert "must have at least 2 samples, one for each rank, but has 1" in text
        assert "Use fewer ranks" in text
        assert "while building `train_dataloader`" in text
        assert f"(rank {rank} of 2, after 0 iterations, config line.py)" in text


@ranks(1, 2)
@pytest.mark.parametrize("mode", ["train", "val"])
def test_an_empty_dataset(tmp_path, mode):
    loaders = {"train": points(), "val": points()} | {mode: points(0)}
    parts = {f"{name}_dataloader": {"dataset": dataset, "batch_size": 2} for name, dataset in loaders.items()}
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, **parts, val_evaluator=Silent(appends=2)).train()
    says = "`dataset` must have samples, but has none"
    if mode == "val":
        says = "`val_dataloader` must have samples, but its dataset has none"
    for rank, text in enumerate(told(caught.value)):
        assert f"{says} (rank {rank} of {get_world_size()})\n" in text
        assert "after 0 iterations" in text


@ranks(2)
def test_a_collate_fn_that_returns_nothing(tmp_path):
    batches = {"dataset": points(), "batch_size": 2, "collate_fn": lambda samples: None}
    with pytest.raises(TypeError) as caught:
        make(tmp_path, train_dataloader=batches).train()
    for rank, text in enumerate(told(caught.value)):
        assert f"the batch must not be None, which the loader's collate_fn has returned (rank {rank} of 2)" in text


@ranks(2)
def test_a_loss_that_is_not_finite_on_one_rank_ends_all(tmp_path):
    with pytest.raises(FloatingPointError) as caught:
        make(tmp_path, model=Line("nan")).train()
    for rank, text in enumerate(told(caught.value)):
        assert "the loss must be finite, but is not in iteration 1" in text
        assert "rank 1 of 2: loss = nan" in text
        assert "Lower the learning rate" in text
        assert "labels that are all left out (-100) is nan" in text
        assert f"(rank {rank} of 2" in text
    assert list(tmp_path.glob("*/epoch_*")) == []  # nothing of it is saved


@ranks(2)
def test_a_loss_that_is_not_scalar(tmp_path):
    with pytest.raises(ValueError, match="must be a scalar") as caught:
        make(tmp_path, model=Line("vector")).train()
    for rank, text in enumerate(told(caught.value)):
        assert "has shape (2, 1). Reduce it in the model, for example with .mean()" in text
        assert f"(rank {rank} of 2, after 0 iterations, config line.py)" in text


@ranks(2)
def test_a_metric_that_computes_nothing(tmp_path):
    validation = {"dataset": points(), "batch_size": 2}
    with pytest.raises((TypeError, PeerError)) as caught:
        make(tmp_path, val_dataloader=validation, val_evaluator=Silent(appends=2)).val()
    first, second = told(caught.value)
    says = "Silent.compute_metrics() must return a dict of numbers by name, but returned None"
    assert first.startswith(f"TypeError: {says}")
    assert second.startswith("PeerError: ")
    assert "rank 0" in second
    assert says in second


@ranks(2)
def test_a_metric_that_collects_nothing(tmp_path):
    validation = {"dataset": points(), "batch_size": 2}
    with pytest.raises(ValueError, match="has appended nothing on any rank") as caught:
        make(tmp_path, val_dataloader=validation, val_evaluator=Silent(appends=0)).val()
    assert all("Silent.process() must append to self.results" in text for text in told(caught.value))


@ranks(2)
def test_a_work_dir_that_cannot_be_written_to(tmp_path):
    if get_rank() == 0:
        (tmp_path / "file").write_text("")
    with pytest.raises((ConfigError, PeerError)) as caught:
        make(tmp_path / "file" / "runs").train()
    first, second = told(caught.value)
    assert first.startswith("ConfigError: `work_dir` must be a folder that can be created and written to")
    assert f"{tmp_path}/file/runs" in first
    assert "Choose another folder" in first
    assert second.startswith("PeerError: ")
    assert "rank 0" in second
    assert "`work_dir` must be a folder" in second


@ranks(2)
def test_arguments_of_the_wrong_type(tmp_path):
    for changes, says in (
        ({"custom_hooks": Trip()}, "`custom_hooks` must be a list of hooks or None"),
        ({"randomness": 3}, "`randomness` must be a dict or None, but is 3"),
        ({"train_cfg": 3}, "`train_cfg` must be a dict or a loop, but is 3"),
        ({"model": {"type": Trip}}, "`model` must build a torch.nn.Module"),
        ({"train_dataloader": 3}, "a data loader must be"),
    ):
        with pytest.raises(TypeError) as caught:
            make(tmp_path, **changes).train()
        assert all(says in text for text in told(caught.value))


def train_until_tripped(folder):
    make(folder, custom_hooks=[Trip()]).train()


def test_a_hook_that_raises_on_one_rank_is_told_as_the_cause(tmp_path):
    with pytest.raises(RankFailure, match="train_until_tripped on 2 ranks: rank 1 raised") as caught:
        run_ranks(2, train_until_tripped, tmp_path)
    cause = caught.value.reports[0]
    assert cause.rank == 1
    assert "RuntimeError: tripped over the hook" in cause.detail
    assert "in Trip.after_train_iter (rank 1 of 2)" in cause.detail
    assert "(rank 1 of 2, after 1 iterations, config line.py)" in cause.detail


def test_a_command_whose_hook_raises_on_one_rank_ends_for_all(lockstep, folder):
    (folder / "tripping.py").write_text(
        dedent("""
            from lockstep.hooks import Hook

            class Trip(Hook):
                def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
                    if runner.rank == 1:
                        raise RuntimeError("tripped over the hook")
        """)
    )
    # The time limit of the fixture says that nobody waits; it is far beyond what this takes.
    code, _, err = lockstep("train", "line.py", "--nproc", "2", "custom_hooks=[{'type':'tripping.Trip'}]")
    assert code == 1
    assert "error: rank 1 raised RuntimeError" in err
    assert err.count("RuntimeError: tripped over the hook") == 1
    assert "in Trip.after_train_iter (rank 1 of 2)" in err
    assert f"config {folder}/line.py" in err
    assert "typer" not in err  # nothing of the frames that lead to the user's
    log = folder / "work_dirs/line/ranks/rank_1.log"
    assert str(log.relative_to(folder)) in err
    assert "RuntimeError: tripped over the hook" in log.read_text()
    assert [process.pid for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(folder)] == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["custom_hoks=[1]"], "no key `custom_hoks` for the option `custom_hoks`: did you mean `custom_hooks`?"),
        (["train_dataloader.batch_sise=2"], "`train_dataloader.batch_sise` = 2 is not an argument of a data loader"),
        (["train_cfg.max_epochs=two"], "an option: `train_cfg.max_epochs` = 'two' must be int, but is text"),
        (["custom_hooks=3"], "an option: `custom_hooks` must be a list of hooks or None, but is 3 of int"),
        (["--work-dir", "toy.py/runs"], "`work_dir` must be a folder that can be created and written to, but toy.py/"),
    ],
)  # fmt: skip
def test_what_can_be_found_before_ranks_are_started_is(here, words, says):
    code, out, err = here("train", "line.py", "--nproc", "2", *words)
    assert (code, out) == (1, "")
    assert says in err
    assert "starting" not in err
