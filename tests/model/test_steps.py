"""One training step of any module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.model import parse_losses, predict_step, train_step
from lockstep.optim import OptimWrapper


class ReturnsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.linear(x) - y).square().mean()


class TakesMode(ReturnsLoss):
    def forward(self, x: Tensor, y: Tensor | None = None, mode: str = "tensor"):
        out = self.linear(x)
        if mode == "loss":
            return {"loss": (out - y).square().mean(), "seen": torch.tensor(float(len(x)))}
        return (out, y) if mode == "predict" else out


class ReturnsObject(ReturnsLoss):
    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=super().forward(x, y), logits=None)


def sgd(model: nn.Module) -> OptimWrapper:
    return OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))


BATCH = (torch.ones(4, 3), torch.zeros(4, 1))


@pytest.mark.parametrize("batch", [BATCH, list(BATCH), dict(zip("xy", BATCH, strict=True))])
@pytest.mark.parametrize("kind", [ReturnsLoss, TakesMode, ReturnsObject])
def test_a_step_is_what_one_writes_by_hand(kind, batch):
    torch.manual_seed(0)
    model, by_hand = kind(), ReturnsLoss()
    by_hand.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    loss = by_hand(*BATCH)
    loss.backward()
    optimizer.step()

    logged = train_step(model, batch, sgd(model))

    assert torch.equal(logged["loss"], loss)
    assert not logged["loss"].requires_grad
    assert torch.equal(model.linear.weight, by_hand.linear.weight)


def test_predictions_come_in_the_mode_for_them():
    model = TakesMode()
    scores, labels = predict_step(model, BATCH)
    assert torch.equal(scores, model.linear(BATCH[0]))
    assert labels is BATCH[1]


def test_a_batch_that_is_one_tensor_is_one_argument():
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return (self.scale * x).mean()

    model = Mean()
    assert train_step(model, torch.full((2,), 3.0), sgd(model))["loss"] == 3.0


class Doubles(nn.Module):
    """As a data preprocessor."""

    def forward(self, data: Tensor, training: bool) -> Tensor:
        return 2 * data


class Hands(nn.Module):
    """Hands on what it does not have, as peft's models do."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x)


@pytest.mark.parametrize("where", ["module", "instance", "class", "base"])
def test_a_preprocessor_is_found_wherever_the_model_keeps_it(where: str):
    inner = nn.Linear(3, 1)
    kind = type("Owner", (nn.Sequential,), {"data_preprocessor": Doubles()} if where == "class" else {})
    model = kind(inner)
    if where == "module":
        model.data_preprocessor = Doubles()
        model.forward = inner.forward
    elif where == "instance":
        vars(model)["data_preprocessor"] = lambda data, training: 2 * data
    elif where == "base":
        model.data_preprocessor = Doubles()
        model.forward = inner.forward
        model = Hands(model)
    assert torch.equal(predict_step(model, torch.ones(2, 3)), inner(2 * torch.ones(2, 3)))


def test_entries_called_loss_are_added_and_all_are_logged():
    total, logged = parse_losses(
        {"loss_cls": torch.tensor([1.0, 3.0]), "loss_boxes": [torch.tensor(1.0), torch.tensor([2.0, 4.0])],
         "accuracy": torch.tensor(7.0)}
    )  # fmt: skip
    assert total == 6.0
    assert [(name, value.item()) for name, value in logged.items()] == [
        ("loss", 6.0), ("loss_cls", 2.0), ("loss_boxes", 4.0), ("accuracy", 7.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "error", "says"),
    [
        (None, TypeError, "must return a loss in training.*returned None"),
        ((torch.tensor(1.0), torch.tensor(2.0)), TypeError, "returned a tuple of"),
        ({"accuracy": torch.tensor(1.0)}, TypeError, "contains 'loss', but returned only .*accuracy"),
        (
            {"loss": torch.ones(()), "ids": torch.ones(2).long()},
            TypeError,
            r"losses\['ids'\]` .* is torch.int64. Leave it out: in training, return only what is to be logged",
        ),
        ({"loss": 1.0}, TypeError, r"losses\['loss'\]` must be a tensor.*1.0"),
        (torch.ones(2), ValueError, r"must be a scalar, but has shape \(2,\)"),
    ],
)
def test_what_is_no_loss_is_refused(losses, error, says):
    with pytest.raises(error, match=says):
        parse_losses(losses)


class TakesLabels(nn.Linear):
    """Computes its loss of labels, and leaves it out without them, as models of transformers do."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = super().forward(x)
        loss = {} if labels is None else {"loss": nn.functional.mse_loss(logits, labels)}
        return {**loss, "logits": logits, "cache": object()} if labels is None else loss


def test_a_batch_without_labels_is_told_to_a_model_that_takes_them():
    model = TakesLabels(3, 1)
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step(model, {"x": torch.ones(2, 3), "labels": torch.ones(2, 1)}, wrapper)
    with pytest.raises(TypeError, match=r"loss only of `labels`, but the batch has only x. .*\(rank 0 of 1\)"):
        train_step(model, {"x": torch.ones(2, 3)}, wrapper)
    with pytest.raises(TypeError, match=r"`losses\['cache'\]` must be a tensor"):
        train_step(model, [torch.ones(2, 3)], wrapper)
