"""Models that return their loss, several validation sets, predictions, and the best checkpoint."""

from __future__ import annotations

import json
import os
import re
import shutil
from math import exp
from multiprocessing import active_children
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Runner
from lockstep.dist import get_rank
from lockstep.errors import ConfigError
from lockstep.evaluator import BaseMetric, Evaluator, LossMetric
from lockstep.hooks import Hook
from lockstep.launch.worker import RESUME_SINCE
from lockstep.model import BaseModel, unwrap_model
from lockstep.model.shards import gather_full
from lockstep.testing import ranks
from lockstep.weights import export_checkpoint
from lockstep.weights.source import best_checkpoint_in

X = torch.randn(13, 4, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
DICTS = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]


class Output(dict):
    """Has its entries as attributes, as the outputs of transformers."""

    __getattr__ = dict.__getitem__


class ReturnsLoss(nn.Module):
    """Computes its loss from the labels, as the models of transformers do, and has a part that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.frozen = nn.Linear(4, 2), nn.Linear(1, 1).requires_grad_(False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.head(x)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return Output(loss=loss, logits=logits)


class Scores(nn.Linear):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(4, 2)


def make(model: nn.Module, work_dir: Path, **options: Any) -> Runner:
    given: dict[str, Any] = {
        "train_dataloader": {"dataset": DICTS if isinstance(model, ReturnsLoss) else pairs(), "batch_size": 2},
        "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.5}},
        "train_cfg": {"max_epochs": 2},
        "randomness": {"seed": 0},
        **options,
    }
    return Runner(model, work_dir, **given)


def pairs(factor: float = 1.0) -> TensorDataset:
    return TensorDataset(factor * X, Y)


def own_loss(outputs, batch):
    return outputs.loss


@ranks(2)
@pytest.mark.parametrize("loss", [None, own_loss])
def test_a_model_that_returns_its_loss_is_validated_by_it(loss, tmp_path: Path):
    model = ReturnsLoss()
    runner = make(model, tmp_path, val_dataloader={"dataset": DICTS, "batch_size": 3}, loss=loss)
    runner.train()
    with torch.no_grad():
        expected = model(X, Y).loss.item()
    assert runner.run.val_loop.metrics == {"loss": pytest.approx(expected, abs=1e-6)}
    assert "12 parameters (10 trainable)" in (tmp_path / runner.run_dir / "environment.json").read_text()
    words = make(model, tmp_path, val_dataloader={"dataset": DICTS}, val_evaluator={"type": "Perplexity"}, loss=loss)
    metrics = words.val()
    assert metrics == {"loss": pytest.approx(expected, abs=1e-6), "perplexity": pytest.approx(exp(expected), abs=1e-5)}


@ranks(2)
def test_a_model_that_returns_no_loss_in_evaluation_is_told_so(tmp_path: Path):
    runner = make(ReturnsLoss(), tmp_path, val_dataloader={"dataset": [{"x": x} for x in X]})
    with pytest.raises(TypeError, match=r"must return its loss in evaluation, too.* returned a Output without one"):
        runner.val()


def of_logits(out, target):
    return out.loss


def forgets(outputs, targets):
    F.cross_entropy(outputs, targets)


def keeps_samples(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (
            of_logits,
            r"in the `loss` given to the Runner, of_logits\(out, target\).* gets the whole batch if its second",
        ),
        (
            forgets,
            r"`loss` must return a scalar, or a dict of tensors, but forgets\(outputs, targets\) returned a None",
        ),
        (keeps_samples, r"keeps_samples\(outputs, targets\) returned a tensor of shape \(2,\)"),
        (
            lambda outputs: outputs,
            r"`loss` must take \(outputs, targets\) or \(outputs, batch\), but is <lambda>\(outp",
        ),
    ],
)
def test_an_error_in_a_loss_names_the_loss(loss, says, tmp_path: Path):
    with pytest.raises((TypeError, AttributeError)) as caught:
        make(Scores(), tmp_path, loss=loss).train()
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert re.search(says, said), said


def test_the_keys_of_a_batch_are_named_if_forward_takes_none_of_them(tmp_path: Path):
    samples = [{"image": x, "label": y} for x, y in zip(X, Y, strict=True)]
    runner = make(Scores(), tmp_path, loss=nn.CrossEntropyLoss(), train_dataloader=DataLoader(samples, batch_size=2))
    with pytest.raises(TypeError, match=r"has the keys image, label, and its parameters are \(input\)"):
        runner.train()


@ranks(2)
def test_several_sets_have_metrics_under_their_names(tmp_path: Path):
    runner = make(
        Scores(),
        tmp_path,
        loss=nn.CrossEntropyLoss(),
        val_dataloader={"clean": {"dataset": pairs()}, "noisy": DataLoader(pairs(-1.0), batch_size=3)},
        val_evaluator={"clean": {"type": "Accuracy"}, "noisy": [{"type": "Accuracy", "topk": (1, 2)}]},
        default_hooks={"checkpoint": {"save_best": "noisy/accuracy/top1"}},
        custom_hooks=[{"type": "EarlyStoppingHook", "monitor": "clean/loss", "patience": 1, "min_delta": 10}],
        train_cfg={"max_epochs": 9},
    )
    runner.train()
    assert runner.epoch == 2  # stopped by the loss of one set
    metrics = runner.run.val_loop.metrics
    assert [*metrics] == [
        "clean/accuracy", "clean/loss", "noisy/accuracy/top1", "noisy/accuracy/top2", "noisy/loss",
    ]  # fmt: skip
    alone = make(Scores(), tmp_path, loss=nn.CrossEntropyLoss(), val_dataloader={"dataset": pairs(-1.0)})
    best = alone.val(checkpoint=runner.best_checkpoint)
    records = [json.loads(line) for line in (runner.run_dir / "metrics.jsonl").read_text().splitlines()]
    first = next(record for record in records if record["mode"] == "val")
    assert runner.best_checkpoint.name == "best_noisy_accuracy_top1_epoch_1"
    assert best["loss"] == pytest.approx(first["noisy/loss"], abs=1e-6)


def test_sets_of_a_list_have_numbers_and_one_evaluator_for_all_or_one_each(tmp_path: Path):
    sets = [DataLoader(pairs()), DataLoader(pairs(-1.0))]
    accuracy = {"type": "Accuracy"}
    given = {"loss": nn.CrossEntropyLoss(), "val_dataloader": sets}
    one = make(Scores(), tmp_path, **given, val_evaluator=[accuracy]).val()
    each = [Evaluator(accuracy), {"metrics": {**accuracy, "prefix": "b"}}]
    several = make(Scores(), tmp_path, **given, val_evaluator=each).val()
    assert one["0/accuracy"] != one["1/accuracy"]
    assert [*several] == ["0/accuracy", "0/loss", "1/b/accuracy", "1/loss"]
    assert [*several.values()] == [*one.values()]


class Parts(Scores):
    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Any]:
        return {"pair": (super().forward(x), x.sum(1)), "name": ["a"] * len(x), "loss": x.sum(), "none": None}


@ranks(1, 3)
def test_predictions_are_in_the_order_of_the_dataset_each_once(tmp_path: Path):
    model = Scores()
    runner = make(model, tmp_path / "run", loss=nn.CrossEntropyLoss())
    trained = runner.train()
    with torch.no_grad():
        expected = model(X)
    for loader in (
        DataLoader(pairs(), batch_size=2, shuffle=True),
        DataLoader(X, batch_size=5),
        {"dataset": TensorDataset(X), "batch_sampler": [[12, 3, 4], [0, 1], [2], [5, 6, 7, 8, 9, 10, 11], [3]]},
    ):
        found = runner.predict(loader)
        assert (found is None) == (get_rank() > 0)
        if found is not None:
            assert torch.allclose(torch.stack(found), expected)
    assert runner.predict(DataLoader(pairs(), batch_size=2), out_dir=tmp_path / "out") is None
    if get_rank() == 0:
        files = sorted((tmp_path / "out").iterdir())
        assert [file.name for file in files] == [f"{index:08}.pt" for index in range(13)]
        assert torch.allclose(torch.stack([torch.load(file) for file in files]), expected)
        assert '"mode": "test"' not in (runner.run_dir / "metrics.jsonl").read_text()  # it has no metrics
    assert trained.training is False
    with pytest.raises(ConfigError, match="`dataloader` must be one data loader to predict for, but is None"):
        runner.predict()
    with pytest.raises(ConfigError, match="but is several: clean, noisy"):
        runner.predict({"clean": DataLoader(X), "noisy": DataLoader(X)})
    before = active_children()
    runner.predict({"dataset": TensorDataset(X), "batch_size": 4, "num_workers": 1, "persistent_workers": True})
    assert active_children() == before


class Order(BaseMetric):
    """Which samples were evaluated, in the order of the results."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += data_batch[1].tolist()

    def compute_metrics(self, results: list[int]) -> dict[str, Any]:
        return {"order": list(results)}


