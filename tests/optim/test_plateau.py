"""A schedule that waits for the metric of the validation to stop falling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from lockstep.dist import get_world_size
from lockstep.errors import ConfigError
from lockstep.evaluator import BaseMetric
from lockstep.hooks import Hook
from lockstep.optim import OptimWrapper, OptimWrapperDict, ReduceOnPlateauLR, ReduceOnPlateauMomentum
from lockstep.runner import EpochBasedTrainLoop, Runner
from lockstep.testing import ranks

from ..runs import StopAfter


def sgd(lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.5)


@given(
    losses=st.lists(st.floats(0.1, 10) | st.just(float("nan")) | st.just(float("inf")), max_size=30),
    rule=st.sampled_from(["less", "greater"]), threshold_rule=st.sampled_from(["rel", "abs"]),
    patience=st.integers(0, 3), cooldown=st.integers(0, 3), threshold=st.sampled_from([0.0, 1e-4, 0.3]),
    min_value=st.sampled_from([0.0, 0.05]),
)  # fmt: skip
def test_it_behaves_as_torchs(losses, rule, threshold_rule, patience, cooldown, threshold, min_value):
    mine, theirs = sgd(), sgd()
    common = {"factor": 0.5, "patience": patience, "cooldown": cooldown, "threshold": threshold}
    ours = ReduceOnPlateauLR(mine, rule=rule, threshold_rule=threshold_rule, min_value=min_value, **common)
    reference = ReduceLROnPlateau(
        theirs, {"less": "min", "greater": "max"}[rule], threshold_mode=threshold_rule, min_lr=min_value, **common
    )
    for loss in losses:
        ours.observe({"loss": loss})
        reference.step(loss)
        assert mine.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


def test_only_validations_in_its_window_count():
    optimizer = sgd()
    scheduler = ReduceOnPlateauLR(optimizer, patience=0, begin=2, end=4, by_epoch=False)
    seen = []
    for _ in range(6):
        scheduler.observe({"loss": 1.0})
        seen.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert seen == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1])


def test_momentum_too():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], betas=(0.8, 0.9))
    scheduler = ReduceOnPlateauMomentum(optimizer, monitor="acc", rule="greater", factor=0.5, patience=0)
    for _ in range(2):
        scheduler.observe({"acc": 0.5})
    assert optimizer.param_groups[0]["betas"] == (0.4, 0.9)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"rule": "min"}, "`rule` must be 'less' or 'greater', but is 'min'"),
        ({"threshold_rule": "relative"}, "`threshold_rule` must be 'rel' or 'abs'"),
        ({"factor": 1.0}, "`factor` must be at least 0 and less than 1, but is 1.0"),
    ],
)
def test_wrong_arguments_are_refused(kwargs, says):
    with pytest.raises(ConfigError, match=says):
        ReduceOnPlateauLR(sgd(), **kwargs)
    with pytest.raises(TypeError, match="`monitor` must be the name of one metric, but is None"):
        ReduceOnPlateauLR(sgd(), monitor=None)


@pytest.mark.parametrize("value", [None, "high", [0.1, 0.2], torch.ones(2)])
def test_a_metric_that_is_not_one_number_is_refused_by_name(value):
    with pytest.raises(ConfigError, match="`monitor` must be a metric with one number, but 'loss' is"):
        ReduceOnPlateauLR(sgd()).observe({"loss": value})


def test_a_best_value_that_is_no_number_is_not_loaded():
    scheduler = ReduceOnPlateauLR(sgd())
    with pytest.raises(ValueError, match="`best` of ReduceOnPlateauLR must be a number or None, but is 'x'"):
        scheduler.load_state_dict({**scheduler.state_dict(), "best": "x"})


class Net(nn.Module):
    """Learns the sum of its inputs; predicts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor"):
        return (self.linear(x) - y).square().mean() if mode == "loss" else x


class Scripted(BaseMetric):
    """Yields what a script says of each validation; the script goes on where a run does."""

    def __init__(self, values: list[float], start: int = 0) -> None:
        super().__init__()
        self.values = values[start:]

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(0)

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        return {"error": self.values.pop(0)}


class Rates(Hook):
    """Notes learning rate, momentum and loss of every iteration."""

    def __init__(self) -> None:
        self.by_iter: dict[int, tuple[float, float, float]] = {}

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        (group,) = runner.optim_wrapper.param_groups
        self.by_iter[runner.iter] = (group["lr"], group["momentum"], outputs["loss"].item())


X = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
SCRIPT = [1.0, 0.5, 0.6, 0.7, 0.4, 0.4, 0.4, 0.4]
SCHEDULES = [
    {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "end": 4},
    {"type": "ReduceOnPlateauLR", "monitor": "error", "patience": 1, "factor": 0.5},
    {"type": "CosineAnnealingMomentum", "eta_min_ratio": 0.5, "convert_to_iter_based": True},
]


