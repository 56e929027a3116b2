"""Several optimizers that one loss updates together."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Runner, Session
from lockstep.dist import get_world_size
from lockstep.errors import ConfigError
from lockstep.optim import JoinedOptimizer, OptimWrapper, build_optim_wrapper
from lockstep.testing import ranks

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def two(model: nn.Module) -> list[Optimizer]:
    matrices = [own for own in model.parameters() if own.dim() == 2]
    others = [own for own in model.parameters() if own.dim() == 1]
    return [SGD([{"params": matrices[:1]}, {"params": matrices[1:], "lr": 0.05}], lr=0.1, momentum=0.9), AdamW(others)]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def by_hand(updates: int) -> nn.Module:
    """Train by both optimizers, one after the other, with a schedule over each."""
    model = network()
    optimizers = two(model)
    schedules = [StepLR(one, 2, 0.5) for one in optimizers]
    for index in range(updates):
        rows = slice(index % 4 * 8, index % 4 * 8 + 8)
        for one in optimizers:
            one.zero_grad()
        loss_of(model, X[rows], Y[rows]).backward()
        for one in (*optimizers, *schedules):
            one.step()
    return model


def weights(model: nn.Module) -> list[Tensor]:
    return [getattr(own, "full_tensor", lambda own=own: own)().detach() for own in model.parameters()]


def test_one_step_is_that_of_all_parts():
    model = network()
    parts = two(model)
    optimizer = JoinedOptimizer(parts)
    schedules = [StepLR(one, 2, 0.5) for one in parts]
    for index in range(4):
        rows = slice(index * 8, index * 8 + 8)
        optimizer.zero_grad()
        loss_of(model, X[rows], Y[rows]).backward()
        optimizer.step()
        for one in schedules:
            one.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.025, 0.0125, 0.00025])
    assert all(map(torch.equal, weights(model), weights(by_hand(4))))


def test_a_closure_is_called_once_and_returned():
    weight = nn.Parameter(torch.ones(1))
    optimizer = JoinedOptimizer([SGD([weight], lr=0.5)])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 1
    assert weight.item() == 0


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    "remake", [lambda state: state, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))]
)
def test_each_group_stays_with_its_part_when_a_state_is_loaded(remake, swap: bool):
    one, other = (nn.Parameter(torch.ones(2)) for _ in range(2))

    def joined() -> JoinedOptimizer:
        parts = [SGD([one], lr=0.1, momentum=0.9), Adagrad([other], lr=0.2)]
        return JoinedOptimizer(parts[::-1] if swap else parts)

    first = joined()
    (one.sum() + other.sum()).backward()
    first.step()
    state = first.state_dict()
    for group in state["param_groups"]:
        group["part"] = 1 - group["part"]  # as of a list in another order
    second = joined()
    second.load_state_dict(remake(state))
    second.step()
    assert set(second.state[one]) == {"momentum_buffer"}
    assert set(second.state[other]) == {"step", "sum"}
    assert float(second.state[other]["step"]) == 2


@pytest.mark.parametrize("remake", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_has_parts_of_its_own(remake):
    weight, bias = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = JoinedOptimizer([SGD([weight], lr=0.1), AdamW([bias])])
    twin = remake(optimizer)
    (its,) = twin.param_groups[0]["params"]
    its.grad = torch.ones(2)
    twin.step()
    assert its is not weight
    assert its.tolist() == pytest.approx([0.9, 0.9])
    assert weight.tolist() == [1, 1]


def test_a_group_that_is_added_has_the_options_of_its_part():
    weight, more = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = JoinedOptimizer([SGD([weight], lr=0.5), AdamW([nn.Parameter(torch.ones(1))])])
    optimizer.add_param_group({"params": [more], "part": 1})
    assert optimizer.param_groups[-1]["betas"] == (0.9, 0.999)
    more.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[more]["step"] == 1


class WithModes(SGD):
    def train(self) -> None:
        raise AssertionError


SHARED = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("optimizers", "error", "says"),
    [
        ([], ConfigError, "but is an empty list"),
        (
            {"optimizer": [{"type": "Muon", "lr": 0.1}]},
            ConfigError,
            "not of configs, which do not say whose parameters",
        ),
        ([SGD([SHARED], lr=0.1), "AdamW"], TypeError, "`optimizer` must be a torch.optim.Optimizer or a list of some"),
        ([torch.optim.LBFGS([SHARED])], ConfigError, "all that they need, but has a LBFGS"),
        ([WithModes([SHARED], lr=0.1)], ConfigError, "all that they need, but has a WithModes"),
        ([SGD([SHARED], lr=0.1), AdamW([SHARED])], ValueError, "more than one parameter group"),
    ],
)
def test_what_can_not_be_joined_is_refused(optimizers, error, says):
    with pytest.raises(error, match=says):
        build_optim_wrapper(network(), optimizers)


@pytest.mark.parametrize(
    "cfg",
    [
        lambda some: some,
        tuple,
        lambda some: {"optimizer": some},
        lambda some: {"type": "AmpOptimWrapper", "optimizer": some},
    ],
)
def test_a_list_of_optimizers_is_one_in_a_config(cfg):
    model = network()
    wrapper = build_optim_wrapper(model, cfg(two(model)))
    assert isinstance(wrapper, OptimWrapper)
    assert wrapper.get_lr() == {"lr": [0.1, 0.05, 0.001]}


@ranks(1, 2)
@pytest.mark.parametrize(("before", "after"), [("ddp", "fsdp"), ("fsdp", "fsdp"), ("fsdp", "ddp")])
def test_a_session_trains_and_resumes_them_under_any_strategy(before: str, after: str, tmp_path: Path):
    for epochs, resume, strategy in ((1, False, before), (2, True, after)):
        options = {"default_hooks": {"progress": None}, "log_level": "ERROR", "randomness": {"seed": 0}}
        session = Session(tmp_path / "runs", strategy=strategy, resume=resume, **options)
        model = network(seed=int(resume))
        optimizers = two(model)
        schedules = [StepLR(one, 2, 0.5) for one in optimizers]
        loader = DataLoader(TensorDataset(X, Y), batch_size=8 // get_world_size())
        model, _, loader = session.prepare(model, optimizers, loader, schedulers=schedules)
        for _ in session.epochs(epochs):
            for inputs, targets in loader:
                session.step(loss_of(model, inputs, targets))
                for one in schedules:
                    one.step()
    for own, expected in zip(weights(model), weights(by_hand(8)), strict=True):
        assert torch.allclose(own, expected, atol=1e-6)


@ranks(1, 2)
def test_a_runner_takes_them_too(tmp_path: Path):
    model = network()
    runner = Runner(
        model,
        tmp_path / "run",
        train_dataloader={"dataset": TensorDataset(X, Y), "batch_size": 8 // get_world_size(), "shuffle": False},
        loss=nn.MSELoss(),
        optim_wrapper={"optimizer": two(model)},
        param_scheduler={"type": "StepLR", "step_size": 2, "gamma": 0.5, "by_epoch": False},
        train_cfg={"max_epochs": 1},
        strategy="single" if get_world_size() == 1 else "fsdp",
        log_level="ERROR",
    )
    runner.train()
    for own, expected in zip(weights(model), weights(by_hand(4)), strict=True):
        assert torch.allclose(own, expected, atol=1e-6)


@ranks(1)
def test_models_by_name_want_an_optimizer_for_each(tmp_path: Path):
    parts = {"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)}
    optimizers = [SGD(part.parameters(), lr=0.1) for part in parts.values()]
    session = Session(tmp_path / "runs", log_level="ERROR")
    with pytest.raises(TypeError, match="but has a list of several as the optimizer"):
        session.prepare(parts, optimizers, [X])
