"""The search for a learning rate: what it finds, and that training afterwards is as if it had not been."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from lockstep.dist import all_gather_object, get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.runner import Runner
from lockstep.runner.lr_finder import LRSearch, smooth
from lockstep.testing import ranks, run_ranks

X = torch.randn(51, 4, generator=torch.Generator().manual_seed(0))
Y = X @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
DATA = TensorDataset(X, Y)
DEFAULT: dict[str, Any] = {
    "train_cfg": {"max_epochs": 2},
    "randomness": {"seed": 3, "diff_rank_seed": True},
    "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 1e-3}},
    "default_hooks": {"logger": {"interval": 1}},
    "visualizer": [],
}


class Net(nn.Module):
    """Has all that a search could leave changed: running statistics, a buffer that is not saved, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls.add_(1)
        noise = 1 + 0.1 * random.random() + 0.001 * self.calls
        out = self.last(nn.functional.dropout(self.norm(self.first(x)).relu(), 0.3))
        return (out - y).square().mean() * noise


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layer(x) - y).square().mean()


class Noisy(TensorDataset):
    """Augments at random, in whichever process it is."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + torch.rand(()) * 0.1, y


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.next = 0

    def __iter__(self):
        while self.next < len(X):
            self.next += 1
            yield X[self.next - 1], Y[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def make(work_dir: Path, model: nn.Module | None = None, loader: Any = None, **changes: Any) -> Runner:
    torch.manual_seed(1)
    loader = {"dataset": DATA, "batch_size": 4} if loader is None else loader
    return Runner(model or Net(), work_dir, train_dataloader=loader, **{**DEFAULT, **changes})


def traces(runner: Runner) -> dict[str, Any]:
    """Train, and return what a search could have changed."""
    runner.train()
    state = {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in runner.strategy.model_state().items()}
    lines = [json.loads(line) for line in (runner.run_dir / "metrics.jsonl").read_text().splitlines()]
    values = [
        [row.get(name) for name in ("iter", "loss", "lr", "grad_norm")] for row in lines if row["mode"] == "train"
    ]
    return {"state": {name: x.tolist() for name, x in state.items()}, "values": values, "next": torch.rand(2).tolist()}


HALF = {
    "type": "AmpOptimWrapper",
    "dtype": "float16",
    "optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9},
    "accumulative_counts": 2,
    "clip_grad": {"max_norm": 0.5},
}
WARM_UP = {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "end": 8}


def compare_with_and_without(work_dir: Path, strategy: Any, changes: dict[str, Any], loader: Any) -> None:
    for_both = {"strategy": strategy, "log_level": "ERROR", **changes}
    first = make(work_dir, loader=loader(), **for_both)
    without = traces(first)
    runner = make(work_dir, loader=loader(), **for_both)
    found = runner.find_lr(1e-5, 1.0, steps=20)
    assert len(set(all_gather_object(str(found)))) == 1
    assert traces(runner) == without


def by_config() -> Any:
    return {"dataset": DATA, "batch_size": 4}


def by_workers() -> Any:
    return DataLoader(Noisy(X, Y), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)


def by_own_generator() -> Any:
    own = torch.Generator().manual_seed(5)
    return DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * 51, 51, generator=own), generator=own)


def by_stream() -> Any:
    return {"dataset": Stream(), "batch_size": 4}


@pytest.mark.parametrize(("size", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
@pytest.mark.parametrize("changes", [{}, {"optim_wrapper": HALF, "param_scheduler": WARM_UP}], ids=["plain", "half"])
def test_training_afterwards_is_as_without_the_search(tmp_path, size, strategy, changes):
    run_ranks(size, compare_with_and_without, tmp_path, strategy, changes, by_config)


_EPOCHS, _ITERS = {"max_epochs": 2}, {"by_epoch": False, "max_iters": 30}


@pytest.mark.parametrize(
    ("loader", "train_cfg"),
    [(by_workers, _EPOCHS), (by_own_generator, _EPOCHS), (by_own_generator, _ITERS), (by_stream, _ITERS)],
)
def test_the_position_in_the_data_is_kept(tmp_path, loader, train_cfg):
    compare_with_and_without(tmp_path, None, {"train_cfg": train_cfg}, loader)


def test_a_search_after_resuming_continues_like_the_first_run(tmp_path):
    traces(make(tmp_path, train_cfg={"max_epochs": 1}))
    without = traces(make(tmp_path, resume=True, load_from=last_checkpoint(tmp_path)))
    runner = make(tmp_path, resume=True, load_from=last_checkpoint(tmp_path, 1))
    runner.find_lr(steps=12)
    assert traces(runner) == without


def last_checkpoint(work_dir: Path, epoch: int = 1) -> Path:
    return sorted(work_dir.glob(f"*/epoch_{epoch}"))[0]


@ranks(1, 2)
def test_the_rates_lie_between_too_slow_and_divergence(tmp_path):
    loader = {"dataset": DATA, "batch_size": 25}
    sgd = {"optimizer": {"type": "SGD", "lr": 1.0}}
    runner = make(tmp_path / str(get_rank()), Line(), loader, optim_wrapper=sgd, log_level="ERROR")
    found = runner.find_lr(1e-4, 10.0)
    too_high = 1 / torch.linalg.eigvalsh(X.T @ X / len(X)).max().item()  # Smith 2015; the loss has the Hessian 2 X'X/n
    assert found.has_diverged
    assert too_high / 100 < found.suggestion < too_high < found.lrs[-1]
    assert found.lrs[1] / found.lrs[0] == pytest.approx(found.lrs[-1] / found.lrs[-2])
    assert runner.optim_wrapper.get_lr() == {"lr": [1.0]}


@ranks(2)
def test_the_loss_is_that_of_all_ranks(tmp_path):
    loader = {"dataset": DATA, "batch_size": 13, "shuffle": False}  # 26 of 52 samples on each rank
    found = make(tmp_path / str(get_rank()), Line(), loader, log_level="ERROR").find_lr(1e-9, 1e-8, steps=10)
    rounded = torch.cat([Y, Y[:1]])
    assert found.losses[0] == pytest.approx(rounded[:26].square().mean().item(), rel=1e-5)
    assert found.losses[1] == pytest.approx(rounded[26:].square().mean().item(), rel=1e-5)


class InfiniteOnLastRank(Line):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        self.calls = getattr(self, "calls", 0) + 1
        return loss * math.inf if self.calls == 6 and get_rank() == get_world_size() - 1 else loss


@ranks(2)
def test_all_ranks_stop_where_one_diverges(tmp_path):
    found = make(tmp_path / str(get_rank()), InfiniteOnLastRank(), log_level="ERROR").find_lr()
    assert (found.has_diverged, len(found.losses), found.losses[-1]) == (True, 6, math.inf)


def test_groups_keep_the_ratio_of_their_rates_and_warm_up_does_not_count(tmp_path):
    model = Net()
    groups = [{"params": model.first.parameters(), "lr": 0.02}, {"params": model.last.parameters(), "lr": 0.2}]
    seen = []
    optimizer = torch.optim.SGD(groups, lr=0.2)
    optimizer.register_step_pre_hook(lambda own, *_: seen.append([group["lr"] for group in own.param_groups]))
    model.norm.requires_grad_(False)
    runner = make(tmp_path, model, optim_wrapper=optimizer, param_scheduler=WARM_UP)
    found = runner.find_lr(1e-4, 1e-1, steps=10)
    assert found.factors == pytest.approx([0.1, 1.0])
    assert [row[1] for row in seen] == pytest.approx(found.lrs)
    assert [row[0] * 10 for row in seen] == pytest.approx(found.lrs)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.002, 0.02])


def test_an_optimizer_with_its_rate_in_a_tensor(tmp_path):
    sgd = {"optimizer": {"type": "SGD", "lr": torch.tensor(0.1)}}
    runner = make(tmp_path, Line(), optim_wrapper=sgd)
    assert runner.find_lr(1e-4, 1e-2, steps=10).factors == [1.0]
    assert runner.optim_wrapper.get_lr() == {"lr": [pytest.approx(0.1)]}


def test_endless_data(tmp_path):
    loader = {"dataset": DATA, "batch_size": 4, "sampler": {"type": "InfiniteSampler"}}
    runner = make(tmp_path, loader=loader, train_cfg={"by_epoch": False, "max_iters": 3})
    assert len(runner.find_lr(1e-6, 1e-3, steps=30).losses) == 30


class SetsTheRate(nn.Module):
    """The loss is what the test wants it to be at each call."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.weight, self.losses = nn.Parameter(torch.zeros(())), iter(losses)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.weight * 0 + next(self.losses)


