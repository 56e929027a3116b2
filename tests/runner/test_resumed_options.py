"""Options of the optimizer and schedules in a run that resumes: as the config says now, or as they were saved."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import StopAfter
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Runner, Session
from lockstep.dist import get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.evaluator import BaseMetric
from lockstep.hooks import Hook
from lockstep.testing import ranks

pytestmark = pytest.mark.checkpoints

X = torch.randn(16, 2, generator=torch.Generator().manual_seed(1))
ADAM = {"type": "AdamW", "lr": 0.1, "weight_decay": 0.01, "betas": (0.9, 0.99)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Tensor, mode: str = "loss") -> Any:
        return self.linear(x).square().mean()


class Rates(Hook):
    """Notes the options with which each iteration is made."""

    def __init__(self) -> None:
        self.by_iter: dict[int, dict[str, Any]] = {}
        self.states: list[set[str]] = []

    def after_train(self, runner: Any) -> None:
        self.states = [set(state) for state in runner.strategy.optim_state()["state"].values()]

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        group = runner.optim_wrapper.param_groups[0]
        self.by_iter[runner.iter] = {
            key: group[key] for key in ("lr", "weight_decay", "betas", "momentum") if key in group
        }

    def lrs(self) -> list[float]:
        return [options["lr"] for options in self.by_iter.values()]


class Loss(BaseMetric):
    """A metric that never improves."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(0)

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        return {"loss": 1.0}


def train(work_dir: Path, epochs: int, optimizer: Any = ADAM, schedule: Any = None, **changes: Any) -> tuple:
    rates = Rates()
    strategy = changes.pop("strategy", "single")
    runner = Runner(
        Net(),
        work_dir,
        train_dataloader={"dataset": TensorDataset(X), "batch_size": 4 // get_world_size()},
        train_cfg={"max_epochs": epochs},
        optim_wrapper={"optimizer": optimizer},
        param_scheduler=schedule,
        strategy="ddp" if strategy == "single" and get_world_size() > 1 else strategy,
        custom_hooks=[rates, StopAfter(changes.pop("stop_after", None))],
        randomness={"seed": 0},
        visualizer=[],
        **changes,
    )
    runner.train()
    weights = runner.run.strategy.model_state().values()
    log = (runner.run_dir / "log.txt").read_text() if runner.rank == 0 else ""
    return rates, [getattr(one, "full_tensor", lambda one=one: one)().clone() for one in weights], log


SCHEDULES = {
    "cosine": {"type": "CosineAnnealingLR"},
    "cosine by iteration": {"type": "CosineAnnealingLR", "by_epoch": False},
    "poly": {"type": "PolyLR", "power": 0.9},
    "warm-up and cosine": [
        {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "end": 3},
        {"type": "CosineAnnealingLR", "begin": 1},
    ],
    "converted": {"type": "PolyLR", "convert_to_iter_based": True},
    "torch's": {"type": torch.optim.lr_scheduler.CosineAnnealingLR},
}


def test_a_rate_in_a_tensor_with_a_dim_is_changed_like_a_number(tmp_path: Path):
    found = []
    for name, kept in {"number": float, "tensor": lambda rate: torch.tensor([rate])}.items():
        for epochs, rate in ((1, 0.1), (2, 0.2)):
            adam = {**ADAM, "lr": kept(rate), "foreach": False}
            _, weights, _ = train(tmp_path / name, epochs, adam, SCHEDULES["cosine"], resume=True)
        found.append(weights)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@ranks(1, 2)
def test_a_longer_training_has_the_rates_of_one_that_was_that_long_from_the_beginning(tmp_path, schedule, strategy):
    straight, _, _ = train(tmp_path / "straight", 4, ADAM, SCHEDULES[schedule], strategy=strategy)
    train(tmp_path / "halves", 2, ADAM, SCHEDULES[schedule], strategy=strategy)
    resumed, _, log = train(tmp_path / "halves", 4, ADAM, SCHEDULES[schedule], strategy=strategy, resume=True)
    assert resumed.lrs() == pytest.approx(straight.lrs()[8:], rel=1e-12)
    assert not log or re.search(r"config has changed the schedule .* -> .*, which hold from here on", log)
    cosine = "the schedule CosineAnnealingLR(epochs 0..2, T_max=2) -> CosineAnnealingLR(epochs 0..4, T_max=4), which"
    assert (cosine in log) is (bool(log) and schedule in ("cosine", "torch's"))
    by_iter = (
        "the schedule CosineAnnealingLR(by_epoch=False) in 2 epochs -> CosineAnnealingLR(by_epoch=False) in 4 epochs"
    )
    assert (by_iter in log) is (bool(log) and schedule == "cosine by iteration")


def warm_up(optimizer: Any, num_warmup_steps: int, num_training_steps: int, options: dict[str, float]) -> Any:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / num_warmup_steps) + options["offset"])


