"""`BaseModel` and its preprocessor."""

from __future__ import annotations

from collections import defaultdict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.model import BaseDataPreprocessor, BaseModel
from lockstep.optim import OptimWrapper
from lockstep.registry import MODELS

Pair = namedtuple("Pair", "image label")


@dataclass(frozen=True)
class Record:
    image: Tensor
    name: str
    parts: list[Tensor]


class Toy(BaseModel):
    def __init__(self, data_preprocessor=None) -> None:
        super().__init__(data_preprocessor)
        self.linear = nn.Linear(2, 1)

    def forward(self, inputs: Tensor, data_samples: Tensor | None = None, mode: str = "tensor"):
        out = self.linear(inputs)
        if mode == "loss":
            return {"loss": (out - data_samples).square().mean()}
        return [out, data_samples] if mode == "predict" else out


class Doubling(BaseDataPreprocessor):
    def forward(self, data, training: bool = False):
        data = self.cast_data(data)
        return {**data, "inputs": 2 * data["inputs"]} if training else data


BATCH = {"inputs": torch.ones(3, 2), "data_samples": torch.zeros(3, 1)}


def test_train_step_changes_the_model_and_val_and_test_steps_predict():
    model = Toy()
    before = model.linear.weight.clone()
    logged = model.train_step(BATCH, OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)))
    assert set(logged) == {"loss"}
    assert not torch.equal(model.linear.weight, before)
    for step in (model.val_step, model.test_step):
        out, samples = step(BATCH)
        assert torch.equal(out, model(BATCH["inputs"]))
        assert samples is BATCH["data_samples"]


def test_the_preprocessor_sees_whether_it_trains():
    model = Toy(Doubling())
    assert torch.equal(model.val_step(BATCH)[0], model.linear(BATCH["inputs"]))
    loss = model.linear(2 * BATCH["inputs"]).square().mean()
    logged = model.train_step(BATCH, OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)))
    assert torch.equal(logged["loss"], loss)


def test_a_preprocessor_can_be_a_config_or_must_be_a_module():
    assert isinstance(Toy({"type": Doubling}).data_preprocessor, Doubling)
    assert isinstance(Toy({"non_blocking": True}).data_preprocessor, BaseDataPreprocessor)
    with pytest.raises(TypeError, match="data_preprocessor"):
        Toy(data_preprocessor="Doubling")
    assert MODELS["BaseDataPreprocessor"] is BaseDataPreprocessor


@pytest.mark.parametrize("move", [lambda m: m.to("meta"), lambda m: m.to_empty(device="meta")])
def test_the_preprocessor_follows_its_model_to_a_device(move):
    model = move(Toy())
    assert model.data_preprocessor.device.type == "meta"
    assert model.data_preprocessor(BATCH)["inputs"].device.type == "meta"
    assert not list(model.data_preprocessor.buffers())


def test_nested_data_keep_their_types():
    preprocessor = BaseDataPreprocessor().to("meta")
    data = {"pairs": [Pair(torch.ones(1), "name")], "none": None, "ids": (1, 2.5, b"x")}
    moved = preprocessor(data)
    assert moved["pairs"][0].image.device.type == "meta"
    assert moved["pairs"][0].label == "name"
    assert isinstance(moved["pairs"][0], Pair)
    assert moved["none"] is None
    assert moved["ids"] == (1, 2.5, b"x")


def test_dataclasses_and_dicts_with_a_default_are_moved_too():
    preprocessor = BaseDataPreprocessor().to("meta")
    data = defaultdict(list, {"record": Record(torch.ones(1), "name", [torch.ones(2)]), "classes": [Record]})
    moved = preprocessor(data)
    assert moved["record"].image.device.type == moved["record"].parts[0].device.type == "meta"
    assert (moved["record"].name, moved["classes"], moved["other"]) == ("name", [Record], [])
    assert data["record"].image.device.type == "cpu"


def test_a_forward_pass_by_mode_unpacks_the_batch():
    model = Toy()
    assert torch.equal(model._run_forward(BATCH, mode="predict")[0], model(BATCH["inputs"]))
    assert set(model._run_forward(tuple(BATCH.values()), mode="loss")) == {"loss"}


def test_initialisation_by_config_is_refused_with_the_remedy():
    assert BaseModel(None, init_cfg=None).init_weights() is None
    with pytest.raises(ConfigError, match=r"`init_cfg` must be None, but is .*Kaiming.*`init_weights`.*`load_from`"):
        BaseModel(init_cfg={"type": "Kaiming", "layer": "Conv2d"})
