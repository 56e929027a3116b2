"""Going on as if nothing had happened: random numbers and places in data, on every rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler

from lockstep.dist import all_gather_object, get_rank, get_world_size
from lockstep.registry import LOOPS
from lockstep.runner import Runner, ValLoop
from lockstep.testing import ranks, run_ranks

from ..runs import Losses

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)


class Net(nn.Module):
    """Draws from every generator there is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor"):
        if mode == "predict":
            torch.rand(3)
            return self.linear(x)[:, 0] > 0, y[:, 0] > 0
        noise = random.random() + np.random.rand()
        return (self.linear(nn.functional.dropout(x, 0.5)) - y).square().mean() * (1 + noise)


def run(work_dir: Path, loader: Any, stop_after: int | None = None, **changes: Any) -> dict[int, float]:
    losses = Losses(stop_after)
    torch.manual_seed(3)
    runner = Runner(
        **{
            "model": Net(),
            "work_dir": work_dir,
            "train_dataloader": loader,
            "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.05}},
            "train_cfg": {"max_epochs": 3},
            "randomness": {"seed": 7, "diff_rank_seed": True},
            "default_hooks": {"checkpoint": {"by_epoch": False, "interval": 1}},
            "custom_hooks": [losses],
            "visualizer": [],
            **changes,
        }
    )
    try:
        runner.train()
    except KeyboardInterrupt:
        assert stop_after is not None
    return losses.by_iter


class Noisy(TensorDataset):
    """Augments at random, in whichever process it is."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + torch.rand(()) * 0.1, y


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Says where it is; counts, over all runs of this process, what it has made."""

    made = 0

    def __init__(self, has_length: bool = True) -> None:
        self.next = 0
        if has_length:
            self.__class__ = SizedStream

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.next < len(X):
            self.next += 1
            Stream.made += 1
            yield X[self.next - 1], Y[self.next - 1]


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(X)


class Forgetful(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(X, Y, strict=True))


WEIGHTS = [float(index % 3 + 1) for index in range(24)]


class Batches(Sampler[list[int]]):
    """Batches of unequal sizes, drawn at random one by one."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            yield [random.randrange(24) for _ in range(1 + np.random.randint(4))]

    def __len__(self) -> int:
        return 4 * get_world_size()


def batch_size() -> int:
    return 6 // get_world_size()


LOADERS = {
    "samples": lambda: {"dataset": TensorDataset(X, Y), "batch_size": batch_size()},
    "augmented here": lambda: {"dataset": Noisy(X, Y), "batch_size": batch_size()},
    "stream": lambda: {"dataset": Stream(), "batch_size": batch_size()},
    "own loader": lambda: DataLoader(Noisy(X, Y), batch_size=batch_size(), shuffle=True),
    "own sampler": lambda: DataLoader(Noisy(X, Y), batch_size=batch_size(), sampler=WeightedRandomSampler(WEIGHTS, 24)),
    "batch sampler": lambda: DataLoader(Noisy(X, Y), batch_sampler=Batches()),
}
VALIDATION = {
    "val_dataloader": DataLoader(TensorDataset(X, Y), batch_size=5),
    "val_evaluator": {"type": "Accuracy"},
}


@ranks(1, 2)
@pytest.mark.parametrize("kind", LOADERS)
def test_the_numbers_that_are_drawn_go_on(kind, tmp_path: Path):
    stop_after = (4, 6)[(get_world_size() + list(LOADERS).index(kind)) % 2]  # at the end of an epoch, or within it
    whole = run(tmp_path / "whole", LOADERS[kind](), **VALIDATION)
    first = run(tmp_path / "work", LOADERS[kind](), stop_after, **VALIDATION)
    second = run(tmp_path / "work", LOADERS[kind](), resume=True, **VALIDATION)
    assert min(second) == stop_after
    assert first | second == whole
    if get_world_size() > 1:
        assert len(set(all_gather_object(whole[0]))) == get_world_size()


@LOOPS.register_module()
class DrawingValLoop(ValLoop):
    """A validation whose random numbers training then lacks, as MMEngine's."""

    keeps_random_state = False


LENGTHS = {
    "epochs": ({"max_epochs": 3}, {"interval": 1}, "epoch_1", 4),
    "iterations": (
        {"by_epoch": False, "max_iters": 8, "val_interval": 2},
        {"by_epoch": False, "interval": 2},
        "iter_2",
        2,
    ),
}


