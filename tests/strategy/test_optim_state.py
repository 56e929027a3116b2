"""What optimizers hold: read without a trace, saved as it is, and given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from lockstep.checkpoint import load_state, save_state
from lockstep.dist import get_world_size
from lockstep.errors import ConfigError
from lockstep.optim import OptimWrapper, OptimWrapperDict
from lockstep.strategy import SingleDeviceStrategy, Strategy, build_strategy
from lockstep.strategy.optim_state import complete_states
from lockstep.testing import ranks, run_ranks

from ..engines.training import assert_equal, whole
from .unused import OPTIMIZERS, PartlyUsed, Training, batch

pytestmark = pytest.mark.layouts

KINDS: dict[str, Any] = {
    "single": "single",
    "ddp": {"type": "ddp", "find_unused_parameters": True},
    "fsdp": "fsdp",
}
UNUSED = {"unused.weight", "unused.bias"}


def training(kind: str = "single", name: str = "Adam", **options: Any) -> Training:
    return Training(build_strategy(KINDS[kind]), name, **options)


def resumed(path: Path, kind: str = "single", name: str = "Adam", used: int = 0) -> Training:
    """Return a training that goes on from a checkpoint, after steps of its own that are to leave no trace."""
    made = training(kind, name, late_from=0)
    made.run(0, used)
    state = load_state(path, made.state())
    made.strategy.load_state(state["model"], state["optimizer"])
    made._late_from = 4
    return made


@pytest.mark.parametrize("used", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_training_goes_on_exactly(name: str, used: int, tmp_path: Path):
    uninterrupted, first = training(name=name), training(name=name)
    losses = uninterrupted.run(0, 8)
    first.run(0, 3)
    save_state(tmp_path / "three", first.state(), {})
    second = resumed(tmp_path / "three", name=name, used=used)
    assert_equal(second.state(), first.state())
    assert second.run(3, 8) == losses[3:]  # with the first gradients of `late` in between
    assert_equal(second.state(), uninterrupted.state())
    entries = second.state()["optimizer"]["state"]
    if name != "Adagrad":  # which has its states from the beginning
        assert not UNUSED & entries.keys()
    if "step" in entries.get("late.bias", {}):
        assert (entries["late.bias"]["step"], entries["first.bias"]["step"]) == (4, 8)


@pytest.mark.parametrize(("kind", "name"), [("ddp", "Adam"), ("ddp", "NAdam"), ("fsdp", "Adam"), ("fsdp", "SGD")])
def test_ranks_go_on_as_if_they_had_not_stopped(kind: str, name: str, tmp_path: Path):
    run_ranks(2, go_on, kind, name, tmp_path / "three")


def go_on(kind: str, name: str, path: Path) -> None:
    uninterrupted, first = training(kind, name), training(kind, name)
    losses = uninterrupted.run(0, 8)
    first.run(0, 3)
    save_state(path, first.state(), {})
    second = resumed(path, kind, name)
    assert second.run(3, 8) == losses[3:]
    assert not UNUSED & second.state()["optimizer"]["state"].keys()
    assert_equal(whole(second.state()), whole(uninterrupted.state()))


def save_after(kind: str, path: Path, steps: int) -> tuple[Any, list[float]]:
    made = training(kind)
    made.run(0, steps)
    save_state(path, made.state(), {})
    return whole(made.state()), made.run(steps, 7)


def load_after(kind: str, path: Path, steps: int) -> tuple[Any, list[float]]:
    made = resumed(path, kind, used=1)
    return whole(made.state()), made.run(steps, 7)


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "steps"),
    [("ddp", "fsdp", 0), ("ddp", "fsdp", 3), ("fsdp", "single", 3), ("single", "fsdp", 3)],
)
def test_other_strategies_find_as_few_states_as_were_saved(saved_by: str, loaded_by: str, steps: int, tmp_path: Path):
    sizes = {"single": 1, "ddp": 2, "fsdp": 2}
    saved = run_ranks(sizes[saved_by], save_after, saved_by, tmp_path / "checkpoint", steps)
    loaded = run_ranks(sizes[loaded_by], load_after, loaded_by, tmp_path / "checkpoint", steps)
    state, losses = saved[0]
    assert set(state["optimizer"]["state"]) == ({"first.weight", "first.bias"} if steps else set())
    for found, found_losses in loaded:
        assert_equal(found["model"], state["model"])
        assert_equal(found["optimizer"]["state"], state["optimizer"]["state"])
        assert found_losses == pytest.approx(losses, abs=1e-6)


@ranks(1, 2)
@pytest.mark.parametrize(("kind", "name"), [("ddp", "SGD"), ("fsdp", "Adam"), ("fsdp", "Adagrad")])
def test_looking_changes_nothing_at_any_time(kind: str, name: str):
    plain, watched = training(kind, name, counts=2), training(kind, name, counts=2)
    for index in range(6):  # in the middle of a window and at its end, before the first update and afterwards
        before = watched.everything()
        watched.state()
        assert_equal(watched.everything(), before)
        assert watched.run(index, index + 1) == plain.run(index, index + 1)
    watched.state()
    assert_equal(watched.everything(), plain.everything())
    assert_equal(whole(watched.state()), whole(plain.state()))


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer):
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(*batch(0, 9))
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_lbfgs_goes_on_exactly(steps: int, tmp_path: Path):
    def prepared() -> tuple[Strategy, nn.Module, Any]:
        torch.manual_seed(2)
        strategy = SingleDeviceStrategy()
        optim = {"optimizer": {"type": "LBFGS", "lr": 0.1, "max_iter": 2, "history_size": 3}}
        return strategy, *strategy.prepare(PartlyUsed(), optim)

    strategy, model, wrapper = prepared()
    for _ in range(steps):
        wrapper.optimizer.step(closure_of(model, wrapper.optimizer))
    state = {"model": strategy.model_state(), "optimizer": strategy.optim_state()}
    save_state(tmp_path / "checkpoint", state, {})
    again, other, other_wrapper = prepared()
    loaded = load_state(tmp_path / "checkpoint", {"model": again.model_state(), "optimizer": {}})
    again.load_state(loaded["model"], loaded["optimizer"])
    assert_equal(again.optim_state(), strategy.optim_state())
    for _ in range(3):
        wrapper.optimizer.step(closure_of(model, wrapper.optimizer))
        other_wrapper.optimizer.step(closure_of(other, other_wrapper.optimizer))
    assert_equal(again.model_state(), strategy.model_state())


def save_as_it_used_to_be(strategy: Strategy, path: Path) -> None:
    """Write a checkpoint as lockstep did when torch read the optimizer's state, which made states that were not."""
    core, optimizers = strategy.core(), strategy._optim_wrapper.optimizers
    state = {"model": strategy.model_state(), "optimizer": get_optimizer_state_dict(core, optimizers)}
    save_state(path, state, {})


