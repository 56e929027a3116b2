"""Resuming a run whose parameters have been frozen or unfrozen since, or whose optimizer is another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.dist import get_world_size
from lockstep.errors import ConfigError
from lockstep.hooks import Hook
from lockstep.model import unwrap_model
from lockstep.optim import OptimWrapper
from lockstep.runner import Runner
from lockstep.testing import ranks

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """`spare` is never used."""

    def __init__(self, frozen: str | None = None) -> None:
        super().__init__()
        self.body, self.head, self.spare = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(2, 2)
        if frozen is not None:
            self.get_submodule(frozen).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).square().mean()


class AddBody(Hook):
    """Unfreezes `body` after the first epoch, in a group of its own."""

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch > 0 and not (body := unwrap_model(runner.model).body).weight.requires_grad:
            body.requires_grad_(True)
            runner.optim_wrapper.add_param_group({"params": list(body.parameters()), "lr": 0.002})


def run(work_dir: Path, epochs: int, frozen: str | None = None, optimizer: str = "Adam", **changes: Any) -> Runner:
    torch.manual_seed(3)
    runner = Runner(
        Net(frozen),
        work_dir,
        train_dataloader={"dataset": TensorDataset(X), "batch_size": 4 // get_world_size()},
        train_cfg={"max_epochs": epochs},
        optim_wrapper={"optimizer": {"type": optimizer, "lr": 0.01}},
        randomness={"seed": 7},
        strategy=None if get_world_size() == 1 else {"type": "ddp", "find_unused_parameters": True},
        visualizer=[],
        **changes,
    )
    runner.train()
    return runner


def steps_of(runner: Runner) -> dict[str, int]:
    entries = runner.strategy.optim_state()["state"]
    return {name.removesuffix(".bias"): int(entry["step"]) for name, entry in entries.items() if "bias" in name}


@ranks(1, 2)
@pytest.mark.parametrize("frozen", [None, "body"])
def test_parameters_without_a_state_begin_without(frozen: str | None, tmp_path: Path):
    assert steps_of(run(tmp_path, 1, frozen)) == ({"head": 3, "body": 3} if frozen is None else {"head": 3})
    resumed = run(tmp_path, 2, resume=True)
    assert steps_of(resumed) == {"head": 6, "body": 6 if frozen is None else 3}


@ranks(1, 2)
def test_the_state_of_what_is_frozen_now_is_left_alone(tmp_path: Path):
    run(tmp_path, 1)
    resumed = run(tmp_path, 2, "body", resume=True)
    assert steps_of(resumed)["head"] == 6
    assert "left out" not in (resumed.run_dir / "log.txt").read_text()  # the optimizer has it


class FreezeBody(Hook):
    """Freezes `body` in the second epoch: there alone, from there on, or after each iteration until the next."""

    def __init__(self, when: str) -> None:
        self.when = when

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch == 1 or (runner.epoch > 1 and self.when == "from there on"):
            unwrap_model(runner.model).body.requires_grad_(False)

    def before_train_iter(self, runner: Any, **batch: Any) -> None:
        if self.when == "between iterations":
            unwrap_model(runner.model).body.requires_grad_(True)

    def after_train_iter(self, runner: Any, **batch: Any) -> None:
        if self.when == "between iterations":
            unwrap_model(runner.model).body.requires_grad_(False)


@ranks(1, 2)
@pytest.mark.parametrize("when", ["there alone", "from there on", "between iterations"])
def test_what_a_hook_has_frozen_and_a_resumed_training_trains_is_named(when: str, tmp_path: Path):
    run(tmp_path, 2, custom_hooks=[FreezeBody(when)])
    resumed = run(tmp_path, 3, resume=True, custom_hooks=[FreezeBody(when)])
    log = (resumed.run_dir / "log.txt").read_text()
    says = "trained now, but frozen when the checkpoint was saved: body.weight, body.bias. If that is not on purpose"
    assert log.count(says) == (when == "there alone")


@ranks(1, 2)
@pytest.mark.parametrize("when", ["there alone", "from there on"])
def test_what_a_hook_has_unfrozen_and_a_resumed_training_freezes_is_named(when: str, tmp_path: Path):
    class Unfreeze(Hook):
        def before_train_epoch(self, runner: Any) -> None:
            body = unwrap_model(runner.model).body
            if runner.epoch == 0:
                body.requires_grad_(False)
            elif runner.epoch == 1 or when == "from there on":
                body.requires_grad_(True)

    class Built(Unfreeze):
        def before_train(self, runner: Any) -> None:
            unwrap_model(runner.model).body.requires_grad_(False)

    run(tmp_path, 2, custom_hooks=[Built()])
    resumed = run(tmp_path, 3, resume=True, custom_hooks=[Built()])
    log = (resumed.run_dir / "log.txt").read_text()
    says = "frozen now, but trained when the checkpoint was saved: body.weight, body.bias. If that is not on purpose"
    assert log.count(says) == (when == "there alone")


@ranks(1, 2)
def test_a_state_that_the_optimizer_has_no_place_for_yet_is_named(tmp_path: Path):
    def unfrozen(epochs: int, **changes: Any) -> Runner:
        net = Net("body")
        torch.manual_seed(3)
        runner = Runner(
            net,
            tmp_path,
            train_dataloader={"dataset": TensorDataset(X), "batch_size": 4 // get_world_size()},
            train_cfg={"max_epochs": epochs},
            optim_wrapper=torch.optim.Adam(net.head.parameters(), lr=0.01),
            custom_hooks=[AddBody()],
            strategy=None if get_world_size() == 1 else {"type": "ddp", "find_unused_parameters": True},
            visualizer=[],
            **changes,
        )
        runner.train()
        return runner

    assert steps_of(unfrozen(2)) == {"head": 6, "body": 3}
    resumed = unfrozen(3, resume=True)
    assert steps_of(resumed) == {"head": 9, "body": 3}
    log = (resumed.run_dir / "log.txt").read_text()
    assert "the state of 'body.weight', 'body.bias' in" in log
    assert "give the optimizer all parameters from the beginning" in log


@ranks(1, 2)
def test_another_optimizer_is_refused_before_training(tmp_path: Path):
    run(tmp_path, 1)
    message = (
        r"must have \['prev', 'step', 'step_size'\], as Rprop keeps it, but has \['exp_avg', .*Resume with the opt"
    )
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, 2, optimizer="Rprop", resume=True)


class Rates(Hook):
    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def before_train_epoch(self, runner: Any) -> None:
        self.seen.append([group["lr"] for group in runner.optim_wrapper.param_groups])


@pytest.mark.parametrize("schedule", ["CosineAnnealingLR", "CosineAnnealingWarmRestarts"])
@pytest.mark.parametrize("frozen", [["body", None], [None, "body"]])
def test_schedules_span_the_groups_that_there_are_now(frozen: list[str | None], schedule: str, tmp_path: Path):
    """One of lockstep's, and one of torch's that computes with the first rates."""

    def rates(work_dir: Path, epochs: int, frozen: str | None, **changes: Any) -> list[list[float]]:
        net, hook = Net(frozen), Rates()
        groups = [{"params": net.head.parameters()}, {"params": net.body.parameters(), "lr": 0.001}]
        optimizer = torch.optim.SGD(groups[: 1 if frozen else 2], lr=0.01)
        length = {"CosineAnnealingLR": "T_max", "CosineAnnealingWarmRestarts": "T_0"}[schedule]
        Runner(
            net,
            work_dir,
            train_dataloader={"dataset": TensorDataset(X), "batch_size": 4},
            train_cfg={"max_epochs": epochs},
            optim_wrapper=OptimWrapper(optimizer),
            param_scheduler={"type": schedule, length: 9},
            custom_hooks=[hook],
            visualizer=[],
            **changes,
        ).train()
        return hook.seen

    before, after = frozen
    rates(tmp_path, 2, before)
    says = rf"have {1 if before else 2} parameter groups? to resume from .*, but has {1 if after else 2}\. .*='config'"
    with pytest.raises(ConfigError, match=rf"the optimizer of {schedule} must {says}"):
        rates(tmp_path, 4, after, resume=True, resume_options="checkpoint")
    straight = rates(tmp_path / "straight", 4, after)
    assert rates(tmp_path, 4, after, resume=True) == [pytest.approx(one) for one in straight[2:]]