@ranks(1, 2, 3)
def test_results_are_in_the_order_of_batches_that_the_user_has_made(tmp_path: Path):
    batches = [[12, 3, 4], [0, 1], [2], [5, 6, 7, 8, 9, 10, 11]]
    numbered = TensorDataset(X, torch.arange(13))
    loaders = {"own": DataLoader(numbered, batch_sampler=batches), "plain": DataLoader(numbered, batch_size=2)}
    runner = make(
        Scores(), tmp_path, loss=lambda scores, y: scores.sum(), val_dataloader=loaders, val_evaluator=Order()
    )
    found = runner.val()
    assert found["own/order"] == [index for batch in batches for index in batch]
    assert found["plain/order"] == list(range(13))


@ranks(2)
def test_predictions_of_shards_and_of_outputs_in_parts(tmp_path: Path):
    model = Parts()
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    runner = make(model, tmp_path, strategy="fsdp", test_dataloader=DataLoader(pairs(), batch_size=7))
    found = runner.predict()
    if found is not None:
        assert len(found) == 13
        assert found[12].keys() == {"pair", "name"}
        scores, total = found[12]["pair"]
        assert torch.allclose(scores, X[12] @ weight.T + bias, atol=1e-6)
        assert (total, found[12]["name"]) == (X[12].sum(), "a")


