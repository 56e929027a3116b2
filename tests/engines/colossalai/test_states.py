"""Checkpoints under ColossalAI: resumed by itself, by PyTorch's strategies, and theirs by it."""

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
from lockstep.runner import Runner
from lockstep.strategy import build_strategy
from lockstep.testing import close_pools, ranks, run_ranks

from ...strategy.transformer import BATCH, INPUTS, STEPS, TARGETS, optim_config, seeded
from ..training import assert_equal, whole
from .training import PLUGINS, Training, config_of, strategy_of


class Losses(Hook):
    def __init__(self) -> None:
        self.by_iter: dict[int, float] = {}

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.by_iter[runner.iter] = outputs["loss"].item()


def run(
    work_dir: Path, kind: str, hooks: tuple[Any, ...] = (), precision: str | None = None, **changes: Any
) -> dict[int, float]:
    """Return the losses of each iteration of a Runner that saves after the tenth."""
    losses = Losses()
    runner = Runner(
        seeded(),
        work_dir,
        train_dataloader={"dataset": TensorDataset(INPUTS, TARGETS), "batch_size": BATCH // get_world_size()},
        train_cfg={"max_iters": STEPS},
        optim_wrapper=optim_config(clip=True),
        param_scheduler={"type": "CosineAnnealingLR", "by_epoch": False},
        default_hooks={"checkpoint": {"by_epoch": False, "interval": 10}},
        custom_hooks=[losses, *hooks],
        strategy=strategy_of(kind, **({} if precision is None else {"precision": precision})),
        randomness={"seed": 3},
        **changes,
    )
    runner.train()
    return losses.by_iter


def save_trained(kind: str, path: Path) -> tuple[Any, list[float]]:
    training = Training(kind)
    training.run(0, 4)
    training.save(path)
    return whole(training.state()), training.run(4, 8)


def load_and_train(kind: str, path: Path) -> tuple[Any, list[float]]:
    training = Training(kind, optim={"optimizer": {"type": "AdamW", "lr": 1.0}})  # the saved one counts
    training.run(0, 2)  # to be overwritten
    training.load(path)
    return whole(training.state()), training.run(4, 8)


@pytest.mark.parametrize("kind", PLUGINS)
def test_a_run_that_is_resumed_in_new_processes_goes_on_as_if_it_had_not_stopped(kind: str, tmp_path: Path):
    uninterrupted = run_ranks(2, run, tmp_path, kind)
    close_pools()
    (checkpoint,) = tmp_path.glob("*/iter_10")
    resumed = run_ranks(2, run, tmp_path / "resumed", kind, load_from=checkpoint, resume=True)
    for before, after in zip(uninterrupted, resumed, strict=True):
        assert after == {step: loss for step, loss in before.items() if step >= 10}


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}], ids=["fp32", "bf16"])
def test_a_run_goes_on_from_its_own_weights_where_their_average_is_saved(options: dict[str, Any], tmp_path: Path):
    average = ({"type": "EMAHook", "momentum": 0.5},)
    uninterrupted = run_ranks(2, run, tmp_path, "zero1", average, **options)
    (checkpoint,) = tmp_path.glob("*/iter_10")
    resumed = run_ranks(2, run, tmp_path / "resumed", "zero1", average, load_from=checkpoint, resume=True, **options)
    assert resumed[0] == {step: loss for step, loss in uninterrupted[0].items() if step >= 10}


