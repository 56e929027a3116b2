"""A rank that updates its weights by other options than the others ends the training of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Runner, Session
from lockstep.dist import get_rank
from lockstep.errors import ConfigError
from lockstep.hooks import Hook
from lockstep.model import BaseModel
from lockstep.runner.options import as_text
from lockstep.testing import RankFailure, ranks, run_ranks

DATA = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)))

SCHEDULE = {"type": "LinearLR", "start_factor": 0.5, "end": 5}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x))).square().mean()


def change_on_rank_1(runner: Any) -> None:
    if get_rank() == 1:
        runner.optim_wrapper.param_groups[0]["lr"] = 0.5


def changing(point: str) -> Hook:
    return type("Changing", (Hook,), {point: lambda self, runner, **_: change_on_rank_1(runner)})()


def trained(
    work_dir: Path, strategy: str, optimizer: dict, scheduler: dict, wrapper: dict, hooks: list, counts: str = "epochs"
) -> None:
    """Train with what is given for rank 1 alone."""
    is_other = get_rank() == 1
    optim = {"type": "AdamW", "lr": 0.1, "weight_decay": 0.1, **(optimizer if is_other else {})}
    Runner(
        Net(),
        work_dir,
        train_dataloader=DataLoader(DATA, batch_size=2),
        train_cfg={"max_epochs": 2} if counts == "epochs" else {"by_epoch": False, "max_iters": 12},
        optim_wrapper={"optimizer": optim, **(wrapper if is_other else {})},
        param_scheduler={**SCHEDULE, "by_epoch": counts == "epochs", **(scheduler if is_other else {})},
        custom_hooks=[changing(point) for point in hooks],
        default_hooks={"logger": {"interval": 2}},
        strategy=strategy,
        launcher="pytorch",
        log_level="ERROR",
    ).train()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"optimizer": {"lr": 0.2}}, "`lr` of parameter group 0 of AdamW must .* 0.05 on rank 0, 0.1 on rank 1"),
        ({"optimizer": {"weight_decay": 0.0}}, "`weight_decay` of parameter group 0 of AdamW must .*0.1 on rank 0"),
        ({"optimizer": {"betas": (0.8, 0.9)}}, r"`betas` of parameter group 0 of AdamW must .*0\.8"),
        ({"scheduler": {"end": 9}}, "`end` of schedule 0, LinearLR, must .* 5 on rank 0, 9 on rank 1"),
        ({"wrapper": {"clip_grad": {"max_norm": 1.0}}}, "`clip_grad` of the wrapper of AdamW must .* None on rank 0"),
        ({"hooks": ["before_train"]}, "`lr` of parameter group 0 of AdamW must .* 0.05 on rank 0, 0.5 on rank 1"),
        ({"hooks": ["before_train_epoch"]}, "`lr` of parameter group 0 of AdamW must .* 0.5 on rank 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@ranks(2)
def test_an_option_of_one_rank_alone_is_named_on_all(strategy: str, given: dict, says: str, tmp_path: Path):
    arguments = {"optimizer": {}, "scheduler": {}, "wrapper": {}, "hooks": [], **given}
    with pytest.raises(ConfigError, match=says):
        trained(tmp_path, strategy, **arguments)


@ranks(2)
def test_of_two_optimizers_of_one_class_the_first_is_compared_too(tmp_path: Path):
    class Separate(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x, y):
            return self.first(x).mean() + self.second(x).mean()

    lr = 0.1 + get_rank()
    wrappers = {name: {"optimizer": {"type": "Adam", "lr": 0.1}} for name in ("first", "second")}
    wrappers["first"]["optimizer"]["lr"] = lr
    with pytest.raises(ConfigError, match=r"`lr` of parameter group 0 of Adam `first` must .* 0\.1 on rank 0, 1\.1 on"):
        Runner(
            Separate(), tmp_path, train_dataloader=DataLoader(DATA, batch_size=2), train_cfg={"max_epochs": 1},
            strategy={"type": "ddp", "model_wrapper": {"type": "MMSeparateDistributedDataParallel"}},
            optim_wrapper=wrappers, launcher="pytorch", log_level="ERROR",
        ).train()  # fmt: skip


def test_another_length_of_accumulation_is_named_before_the_first_step(tmp_path: Path):
    wrapper = {"accumulative_counts": 2}
    with pytest.raises(RankFailure, match=r"`accumulative_counts` of the wrapper of AdamW must .* 1 on rank 0, 2 on"):
        run_ranks(2, trained, tmp_path, "ddp", {}, {}, wrapper, [])


def test_a_change_in_the_midst_of_an_epoch_ends_the_training_with_a_record(tmp_path: Path):
    says = "options of the optimizer must be the same on all ranks, but are not after iteration 2: rank 1 of 2 has"
    with pytest.raises(RankFailure, match=says):
        run_ranks(2, trained, tmp_path, "fsdp", {}, {}, {}, ["before_train_iter"], "iterations")


def test_numbers_of_numpy_are_compared_by_their_values():
    one, other = (as_text([numpy.float32(value)], reads_device=True) for value in (0.1, 0.2))
    assert one != other


def test_ranks_that_agree_train(tmp_path: Path):
    run_ranks(2, trained, tmp_path, "ddp", {}, {}, {}, [])


def by_hand(work_dir: Path) -> None:
    session = Session(work_dir, strategy="ddp", launcher="pytorch", log_level="ERROR")
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(DATA, batch_size=2))
    for epoch in session.epochs(3):
        for (x,) in loader:
            session.step(model(x))
        if epoch == 1 and session.is_main:
            optimizer.param_groups[0]["lr"] *= 0.1


def test_a_schedule_that_one_rank_steps_in_a_loop_by_hand_is_named(tmp_path: Path):
    with pytest.raises(
        RankFailure, match=r"`lr` of parameter group 0 of SGD must .* 0\.01\d* on rank 0, 0\.1 on rank 1"
    ):
        run_ranks(2, by_hand, tmp_path)
