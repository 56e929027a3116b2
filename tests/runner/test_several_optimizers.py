"""A Runner that trains a GAN: two optimizers, each with its schedule, on one process and on two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.runs import StopAfter
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.dist import get_world_size
from lockstep.errors import ConfigError
from lockstep.hooks import Hook
from lockstep.model import BaseModel, unwrap_model
from lockstep.optim import StepLR
from lockstep.runner import Runner
from lockstep.testing import run_ranks

REAL = torch.linspace(-1, 1, 48).reshape(24, 2)


class Gan(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(2, 2)
        self.discriminator = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def train_step(self, data, optim_wrapper):
        real, noise = data
        with optim_wrapper["discriminator"].optim_context(self.discriminator):
            d_loss = (self.discriminator(self.generator(noise).detach()) - self.discriminator(real)).mean()
        optim_wrapper["discriminator"].update_params(d_loss)
        with optim_wrapper["generator"].optim_context(self.generator):
            g_loss = -self.discriminator(self.generator(noise)).mean()
        optim_wrapper["generator"].update_params(g_loss)
        optim_wrapper["discriminator"].zero_grad()
        return {"loss": g_loss.detach(), "d_loss": d_loss.detach()}


def train(work_dir: Path, epochs: int = 2, **changes) -> tuple[dict[str, Tensor], list[float], list[dict]]:
    torch.manual_seed(3)
    arguments = {
        "train_dataloader": {"dataset": TensorDataset(REAL, REAL.flip(0)), "batch_size": 6 // get_world_size()},
        "train_cfg": {"max_epochs": epochs},
        "optim_wrapper": {
            "generator": {"optimizer": {"type": "Adam", "lr": 0.1}},
            "discriminator": {"optimizer": {"type": "SGD", "lr": 0.2, "momentum": 0.9}},
        },
        "strategy": {"type": "ddp", "model_wrapper": {"type": "MMSeparateDistributedDataParallel"}}
        if get_world_size() > 1
        else "single",
        "randomness": {"seed": 1},
        **changes,
    }
    runner = Runner(Gan(), work_dir, **arguments)
    core = unwrap_model(runner.train())
    state = {name.replace("module.", ""): value.clone() for name, value in core.state_dict().items()}
    lines = (runner.run_dir / "metrics.jsonl").read_text().splitlines() if runner.rank == 0 else []
    return state, [group["lr"] for group in runner.optim_wrapper.param_groups], [json.loads(line) for line in lines]


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.allclose(value, right[name], rtol=1e-4, atol=1e-6), name


def test_a_gan_trains_alike_on_one_rank_and_two_and_goes_on_from_its_checkpoint(tmp_path: Path):
    ((alone, _, records),) = run_ranks(1, train, tmp_path / "one")
    for state, _, _ in run_ranks(2, train, tmp_path / "two"):
        assert_close(state, alone)
    run_ranks(2, train, tmp_path / "three", 1)
    for state, _, _ in run_ranks(2, train, tmp_path / "three", 2, resume=True):
        assert_close(state, alone)
    epochs = [record for record in records if record["mode"] == "epoch"]
    assert [(record["generator.lr"], record["discriminator.lr"]) for record in epochs] == [(0.1, 0.2)] * 2


def test_unequal_amounts_weigh_in_every_optimizer(tmp_path: Path):
    def dealt(size: int) -> dict[str, Tensor]:
        data = TensorDataset(REAL[:23], REAL[:23].flip(0))
        loader = {"dataset": data, "batch_size": 8 // size, "sampler": {"round_up": False}}
        return run_ranks(size, train, tmp_path / str(size), 2, train_dataloader=loader)[-1][0]

    # On four ranks the last batch of one has a sample less than those of the others.
    assert_close(dealt(2), dealt(1))
    assert_close(dealt(4), dealt(1))


HALVED = {"type": "StepLR", "step_size": 1, "gamma": 0.5}


@pytest.mark.parametrize(
    ("cfg", "rates"),
    [
        (HALVED, [0.025, 0.05]),
        ([HALVED], [0.025, 0.05]),
        ({"discriminator": HALVED}, [0.1, 0.05]),
        (None, [0.1, 0.2]),
    ],
)
def test_each_optimizer_has_its_own_schedule(cfg, rates, tmp_path: Path):
    assert train(tmp_path, param_scheduler=cfg)[1] == pytest.approx(rates)


def test_a_schedule_of_nobody_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="keys out of generator, discriminator, but has critic"):
        train(tmp_path, param_scheduler={"critic": HALVED})
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    mine = StepLR(optimizer, step_size=1)
    with pytest.raises(ConfigError, match="must say whose each scheduler is"):
        train(tmp_path, param_scheduler=[mine])


COSINE = {"type": "CosineAnnealingLR", "by_epoch": False}
STEPS = {"type": "StepLR", "step_size": 3, "by_epoch": False}
WARM_UP = [{"type": "LinearLR", "start_factor": 0.1, "end": 1}, {"type": "CosineAnnealingLR", "begin": 1}]


class Rates(Hook):
    """Notes both rates of each iteration."""

    def __init__(self) -> None:
        self.by_iter: dict[int, list[float]] = {}

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        self.by_iter[runner.iter] = [group["lr"] for group in runner.optim_wrapper.param_groups]


def rates_of(work_dir: Path, schedule, **changes) -> tuple[dict[int, list[float]], str]:
    rates = Rates()
    train(work_dir, 3, param_scheduler=schedule, custom_hooks=[rates, StopAfter(changes.pop("stop", None))], **changes)
    return rates.by_iter, max(work_dir.glob("*/log.txt")).read_text()


@pytest.mark.parametrize("generators", [[COSINE], [STEPS, COSINE]])
def test_a_schedule_that_another_optimizer_had_before_the_stop_is_its_own_now(generators, tmp_path: Path):
    after = {"generator": generators, "discriminator": [STEPS]}
    before = {"generator": [*generators, STEPS], "discriminator": []}
    hooks = {"checkpoint": {"by_epoch": False, "interval": 5}}
    straight, _ = rates_of(tmp_path / "straight", after)
    with pytest.raises(KeyboardInterrupt):
        rates_of(tmp_path / "cut", before, default_hooks=hooks, stop=5)
    resumed, log = rates_of(tmp_path / "cut", after, resume=True)
    assert list(resumed) == list(range(5, 12))
    for done, values in resumed.items():
        assert values == pytest.approx(straight[done], rel=1e-12)
    assert "StepLR(step_size=3, by_epoch=False) in 3 epochs of `generator` -> StepLR(" in log
    assert "in 3 epochs of `discriminator`, which hold from here on" in log


def test_schedules_in_epochs_of_each_optimizer_go_on_at_the_same_part_of_the_run(tmp_path: Path):
    schedules = [{**one, "convert_to_iter_based": True} for one in WARM_UP]
    by_name = {"generator": schedules, "discriminator": schedules}
    hooks = {"checkpoint": {"by_epoch": False, "interval": 2}}
    with pytest.raises(KeyboardInterrupt):
        rates_of(tmp_path, by_name, default_hooks=hooks, stop=2)
    loader = {"dataset": TensorDataset(REAL, REAL.flip(0)), "batch_size": 3}
    resumed, log = rates_of(tmp_path, by_name, train_dataloader=loader, resume=True)
    straight, _ = rates_of(tmp_path / "straight", by_name, train_dataloader=loader)
    assert list(resumed) == list(range(2, 22))  # 2 of 4 iterations, then 4 of 8, and 16
    assert "the config has the same" in log
    del resumed[2]  # made at the rates that were saved
    for done, values in resumed.items():
        assert values == pytest.approx(straight[done + 2], rel=1e-12)
