"""Metrics are exact on any number of ranks, and say what is wrong."""

from __future__ import annotations

import logging
from math import inf, nan
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from lockstep import Runner
from lockstep.dataset import DefaultSampler, ShardedSampler
from lockstep.dist import all_reduce, get_rank, get_world_size
from lockstep.errors import PeerError
from lockstep.evaluator import Accuracy, BaseMetric, Evaluator, LossMetric, Perplexity, format_metrics
from lockstep.evaluator.metric import Predictions, per_sample
from lockstep.registry import METRICS
from lockstep.testing import ranks, run_ranks


class InOrder(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += data_samples

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"order": results}


class PerBatch(BaseMetric):
    default_prefix = "batches"

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(len(data_samples))

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return {"samples": sum(results)}


class ReturnsNothing(InOrder):
    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        return None  # type: ignore[return-value]


class Fails(InOrder):
    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        raise ZeroDivisionError("no boxes")


def evaluate_shard(length: int, batch_size: int, round_up: bool) -> dict[str, Any]:
    share = list(DefaultSampler(range(length), shuffle=False, round_up=round_up))
    evaluator = Evaluator([InOrder(), PerBatch()])
    for start in range(0, len(share), batch_size):
        evaluator.process(share[start : start + batch_size])
    return evaluator.evaluate(length)


@settings(max_examples=25)
@given(length=st.integers(4, 30), batch_size=st.integers(1, 7), size=st.integers(1, 4), round_up=st.booleans())
def test_every_sample_counts_once_in_the_order_of_the_data(length, batch_size, size, round_up):
    for metrics in run_ranks(size, evaluate_shard, length, batch_size, round_up):
        assert metrics["order"] == list(range(length))
        # Results of whole batches can't be told from padding; one sample in a batch is a result of its own.
        repeats = round_up and batch_size > 1
        assert metrics["batches/samples"] == (-(-length // size) * size if repeats else length)


def accuracy_of_shard(length: int) -> float:
    generator = torch.Generator().manual_seed(length)
    scores, labels = torch.randn(length, 5, generator=generator), torch.randint(5, (length,), generator=generator)
    share = list(DefaultSampler(range(length), shuffle=False, round_up=False))
    metric = Accuracy()
    for index in share:
        metric.process(None, (scores[[index]], labels[[index]]))
    return metric.evaluate(length)["accuracy"]


@pytest.mark.parametrize("length", [1, 3, 7, 359])
def test_accuracy_is_that_of_one_process(length):
    alone = accuracy_of_shard(length)
    for size in (2, 4):
        assert run_ranks(size, accuracy_of_shard, length) == [alone] * size


SCORES = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
LABELS = torch.tensor([0, 1, 1])


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (None, (SCORES, LABELS)),
        (None, [SCORES.argmax(1), LABELS]),
        (None, {"scores": SCORES, "labels": LABELS}),
        ((torch.zeros(3), LABELS), SCORES),
        ({"img": torch.zeros(3), "label": LABELS.tolist()}, SCORES),
    ],
)
def test_accuracy_finds_scores_and_labels(batch, samples):
    metric = Accuracy()
    metric.process(batch, samples)
    assert metric.evaluate(3) == {"accuracy": pytest.approx(200 / 3)}
    assert metric.results == []


@pytest.mark.parametrize(
    ("samples", "error", "says"),
    [
        (None, TypeError, "scores of a batch and its labels.*predicted NoneType"),
        ((SCORES, LABELS[:2]), ValueError, r"\(3, 2\) and \(2,\)"),
        ([SCORES[0], SCORES[1]], TypeError, "predicted list"),  # for a batch of two
        ((SCORES[:, 0], LABELS), ValueError, r"float32 of shape \(3,\)\. One score .* by \(score > 0\)\.long\(\)"),
        ((SCORES[:, :1], LABELS), ValueError, r"float32 of shape \(3, 1\)"),
    ],
)
def test_accuracy_refuses_what_it_cannot_read(samples, error, says):
    with pytest.raises(error, match=says):
        Accuracy().process(None, samples)