def search(tmp_path: Path, losses: list[float], **options: Any) -> LRSearch:
    return make(tmp_path, SetsTheRate(losses)).find_lr(1e-4, 1.0, len(losses), **options)


def test_the_fall_from_a_peak_is_no_suggestion(tmp_path):
    losses = [4.0] * 20 + [4.0 - 0.1 * step for step in range(20)] + [7.0] * 5 + [1.5] * 15
    found = search(tmp_path, losses)
    assert not found.has_diverged
    assert found.lrs[20] <= found.suggestion <= found.lrs[40]


@pytest.mark.parametrize(
    "losses", [[1.0] * 30, [1.0 + 0.01 * step for step in range(30)], [1.0 + 0.1 * (step % 2) for step in range(30)]]
)
def test_without_a_fall_there_is_no_suggestion(tmp_path, losses):
    assert search(tmp_path, losses).suggestion is None


def test_a_loss_below_zero_does_not_diverge_by_falling(tmp_path):
    found = search(tmp_path, [-0.1 * step for step in range(40)])
    assert (len(found.losses), found.has_diverged, found.still_falls) == (40, False, True)


def test_divergence_is_a_factor(tmp_path):
    losses = [1.0] * 20 + [3.0] * 30
    assert not search(tmp_path, losses).has_diverged
    assert search(tmp_path, losses, divergence=2.0).has_diverged


