"""Going on inside an epoch on other ranks, with other batches: which samples are trained on, and what is said."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, WeightedRandomSampler

from lockstep import Session
from lockstep.checkpoint import read_meta
from lockstep.dataset import DefaultSampler
from lockstep.dist import get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.hooks import Hook
from lockstep.runner import Runner
from lockstep.testing import run_ranks

pytestmark = pytest.mark.checkpoints

SIZE, SEED = 24, 7


class Numbers(Dataset[Tensor]):
    """Its samples are their indices; counts those that were read."""

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.read = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        self.read += 1
        return torch.tensor([float(index)])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: Tensor, mode: str = "loss") -> Tensor:
        return self.linear(x).square().mean()


class Noting(Hook):
    """Notes, by iteration, the samples that count and the learning rate; ends the run as a crash would."""

    priority = "LOWEST"

    def __init__(self, stop_after: int | None) -> None:
        self.stop_after = stop_after
        self.seen: dict[int, list[int]] = {}
        self.rates: dict[int, float] = {}

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        self.rates[runner.iter] = runner.optim_wrapper.param_groups[0]["lr"]

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.seen[runner.iter] = [int(x) for x in data_batch.flatten()] if runner.train_loop.samples else []
        if runner.iter + 1 == self.stop_after:
            raise KeyboardInterrupt


class Halves(Sampler[int]):
    """Draws from the global generator: first the even numbers, then the odd ones."""

    def __iter__(self) -> Iterator[int]:
        for first in (0, 1):
            yield from (2 * place + first for place in torch.randperm(SIZE // 2).tolist())

    def __len__(self) -> int:
        return SIZE


class Clock(Halves):
    """Draws other numbers whenever it is asked."""

    begun = 0

    def __iter__(self) -> Iterator[int]:
        Clock.begun += 1
        return iter(torch.randperm(SIZE, generator=torch.Generator().manual_seed(Clock.begun)).tolist())


class ByLoss(Halves):
    resumable = False


class Pairs(Sampler[list[int]]):
    """A batch sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * place, 2 * place + 1] for place in torch.randperm(SIZE // 2).tolist()])

    def __len__(self) -> int:
        return SIZE // 2


class Backwards(DefaultSampler):
    """Has an order of its own, in which it can't begin."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE - 1 - self.rank, -1, -self.world_size))


class KnowsRanks(Sampler[int]):
    """Splits in its own way: each rank has a block."""

    def __init__(self) -> None:
        self.rank, self.num_replicas = get_rank(), get_world_size()

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank * len(self), (self.rank + 1) * len(self)))

    def __len__(self) -> int:
        return SIZE // self.num_replicas


def stateful() -> DataLoader[Tensor]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings(action="ignore", category=UserWarning):  # it calls a function that torch deprecates
        loader: DataLoader[Tensor] = StatefulDataLoader(Numbers(), batch_size=2, shuffle=True)
    return loader


def distributed() -> DataLoader[Tensor]:
    data = Numbers()
    sampler = DistributedSampler(data, get_world_size(), get_rank(), seed=SEED)
    return DataLoader(data, batch_size=2, sampler=sampler)


LOADERS: dict[str, Any] = {
    "config": lambda: {"dataset": Numbers(), "batch_size": 2},
    "endless": lambda: {"dataset": Numbers(), "batch_size": 2, "sampler": {"type": "InfiniteSampler"}},
    "computed": lambda: {
        "dataset": Numbers(),
        "batch_size": 2,
        "sampler": {"type": "DefaultSampler", "computed": True},
    },
    "more data": lambda: {"dataset": Numbers(30), "batch_size": 2},
    "in order": lambda: DataLoader(Numbers(), batch_size=2),
    "halves": lambda: DataLoader(Numbers(), batch_size=2, sampler=Halves()),
    "weighted": lambda: DataLoader(Numbers(), batch_size=2, sampler=WeightedRandomSampler([1.0, 2.0, 3.0] * 8, SIZE)),
    "clock": lambda: DataLoader(Numbers(), batch_size=2, sampler=Clock()),
    "by loss": lambda: DataLoader(Numbers(), batch_size=2, sampler=ByLoss()),
    "batch sampler": lambda: DataLoader(Numbers(), batch_sampler=Pairs()),
    "distributed": distributed,
    "stateful": stateful,
    "subclass": lambda: {"dataset": Numbers(), "batch_size": 2, "sampler": {"type": Backwards}},
    "knows ranks": lambda: DataLoader(Numbers(), batch_size=2, sampler=KnowsRanks()),
}
BY_EPOCH, BY_ITER = {"max_epochs": 3}, {"max_iters": 30}


def train(work_dir: Path, kind: str, stop_after: int | None = None, **changes: Any) -> Noting:
    """Train with checkpoints after each iteration."""
    torch.manual_seed(3)
    noting = Noting(stop_after)
    runner = Runner(
        **{
            "model": Net(),
            "work_dir": work_dir,
            "train_dataloader": LOADERS[kind](),
            "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 1e-4}},
            "train_cfg": BY_EPOCH,
            "randomness": {"seed": SEED},
            "default_hooks": {"checkpoint": {"by_epoch": False, "interval": 1}},
            "custom_hooks": [noting],
            "visualizer": [],
            "resume": stop_after is None,
            **changes,
        }
    )
    try:
        runner.train()
    except KeyboardInterrupt:
        assert stop_after is not None
    return noting


def together(by_rank: Sequence[Noting], until: int = 10**9) -> list[int]:
    """Return the samples of all ranks, in the order in which they were dealt."""
    rows = [[noting.seen[index] for noting in by_rank] for index in sorted(by_rank[0].seen) if index < until]
    return [own[i] for row in rows for i in range(max(map(len, row))) for own in row if i < len(own)]


def order_of(epoch: int, size: int = SIZE) -> list[int]:
    return torch.randperm(size, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()


def log_of(work_dir: Path) -> str:
    return sorted(work_dir.glob("2*/log.txt"))[-1].read_text()


@pytest.mark.parametrize(
    "kind",
    ["config", "computed", "in order", "halves", "weighted", "batch sampler", "distributed", "stateful"],
)
@pytest.mark.parametrize(("saved", "resumed"), [(2, 1), (1, 3)])
def test_the_rest_of_an_epoch_is_dealt_anew(kind, saved, resumed, tmp_path: Path):
    if kind == "stateful":
        pytest.importorskip("torchdata")
    whole = together(run_ranks(1, train, tmp_path / "whole", kind, 10**9))
    # The epoch has 12 iterations on 1 rank, 6 on 2, 4 on 3.
    first = run_ranks(saved, train, tmp_path / "work", kind, stop_after=3)
    second = run_ranks(resumed, train, tmp_path / "work", kind)
    assert min(second[0].seen) == 3
    seen = together(first) + together(second)
    if kind == "batch sampler":  # batches of two samples are dealt whole
        pairs = [sorted(seen[i : i + SIZE]) for i in range(0, len(seen), SIZE)]
        assert pairs == [sorted(whole[i : i + SIZE]) for i in range(0, len(seen), SIZE)]
    else:
        assert seen == whole
    assert "begins anew" not in log_of(tmp_path / "work").replace("dropout, begin anew", "")
    if kind == "config":
        assert whole == order_of(0) + order_of(1) + order_of(2)
        position = read_meta(next(tmp_path.glob("work/*/iter_3")))["position"]
        assert (position["samples"], position["total"], position["batches"]) == (6 * saved, SIZE, 3)
        assert f"{6 * saved} of {SIZE} samples into the epoch" in log_of(tmp_path / "work")


def test_what_workers_draw_is_told_to_begin_anew_where_it_does(tmp_path: Path):
    for workers in (0, 1):
        data = {"dataset": Numbers(), "batch_size": 2, "num_workers": workers}
        for stop in (3, None):
            train(tmp_path / str(workers), "config", stop_after=stop, train_dataloader=data)
        said = "into the epoch; what its workers draw, as for augmentations, begins anew" in log_of(
            tmp_path / str(workers)
        )
        assert said == bool(workers)


def test_it_can_be_resumed_several_times_in_one_epoch(tmp_path: Path):
    seen = together(run_ranks(2, train, tmp_path, "config", 2))
    for size, stop in ((3, 3), (1, 5), (2, 7)):
        seen += together(run_ranks(size, train, tmp_path, "config", stop, resume=True))
    seen += together(run_ranks(3, train, tmp_path, "config"))
    assert seen == order_of(0) + order_of(1) + order_of(2)


def test_nothing_of_the_past_is_read(tmp_path: Path):
    for kind in ("config", "halves", "distributed", "knows ranks"):
        train(tmp_path / kind, kind, 8)
        data = Numbers()
        loader = LOADERS[kind]()
        if isinstance(loader, dict):
            loader["dataset"] = data
        else:
            loader.__dict__["dataset"] = data
        train(tmp_path / kind, kind, train_dataloader=loader, train_cfg={"max_epochs": 1})
        assert data.read == SIZE - 16


def test_a_cosine_over_the_run_goes_on_at_the_same_part_and_a_warm_up_counts_on(tmp_path: Path):
    schedules = [
        {"type": "LinearLR", "start_factor": 0.5, "by_epoch": False, "end": 12},
        {"type": "CosineAnnealingLR", "by_epoch": False, "param_name": "momentum"},
    ]
    changes: dict[str, Any] = {
        "param_scheduler": schedules,
        "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 1e-4, "momentum": 0.5}},
    }

    first = train(tmp_path, "config", 6, **changes)  # half of the first epoch, of 12 iterations
    (second, _) = run_ranks(2, train, tmp_path, "config", **changes)
    whole = train(tmp_path / "whole", "config", 10**9, **changes)
    assert min(second.seen) == 6
    assert max(second.seen) + 1 == 6 + 3 + 6 + 6
    assert first.rates | {i: second.rates[i] for i in range(6, 12)} == {i: whole.rates[i] for i in range(12)}
    log = log_of(tmp_path)
    assert "the global batch has 4 samples now, and had 2" in log
    assert "jump" not in log
    assert "epoch 1 ends after iteration 9, and the run after 21. CosineAnnealingLR goes on at the same part" in log
    state = read_meta(next(tmp_path.glob("*/iter_21")))["param_schedulers"]
    assert [one["count"] for one in state] == [21, 18]  # 18 is the length of a run on two ranks


def test_a_cosine_of_torch_goes_on_at_the_same_part_as_lockstep_s_own(tmp_path: Path):
    rates = {}
    for kind in ("CosineAnnealingLR", torch.optim.lr_scheduler.CosineAnnealingLR):
        warm_up = {"type": "LinearLR", "start_factor": 0.5, "by_epoch": False, "end": 4}
        cosine = {"type": kind, "by_epoch": False, "begin": 4, "eta_min": 1e-6}
        work_dir = tmp_path / str(isinstance(kind, str))
        changes: dict[str, Any] = {
            "param_scheduler": [warm_up, cosine],
            "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 1e-4}},
        }
        train(work_dir, "config", 6, **changes)
        (second, _) = run_ranks(2, train, work_dir, "config", **changes)
        rates[kind] = [second.rates[i] for i in sorted(second.rates)]
        log = log_of(work_dir)
        assert "CosineAnnealingLR goes on at the same part" in log
        assert "CosineAnnealingLR begins after iteration 4 whatever the global batch is" in log
        assert "on their way" not in log
        assert "rises again" not in log
    own, of_torch = rates.values()
    assert of_torch == sorted(of_torch, reverse=True)
    assert of_torch[1:] == pytest.approx(own[1:], rel=1e-9)  # lockstep's own has the saved rate once more


@pytest.mark.parametrize("length", [36, 21])  # as it was saved, and as long as the run on two ranks is
def test_a_length_that_is_written_out_counts_on(length: int, tmp_path: Path):
    def changes(t_max: int) -> dict[str, Any]:
        cosine = {"type": "CosineAnnealingLR", "by_epoch": False, "T_max": t_max}
        return {"param_scheduler": cosine, "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 1e-4}}}

    train(tmp_path, "config", 6, **changes(36))
    (second, _) = run_ranks(2, train, tmp_path, "config", **changes(length))
    assert second.rates == pytest.approx({i: 1e-4 * (1 + math.cos(math.pi * i / length)) / 2 for i in range(6, 21)})
    stops = "CosineAnnealingLR ends after 36 iterations, but the training after 21: the rates stop on their way"
    assert (stops in log_of(tmp_path)) == (length == 36)


@pytest.mark.parametrize(("saved", "resumed"), [(1, 2), (2, 1)])
def test_loops_may_change_between_epochs_and_iterations(saved, resumed, tmp_path: Path):
    endless, epochs = {"kind": "endless", "train_cfg": BY_ITER}, {"kind": "config", "train_cfg": BY_EPOCH}
    for first, second in ((endless, epochs), (epochs, endless)):
        work_dir = tmp_path / f"{first['kind']} first"
        stop = 13 if saved == 1 else 7  # in the second epoch
        seen = together(run_ranks(saved, train, work_dir, stop_after=stop, **first))
        seen += together(run_ranks(resumed, train, work_dir, **second))
        expected = [index for epoch in range(5) for index in order_of(epoch)]
        assert len(seen) >= 2 * SIZE
        assert seen == expected[: len(seen)]


def test_an_order_that_is_another_one_is_noticed(tmp_path: Path):
    train(tmp_path, "clock", 4)
    train(tmp_path, "clock")
    assert "the order of epoch 1 begins with other items than in the run that is resumed" in log_of(tmp_path)


def test_a_sampler_may_say_that_it_cannot_be_resumed(tmp_path: Path):
    train(tmp_path, "by loss", 4)
    second = train(tmp_path, "by loss", train_cfg={"max_epochs": 1})
    assert sorted(together([second])) == list(range(SIZE))
    assert (min(second.seen), max(second.seen)) == (4, 15)
    assert "4 batches into epoch 1. The epoch begins anew: the sampler says by `resumable = False`" in log_of(tmp_path)


@pytest.mark.parametrize("train_cfg", [BY_EPOCH, BY_ITER], ids=["by epoch", "by iteration"])
def test_without_a_global_order_the_epoch_begins_anew_on_other_ranks(train_cfg, tmp_path: Path):
    run_ranks(2, train, tmp_path, "knows ranks", 3, train_cfg=train_cfg)
    (second,) = run_ranks(1, train, tmp_path, "knows ranks", train_cfg=train_cfg)
    assert together([second])[:SIZE] == list(range(SIZE))
    assert min(second.seen) == 3
    assert "The epoch begins anew: each of 2 ranks had an order of its own, which is another one on 1" in log_of(
        tmp_path
    )


def test_a_subclass_with_an_order_of_its_own_goes_on_after_as_many_batches(tmp_path: Path):
    train(tmp_path, "subclass", 4)
    data = Numbers()
    loader = {**LOADERS["subclass"](), "dataset": data}
    second = train(tmp_path, "subclass", train_dataloader=loader, train_cfg={"max_epochs": 1})
    assert together([second]) == list(range(SIZE - 9, -1, -1))
    assert data.read == SIZE - 8


def test_other_data_are_noticed(tmp_path: Path):
    train(tmp_path, "config", 4)
    second = train(tmp_path, "more data", train_cfg={"max_epochs": 1})
    assert together([second]) == order_of(0, 30)[8:]
    assert "the data have 30 samples, but had 24 when" in log_of(tmp_path)


class Drawn(IterableDataset[Tensor]):
    """Draws its samples from generators of Python and of numpy, whose states are tuples and arrays."""

    def __init__(self) -> None:
        self.python, self.numpy, self.left = random.Random(SEED), np.random.RandomState(SEED), SIZE

    def state_dict(self) -> dict[str, Any]:
        return {"python": self.python.getstate(), "numpy": self.numpy.get_state(), "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.python.setstate(state["python"])
        self.numpy.set_state(state["numpy"])
        self.left = state["left"]

    def __iter__(self) -> Iterator[Tensor]:
        while self.left:
            self.left -= 1
            yield torch.tensor([float(5 * self.python.randrange(5) + self.numpy.randint(5))])


class Unsaved(Drawn):
    def state_dict(self) -> dict[str, Any]:
        return {"drawn": {1, 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_states_of_datasets_may_hold_tuples_and_arrays(tmp_path: Path):
    def run(work_dir: Path, stop_after: int | None = None) -> dict[int, list[int]]:
        data = {"dataset": Drawn(), "batch_size": 2}
        return train(work_dir, "config", stop_after, train_dataloader=data, train_cfg=BY_ITER).seen

    whole = run(tmp_path / "whole", 30)
    assert run(tmp_path / "work", 17) | run(tmp_path / "work") == whole
    assert "made again and discarded" not in log_of(tmp_path / "work")


def test_a_state_that_a_checkpoint_cannot_hold_is_refused_with_its_place(tmp_path: Path):
    data = {"dataset": Unsaved(), "batch_size": 2}
    with pytest.raises(ConfigError, match=r"`ranks.0.data.position.workers.0.dataset.drawn` must be .* a builtins.set"):
        train(tmp_path, "config", 2, train_dataloader=data, train_cfg=BY_ITER)


def train_by_hand(work_dir: Path, stop_after: int | None, batch_size: int) -> list[list[int]]:
    seen: list[list[int]] = []
    with Session(work_dir, resume=stop_after is None, randomness={"seed": SEED}, visualizer=[]) as session:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        loader = DataLoader(Numbers(), batch_size=batch_size, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for _ in session.epochs(2):
            for batch in loader:
                if stop_after == len(seen):
                    return seen
                session.step(model(batch))
                seen.append([int(x) for x in batch.flatten()])
                if stop_after == len(seen):
                    session.save()
        assert stop_after is not None or session.iter == 3 + 3 + 6
    return seen


def test_a_loop_by_hand_goes_on_with_the_rest_of_the_epoch(tmp_path: Path):
    def dealt(by_rank: list[list[list[int]]]) -> list[int]:
        return [own[i] for row in zip(*by_rank, strict=True) for i in range(len(row[0])) for own in row]

    first = dealt([train_by_hand(tmp_path, 3, 4)])
    second = dealt(run_ranks(2, train_by_hand, tmp_path, None, 2))
    assert first + second == order_of(0) + order_of(1)