def run(work_dir: Path, epochs: int, start: int = 0, **changes: Any) -> dict[int, tuple[float, float, float]]:
    torch.manual_seed(3)
    rates = Rates()
    data = {"dataset": TensorDataset(X, X.sum(1, keepdim=True)), "batch_size": 6 // get_world_size()}
    arguments = {
        "val_dataloader": data,
        "val_evaluator": Scripted(SCRIPT, start),
        "param_scheduler": SCHEDULES,
        "train_cfg": {"max_epochs": 8},
        **changes,
        "custom_hooks": [rates, StopAfterEpoch(epochs), *changes.get("custom_hooks", [])],
    }
    try:
        Runner(
            Net(), work_dir, train_dataloader=data, randomness={"seed": 7}, visualizer=[],
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.8}}, **arguments,
        ).train()  # fmt: skip
    except KeyboardInterrupt:
        assert "custom_hooks" in changes
    return rates.by_iter


class StopAfterEpoch(Hook):
    """Ends a run as a user would."""

    priority = "LOWEST"

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def after_val_epoch(self, runner, metrics=None) -> None:
        if runner.epoch == self.epochs:
            runner.train_loop.stop_training = True


@ranks(1, 2)
def test_a_runner_shows_it_the_metrics_and_resumes_it_to_the_last_bit(tmp_path: Path):
    whole = run(tmp_path / "whole", 8)
    first_of_epochs = [whole[2 * epoch][0] for epoch in range(8)]
    # A ramp of four iterations; the third epoch is the second in a row without a gain, as is the last but one.
    assert first_of_epochs == pytest.approx([0.01, 0.07, 0.1, 0.1, 0.05, 0.05, 0.05, 0.025])
    assert len({momentum for _, momentum, _ in whole.values()}) == 16
    # The checkpoint is of the end of the fourth epoch, before its validation, which comes once more.
    first = run(tmp_path / "parts", 4)
    second = run(tmp_path / "parts", 8, start=3, resume=True)
    assert (max(first), min(second)) == (7, 8)
    assert first | second == whole


def test_validations_of_iterations_are_made_up_for_too(tmp_path: Path):
    changes = {
        "train_cfg": {"max_iters": 14, "val_interval": 2},
        "param_scheduler": {"type": "ReduceOnPlateauLR", "monitor": "error", "patience": 0},
        "default_hooks": {"checkpoint": {"by_epoch": False, "interval": 1}},
    }
    whole = run(tmp_path / "whole", 99, **changes)
    for stop, seen in ((6, 2), (7, 3)):  # at the time of a validation, and after it
        first = run(tmp_path / f"{stop}", 99, **changes, custom_hooks=[StopAfter(stop)])
        second = run(tmp_path / f"{stop}", 99, start=seen, resume=True, **changes)
        assert (max(first), min(second)) == (stop - 1, stop)
        assert first | second == whole


def test_without_a_validation_it_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="`monitor` is the metric 'error', but nothing is validated"):
        run(tmp_path, 8, val_dataloader=None, val_evaluator=None)


class OwnCourse(EpochBasedTrainLoop):
    """As a loop of the user's own that validates in its own way."""

    def run(self) -> Any:
        return super().run()


class OwnValidation(Hook):
    def after_train_epoch(self, runner) -> None:
        runner.call_hook("after_val_epoch", metrics={"error": 1.0})


def test_a_loop_of_the_users_own_may_validate_in_its_own_way(tmp_path: Path):
    schedule = {"type": "ReduceOnPlateauLR", "monitor": "error", "patience": 1, "factor": 0.5}
    validates = {"val_dataloader": None, "val_evaluator": None, "custom_hooks": [OwnValidation()]}
    seen = run(tmp_path, 8, train_cfg={"type": OwnCourse, "max_epochs": 4}, param_scheduler=schedule, **validates)
    assert [seen[iteration][0] for iteration in (0, 2, 4, 6)] == [0.1, 0.1, 0.1, 0.05]


def test_a_metric_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="must be a metric of the validation, but is 'eror': did you mean `error`"):
        run(tmp_path, 8, param_scheduler={"type": "ReduceOnPlateauLR", "monitor": "eror"})


def test_several_optimizers_have_their_own(tmp_path: Path):
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 1), nn.Linear(3, 1)

        def train_step(self, data, optim_wrapper):
            for name in ("left", "right"):
                with optim_wrapper[name].optim_context(self):
                    loss = getattr(self, name)(data[0]).square().mean()
                optim_wrapper[name].update_params(loss)
            return {"loss": loss.detach()}

        def val_step(self, data):
            return data

    data = {"dataset": TensorDataset(X), "batch_size": 6}
    pair = Pair()
    wrapper = OptimWrapperDict(
        left=OptimWrapper(torch.optim.SGD(pair.left.parameters(), lr=1e-3)),
        right=OptimWrapper(torch.optim.Adam(pair.right.parameters(), lr=1e-3)),
    )
    Runner(
        pair, tmp_path, train_dataloader=data, val_dataloader=data, val_evaluator=Scripted([1.0] * 3), visualizer=[],
        train_cfg={"max_epochs": 3}, optim_wrapper=wrapper, default_hooks={"checkpoint": None},
        param_scheduler={
            "left": {"type": "ReduceOnPlateauLR", "monitor": "error", "patience": 0},
            "right": [
                {"type": "StepMomentum", "step_size": 1, "gamma": 0.5},
                {"type": "ReduceOnPlateauLR", "monitor": "error", "patience": 1, "factor": 0.5},
            ],
        },
    ).train()  # fmt: skip
    assert wrapper.get_lr() == {"left.lr": [pytest.approx(1e-5)], "right.lr": [5e-4]}
    assert wrapper.get_momentum()["right.momentum"] == [pytest.approx(0.9 / 8)]