def test_smoothing_is_centred_and_leaves_out_what_is_not_finite():
    step = smooth([0.0] * 10 + [1.0] * 10, 2.0)
    assert step[9] + step[10] == pytest.approx(1.0)
    assert smooth([1.0, 1.0, 1.0, math.nan], 2.0)[:3] == pytest.approx([1.0] * 3)


def test_hooks_see_nothing_of_a_search(tmp_path):
    runner = make(tmp_path, custom_hooks=[{"type": "EMAHook"}], default_hooks={"checkpoint": {"interval": 1}})
    runner.find_lr(steps=12)
    assert not list(runner.run_dir.glob("epoch_*"))
    assert (runner.epoch, runner.iter) == (0, 0)


def test_the_records_of_two_searches_and_a_training(tmp_path):
    runner = make(tmp_path)
    runner.find_lr(steps=12)
    found = runner.find_lr(1e-6, 1e-2, steps=15)
    runner.train()
    rows = [json.loads(line) for line in (found.run_dir / "metrics.jsonl").read_text().splitlines()]
    searched = [row for row in rows if row["mode"] == "lr_search"]
    assert [row["iter"] for row in searched] == [*range(1, 13), *range(1, 16)]
    assert [row["lr"] for row in searched[12:]] == found.lrs
    assert searched[-1]["suggestion"] == found.suggestion
    assert {row["mode"] for row in rows} == {"lr_search", "train", "epoch"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"start": 0.0}, "`start` must be a rate above 0, but is 0.0"),
        ({"start": math.nan}, "`start` must be a rate above 0"),
        ({"start": 1.0, "end": 0.1}, "`end` must be a rate above `start`, which is 1.0, but is 0.1"),
        ({"end": math.inf}, "`end` must be a rate above `start`"),
        ({"steps": 1}, "`steps` must be an int of at least 10, but is 1"),
        ({"steps": 20.0}, "`steps` must be an int"),
        ({"divergence": 1.0}, "`divergence` must be a factor above 1"),
    ],
)
def test_ranges_that_are_none(tmp_path, given, says):
    runner = make(tmp_path)
    with pytest.raises(ConfigError, match=says):
        runner.find_lr(**given)
    assert not list(tmp_path.iterdir())


class Wordless(Line):
    def train_step(self, data, optim_wrapper):
        optim_wrapper.update_params(self(*data))
        return {"error": 1.0}


class NotANumber(Line):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * math.nan


class Two(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        return self["a"](x)


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        (Line, {"optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.0}}}, r"rates of SGD must be above 0.*\[0.0\]"),
        (Wordless, {}, "must return its total under 'loss' to search a learning rate, but returned none"),
        (NotANumber, {}, "the loss must be finite before training, but is nan at the first rate, 1e-07"),
        (Line, {"train_dataloader": None}, "`train_dataloader` must be given to search a learning rate, but is None"),
        (
            lambda: Two({"a": Line(), "b": Line()}),
            {"optim_wrapper": {name: {"optimizer": {"type": "SGD", "lr": 0.1}} for name in "ab"}},
            r"`optim_wrapper` must have one optimizer to search its learning rate, but has 2 \(a, b\)",
        ),
    ],
)
def test_trainings_that_have_no_rate_to_search(tmp_path, model, changes, says):
    loader = {"dataset": DATA, "batch_size": 4}
    runner = Runner(model(), tmp_path, **{"train_dataloader": loader, **DEFAULT, **changes})
    with pytest.raises(ConfigError, match=says):
        runner.find_lr()


def test_a_schedule_that_watches_a_metric_does_not_act(tmp_path):
    plateau = {"type": "ReduceOnPlateauLR", "monitor": "loss", "rule": "less"}
    found = make(tmp_path, Line(), param_scheduler=plateau).find_lr(steps=10)
    assert len(found.lrs) == 10


def test_after_an_error_within_the_search_there_is_no_training(tmp_path):
    runner = make(tmp_path, NotANumber())
    with pytest.raises(ConfigError, match="the loss must be finite"):
        runner.find_lr()
    with pytest.raises(RuntimeError, match="has failed before its training"):
        runner.train()
    with pytest.raises(RuntimeError, match="has failed before its training"):
        runner.find_lr()