@pytest.mark.parametrize("other", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", PLUGINS)
def test_a_checkpoint_of_pytorchs_strategies_is_resumed_and_the_other_way_round(kind: str, other: str, tmp_path: Path):
    native = "DDPStrategy" if other == "ddp" else "fsdp"
    for saved_by, loaded_by in ((native, kind), (kind, native)):
        saved = run_ranks(2, save_trained, saved_by, tmp_path / saved_by)
        loaded = run_ranks(2, load_and_train, loaded_by, tmp_path / saved_by)
        state, losses = saved[0]
        assert {"exp_avg", "exp_avg_sq", "step"} == state["optimizer"]["state"]["layers.0.linear1.weight"].keys()
        assert state["optimizer"]["param_groups"][0]["lr"] == 3e-3
        for rank_state, rank_losses in (*saved[1:], *loaded):
            assert_equal(rank_state["model"], state["model"])
            assert_equal(rank_state["optimizer"]["state"], state["optimizer"]["state"])
            assert rank_losses == pytest.approx(losses, abs=5e-6, rel=0)


def state_bytes(kind: str) -> int:
    training = Training(kind)
    training.run(0, 1)
    states = training.optim_wrapper.optimizer.state.values()
    return sum(value.numel() for state in states for name, value in state.items() if name != "step")


def test_zero_gives_each_rank_half_of_the_optimizers_state():
    (replica, _), *halves = (run_ranks(2, state_bytes, kind) for kind in ("ddp", "zero1", "zero2"))
    assert replica == 2 * sum(parameter.numel() for parameter in seeded().parameters())
    for both in halves:
        assert both == pytest.approx([replica / 2] * 2, rel=0.01)


@ranks(2)
@pytest.mark.parametrize("kind", PLUGINS)
def test_states_before_the_first_step_leave_no_trace(kind: str):
    plain, asked = Training(kind), Training(kind)
    fresh = asked.strategy.optim_state()
    assert fresh["state"] == {}
    assert set(fresh["param_groups"][0]["params"]) == set(asked.strategy.model_state()) == set(seeded().state_dict())
    assert not asked.optim_wrapper.optimizer.state
    assert asked.optim_wrapper.get_lr() == {"lr": [3e-3]}
    assert asked.run(0, 3) == plain.run(0, 3)


@ranks(2)
def test_what_does_not_fit_is_refused():
    training = Training("zero1")
    training.run(0, 1)
    state = training.strategy.optim_state()
    del state["state"]["head.weight"]["exp_avg"]
    with pytest.raises(ConfigError, match=r"state of 'head.weight' must have \['exp_avg', .*but has \['exp_avg_sq'"):
        training.strategy.load_state(optim_state=state)
    state = training.strategy.optim_state()
    state["param_groups"][0]["params"].remove("head.weight")
    state["param_groups"].append({**state["param_groups"][0], "params": ["head.weight"]})
    with pytest.raises(ConfigError, match=r"which has 2, but 'head.weight', 'places' are in one group here"):
        training.strategy.load_state(optim_state=state)
    with pytest.raises(ConfigError, match=r"must fit the model, but lacks \[head.weight\] and has \[\] besides"):
        training.strategy.load_state(
            {name: value for name, value in training.state()["model"].items() if "head" not in name}
        )


class Tied(nn.Module):
    """Odd sizes, a shared weight, a scalar, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.words.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(self.words(x)) * self.scale).square().mean()


@ranks(2)
@pytest.mark.parametrize("optimizer", [{"type": "NAdam", "lr": 0.1}, {"type": "SGD", "lr": 0.1}])
def test_odd_sizes_shared_scalar_and_frozen_parameters_are_translated(optimizer):
    states = []
    for kind in ("ddp", "zero1"):
        strategy = strategy_of(kind)
        torch.manual_seed(2)
        model, optim_wrapper = strategy.prepare(Tied(), {"optimizer": optimizer})
        for _ in range(3):
            model.train_step({"x": torch.arange(7)}, optim_wrapper)
        states.append({"model": strategy.model_state(), "optimizer": strategy.optim_state()["state"]})
        again = strategy_of(kind)
        model, optim_wrapper = again.prepare(Tied(), {"optimizer": optimizer})
        again.load_state(strategy.model_state(), strategy.optim_state())
        assert_equal(whole(again.model_state()), whole(strategy.model_state()))
        assert_equal(whole(again.optim_state()), whole(strategy.optim_state()))
    assert_equal(*map(whole, states))


@ranks(2)
def test_half_precision_is_saved_as_it_is_trained():
    for kind in PLUGINS:
        strategy = strategy_of(kind, precision="bf16")
        model, optim_wrapper = strategy.prepare(seeded(), optim_config())
        batch = (INPUTS[:4], TARGETS[:4])
        for _ in range(3):
            model.train_step(batch, optim_wrapper)
        assert model.module.head.weight.dtype == torch.bfloat16
        state = strategy.model_state()
        assert {value.dtype for value in state.values()} == {torch.float32}
        assert_equal(state.keys(), strategy.optim_state()["state"].keys())
        weight = whole(state)["head.weight"]
        assert not torch.equal(weight, weight.bfloat16().float())
        again = build_strategy(config_of("zero1", precision="bf16"))
        other, other_wrapper = again.prepare(seeded(), optim_config())
        again.load_state(state, strategy.optim_state())
        assert_equal(whole(again.model_state()), whole(state))
        for _ in range(2):
            losses = [step(batch, wrapper)["loss"].item() for step, wrapper in (
                (model.train_step, optim_wrapper), (other.train_step, other_wrapper),
            )]  # fmt: skip
            assert losses[0] == pytest.approx(losses[1], abs=0.05)
