"""Batches of the package tensordict: given whole to a model, moved by their own method, predicted sample by sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, tensorclass
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Runner
from lockstep.dataset import batch_size_of
from lockstep.device import cast_data_device
from lockstep.dist import get_rank
from lockstep.model.preprocessor import move_to_device
from lockstep.testing import ranks
from lockstep.tree import tree_map

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
LABELS = (X.sum(1) > 0).long()
ITEMS = TensorDict({"x": X, "labels": LABELS, "nested": {"index": torch.arange(24)}}, batch_size=[24])


@tensorclass
class Pair:
    x: Tensor
    y: Tensor


class Items(TensorDataset):
    def __init__(self) -> None:
        super().__init__(X)

    def __getitem__(self, index: int) -> Any:
        return ITEMS[index]


def model() -> TensorDictModule:
    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(4, 2), in_keys=["x"], out_keys=["logits"])


def loss_of_batch(outputs: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs["logits"], batch["labels"])


def train(work_dir: Path, network: nn.Module, data: DataLoader, loss: Any, strategy: str) -> tuple[list[Tensor], float]:
    runner = Runner(
        network,
        work_dir,
        train_dataloader=data,
        val_dataloader=data,
        val_evaluator={"type": "Accuracy"},
        loss=loss,
        train_cfg={"max_epochs": 2},
        strategy=strategy,
        visualizer=[],
    )
    runner.train()
    metrics = runner.val()
    weights = runner.run.strategy.model_state().values()
    return [getattr(one, "full_tensor", lambda one=one: one)().clone() for one in weights], metrics["loss"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@ranks(1, 2)
def test_it_trains_as_on_tuples(strategy: str, tmp_path: Path):
    found = train(tmp_path, model(), DataLoader(Items(), batch_size=4, collate_fn=torch.stack), loss_of_batch, strategy)
    torch.manual_seed(0)
    pairs = DataLoader(TensorDataset(X, LABELS), batch_size=4)
    expected = train(tmp_path, nn.Linear(4, 2), pairs, nn.CrossEntropyLoss(), strategy)
    assert all(map(torch.equal, found[0], expected[0]))
    assert found[1] == expected[1]


@ranks(1, 3)
def test_each_sample_is_predicted_once_as_a_tensordict(tmp_path: Path):
    loader = DataLoader(Items(), batch_size=5, collate_fn=torch.stack)
    predicted = Runner(model(), tmp_path, visualizer=[]).predict(loader)
    if get_rank() == 0:
        assert [one["nested", "index"].item() for one in predicted] == list(range(24))
        assert all(isinstance(one, TensorDict) and one["logits"].shape == (2,) for one in predicted)


def test_a_model_that_takes_parts_is_told_that_it_gets_the_whole(tmp_path: Path):
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.linear(x), labels)

    loader = DataLoader(Items(), batch_size=4, collate_fn=torch.stack)
    with pytest.raises(TypeError, match="must take the batch, which has 1 entry, but its parameters are"):
        Runner(Parts(), tmp_path, train_dataloader=loader, visualizer=[]).train()


@pytest.mark.parametrize("move", [move_to_device, cast_data_device])
def test_it_goes_to_a_device_although_it_names_another(move: Any):
    there = torch.device("meta")
    moved = move(TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.zeros(3)}}, batch_size=[3], device="cpu"), there)
    assert isinstance(moved, TensorDict)
    assert (moved["a"].device, moved["n", "b"].device, moved.batch_size) == (there, there, (3,))
    pair = move(Pair(x=torch.ones(3, 2), y=torch.zeros(3), batch_size=[3]), there)
    assert (type(pair), pair.x.device, pair.y.device, pair.batch_size) == (Pair, there, there, (3,))


def test_it_is_a_tree_and_has_its_batch_size():
    pair = Pair(x=torch.ones(3, 2), y=torch.zeros(3), batch_size=[3])
    raised = tree_map(lambda leaf: leaf + 1, pair)
    assert (type(raised), raised.x[0, 0], raised.y[0], pair.y[0]) == (Pair, 2, 1, 0)
    assert (batch_size_of(ITEMS), batch_size_of(pair), batch_size_of(TensorDict({}, batch_size=[7]))) == (24, 3, 7)