@ranks(1, 2)
@pytest.mark.parametrize("steps", [0, 3])
def test_checkpoints_of_former_versions_are_resumed(steps: int, tmp_path: Path):
    kind = "single" if get_world_size() == 1 else "fsdp"
    first = training(kind)
    first.run(0, steps)
    save_as_it_used_to_be(first.strategy, tmp_path / "checkpoint")
    second = resumed(tmp_path / "checkpoint", kind, used=1)
    assert_equal(whole(second.state()), whole(first.state()))
    assert second.run(steps, 7) == first.run(steps, 7)


def test_numbers_that_all_elements_share_keep_their_precision():
    def prepared() -> tuple[Strategy, nn.Module, OptimWrapper]:
        torch.manual_seed(2)
        strategy = SingleDeviceStrategy()
        return strategy, *strategy.prepare(nn.Linear(3, 2, dtype=torch.bfloat16), {"optimizer": {"type": "NAdam"}})

    strategy, model, wrapper = prepared()
    wrapper.update_params(model(torch.ones(2, 3, dtype=torch.bfloat16)).sum())
    again, _, _ = prepared()
    again.load_state(strategy.model_state(), strategy.optim_state())
    assert_equal(again.optim_state(), strategy.optim_state())


def parts(update: list[str], frozen: tuple[str, ...] = (), kind: str = "Adam") -> tuple[Strategy, nn.Module, Any]:
    """Prepare a `PartlyUsed` of which an optimizer updates some parts."""
    torch.manual_seed(2)
    model, strategy = PartlyUsed(), SingleDeviceStrategy()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    groups = [{"params": list(model.get_submodule(name).parameters())} for name in update]
    return strategy, *strategy.prepare(model, OptimWrapper(getattr(torch.optim, kind)(groups, lr=0.1)))


