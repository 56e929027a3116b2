"""One loss curve: a single process, and every stage of ZeRO on two ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lockstep.dist import get_rank, get_world_size
from lockstep.model import train_step
from lockstep.testing import ranks, run_ranks

from ...strategy.transformer import INPUTS, STEPS, TARGETS, Transformer, mean_over_ranks, optim_config, own_batches
from ..training import assert_equal, whole
from .training import STAGES, Training, strategy_of, train

AUTOCAST = {"enabled": True, "dtype": "bfloat16"}
# An update in proportion to the gradients, so that a wrong factor shows, as it may not with Adam.
SGD = {"type": "SGD", "lr": 0.1}


def tolerance(stage: int) -> float:
    return 1e-5 if stage == 3 else 5e-6


@pytest.mark.parametrize("counts", [1, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_losses_and_gradient_norms_are_those_of_one_process(stage: int, counts: int):
    losses, norms = run_ranks(1, train, "single", counts, True)[0]
    for rank_losses, rank_norms in run_ranks(2, train, f"zero{stage}", counts, True):
        assert rank_losses == pytest.approx(losses, abs=tolerance(stage), rel=0)
        assert rank_norms == pytest.approx(norms, rel=1e-5)
        assert len(rank_norms) == STEPS


@pytest.mark.parametrize("stage", STAGES)
def test_losses_without_clipping_are_those_of_one_process(stage: int):
    losses, no_norms = run_ranks(1, train, "single")[0]
    for rank_losses, rank_norms in run_ranks(2, train, f"zero{stage}"):
        assert rank_losses == pytest.approx(losses, abs=tolerance(stage), rel=0)
        assert rank_norms == no_norms == []


def train_to_a_short_window(kind: str) -> list[float]:
    training = Training(kind, {"optimizer": SGD, "accumulative_counts": 4})
    training.optim_wrapper.initialize_count_status(training.model, 0, 10)
    losses = training.run(0, 10)
    assert training.optim_wrapper.inner_count == 10
    return losses + training.run(10, 11)


@pytest.mark.parametrize("stage", STAGES)
def test_the_last_window_may_be_shorter(stage: int):
    alone = run_ranks(1, train_to_a_short_window, "single")[0]
    for losses in run_ranks(2, train_to_a_short_window, f"zero{stage}"):
        assert losses == pytest.approx(alone, abs=tolerance(stage), rel=0)


def train_in_windows_that_end_with_epochs(kind: str) -> list[float]:
    config = {"optimizer": SGD, "accumulative_counts": 4, "accumulate_across_epochs": False}
    training = Training(kind, config)
    training.optim_wrapper.initialize_count_status(training.model, 0, 12)
    losses, updates = [], []
    for index in range(12):
        training.optim_wrapper.begin_iteration(index, 6 if index < 6 else 12)
        losses += training.run(index, index + 1)
        updates.append(training.optim_wrapper.should_update())
    assert [index for index, is_update in enumerate(updates) if is_update] == [3, 5, 9, 11]
    return losses


@pytest.mark.parametrize("stage", STAGES)
def test_windows_may_end_with_each_epoch(stage: int):
    alone = run_ranks(1, train_in_windows_that_end_with_epochs, "single")[0]
    for losses in run_ranks(2, train_in_windows_that_end_with_epochs, f"zero{stage}"):
        assert losses == pytest.approx(alone, abs=tolerance(stage), rel=0)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_holds_its_share_of_the_optimizers_state(stage: int):
    training = Training(f"zero{stage}")
    training.run(0, 1)
    held = sum(
        value.numel()
        for entry in training.optim_wrapper.optimizer.state.values()
        for key, value in entry.items()
        if key in ("exp_avg", "exp_avg_sq")
    )
    parameters = sum(value.numel() for value in training.strategy.model_state().values())
    share = held / (2 * parameters)
    assert share == pytest.approx(1 / get_world_size(), rel=0.01)
    own = sum(parameter.numel() for parameter in training.model.parameters())
    assert own == (0 if stage == 3 else parameters)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_schedule_changes_the_learning_rate_that_is_used(stage: int):
    training = Training(f"zero{stage}")
    assert training.optim_wrapper.get_lr() == {"lr": [3e-3]}
    training.run(0, 1)
    before = whole(training.strategy.model_state())
    training.optim_wrapper.param_groups[0]["lr"] = 0.0
    training.run(1, 2)
    assert_equal(whole(training.strategy.model_state()), before)
    training.optim_wrapper.param_groups[0]["lr"] = 0.1
    training.run(2, 3)
    assert not torch.equal(whole(training.strategy.model_state())["head.weight"], before["head.weight"])


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_training_after_a_validation_is_as_if_there_had_been_none(stage: int):
    expected = Training(f"zero{stage}").run(0, 4)
    training = Training(f"zero{stage}")
    losses = training.run(0, 2)
    training.model.eval()
    with torch.no_grad():
        inputs, targets = own_batches()[0]
        training.model.val_step((inputs, targets))
    training.model.train()
    assert losses + training.run(2, 4) == expected


@ranks(1)
@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_trains_too(stage: int):
    losses = Training(f"zero{stage}").run()
    assert losses == pytest.approx(Training("single").run(), abs=tolerance(stage), rel=0)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("zero1", {"bf16": True}), ("zero3", {"bf16": True}), ("zero1", {"torch_autocast": AUTOCAST})],
    ids=["zero1", "zero3", "autocast"],
)
def test_bfloat16_comes_close(kind: str, options: dict):
    losses, _ = run_ranks(1, train, "single")[0]
    for rank_losses, _ in run_ranks(2, train, kind, **options):
        # A loss around 3 is itself a multiple of 1/64.
        assert rank_losses == pytest.approx(losses, abs=2 / 64)
        assert rank_losses != pytest.approx(losses, abs=1e-4)


@ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloading_changes_no_number(stage: int):
    expected = Training(f"zero{stage}").run(0, 6)
    assert Training(f"zero{stage}", offload=True).run(0, 6) == pytest.approx(expected, abs=1e-6)


class Outputs(dict):
    """What models of HuggingFace's return: a dict whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class HuggingFaceStyle(Transformer):
    """Takes its batch by names, and returns more than its loss."""

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Outputs:
        scores = self.scores(inputs)
        loss = None if targets is None else cross_entropy(scores.flatten(0, 1), targets.flatten())
        return Outputs(loss=loss, scores=scores)

    def scores(self, inputs: Tensor) -> Tensor:
        x = self.words(inputs) + self.places
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def train_named(kind: str) -> list[float]:
    torch.manual_seed(11)
    model, optim_wrapper = strategy_of(kind).prepare(HuggingFaceStyle(), optim_config(1, True))
    step = getattr(model, "train_step", partial(train_step, model))
    batches = [{"inputs": inputs, "targets": targets} for inputs, targets in own_batches()[:6]]
    losses = mean_over_ranks([step(batch, optim_wrapper)["loss"].item() for batch in batches])
    if kind != "single":
        model.eval()
        with torch.no_grad():
            assert model.val_step({"inputs": batches[0]["inputs"]}).scores.shape == (4, 12, 17)
    return losses