@ranks(2)
@pytest.mark.parametrize("val_loop", ["ValLoop", "DrawingValLoop"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", ["samples", "own loader", "batch sampler"])
def test_the_numbers_that_are_drawn_before_the_next_batch_are_drawn_again(kind, length, val_loop, tmp_path: Path):
    """Validating, and opening a loader, draws numbers after a checkpoint: they come again when a run resumes."""
    cfg, saving, name, done = LENGTHS[length]
    changes = {"train_cfg": cfg, "default_hooks": {"checkpoint": saving}, "val_cfg": {"type": val_loop}, **VALIDATION}
    whole = run(tmp_path / "whole", LOADERS[kind](), **changes)
    (checkpoint,) = (tmp_path / "whole").glob(f"*/{name}")
    resumed = run(tmp_path / "work", LOADERS[kind](), resume=True, load_from=checkpoint, **changes)
    assert resumed == {step: loss for step, loss in whole.items() if step >= done}


@ranks(2)
@pytest.mark.parametrize("length", LENGTHS)
def test_ranks_that_were_told_nothing_go_on_with_numbers_of_their_own(length, tmp_path: Path):
    cfg, saving, name, done = LENGTHS[length]
    changes = {"train_cfg": cfg, "default_hooks": {"checkpoint": saving}, "randomness": {"seed": 1}, **VALIDATION}
    whole = run(tmp_path / "whole", LOADERS["samples"](), **changes)
    (checkpoint,) = (tmp_path / "whole").glob(f"*/{name}")
    resumed = run(tmp_path / "work", LOADERS["samples"](), resume=True, load_from=checkpoint, **changes)
    assert resumed == {step: loss for step, loss in whole.items() if step >= done}


@ranks(2)
@pytest.mark.parametrize("has_length", [True, False])
def test_a_stream_goes_on_without_going_through_the_past(has_length, tmp_path: Path):
    cfg = {"max_iters": 11, "val_interval": 100}
    whole = run(tmp_path / "whole", {"dataset": Stream(has_length), "batch_size": 3}, train_cfg=cfg)
    first = run(tmp_path / "work", {"dataset": Stream(has_length), "batch_size": 3}, 6, train_cfg=cfg)
    before = Stream.made
    second = run(tmp_path / "work", {"dataset": Stream(has_length), "batch_size": 3}, train_cfg=cfg, resume=True)
    assert first | second == whole
    assert set(second) == {6, 7, 8, 9, 10}
    # 12 samples of the second pass lay behind, 12 before it, and all but the last batch of the third.
    assert Stream.made - before <= 12 + 24


@ranks(2)
def test_without_a_position_the_past_is_read_again_and_this_is_said(tmp_path: Path):
    loader = {"dataset": Forgetful(), "batch_size": 3}
    cfg = {"max_iters": 7, "val_interval": 100}
    whole = run(tmp_path / "whole", loader, train_cfg=cfg)
    first = run(tmp_path / "work", loader, 6, train_cfg=cfg)
    second = run(tmp_path / "work", loader, train_cfg=cfg, resume=True)
    assert first | second == whole
    if get_rank() == 0:
        (log,) = [path.read_text() for path in tmp_path.glob("work/*/log.txt") if "resumed" in path.read_text()]
        assert "12 samples of Forgetful are made again and discarded, to go on after them" in log


class Stateful:
    """A loader of somebody else's that knows where it is, as torchdata's StatefulDataLoader does."""

    def __init__(self) -> None:
        self.next = 0
        self.rank = get_rank()  # all ranks are to train on the same

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.next < 4:
            self.next += 1
            yield X[self.next :: 4], Y[self.next :: 4]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@ranks(1, 2)
def test_a_loader_that_knows_where_it_is_is_asked(tmp_path: Path):
    whole = run(tmp_path / "whole", Stateful())
    first = run(tmp_path / "work", Stateful(), 7)
    second = run(tmp_path / "work", Stateful(), resume=True)
    assert set(second) == set(range(7, 12))
    assert first | second == whole


@ranks(2)
def test_workers_draw_the_same_in_every_epoch_that_follows(tmp_path: Path):
    loader = {
        "dataset": Noisy(X, Y),
        "batch_size": 3,
        "num_workers": 1,
        "multiprocessing_context": "fork",
    }
    whole = run(tmp_path / "whole", loader)
    first = run(tmp_path / "work", loader, 4)
    second = run(tmp_path / "work", loader, resume=True)
    assert first | second == whole


def test_on_other_ranks_random_numbers_begin_anew_and_this_is_said(tmp_path: Path):
    run_ranks(2, run, tmp_path, LOADERS["samples"]() | {"batch_size": 3}, 8)
    run_ranks(1, run, tmp_path, LOADERS["samples"](), None, resume=True)
    log = sorted(tmp_path.glob("2*/log.txt"))[-1].read_text()
    assert "saved by 2 ranks, so that on 1 random numbers, such as those of dropout, begin anew" in log


@ranks(1, 2)
def test_validation_changes_nothing_in_training(tmp_path: Path):
    loader = LOADERS["augmented here"]()
    assert run(tmp_path, loader, **VALIDATION) == run(tmp_path, loader)


@ranks(2)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_endless_sampler_goes_on_where_it_was(workers, tmp_path: Path):
    context = {"multiprocessing_context": "fork"} if workers else {}
    loader = {
        "dataset": TensorDataset(X[:17], Y[:17]),
        "batch_size": 3,
        "sampler": {"type": "InfiniteSampler"},
        "num_workers": workers,
        **context,
    }
    cfg = {"max_iters": 11, "val_interval": 100}
    whole = run(tmp_path / "whole", loader, train_cfg=cfg)
    first = run(tmp_path / "work", loader, 7, train_cfg=cfg)
    second = run(tmp_path / "work", loader, train_cfg=cfg, resume=True)
    assert set(second) == set(range(7, 11))
    assert first | second == whole