def trained_parts(*update: str) -> dict[str, Any]:
    strategy, model, wrapper = parts(list(update))
    wrapper.update_params(model(*batch(0, 0)))
    return strategy.optim_state()


def test_the_state_of_what_is_frozen_now_is_passed_over():
    saved = trained_parts("first", "late")
    strategy, _, _ = parts(["first"], frozen=("late",))
    strategy.load_state(optim_state=saved)
    assert set(strategy.optim_state()["state"]) == {"first.weight", "first.bias"}
    held, _, _ = parts(["first", "late"], frozen=("late",))  # and kept where the optimizer holds it
    held.load_state(optim_state=saved)
    assert_equal(held.optim_state(), saved)


def test_what_is_trained_anew_begins_without_a_state():
    strategy, model, wrapper = parts(["first", "late"])
    wrapper.param_groups[1]["lr"] = 0.7
    strategy.load_state(optim_state=trained_parts("first"))
    assert set(strategy.optim_state()["state"]) == {"first.weight", "first.bias"}
    assert [group["lr"] for group in wrapper.param_groups] == [0.1, 0.7]
    wrapper.update_params(model(*batch(0, 0)))
    steps = {name: int(entry["step"]) for name, entry in strategy.optim_state()["state"].items()}
    assert steps == {"first.weight": 2, "first.bias": 2, "late.weight": 1, "late.bias": 1}


def test_states_that_do_not_fit_are_refused_by_name():
    saved = trained_parts("first", "late")
    strategy, _, _ = parts(["first"])
    with pytest.raises(ConfigError, match=r"does not update 'late.weight', 'late.bias'. Give them .* or freeze them"):
        strategy.load_state(optim_state=saved)
    other = {**saved, "state": {**saved["state"], "head": saved["state"]["late.bias"]}}
    with pytest.raises(ConfigError, match=r"has entries for 'head', which the model does not have"):
        parts(["first", "late"])[0].load_state(optim_state=other)
    one = {**saved, "param_groups": [{"lr": 0.1, "params": list(saved["state"])}]}
    with pytest.raises(
        ConfigError, match=r"which has 1, but 'first.weight', 'late.weight' are in two groups here and are not there"
    ):
        parts(["first", "late"])[0].load_state(optim_state=one)
    of_sgd = {"state": {}, "param_groups": [{"lr": 0.1, "momentum": 0, "params": ["first.weight", "first.bias"]}]}
    with pytest.raises(ConfigError, match=r"of the kind whose .* its groups have 'betas', .* 'momentum'"):
        parts(["first"])[0].load_state(optim_state=of_sgd)
    strategy, model, wrapper = parts(["first"])
    wrapper.param_groups[0]["params"] += list(model.late.parameters())
    with pytest.raises(ConfigError, match=r"which has 2, but 'first.weight', 'late.weight' are in one group here"):
        strategy.load_state(optim_state=saved)


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "message"),
    [
        (
            "SGD",
            "Adam",
            r"'first.weight' must have \['exp_avg', 'exp_avg_sq', 'step'\], as Adam keeps it, but has \['momentum_",
        ),
        (
            "Adam",
            "SGD",
            r"'first.weight' must have \['momentum_buffer'\], as SGD keeps it, but has \['exp_avg'",
        ),
        ("Adam", "Adafactor", "Adafactor can't have the options that were saved"),
        (
            "Adam",
            "LBFGS",
            r"'first.weight' must have \['func_evals', 'n_iter'\], as LBFGS keeps it, but has \['exp_avg', ",
        ),
    ],
)
def test_the_state_of_another_optimizer_is_refused(saved_by: str, loaded_by: str, message: str):
    options = {"SGD": {"momentum": 0.9, "lr": 0.1}}
    strategies = []
    for kind in (saved_by, loaded_by):
        strategy = SingleDeviceStrategy()
        model, wrapper = strategy.prepare(PartlyUsed(), {"optimizer": {"type": kind, **options.get(kind, {})}})
        strategies.append(strategy)
        if kind == saved_by:
            wrapper.update_params(model(*batch(0, 0)))
    with pytest.raises(ConfigError, match=message):
        strategies[1].load_state(optim_state=strategies[0].optim_state())
    assert not strategies[1].optim_state()["state"]


