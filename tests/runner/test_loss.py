"""A model that returns outputs, and a loss that is given to the Runner."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.dist import get_world_size
from lockstep.errors import ConfigError
from lockstep.model import unwrap_model
from lockstep.runner import Runner
from lockstep.testing import ranks

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
STRATEGIES = ["ddp", "fsdp"]


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class Several(Logits):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x * mask)


class ReturnsLoss(Logits):
    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor"):
        logits = super().forward(x)
        return F.cross_entropy(logits, y) if mode == "loss" else (logits, y)


def train(model: nn.Module, work_dir: Path, **options: Any) -> tuple[nn.Module, Runner, list[float]]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    given: dict[str, Any] = {
        "train_dataloader": {"dataset": TensorDataset(X, Y), "batch_size": 4},
        "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}},
        "train_cfg": {"max_epochs": 2},
        "default_hooks": {"logger": {"interval": 1}},
        "randomness": {"seed": 0},
        **options,
    }
    runner = Runner(model, work_dir, **given)
    runner.train()
    records = [json.loads(line) for line in (runner.run_dir / "metrics.jsonl").read_text().splitlines()]
    return model, runner, [record["loss"] for record in records if record["mode"] == "train"]


def by_batch(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch[1])


LOSSES = {
    "module": nn.CrossEntropyLoss(),
    "function": F.cross_entropy,
    "of the batch": by_batch,
    "weights on the device": nn.CrossEntropyLoss(weight=torch.ones(2)),
    "config": {"type": nn.CrossEntropyLoss},
    "a dict of losses": lambda outputs, target: {"loss_ce": F.cross_entropy(outputs, target)},
}


@ranks(1, 2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_trains_as_a_model_that_returns_its_loss(strategy: str, tmp_path: Path) -> None:
    _, _, expected = train(ReturnsLoss(), tmp_path / "inside", strategy=strategy)
    for name, loss in LOSSES.items():
        _, _, losses = train(Logits(), tmp_path / name, strategy=strategy, loss=loss)
        assert losses == expected, name


@ranks(1, 2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_validation_has_the_loss_as_a_metric(strategy: str, tmp_path: Path) -> None:
    validation = {"dataset": TensorDataset(X[:13], Y[:13]), "batch_size": 3}
    _, runner, _ = train(Logits(), tmp_path, strategy=strategy, loss=nn.CrossEntropyLoss(), val_dataloader=validation)
    weights = {name: value.full_tensor() if hasattr(value, "full_tensor") else value
               for name, value in runner.run.strategy.model_state().items()}  # fmt: skip
    alone = Logits()
    alone.load_state_dict(weights)
    assert runner.run.val_loop.metrics == {
        "loss": pytest.approx(F.cross_entropy(alone(X[:13]), Y[:13]).item(), rel=1e-6)
    }


def test_a_validation_may_have_an_evaluator_beside(tmp_path: Path) -> None:
    loader = {"dataset": TensorDataset(X, Y), "batch_size": 5}
    _, runner, _ = train(Logits(), tmp_path, loss=nn.CrossEntropyLoss(), val_dataloader=loader, val_evaluator={"type": "Accuracy"})  # fmt: skip  # noqa: E501
    assert runner.run.val_loop.metrics.keys() == {"accuracy", "loss"}


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return self.head(x if scale is None else x * scale)


class Dicts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": X[index], "label": Y[index], "scale": torch.ones(1), "name": f"sample {index}"}


def test_of_a_dict_the_module_gets_what_it_takes_and_the_loss_the_target(tmp_path: Path) -> None:
    loader = {"dataset": Dicts(), "batch_size": 4}
    train(Named(), tmp_path, train_dataloader=loader, val_dataloader=loader, loss=nn.CrossEntropyLoss())


@pytest.mark.parametrize("data", [X, TensorDataset(X)], ids=["a tensor", "a list of one"])
def test_a_batch_of_one_tensor_is_its_own_target(data: Any, tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    train(nn.Linear(4, 4), tmp_path, train_dataloader=loader, loss=nn.MSELoss())


class Output(Logits):
    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=super().forward(x), hidden=x)


def test_what_a_loss_takes_out_of_a_batch_others_still_have(tmp_path: Path) -> None:
    def popping(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs, batch.pop("labels"))

    items = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    loaders = {name: {"dataset": items, "batch_size": 4} for name in ("train_dataloader", "val_dataloader")}
    cfg = {"max_epochs": 1, "batch_size_of": lambda batch: len(batch["labels"])}
    _, runner, _ = train(Logits(), tmp_path, loss=popping, val_evaluator={"type": "Accuracy"}, train_cfg=cfg, **loaders)
    assert {"accuracy", "loss"} == runner.val().keys()


def test_of_outputs_that_name_logits_the_loss_and_metrics_get_these(tmp_path: Path) -> None:
    loader = {"dataset": TensorDataset(X, Y), "batch_size": 4}
    evaluation = {"val_dataloader": loader, "val_evaluator": {"type": "Accuracy"}}
    _, _, expected = train(Logits(), tmp_path / "plain", loss=nn.CrossEntropyLoss())
    _, runner, losses = train(Output(), tmp_path / "named", loss=nn.CrossEntropyLoss(), **evaluation)
    assert losses == expected
    assert runner.run.val_loop.metrics.keys() == {"accuracy", "loss"}


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(2))

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs - self.centers[target]).square().mean()


class Unlabelled(Dicts):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": X[index]}


@pytest.mark.parametrize(
    ("model", "options", "error", "says"),
    [
        (
            Logits,
            {},
            TypeError,
            r"`forward` of Logits must take the batch, which has 2 entries.*the Runner is given loss=",
        ),
        (
            Several,
            {"loss": nn.CrossEntropyLoss()},
            TypeError,
            r"which has 1 entry, but its parameters are .*: missing .* 'mask'\. A tuple is passed by position",
        ),
        (Logits, {"loss": Learned()}, ConfigError, "`loss` must have no parameters, but Learned has centers"),
        (Logits, {"loss": nn.CrossEntropyLoss}, TypeError, r"is the class CrossEntropyLoss\. Call it: loss=Cross"),
        (Logits, {"loss": 3}, TypeError, "`loss` must be a function or a module, but is 3 of type int"),
        (
            Named,
            {"loss": nn.CrossEntropyLoss(), "train_dataloader": {"dataset": Unlabelled(), "batch_size": 4}},
            ConfigError,
            "`loss` must find its targets under one of the keys labels, .*, but the batch has x",
        ),
    ],
)
def test_what_cannot_work_is_said(model: Any, options: Any, error: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=says):
        train(model(), tmp_path, **options)


def test_outputs_without_a_loss_are_named(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(X, batch_size=4)
    with pytest.raises(ValueError, match=r"has shape \(4, 2\).* or, if these are outputs, give the Runner a `loss`"):
        train(Logits(), tmp_path, train_dataloader=loader)


def test_a_model_with_a_step_of_its_own_computes_its_loss(tmp_path: Path) -> None:
    model = Logits()
    model.train_step = lambda data, optim_wrapper: {}
    with pytest.raises(ConfigError, match="but Logits has train_step"):
        train(model, tmp_path, loss=nn.CrossEntropyLoss())


WEIGHT = torch.tensor([1.0, 5.0])


def weight_of(batch: Any) -> Tensor:
    return WEIGHT[batch[1]].sum()


@ranks(1, 2)
@pytest.mark.parametrize("counts", [1, 2])
@pytest.mark.parametrize("weighted", ["by labels", "by samples", "in sum", "not"])
def test_a_loss_that_is_no_mean_over_samples_is_told(weighted: str, counts: int, tmp_path: Path) -> None:
    loss = nn.CrossEntropyLoss(
        None if weighted == "not" else WEIGHT, reduction="sum" if weighted == "in sum" else "mean"
    )
    cfg = {"max_epochs": 1, **({"batch_size_of": weight_of} if weighted == "by labels" else {})}
    batch_size = 24 // counts // get_world_size()
    model, runner, _ = train(
        Logits(), tmp_path, loss=loss, train_cfg=cfg,
        train_dataloader={"dataset": TensorDataset(X, Y), "batch_size": batch_size},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}, "accumulative_counts": counts},
    )  # fmt: skip
    alone = counts * get_world_size() == 1
    told = {
        "by samples": "CrossEntropyLoss is a mean over the weights of its labels",
        "in sum": "is a sum over samples",
    }
    log = (runner.run_dir / "log.txt").read_text()
    assert (told.get(weighted, "the loss CrossEntropyLoss is") in log) == (weighted in told and not alone)
    if weighted in ("by labels", "not"):
        whole = Logits()
        torch.manual_seed(0)
        for parameter in whole.parameters():
            nn.init.normal_(parameter)
        loss(whole(X), Y).backward()
        expected = whole.head.weight - 0.1 * whole.head.weight.grad
        torch.testing.assert_close(unwrap_model(model).head.weight, expected)
