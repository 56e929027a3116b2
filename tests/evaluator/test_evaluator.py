"""Metrics of torchmetrics as evaluators, over ranks."""

from __future__ import annotations

import pytest
import torch
from torchmetrics import MeanSquaredError, Metric, MetricCollection, MetricTracker, PearsonCorrCoef
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix
from torchmetrics.retrieval import RetrievalMAP

from lockstep.dist import all_reduce, get_dist_info
from lockstep.evaluator import BaseMetric, Evaluator, LossMetric
from lockstep.testing import ranks

SCORES = torch.randn(11, 3, generator=torch.Generator().manual_seed(2)).softmax(1)
LABELS = torch.randint(0, 3, (11,), generator=torch.Generator().manual_seed(3))


def metrics() -> list:
    return [
        MulticlassAccuracy(3, average="micro"),
        MulticlassAUROC(3, thresholds=None),  # keeps all samples
        MetricCollection(
            {"top2": MulticlassAccuracy(3, top_k=2), "confusion": MulticlassConfusionMatrix(3)}, prefix="all_"
        ),
    ]


@pytest.fixture
def wanted() -> dict:
    """What one process finds; made there, where torchmetrics has no ranks to add up."""
    found = {}
    for metric in metrics():
        metric.update(SCORES, LABELS)
        value = metric.compute()
        found |= value if isinstance(value, dict) else {type(metric).__name__: value}
    return {name: value.tolist() for name, value in found.items()}


@ranks(1, 2, 4)
@pytest.mark.parametrize("who", ["one rank", "all ranks"])
def test_numbers_are_those_of_one_process(who: str, wanted: dict) -> None:
    """Also where some ranks have seen no batch at all."""
    rank, size = get_dist_info()
    holders = 1 if who == "one rank" else size
    evaluator = Evaluator(metrics())
    for _ in range(2):  # the second pass begins anew
        if rank < holders:
            for start in range(rank * 2, 11, holders * 2):
                evaluator.process((SCORES[start : start + 2], LABELS[start : start + 2]))
        found = evaluator.evaluate(11)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.allclose(torch.tensor(found[name]), torch.tensor(value), atol=1e-6), name


def test_one_may_be_given_alone_or_by_a_config() -> None:
    for given in (MeanSquaredError(), {"type": MeanSquaredError}, [MeanSquaredError()]):
        evaluator = Evaluator(given)
        evaluator.process((torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])))
        assert evaluator.evaluate(2) == {"MeanSquaredError": 2.0}


def test_two_of_one_class_are_to_be_named() -> None:
    evaluator = Evaluator([MeanSquaredError(), MeanSquaredError()])
    evaluator.process((torch.ones(2), torch.ones(2)))
    with pytest.raises(ValueError, match=r"called 'MeanSquaredError'.*by MeanSquaredError. Name them: MetricColl"):
        evaluator.evaluate(2)


def test_labels_may_be_those_of_the_batch() -> None:
    evaluator = Evaluator(MulticlassAccuracy(3, average="micro"))
    evaluator.process(SCORES, data_batch=(None, SCORES.argmax(1)))
    assert evaluator.evaluate(11) == {"MulticlassAccuracy": 1.0}


class BuiltWhileComputing(BaseMetric):
    """Uses torchmetrics, and a collective, where only rank 0 is."""

    def process(self, data_batch: object, data_samples: tuple) -> None:
        self.results += list(zip(*data_samples, strict=True))

    def compute_metrics(self, results: list) -> dict[str, float]:
        metric = MulticlassAccuracy(3, average="micro")
        for scores, label in results:
            metric.update(scores[None], label[None])
        count = torch.tensor(len(results))
        all_reduce(count)
        return {"accuracy": metric.compute().item(), "count": count.item()}


@ranks(1, 2, 4)
def test_a_metric_may_be_built_where_only_one_rank_is(wanted: dict) -> None:
    rank, world_size = get_dist_info()
    metric = BuiltWhileComputing()
    metric.process(None, (SCORES[rank::world_size], LABELS[rank::world_size]))
    found = metric.evaluate(len(SCORES))
    assert found["count"] == len(SCORES)
    assert found["accuracy"] == pytest.approx(wanted["MulticlassAccuracy"])
    assert get_dist_info() == (rank, world_size)