def test_a_function_of_a_schedule_whose_arguments_have_changed_is_described_whole(tmp_path: Path):
    schedule = {"type": warm_up, "num_warmup_steps": 2, "num_training_steps": 4, "options": {"offset": 0.0}}
    train(tmp_path, 1, ADAM, schedule)
    *_, log = train(tmp_path, 2, ADAM, schedule | {"num_training_steps": 8, "options": {"offset": 0.5}}, resume=True)
    former = "warm_up(num_warmup_steps=2, num_training_steps=4, options={'offset': 0.0}) in 1 epochs"
    now = "warm_up(num_warmup_steps=2, num_training_steps=8, options={'offset': 0.5}) in 2 epochs"
    assert f"the config has changed the schedule {former} -> {now}, which hold from here on" in log


class SetsItsRate(torch.optim.Optimizer):
    """Has options of every kind, as optimizers of others do: none at first, dtypes, dicts, tuples in lists."""

    def __init__(self, params: Any) -> None:
        kinds = {"lr": None, "dtype": torch.float32, "norms": {"kind": "spectral", 2: (1, [0.5])}, "empty": {}}
        super().__init__(params, {**kinds, "eps": (None, 1e-3), "inf": float("inf")})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert (group["dtype"], group["norms"][2], group["empty"]) == (torch.float32, (1, [0.5]), {})
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter -= 0.1 / state["step"] * parameter.grad


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@ranks(1, 2)
def test_options_of_any_kind_come_back(tmp_path, strategy):
    optimizer = {"type": SetsItsRate}
    _, straight, _ = train(tmp_path / "straight", 4, optimizer, strategy=strategy)
    train(tmp_path / "halves", 2, optimizer, strategy=strategy)
    _, resumed, _ = train(tmp_path / "halves", 4, optimizer, strategy=strategy, resume=True)
    assert all(map(torch.equal, straight, resumed))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": {"type": "LinearLR"}}, "LinearLR changes `lr`, which this optimizer sets itself"),
        ({"auto_scale_lr": {"enable": True, "base_batch_size": 8}}, "`auto_scale_lr` multiplies learning rates, which"),
    ],
)
def test_a_rate_that_the_optimizer_sets_itself_is_not_changed(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        train(tmp_path, 1, {"type": SetsItsRate}, **changes)


def test_a_longer_training_changes_no_schedule_that_says_when_it_ends(tmp_path):
    schedules = [
        {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "end": 3},
        {"type": "CosineAnnealingLR", "begin": 1, "end": 4, "convert_to_iter_based": True},
    ]
    train(tmp_path, 2, ADAM, schedules)
    _, _, log = train(tmp_path, 4, ADAM, schedules, resume=True)
    assert "the optimizer's options and schedules go on as they were saved: the config has the same" in log


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@ranks(1, 2)
def test_options_that_the_config_changes_hold(tmp_path, strategy):
    other = {"type": "AdamW", "lr": 0.2, "weight_decay": 0.05, "betas": (0.8, 0.99)}
    train(tmp_path, 1, ADAM, strategy=strategy)
    resumed, _, log = train(tmp_path, 2, other, strategy=strategy, resume=True)
    assert resumed.by_iter[4] == {"lr": 0.2, "weight_decay": 0.05, "betas": (0.8, 0.99)}
    again, _, _ = train(tmp_path, 3, other, strategy=strategy, resume=True)
    assert again.by_iter[8] == resumed.by_iter[4]
    assert not log or "lr 0.1 -> 0.2" in log


@pytest.mark.parametrize(
    ("kind", "off", "on", "key"),
    [
        ("AdamW", {"amsgrad": False}, {"amsgrad": True}, "max_exp_avg_sq"),
        ("SGD", {"momentum": 0}, {"momentum": 0.9}, "momentum_buffer"),
        ("RMSprop", {"centered": False}, {"centered": True}, "grad_avg"),
    ],
)
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@ranks(1, 2)
def test_an_option_that_is_switched_on_or_off_gives_and_takes_its_state(tmp_path, strategy, kind, off, on, key):
    for epochs, options in enumerate((off, on, on, off, off), 1):
        optimizer = {"type": kind, "lr": 0.01, **options}
        rates, weights, _ = train(tmp_path, epochs, optimizer, strategy=strategy, resume=epochs > 1)
        assert [key in kept for kept in rates.states] == [options is on] * len(rates.states)
        assert all(one.isfinite().all() for one in weights)


@ranks(1, 2)
def test_what_was_saved_holds_if_it_is_to(tmp_path):
    other = {"type": "AdamW", "lr": 0.2, "weight_decay": 0.05, "betas": (0.8, 0.99)}
    train(tmp_path, 2, ADAM, SCHEDULES["poly"])
    options = {"resume": True, "resume_options": "checkpoint"}
    resumed, _, log = train(tmp_path, 4, other, SCHEDULES["poly"], **options)
    assert resumed.by_iter[8] == {"lr": 0.0, "weight_decay": 0.01, "betas": (0.9, 0.99)}
    assert not log or "resume_options='checkpoint'" in log
    # The config of that checkpoint is what holds, so that it has been changed here, too.
    later, _, _ = train(tmp_path, 5, other, None, resume=True)
    assert later.by_iter[16] == {"lr": 0.2, "weight_decay": 0.05, "betas": (0.8, 0.99)}


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_a_config_that_stays_changes_nothing(tmp_path, schedule):
    cfg = SCHEDULES.get(schedule)
    hooks = {"checkpoint": {"by_epoch": False, "interval": 3}}
    straight, weights, _ = train(tmp_path / "straight", 3, ADAM, cfg)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", 3, ADAM, cfg, default_hooks=hooks, stop_after=9)
    resumed, again, log = train(tmp_path / "cut", 3, ADAM, cfg, resume=True)
    assert resumed.lrs() == straight.lrs()[9:]
    assert "go on as they were saved: the config has the same" in log
    for one, other in zip(weights, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("before", "after"), [("cosine", "warm-up and cosine"), ("warm-up and cosine", "poly"), ("poly", "torch's")]
)
def test_other_schedules_go_on_where_they_would_be(tmp_path, before, after):
    straight, _, _ = train(tmp_path / "straight", 3, ADAM, SCHEDULES[after])
    train(tmp_path / "halves", 1, ADAM, SCHEDULES[before])
    resumed, _, _ = train(tmp_path / "halves", 3, ADAM, SCHEDULES[after], resume=True)
    assert resumed.lrs() == pytest.approx(straight.lrs()[4:], rel=1e-12)
    if len(SCHEDULES[before]) != len(SCHEDULES[after]) or isinstance(SCHEDULES[before], list):
        with pytest.raises(ConfigError, match=r"schedulers to resume from.*resume_options='config'"):
            train(tmp_path / "halves", 4, ADAM, [], resume=True, resume_options="checkpoint")


@pytest.mark.parametrize("stop_after", [3, 6])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("cosine", "cosine by iteration"),
        ("cosine by iteration", "cosine"),
        ("cosine", "converted"),
        ("converted", "poly"),
        ("torch's", "converted"),
        ("warm-up and cosine", "cosine and warm-up"),
    ],
)
def test_a_schedule_that_counts_in_another_unit_has_the_rates_of_one_that_always_did(
    tmp_path, before, after, stop_after
):
    schedules = {**SCHEDULES, "cosine and warm-up": SCHEDULES["warm-up and cosine"][::-1]}
    straight, _, _ = train(tmp_path / "straight", 3, ADAM, schedules[after])
    hooks = {"checkpoint": {"by_epoch": False, "interval": 1}}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", 3, ADAM, schedules[before], default_hooks=hooks, stop_after=stop_after)
    with pytest.raises(ConfigError, match=r"must count (batches|epochs) to resume from .*resume_options='config'"):
        train(tmp_path / "cut", 3, ADAM, schedules[after], resume=True, resume_options="checkpoint")
    resumed, _, _ = train(tmp_path / "cut", 3, ADAM, schedules[after], resume=True)
    assert resumed.lrs() == pytest.approx(straight.lrs()[stop_after:], rel=1e-12)