def test_predictions_are_made_in_the_precision_of_a_test(tmp_path: Path):
    runner = make(Scores(), tmp_path, test_dataloader=DataLoader(X, batch_size=7), test_cfg={"dtype": "bfloat16"})
    assert {scores.dtype for scores in runner.predict()} == {torch.bfloat16}


def test_an_evaluator_may_be_that_of_several_runners(tmp_path: Path):
    data = {"dataset": pairs(), "batch_size": 4}
    for metrics in (["Accuracy"], [LossMetric()]):
        evaluator = Evaluator(metrics)
        runners = [
            make(Scores(), tmp_path / str(number), loss=loss, val_dataloader=data, val_evaluator=evaluator)
            for number, loss in enumerate((nn.CrossEntropyLoss(), lambda outputs, batch: 7.0 + 0 * outputs.sum()))
        ]
        found = [runner.val()["loss"] for runner in (*runners, runners[0])]
        assert found[0] == found[2] < found[1] == 7.0
        assert len(evaluator.metrics) == 1
        assert evaluator.metrics[0].results == []


@pytest.mark.parametrize("ema", [False, True])
def test_the_best_checkpoint_is_tested_exported_and_found_again(ema, tmp_path: Path):
    data = {"dataset": pairs(), "batch_size": 4}
    options: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(),
        "val_dataloader": data,
        "test_dataloader": data,
        "default_hooks": {"checkpoint": {"save_best": "loss", "rule": "greater"}},  # the first one
        "custom_hooks": [{"type": "EMAHook", "momentum": 0.5}] if ema else [],
        "train_cfg": {"max_epochs": 3},
    }
    runner = make(Scores(), tmp_path / "work", **options)
    assert runner.best_checkpoint is None
    with pytest.raises(ConfigError, match=r"`checkpoint` must be 'best' only where a run has kept its best one"):
        make(Scores(), tmp_path / "work", **options).test(checkpoint="best")
    runner.train()
    records = [json.loads(line) for line in (runner.run_dir / "metrics.jsonl").read_text().splitlines()]
    best, *_, last = [record["loss"] for record in records if record["mode"] == "val"]
    assert best > last
    assert runner.best_checkpoint == runner.run_dir / "best_loss_epoch_1"
    assert runner.test() == {"loss": pytest.approx(last, abs=1e-6)}
    assert runner.test(checkpoint="best") == {"loss": pytest.approx(best, abs=1e-6)}
    record = json.loads((runner.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert (record["epoch"], record["iter"]) == (1, runner.max_iters // 3)
    assert record["checkpoint"] == str(runner.best_checkpoint)
    copied = tmp_path / "copied" / runner.run_dir.name / "best_loss_epoch_1"
    shutil.copytree(tmp_path / "work", tmp_path / "copied")  # and trained on, with its own files
    assert best_checkpoint_in([tmp_path / "copied"]) == copied
    again = make(Scores(), tmp_path / "copied", **{**options, "train_cfg": {"max_epochs": 4}}, resume=True)
    again.train()
    assert again.best_checkpoint == copied
    (tmp_path / "work").rename(tmp_path / "moved")
    assert make(Scores(), tmp_path / "moved", **options).test(checkpoint="best") == {"loss": pytest.approx(best)}
    export_checkpoint(tmp_path / "moved", tmp_path / "best.pth", "torch", best=True)
    plain = Scores()
    plain.load_state_dict(torch.load(tmp_path / "best.pth", weights_only=True))
    assert F.cross_entropy(plain(X), Y).item() == pytest.approx(best, abs=1e-6)


def test_the_best_checkpoint_of_a_training_is_its_own_where_another_job_trains_in_the_work_dir(tmp_path: Path):
    data = {"dataset": pairs(), "batch_size": 4}
    options: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "val_dataloader": data}
    keeps = {"default_hooks": {"checkpoint": {"save_best": "loss"}}}
    first, second = (make(Scores(), tmp_path, **options, **keeps) for _ in range(2))
    first.train()
    second.train()
    for runner in (first, second):
        assert runner.best_checkpoint.parent == runner.run_dir
    assert make(Scores(), tmp_path, **options).best_checkpoint.parent == second.run_dir


@pytest.mark.parametrize("out_dir", [None, "elsewhere"])
def test_all_of_a_run_is_in_one_folder_wherever_the_script_goes(out_dir, tmp_path: Path, monkeypatch):
    class Goes(Hook):
        def after_train_iter(self, runner: Any, **values: Any) -> None:
            os.chdir(tmp_path)

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    keeps = {"default_hooks": {"checkpoint": {"out_dir": out_dir}}}
    runner = make(Scores(), "work", loss=nn.CrossEntropyLoss(), custom_hooks=[Goes()], **keeps)
    runner.train()
    assert [one.name for one in tmp_path.iterdir()] == ["here"]
    root = tmp_path / "here" / (out_dir or "")
    assert (root / "work" / runner.run_dir.name / "epoch_2").is_dir()


@ranks(2)
def test_ranks_that_were_started_again_resume_although_a_validation_comes_before_the_training(tmp_path: Path):
    def run() -> Runner:
        runner = make(Scores(), tmp_path, loss=nn.CrossEntropyLoss(), val_dataloader=DataLoader(pairs()))
        runner.val()
        runner.train()
        return runner

    first = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RESUME_SINCE, "1")
        again = run()
    assert (first.resume_from, again.resume_from) == (None, first.run_dir / "epoch_2")


class Ones(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def init_weights(self) -> None:
        nn.init.ones_(self.linear.weight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x), y)


def test_what_is_validated_before_a_training_are_the_weights_that_it_begins_with(tmp_path: Path):
    runner = make(Ones, tmp_path, val_dataloader=DataLoader(pairs()))
    runner.val()
    assert (runner.model.linear.weight == 1).all()
    given = Ones()
    make(given, tmp_path, val_dataloader=DataLoader(pairs())).val()  # may have trained
    assert not (given.linear.weight == 1).any()


@ranks(1, 2)
@pytest.mark.parametrize("strategy", [None, "fsdp"])
def test_a_training_initialises_the_weights_that_a_validation_has_left_alone(strategy: Any, tmp_path: Path):
    options: dict[str, Any] = {"optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.0}}, "strategy": strategy}
    runner = make(Ones(), tmp_path, val_dataloader={"dataset": pairs()}, **options)
    runner.val()
    runner.train()
    assert (gather_full(unwrap_model(runner.model).linear.weight) == 1).all()
    if get_rank() == 0:
        assert "those that were evaluated before are others" in (runner.run_dir / "log.txt").read_text()


def test_a_training_keeps_the_weights_that_were_loaded_for_a_validation(tmp_path: Path):
    given = Ones()
    torch.save({name: torch.full_like(value, 5.0) for name, value in given.state_dict().items()}, tmp_path / "five.pth")
    options: dict[str, Any] = {"optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.0}}}
    runner = make(given, tmp_path, val_dataloader=DataLoader(pairs()), **options)
    runner.val(tmp_path / "five.pth")
    runner.train()
    assert (given.linear.weight == 5).all()


def test_another_training_in_the_work_dir_is_told(tmp_path: Path):
    first = make(Scores(), tmp_path, loss=nn.CrossEntropyLoss())
    with first.training():
        second = make(Scores(), tmp_path, loss=nn.CrossEntropyLoss())
        second.train()
    third = make(Scores(), tmp_path, loss=nn.CrossEntropyLoss())
    third.train()
    logs = [(each.run_dir / "log.txt").read_text() for each in (second, third)]
    says = f"another training goes on in this work_dir: that of {first.run_dir}"
    assert [says in log for log in logs] == [True, False]


def test_a_folder_that_has_become_read_only_does_not_hide_the_error_of_a_training(tmp_path: Path):
    runner = make(Scores(), tmp_path, loss=nn.CrossEntropyLoss())
    broken = patch.object(Path, "unlink", side_effect=PermissionError)
    with pytest.raises(ValueError, match="the cause"), broken, runner.training():
        raise ValueError("the cause")


@ranks(2)
def test_weights_that_a_validation_leaves_gathered_are_not_said_to_be_left_out(tmp_path: Path) -> None:
    data = {"dataset": pairs(), "batch_size": 4}
    options: dict[str, Any] = {"val_dataloader": data, "loss": nn.CrossEntropyLoss(), "strategy": "fsdp"}
    make(Scores(), tmp_path, train_cfg={"max_epochs": 2}, **options).train()
    assert not any("never updates" in log.read_text() for log in tmp_path.glob("*/log*.txt"))


def weights_file(path: Path, value: float) -> str:
    torch.save({name: torch.full_like(tensor, value) for name, tensor in Scores().state_dict().items()}, path)
    return str(path)


def test_training_goes_on_with_the_weights_that_were_validated(tmp_path: Path):
    given, other = weights_file(tmp_path / "given.pth", 1.0), weights_file(tmp_path / "other.pth", 5.0)
    options = {"loss": nn.CrossEntropyLoss(), "val_dataloader": DataLoader(pairs()), "load_from": given}
    runner = make(Scores(), tmp_path, optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.0}}, **options)
    runner.val()
    assert runner.model.weight.mean() == 1.0
    runner.val(other)
    runner.train()
    assert runner.model.weight.mean() == 5.0


@pytest.mark.parametrize("checkpoint", [False, True])
def test_what_is_resumed_is_also_validated(checkpoint: bool, tmp_path: Path):
    options: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "val_dataloader": DataLoader(pairs())}
    trained = make(Scores(), tmp_path, **options).train()
    other = weights_file(tmp_path / "other.pth", 5.0)
    runner = make(Scores(), tmp_path, resume=True, **options)
    runner.val(other if checkpoint else None)
    expected = torch.full((2, 4), 5.0) if checkpoint else trained.weight
    torch.testing.assert_close(runner.model.weight, expected, rtol=0, atol=0)