class Found(Metric):
    """The share of objects that are found, image by image; of an image with none, an entry without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("found", default=[], dist_reduce_fx=None)
        self.add_state("names", default=[], dist_reduce_fx=None)

    def update(self, found: torch.Tensor, names: list[str]) -> None:
        self.found.append(found)
        self.names.append(tuple(names))

    def compute(self) -> torch.Tensor:
        right = sum(name in NAMES for names in self.names for name in names)
        return torch.tensor((sum(one.numel() for one in self.found), right, len(self.found)))


NAMES = ("cat", "dog")
IMAGES = [(torch.tensor([]), []), (torch.tensor([1.0, 2.0]), ["cat", "cow"]), (torch.tensor([3.0]), ["dog"])]


@ranks(1, 2, 4)
def test_lists_of_unequal_lengths_are_put_together() -> None:
    rank, size = get_dist_info()
    evaluator = Evaluator([Found(), RetrievalMAP(), PearsonCorrCoef()])
    found, retrieval, correlation = (one.metric for one in evaluator.metrics)
    for index in range(rank, len(IMAGES), size):
        found.update(*IMAGES[index])
    for index in range(rank, 5, size):  # one query each
        scores, hits = SCORES[index], torch.arange(3) == LABELS[index]
        retrieval.update(scores, hits, indexes=torch.full((3,), index))
    for index in range(rank, 11, size):
        correlation.update(SCORES[index, :2], SCORES[index, 1:])
    values = evaluator.evaluate(None)
    assert values.pop("Found") == [3, 2, 3]
    wanted = RetrievalMAP(sync_on_compute=False), PearsonCorrCoef(sync_on_compute=False)
    indexes = torch.arange(5).repeat_interleave(3)
    wanted[0].update(SCORES[:5].flatten(), (torch.arange(3) == LABELS[:5, None]).flatten(), indexes=indexes)
    wanted[1].update(SCORES[:, :2].flatten(), SCORES[:, 1:].flatten())
    expected = {type(one).__name__: one.compute().item() for one in wanted}
    assert values == pytest.approx(expected, abs=1e-5)


def test_a_metric_that_keeps_values_over_time_is_refused():
    with pytest.raises(TypeError, match=r"must be a BaseMetric, (.|\n)* of type MetricTracker"):
        Evaluator(MetricTracker(MeanSquaredError()))


@ranks(1, 2)
@pytest.mark.parametrize("named", [True, False])
def test_a_loss_beside_the_arguments_is_for_the_loss_metric_alone(named: bool) -> None:
    for metric in (MulticlassAccuracy(3, average="micro"), MetricCollection([MulticlassAccuracy(3, average="micro")])):
        evaluator = Evaluator([LossMetric(), metric])
        outputs = {"preds": SCORES, "target": LABELS} if named else {"logits": SCORES}
        evaluator.process({**outputs, "loss": torch.tensor(0.5)}, data_batch={"x": SCORES, "labels": LABELS})
        right = (SCORES.argmax(1) == LABELS).float().mean().item()
        assert evaluator.evaluate(None) == pytest.approx({"loss": 0.5, "MulticlassAccuracy": right})
    with pytest.raises(TypeError, match="unexpected keyword argument 'predictions'"):
        Evaluator(MulticlassAccuracy(3)).process({"predictions": SCORES, "target": LABELS})


class Words(Metric):
    """The share of right words; raises if there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("right", default=[], dist_reduce_fx="cat")

    def update(self, predicted: list[str], wanted: list[str]) -> None:
        self.right.append(torch.tensor([float(a == b) for a, b in zip(predicted, wanted, strict=True)]))

    def compute(self) -> torch.Tensor:
        right = torch.cat(self.right) if isinstance(self.right, list) else self.right
        if not right.any():
            raise ValueError("no word is right")
        return right.mean()


@ranks(1, 2)
def test_a_pair_of_texts_is_given_to_a_metric_as_it_is() -> None:
    evaluator = Evaluator(Words())
    evaluator.process((["a", "b"], ["a", "c"]))
    assert evaluator.evaluate(2) == {"Words": 0.5}


@ranks(1, 2)
def test_a_metric_whose_value_could_not_be_computed_can_be_used_again() -> None:
    evaluator = Evaluator(Words())
    evaluator.process((["a"], ["b"]))
    with pytest.raises(ValueError, match="no word is right"):
        evaluator.evaluate(1)
    evaluator.reset()
    evaluator.process((["a"], ["a"]))
    assert evaluator.evaluate(1) == {"Words": 1.0}