@pytest.mark.parametrize(("batch", "says"), [({"x": SCORES, "id": LABELS}, "which has only x, id"), (None, "has none")])
def test_accuracy_says_where_labels_are_missing(batch, says):
    with pytest.raises(
        TypeError, match=f"no labels are there: neither the prediction has them, nor the batch, .*{says}"
    ):
        Accuracy().process(batch, SCORES)


def test_accuracy_reads_no_batch_of_an_accelerator():
    scores, labels = torch.empty(3, 2, device="meta"), torch.empty(3, dtype=torch.int64, device="meta")
    Accuracy(topk=(1, 2)).process(None, (scores, labels))  # which on the meta device could not be read
    Accuracy().process(None, (labels, labels))


@ranks(1, 2)
def test_accuracy_among_the_best():
    scores = torch.tensor([[5.0, 4, 3, 2], [5, 4, 3, 2], [1, 1, 1, 1], [2, 3, 4, 5]])[get_rank() :: get_world_size()]
    labels = torch.tensor([0, 2, 1, 0])[get_rank() :: get_world_size()]
    metric = Accuracy(topk=(1, 2, 3), prefix="val")
    metric.process(None, (scores, labels))
    assert metric.evaluate(4) == {"val/accuracy/top1": 25.0, "val/accuracy/top2": 50.0, "val/accuracy/top3": 75.0}
    assert Evaluator(metric).units == dict.fromkeys([f"val/accuracy/top{k}" for k in (1, 2, 3)], "%")
    second = Accuracy(topk=2)
    second.process(None, (scores, labels))
    assert second.evaluate(4) == {"accuracy": 50.0}


@pytest.mark.parametrize("topk", [1, (1, 2)])
def test_a_score_that_is_no_number_is_no_right_one(topk):
    scores = torch.tensor([[1.0, 0, 0], [0, 0, 1], [torch.nan] * 3, [torch.nan, 0, 2], [torch.nan, 1, 1]])
    metric = Accuracy(topk=topk)
    metric.process(None, (scores, torch.tensor([0, -100, 0, 2, 2])))
    assert metric.evaluate(5) == ({"accuracy": 20.0} if topk == 1 else {"accuracy/top1": 20.0, "accuracy/top2": 40.0})


@pytest.mark.parametrize(
    ("topk", "samples", "says"),
    [
        (0, None, "`topk` must be an int of at least 1, or several of them, but is 0"),
        ((), None, r"`topk` must be an int of at least 1, or several of them, but is \(\)"),
        (3, (SCORES, LABELS), "`topk` must be at most 2, the number of classes, but is 3"),
        ((1, 2), (LABELS, LABELS), "for the top 2, but are classes"),
    ],
)
def test_what_cannot_be_among_the_best(topk, samples, says):
    with pytest.raises(ValueError, match=says):
        Accuracy(topk=topk).process(None, samples)


@ranks(2)
def test_without_a_known_size_all_results_count():
    metric = PerBatch()
    for _ in range(1 + get_rank()):
        metric.process(None, [0])
    assert metric.evaluate(None) == {"batches/samples": 3}


@ranks(2)
def test_a_metric_that_collects_nothing_is_named_on_every_rank():
    with pytest.raises(ValueError, match=rf"InOrder.process\(\) must append.*rank {get_rank()} of 2"):
        InOrder().evaluate(3)


@ranks(2)
@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        (ReturnsNothing, TypeError, r"ReturnsNothing.compute_metrics\(\) must return a dict.*None"),
        (Fails, ZeroDivisionError, "no boxes"),
    ],
)
def test_a_failure_on_rank_0_reaches_every_rank_and_the_group_lives_on(kind, error, says):
    metric = kind()
    metric.process(None, [1])
    with pytest.raises(error if get_rank() == 0 else PeerError, match=says):
        metric.evaluate(2)
    data = torch.ones(1)
    all_reduce(data)
    assert data == get_world_size()


def test_more_results_than_samplers_repeat_are_warned_of(caplog):
    metric = InOrder()
    metric.process(None, [1, 2, 3, 4])
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        assert metric.evaluate(2) == {"order": [1, 2]}
    assert "4 results for 2 samples" in caplog.text