@pytest.mark.parametrize("lr", [0.2, torch.tensor(0.2)])
@pytest.mark.parametrize("saved", [0.1, torch.tensor(0.1)])
def test_a_rate_is_a_number_or_a_tensor_as_in_the_run_that_loads_it(lr: Any, saved: Any):
    strategies, options = [], {} if isinstance(lr, torch.Tensor) else {"foreach": True}
    for config in ({"lr": saved}, {"lr": lr, **options}):
        strategy = SingleDeviceStrategy()
        model, wrapper = strategy.prepare(PartlyUsed(), {"optimizer": {"type": "Adam", **config}})
        strategies.append(strategy)
        if len(strategies) == 2:
            strategies[1].load_state(optim_state=strategies[0].optim_state())
        wrapper.update_params(model(*batch(0, 0)))
    assert type(wrapper.param_groups[0]["lr"]) is type(lr)
    assert float(wrapper.param_groups[0]["lr"]) == pytest.approx(0.1)


def test_scalars_have_each_its_own_value_of_an_option_that_is_switched_on():
    one, two = parameters = [nn.Parameter(torch.tensor(value)) for value in (1.0, 2.0)]
    optimizer = torch.optim.Adam(parameters)
    for is_on in (False, True):
        optimizer.param_groups[0]["amsgrad"] = is_on
        complete_states(optimizer)
        (3 * one + two).backward()
        optimizer.step()
        optimizer.zero_grad()
    largest = [optimizer.state[parameter]["max_exp_avg_sq"].item() for parameter in parameters]
    assert largest == [optimizer.state[parameter]["exp_avg_sq"].item() for parameter in parameters]


def test_states_of_several_optimizers_are_given_back_to_each():
    strategies = []
    for _ in range(2):
        torch.manual_seed(2)
        model, strategy = PartlyUsed(), SingleDeviceStrategy()
        wrappers = {
            "one": OptimWrapper(torch.optim.Adam([*model.first.parameters(), *model.unused.parameters()])),
            "two": OptimWrapper(torch.optim.SGD(model.late.parameters(), lr=0.1, momentum=0.9)),
        }
        model, wrapper = strategy.prepare(model, OptimWrapperDict(**wrappers))
        strategies.append(strategy)
        if len(strategies) == 1:
            wrapper["one"].backward(model(*batch(0, 0)))
            wrapper["one"].step()
            wrapper["two"].step()
    strategies[1].load_state(optim_state=strategies[0].optim_state())
    entries = strategies[1].optim_state()["state"]
    assert_equal(strategies[1].optim_state(), strategies[0].optim_state())
    assert entries["late.bias"].keys() == {"momentum_buffer"}
    assert not UNUSED & entries.keys()


def test_what_is_no_parameter_of_the_model_has_no_name():
    strategy = SingleDeviceStrategy()
    model, scale = PartlyUsed(), nn.Parameter(torch.ones(7))
    strategy.prepare(model, OptimWrapper(torch.optim.SGD([scale, *model.parameters()], lr=0.1)))
    with pytest.raises(ConfigError, match=r"SGD updates 1 others, one of shape \(7,\), whose state has no name"):
        strategy.optim_state()


@ranks(2)
def test_the_state_is_a_copy_of_what_is_given():
    first, second = training("fsdp"), training("fsdp")
    first.run(0, 2)
    state = first.state()
    second.strategy.load_state(state["model"], state["optimizer"])
    before = whole(first.state())
    second.run(2, 4)
    assert_equal(whole(first.state()), before)