def test_options_are_the_configs_where_their_schedules_are_taken_away(tmp_path):
    momentum = {"type": "LinearMomentum", "start_factor": 0.5, "end": 4}
    train(tmp_path, 2, ADAM, [SCHEDULES["poly"], momentum])
    without_momentum, _, _ = train(tmp_path, 3, ADAM, [SCHEDULES["poly"]], resume=True)
    assert [one["betas"] for one in without_momentum.by_iter.values()] == [(0.9, 0.99)] * 4
    resumed, _, log = train(tmp_path, 4, ADAM, None, resume=True)
    assert resumed.lrs() == [0.1] * 4
    assert "-> none, which hold from here on" in log


def test_a_schedule_that_follows_a_metric_begins_with_the_configs_rate_in_place_of_another_kind(tmp_path):
    plateau = {"type": "ReduceOnPlateauLR", "patience": 0, "factor": 0.5}
    data = {"val_dataloader": {"dataset": TensorDataset(X), "batch_size": 4}, "val_evaluator": Loss()}
    train(tmp_path, 2, ADAM, SCHEDULES["cosine"], **data)
    resumed, _, log = train(tmp_path, 5, ADAM, plateau, resume=True, **data)
    assert resumed.lrs() == [0.1] * 4 + [0.05] * 4 + [0.025] * 4  # the first validation is the one to beat
    assert "-> ReduceOnPlateauLR(" in log