@pytest.mark.parametrize("stage", STAGES)
def test_models_in_the_style_of_huggingface_train_too(stage: int):
    expected = run_ranks(1, train_named, "single")[0]
    for losses in run_ranks(2, train_named, f"zero{stage}"):
        assert losses == pytest.approx(expected, abs=tolerance(stage), rel=0)


SAMPLES = [(3, 1), (2, 2), (1, 2), (4, 4)]  # of each rank, in each batch


def train_on_uneven_batches(kind: str, offload: bool = False) -> list[float]:
    """Return the losses of two updates, of two batches of unequal size each, whose gradients are clipped."""
    clipped = {"optimizer": SGD, "accumulative_counts": 2, "clip_grad": {"max_norm": 0.5}}
    training = Training(kind, clipped, **({"offload": True} if offload else {}))
    losses = []
    for index, samples in enumerate(SAMPLES):
        own = samples[get_rank()]
        inputs, targets = INPUTS[8 * index + 4 * get_rank() :][:own], TARGETS[8 * index + 4 * get_rank() :][:own]
        training.optim_wrapper.count_samples(own, sum(samples) / len(samples))
        losses.append(training.model.train_step((inputs, targets), training.optim_wrapper)["loss"].item())
    return losses + training.run(0, 1)


@pytest.mark.parametrize(("stage", "offload"), [*((stage, False) for stage in STAGES), (1, True), (2, True), (3, True)])
def test_each_sample_counts_alike_in_batches_of_unequal_size(stage: int, offload: bool):
    expected = run_ranks(2, train_on_uneven_batches, "ddp")
    for losses, by_ddp in zip(run_ranks(2, train_on_uneven_batches, f"zero{stage}", offload), expected, strict=True):
        assert losses == pytest.approx(by_ddp, abs=tolerance(stage), rel=0)