class SquaredSum(BaseMetric):
    """Computes with a matrix product, which autocast would round."""

    def process(self, data_batch, data_samples):
        ones = torch.ones(3, 3) / 3
        self.results.append((ones @ ones).sum().item())

    def compute_metrics(self, results):
        return {"sum": sum(results)}


def test_half_precision_is_the_models_and_not_that_of_metrics(tmp_path):
    seen = []
    model = Scores()
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    loader = DataLoader(X, batch_size=13)
    runner = Runner(
        model, tmp_path, test_dataloader=loader, test_evaluator=SquaredSum(), test_cfg={"dtype": "bfloat16"}
    )
    assert runner.test()["sum"] == (torch.ones(3, 3) / 3 @ (torch.ones(3, 3) / 3)).sum().item()
    assert seen == [torch.bfloat16]


class Remembers(nn.Linear):
    """Counts, before each prediction, which of the earlier ones are still in memory."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.made: list[ref[Tensor]] = []
        self.held: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.held.append(sum(one() is not None for one in self.made))
        scores = super().forward(x)
        self.made.append(ref(scores))
        return scores


def test_predictions_are_gone_before_the_next_ones_are_made(tmp_path: Path):
    model = Remembers()
    data = {"dataset": pairs(), "batch_size": 4}
    given = {"test_dataloader": data, "test_evaluator": {"type": "Accuracy"}, "loss": nn.CrossEntropyLoss()}
    Runner(model, tmp_path, **given).test()
    assert model.held == [0, 0, 0, 0]