def test_a_rate_with_a_schedule_changes_with_the_config(tmp_path):
    other = {**ADAM, "lr": 0.4}
    straight, _, _ = train(tmp_path / "straight", 4, other, SCHEDULES["warm-up and cosine"])
    train(tmp_path / "halves", 2, ADAM, SCHEDULES["warm-up and cosine"])
    resumed, _, _ = train(tmp_path / "halves", 4, other, SCHEDULES["warm-up and cosine"], resume=True)
    assert resumed.lrs() == pytest.approx(straight.lrs()[8:], rel=1e-12)


def test_a_rate_that_follows_a_metric_changes_in_proportion(tmp_path):
    schedule = {"type": "ReduceOnPlateauLR", "patience": 1, "factor": 0.5}
    data = {"val_dataloader": {"dataset": TensorDataset(X), "batch_size": 4}, "val_evaluator": Loss()}
    _, _, _ = train(tmp_path, 4, ADAM, schedule, **data)
    resumed, _, _ = train(tmp_path, 5, {**ADAM, "lr": 1.0}, schedule, resume=True, **data)
    assert resumed.by_iter[16]["lr"] == pytest.approx(0.5)


def test_without_the_optimizers_state_a_schedule_goes_on(tmp_path):
    straight, _, _ = train(tmp_path / "straight", 4, ADAM, SCHEDULES["poly"])
    hooks = {"default_hooks": {"checkpoint": {"save_optimizer": False}}}
    train(tmp_path / "halves", 2, ADAM, SCHEDULES["poly"], **hooks)
    resumed, _, _ = train(tmp_path / "halves", 4, ADAM, SCHEDULES["poly"], resume=True)
    assert resumed.lrs() == pytest.approx(straight.lrs()[8:], rel=1e-12)