def test_an_evaluator_takes_metrics_in_any_form():
    accuracy = Accuracy(prefix="top")
    evaluator = Evaluator([accuracy, {"type": "Accuracy"}, {"type": PerBatch}])
    assert evaluator.units == {"top/accuracy": "%", "accuracy": "%"}
    evaluator.set_dataset_meta({"classes": ("a", "b")})
    assert accuracy.dataset_meta == {"classes": ("a", "b")}
    evaluator.process((SCORES, LABELS))
    assert set(evaluator.evaluate(3)) == {"top/accuracy", "accuracy", "batches/samples"}
    assert Evaluator({"type": "Accuracy"}).metrics[0].prefix is None
    assert METRICS["Accuracy"] is Accuracy


class Arrays(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += data_samples

    def compute_metrics(self, results):
        rates = numpy.array(results, dtype=numpy.float32)
        return {"mean": rates.mean(), "by_class": rates, "one": torch.ones(1), "pair": (torch.zeros(2), 1), "kind": "a"}


def test_values_of_numpy_and_torch_become_plain_ones():
    evaluator = Evaluator(Arrays())
    evaluator.process([0.5, 1.0])
    found = evaluator.evaluate(2)
    assert found == {"mean": 0.75, "by_class": [0.5, 1.0], "one": 1.0, "pair": [[0.0, 0.0], 1], "kind": "a"}
    assert type(found["mean"]) is float
    assert format_metrics(found, {"mean": "%"}) == "mean 0.75 %  one 1  kind a"
    assert format_metrics({"error": 1.5e30}, {"error": "%"}) == "error 1.5e+30 %"


def test_two_metrics_of_one_name_are_refused():
    evaluator = Evaluator([Accuracy(), Accuracy()])
    evaluator.process((SCORES, LABELS))
    with pytest.raises(ValueError, match=r"'accuracy'.*Give it a `prefix`"):
        evaluator.evaluate(3)


@pytest.mark.parametrize(("metrics", "error"), [([], ValueError), ([len], TypeError), ([3], TypeError)])
def test_what_is_no_metric_is_refused(metrics, error):
    with pytest.raises(error, match="an evaluator must"):
        Evaluator(metrics)


class Doubled(BaseMetric):
    @BaseMetric.dataset_meta.setter
    def dataset_meta(self, meta):
        self._dataset_meta = {"classes": meta["classes"] * 2}

    def process(self, data_batch, data_samples):
        self.results += data_samples

    def compute_metrics(self, results):
        return {"classes": len(self.dataset_meta["classes"])}


def test_a_subclass_may_override_what_is_done_with_the_metainfo():
    metric = Doubled()  # which has none yet
    metric.dataset_meta = {"classes": ["a", "b"]}
    metric.process(None, [1])
    assert metric.evaluate(1) == {"classes": 4}


class Halved(Accuracy):
    """Computes other values than its base class."""

    def compute_metrics(self, results: list) -> dict[str, float]:
        return {f"half_{name}": value / 2 for name, value in super().compute_metrics(results).items()}


class HalvedByName(Halved):
    value_names = ("half_accuracy",)


def test_names_of_values_are_known_before_where_the_class_itself_gives_them() -> None:
    assert Evaluator(Accuracy((1, 2), prefix="val")).value_names == ["val/accuracy/top1", "val/accuracy/top2"]
    assert Evaluator(Halved()).value_names is None
    assert Evaluator([LossMetric(), Accuracy(), Halved()]).value_names is None
    assert Evaluator([Perplexity(), HalvedByName()]).value_names == ["loss", "perplexity", "half_accuracy"]


def test_a_loss_is_found_beside_whatever_a_step_returns_with_it():
    metric = Perplexity()
    metric.samples = 4
    metric.process(None, {"loss": torch.tensor(0.0), "generated": torch.ones(4, 2, dtype=torch.int64)})
    assert metric.evaluate(4) == {"loss": 0.0, "perplexity": 1.0}


@pytest.mark.parametrize(("loss", "expected"), [(1e3, inf), (nan, nan)])
def test_a_perplexity_that_is_no_number_is_told_from_one_that_is_too_large(loss, expected):
    metric = Perplexity()
    metric.samples = 1
    metric.process(None, {"loss": torch.tensor(loss)})
    assert metric.evaluate(1)["perplexity"] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("further", [{}, {"aux_loss": torch.tensor(0.5)}])
def test_a_perplexity_of_more_than_a_cross_entropy_is_told_once(further, caplog):
    metric = Perplexity()
    metric.samples = 1
    for _ in range(2):
        metric.process(None, {"loss": torch.tensor(1.0), "logits": torch.ones(1), **further})
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == len(further)
    assert all("The model returns `loss`, `aux_loss`" in message for message in warned)


class Sent(int):
    """An index that notes where it arrives."""

    arrived: ClassVar[list[int]] = []

    def __reduce__(self) -> Any:
        return _arrive, (int(self),)


def _arrive(value: int) -> int:
    Sent.arrived.append(value)
    return value


@ranks(2)
@pytest.mark.parametrize("kept", [True, False])
def test_predictions_go_to_rank_0_alone_and_those_in_files_to_none(tmp_path: Path, kept: bool):
    Sent.arrived.clear()
    metric = Predictions(None if kept else tmp_path)
    # Two samples on rank 0, two on rank 1, which repeats the first.
    for index in ([3, 1], [0, 3])[get_rank()]:
        metric.samples, metric.indices = 1, [Sent(index)]
        metric.process(None, torch.tensor([[index]]))
    assert metric.evaluate(None) == {}
    assert metric.collected == ([torch.tensor([index]) for index in (0, 1, 3)] if kept and get_rank() == 0 else None)
    assert Sent.arrived == ([0, 3] if kept and get_rank() == 0 else [])
    if not kept:
        assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_list_has_one_entry_for_each_sample_and_a_tuple_parts(size):
    rows = torch.arange(size)
    assert per_sample([rows, "b"] if size == 2 else ["a"] * size, size) == ([rows, "b"] if size == 2 else ["a"] * size)
    assert per_sample((rows, ["a"] * size), size) == [(index, "a") for index in range(size)]
    for wrong in ([rows] * (size + 1), (rows, torch.tensor(1.0))):
        with pytest.raises(TypeError, match=r"a tuple of these alone, a dict with some, or a list with one entry"):
            per_sample(wrong, size)


@pytest.mark.parametrize("count", [15, 16, 17])
@ranks(2, 3)
def test_batches_that_ranks_take_in_turns_count_each_sample_once(count: int, tmp_path: Path) -> None:
    """Where the first ones are repeated, so that all ranks have equally many, whatever a metric keeps of a batch."""
    labels = torch.arange(count) % 3
    scores = torch.nn.functional.one_hot(torch.where(torch.arange(count) < 4, (labels + 1) % 3, labels), 3).float()
    data = TensorDataset(scores, labels)
    sampler = ShardedSampler(BatchSampler(SequentialSampler(data), 4, drop_last=False), round_up=True)
    runner = Runner(
        FirstOfTwo(),
        tmp_path / "run",
        val_dataloader=DataLoader(data, batch_sampler=sampler),
        val_evaluator=[Accuracy(), PerSample()],
        log_level="ERROR",
    )
    found = runner.val()
    assert found == pytest.approx({"accuracy": 100 * (count - 4) / count, "per_sample": 100 * (count - 4) / count})


class FirstOfTwo(torch.nn.Module):
    def forward(self, scores, labels):
        return scores


class PerSample(BaseMetric):
    """Keeps a result of each sample, as most metrics do."""

    def process(self, data_batch, data_samples):
        scores, labels = data_batch
        self.results += (scores.argmax(1) == labels).tolist()

    def compute_metrics(self, results):
        return {"per_sample": 100 * sum(results) / len(results)}


def test_labels_that_are_no_class_are_wrong() -> None:
    metric = Accuracy(topk={1, 2})
    scores = torch.tensor([[0.1, 0.9, 0.0], [0.9, 0.1, 0.0], [0.0, 0.4, 0.6], [0.9, 0.1, 0.0]])
    metric.process(None, (scores, torch.tensor([1.0, 0.5, 2.0, 7.0])))
    assert metric.evaluate(4) == {"accuracy/top1": 50.0, "accuracy/top2": 50.0}


def test_scores_that_are_no_tensor_are_named() -> None:
    with pytest.raises(TypeError, match="but the scores that it found are a list, and no tensor"):
        Accuracy().process(None, {"scores": [[0.1, 0.9]], "labels": torch.tensor([1])})
