"""A run that goes on under another strategy in the same processes, as if it had been one run."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lockstep.checkpoint import find_last_checkpoint
from lockstep.dist import all_gather_object, get_rank, get_world_size
from lockstep.errors import ConfigError, Preempted
from lockstep.evaluator import BaseMetric
from lockstep.hooks import EMAHook, Hook
from lockstep.runner import Runner, Session
from lockstep.runner.agreement import Request
from lockstep.testing import ranks

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)


class Points(Dataset[tuple[Tensor, Tensor, int]]):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return X[index], Y[index], index

    def __len__(self) -> int:
        return len(X)


class Net(nn.Module):
    """Draws random numbers, and notes the samples that it is trained with."""

    seen: list[int] = []

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.3), nn.Linear(12, 1))

    def forward(self, x: Tensor, y: Tensor, index: Tensor, mode: str = "tensor") -> Any:
        out = self.layers(x)
        if mode == "predict":
            return (out - y).square()
        Net.seen.extend(index.tolist())
        return (out - y).square().mean()


class Error(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.extend(data_samples[:, 0].tolist())

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"error": sum(results) / len(results)}


def seeded() -> Net:
    torch.manual_seed(3)
    return Net()


class Watch(Hook):
    """Asks for strategies after the iterations of their keys; notes losses, metrics and models."""

    priority = "VERY_LOW"

    def __init__(self, plan: dict[int, Any]) -> None:
        self.plan = plan
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.metrics: list[float] = []
        self.strategies: list[str] = []
        self.models: list[ref[Any]] = []
        self.alive: list[int] = []

    def before_train(self, runner) -> None:
        gc.collect()
        self.alive.append(sum(model() is not None for model in self.models))
        self.models.append(ref(next(runner.model.parameters())))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.losses.append(float(outputs["loss"]))
        self.rates.append(runner.optim_wrapper.get_lr()["lr"][0])
        self.strategies.append(type(runner.strategy).__name__.removesuffix("Strategy"))
        if runner.iter + 1 in self.plan:
            runner.switch_strategy(self.plan[runner.iter + 1])

    def after_val_epoch(self, runner, metrics=None) -> None:
        self.metrics.append(metrics["error"])


def train(work_dir: Path, plan: dict[int, Any], **changes: Any) -> tuple[Watch, Runner]:
    watch = Watch(plan)
    Net.seen = []
    size = 8 // get_world_size()
    runner = Runner(
        **{
            "model": seeded,
            "work_dir": work_dir,
            "train_dataloader": DataLoader(Points(), batch_size=size, shuffle=True),
            "val_dataloader": DataLoader(Points(), batch_size=size),
            "val_evaluator": Error(),
            "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 0.02}},
            "param_scheduler": {"type": "CosineAnnealingLR", "by_epoch": False},
            "train_cfg": {"max_epochs": 2},
            "randomness": {"seed": 7, "diff_rank_seed": True},
            "custom_hooks": [watch, {"type": "EMAHook", "momentum": 0.1}],
            "visualizer": [],
            **changes,
        }
    )
    runner.train()
    return watch, runner


def assert_alike(one: Watch, other: Watch) -> None:
    for left, right in ((one.losses, other.losses), (one.rates, other.rates), (one.metrics, other.metrics)):
        assert len(left) == len(right) > 0
        torch.testing.assert_close(torch.tensor(left), torch.tensor(right), rtol=0, atol=1e-6)


def names(*counts: tuple[str, int]) -> list[str]:
    return [name for name, count in counts for _ in range(count)]


@ranks(2)
def test_ddp_fsdp_ddp_within_an_epoch(tmp_path: Path):
    whole, _ = train(tmp_path / "whole", {})
    seen = all_gather_object(Net.seen)
    watch, runner = train(tmp_path / "switched", {2: "fsdp", 5: "ddp", 9: {"type": "FSDPStrategy"}})
    assert_alike(whole, watch)
    assert all_gather_object(Net.seen) == seen
    drawn = [sample for rank in seen for sample in rank[:24]]
    assert sorted(drawn) == list(range(48))
    assert watch.strategies == names(("DDP", 2), ("FSDP", 3), ("DDP", 4), ("FSDP", 3))
    assert watch.alive == [0, 0, 0, 0]  # at the begin of each part, no model of the parts before
    assert type(runner.strategy).__name__ == "FSDPStrategy"
    # One run: one folder, with everything in it.
    (folder,) = (path for path in (tmp_path / "switched").iterdir() if path.is_dir())
    checkpoints = {path.name for path in folder.iterdir() if path.is_dir()}
    assert checkpoints == {"iter_2", "iter_5", "iter_9", "epoch_1", "epoch_2"}
    assert "FSDPStrategy instead of DDPStrategy from iteration 3 on" in (folder / "log.txt").read_text()


class Tracker:
    """Counts how often it is opened and closed, and notes the steps at which it gets losses."""

    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.steps: list[int] = []

    def open(self, run: Any) -> None:
        self.opened += 1

    def add_scalars(self, scalars: dict[str, Any], step: int) -> None:
        if "train/loss" in scalars:
            self.steps.append(step)

    def close(self) -> None:
        self.closed += 1


ITERATIONS: dict[str, Any] = {
    "train_cfg": {"by_epoch": False, "max_iters": 10, "val_interval": 4},
    "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 0.02}, "accumulative_counts": 3},
}


@ranks(2)
def test_a_window_of_accumulation_is_completed_first(tmp_path: Path):
    whole, _ = train(tmp_path / "whole", {}, **ITERATIONS)
    watch, _ = train(tmp_path / "switched", {1: "fsdp", 3: "ddp", 4: "fsdp"}, **ITERATIONS)
    assert_alike(whole, watch)
    # What is asked for last counts: that of 3 came before the end of the window.
    assert watch.strategies == names(("DDP", 6), ("FSDP", 4))


@ranks(2)
def test_hooks_and_models_that_are_objects(tmp_path: Path):
    """A module can go from DDP to another strategy, an average of weights too; trackers stay open."""
    trained = []
    for plan in ({}, {4: "ddp", 7: "fsdp"}):
        watch, tracker = Watch(plan), Tracker()
        # Of the last checkpoints, two are kept, those of switches included.
        checkpoint = {"by_epoch": False, "interval": 2, "max_keep_ckpts": 2}
        _, runner = train(
            tmp_path / f"{len(plan)}", {}, model=seeded(), visualizer=tracker,
            custom_hooks=[watch, EMAHook(momentum=0.1)],
            default_hooks={"logger": {"interval": 1}, "checkpoint": checkpoint},
        )  # fmt: skip
        trained.append(watch)
        folders = {path.name for path in runner.run_dir.iterdir() if path.is_dir()}
        assert folders == {"iter_10", "iter_12"}
        if get_rank() == 0:
            assert (tracker.opened, tracker.closed) == (1, 1)
            assert tracker.steps == list(range(1, 13))
    assert_alike(*trained)
    assert trained[1].strategies == names(("DDP", 7), ("FSDP", 5))
    with pytest.raises(RuntimeError, match=r"before or during the training, but this Runner has trained"):
        runner.switch_strategy("ddp")


@ranks(2)
def test_what_can_not_be_built_anew_is_refused_and_the_training_goes_on(tmp_path: Path):
    refusals = []

    class Ask(Hook):
        def __init__(self, strategy: Any) -> None:
            self.strategy = strategy

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
            try:
                runner.switch_strategy(self.strategy)
            except (ConfigError, KeyError) as error:
                refusals.append(str(error))
            assert runner.next_strategy is None

    short = {"train_cfg": {"by_epoch": False, "max_iters": 1}, "val_dataloader": None, "val_evaluator": None}
    short["param_scheduler"] = None
    train(tmp_path, {}, model=seeded(), strategy="fsdp", custom_hooks=[Ask("ddp")], **short)
    assert "`model` must be built anew to switch the strategy, but is a module that is laid out for FSDP" in refusals[0]
    assert "Give its config or a function that returns it" in refusals[0]
    net = seeded()
    adam = torch.optim.AdamW(net.parameters())
    train(tmp_path, {}, model=net, optim_wrapper={"optimizer": adam}, custom_hooks=[Ask("fsdp")], **short)
    assert "`optim_wrapper` must be a config to switch the strategy, but has a AdamW" in refusals[1]
    train(tmp_path, {}, custom_hooks=[Ask("fsdq")], **short)
    assert "fsdq" in refusals[2]
    session = Session(tmp_path, visualizer=[], log_level="ERROR", custom_hooks=[Ask("fsdp")])
    net = nn.Linear(6, 1)
    model, _, loader = session.prepare(net, torch.optim.SGD(net.parameters()), DataLoader(Points(), batch_size=24))
    for _ in session.epochs(1):
        for x, y, _ in loader:
            session.step(nn.functional.mse_loss(model(x), y))
    assert "this loop is a Session's" in refusals[3]
    assert len(refusals) == 4


@ranks(2)
def test_saves_in_the_background_and_workers_and_an_early_stop(tmp_path: Path):
    class Stop(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
            if runner.iter == 3:  # after this epoch, and so it is not worth a switch any more
                runner.train_loop.stop_training = True

    watch = Watch({2: "fsdp", 4: "ddp"})
    _, runner = train(
        tmp_path, {}, custom_hooks=[Stop(), watch], test_evaluator=Error(),
        train_dataloader=DataLoader(Points(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True),
        test_dataloader=DataLoader(Points(), batch_size=4),
        default_hooks={"checkpoint": {"by_epoch": False, "interval": 1, "async_save": True}},
    )  # fmt: skip
    assert (runner.iter, runner.epoch) == (6, 1)
    assert watch.strategies == names(("DDP", 2), ("FSDP", 4))
    assert sorted(sample for rank in all_gather_object(Net.seen) for sample in rank) == list(range(48))
    assert {path.name for path in runner.run_dir.iterdir() if path.is_dir()} == {f"iter_{done}" for done in range(1, 7)}
    assert runner.test()["error"] == pytest.approx(watch.metrics[-1], abs=1e-6)


@ranks(2)
def test_ranks_that_share_samples_from_then_on(tmp_path: Path):
    """With tensor parallelism the global batch is half as large; each sample of the epoch is still seen once."""
    parallel = {
        "type": "fsdp",
        "tensor_parallel": {"degree": 2, "plan": {"layers.0": "colwise", "layers.2": "rowwise"}},
    }
    _, runner = train(tmp_path, {}, train_cfg={"max_epochs": 1}, custom_hooks=[Watch({2: parallel})])
    assert runner.iter == 2 + 8
    first, second = all_gather_object(Net.seen)
    assert first[8:] == second[8:]
    assert sorted([*first, *second[:8]]) == list(range(48))


@ranks(2)
def test_a_strategy_that_fails_leaves_a_checkpoint_to_resume_from(tmp_path: Path):
    whole, _ = train(tmp_path / "whole", {})
    tracker = Tracker()
    with pytest.raises(ConfigError, match="'single'") as caught:
        train(tmp_path / "failed", {5: "single"}, visualizer=tracker)
    notes = " ".join(caught.value.__notes__)
    assert "The state before the switch is saved: start again with resume=True" in notes
    assert "iter_5" in notes
    assert "after 5 iterations" in notes
    assert tracker.closed == (get_rank() == 0)
    assert find_last_checkpoint(tmp_path / "failed").name == "iter_5"
    rest, _ = train(tmp_path / "failed", {}, resume=True, strategy="fsdp")
    assert_alike(whole, _joined(Watch({}), whole, 5, rest))


def _joined(into: Watch, first: Watch, count: int, rest: Watch) -> Watch:
    into.losses, into.rates = first.losses[:count] + rest.losses, first.rates[:count] + rest.rates
    into.metrics = rest.metrics
    return into


@ranks(2)
def test_a_stop_at_the_point_of_the_switch_ends_the_training_there(tmp_path: Path):
    class Stop(Hook):
        def __init__(self, by_asking: bool) -> None:
            self.by_asking = by_asking

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
            request, agreement = Request("stop", "a test"), runner.agreement
            if runner.iter != 4:
                return
            if not self.by_asking:
                agreement.settle(agreement.begin(request))
            elif runner.rank == 0:  # perhaps the other rank has announced the next point by then
                agreement.ask(request)
            if self.by_asking:
                while not agreement.is_stopping:
                    time.sleep(0.01)

    for by_asking in (False, True):
        with pytest.raises(Preempted):
            train(tmp_path, {}, custom_hooks=[Watch({5: "fsdp"}), Stop(by_asking)])
        assert find_last_checkpoint(tmp_path).name == "iter_5"


def test_one_process_switches_before_and_in_its_training(tmp_path: Path):
    whole, _ = train(tmp_path / "whole", {}, model=seeded())
    # 6 is the end of an epoch, 12 that of the training.
    watch, _ = train(tmp_path / "switched", {3: "ddp", 6: "single", 12: "ddp"}, model=seeded(), strategy="single")
    assert_alike(whole, watch)
    assert watch.strategies == names(("SingleDevice", 3), ("DDP", 3), ("SingleDevice", 6))
    assert watch.alive == [0, 1, 2, 3]  # the module is the user's own

    _, runner = train(tmp_path / "late", {3: "ddp"}, train_cfg={"by_epoch": False, "max_iters": 3})
    said = "the training has ended before it could go on under another strategy"
    assert said in (runner.run_dir / "log.txt").read_text()

    runner = Runner(seeded, tmp_path / "before", train_dataloader=DataLoader(Points(), batch_size=48), visualizer=[],
                    val_dataloader=DataLoader(Points(), batch_size=48), val_evaluator=Error())  # fmt: skip
    with pytest.raises(KeyError, match="fsdq"):
        runner.switch_strategy("fsdq")
    runner.switch_strategy("ddp")
    runner.val()
    assert type(runner.strategy).__name__ == "DDPStrategy"
    with pytest.raises(RuntimeError, match="this Runner has evaluated already"):
        runner.switch_strategy("single")


def test_a_switch_after_a_search_comes_before_the_first_iteration(tmp_path: Path):
    class Rates(Hook):
        seen: list[str] = []

        def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
            self.seen.append(type(runner.strategy).__name__)

    runner = Runner(
        lambda: nn.Linear(6, 1), tmp_path, loss=lambda outputs, batch: (outputs - batch[1]).square().mean(),
        train_dataloader=[(X[:24], Y[:24]), (X[24:], Y[24:])], train_cfg={"max_epochs": 1}, visualizer=[],
        custom_hooks=[Rates()], log_level="WARNING",
    )  # fmt: skip
    runner.find_lr(steps=10)
    runner.switch_strategy("ddp")
    runner.train()
    assert Rates.seen == ["DDPStrategy"] * 2


def test_a_function_that_builds_no_module_is_refused(tmp_path: Path):
    with pytest.raises(TypeError, match=r"`model` must build a torch\.nn\.Module, but built 3"):
        Runner(lambda: 3, tmp_path, train_dataloader=[(X, Y)]).train()