def warmed_up(optimizer: Any, total: int) -> Any:
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [2])


def one_cycle(optimizer: Any, total: int) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 10 * optimizer.param_groups[0]["lr"], total + 2)


def falling(optimizer: Any, total: int) -> Any:
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))


def warmed_up_by_a_function(optimizer: Any, total: int) -> Any:
    warm_up = LambdaLR(optimizer, lambda step: (step + 1) / total)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, T_max=9)], [4])


def loop_by_hand(
    work_dir: Path, epochs: int, lr: float, total: int, schedule_of: Any = warmed_up, **options: Any
) -> list[float]:
    session = Session(work_dir, randomness={"seed": 0}, log_level="ERROR", **options)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    schedule = schedule_of(optimizer, total)
    loader = DataLoader(TensorDataset(X), batch_size=4 // get_world_size())
    model, optim, batches = session.prepare(model, optimizer, loader, schedulers=[schedule])
    rates = []
    for _ in session.epochs(epochs):
        rates.append(optim.param_groups[0]["lr"])
        for (x,) in batches:
            session.step(model(x))
        schedule.step()
    return rates


@pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step")
@pytest.mark.parametrize(
    ("lr", "total", "schedule_of"),
    [
        *((0.2, 4, warmed_up), (0.2, 8, warmed_up), (0.6, 8, warmed_up), (0.6, 4, one_cycle), (0.6, 8, one_cycle)),
        *((0.2, 8, falling), (0.2, 4, falling), (0.2, 8, warmed_up_by_a_function)),
    ],
)
@ranks(1, 2)
def test_schedules_of_a_session_follow_the_script(tmp_path, lr, total, schedule_of):
    straight = loop_by_hand(tmp_path / "straight", 6, lr, total, schedule_of)
    loop_by_hand(tmp_path / "halves", 3, 0.2, 4, schedule_of)
    resumed = loop_by_hand(tmp_path / "halves", 6, lr, total, schedule_of, resume=True)
    assert resumed == pytest.approx(straight[3:], rel=1e-12)
    if get_rank() == 0 and total != 4 and schedule_of is warmed_up:
        log = max(tmp_path.glob("halves/*/log.txt")).read_text()
        assert "the schedule SequentialLR, 'T_max': 4 -> 'T_max': 8" in log


@pytest.mark.parametrize("others", [False, True])
def test_a_session_without_its_former_schedule_has_the_rate_of_the_script(tmp_path, others):
    def train_by_hand(epochs: int, *schedules: Callable[[Any], Any]) -> list[float]:
        session = Session(tmp_path, resume=True)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        schedulers = [schedule(optimizer) for schedule in schedules]
        loader = DataLoader(TensorDataset(X), batch_size=4)
        model, optim, batches = session.prepare(model, optimizer, loader, schedulers=schedulers)
        for _ in session.epochs(epochs):
            for (x,) in batches:
                session.step(model(x))
            for schedule in schedulers:
                schedule.step(*([1.0] if isinstance(schedule, ReduceLROnPlateau) else []))
        assert "is not handed to prepare" not in (session.run.run_dir / "log.txt").read_text()
        return [group["lr"] for group in optim.param_groups]

    assert train_by_hand(2, lambda optimizer: CosineAnnealingLR(optimizer, T_max=2)) == [0.0]
    if others:
        assert train_by_hand(3, lambda optimizer: ReduceLROnPlateau(optimizer, patience=0)) == [0.2]
        assert train_by_hand(4, lambda optimizer: ReduceLROnPlateau(optimizer, patience=0)) == pytest.approx([0.02])
    else:
        assert train_by_hand(3) == [0.2]


def test_another_word_is_refused(tmp_path):
    with pytest.raises(TypeError, match="`resume_options` must be 'config' or 'checkpoint', but is 'configs': did you"):
        Runner(Net(), tmp_path, resume_options="configs")
