"""Linear layers in float8, emulated on the CPU; torchao is an extra, which the development environment has."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.model import float8
from lockstep.model.float8 import Float8
from lockstep.strategy import build_strategy
from lockstep.testing import ranks

SGD = {"optimizer": {"type": "SGD", "lr": 0.5}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(32, 32), nn.Linear(32, 16)
        self.small = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.small(self.head(torch.tanh(self.inner(x)))) - 1).square().mean()


def losses(name: str, *converters: Any) -> list[float]:
    model, wrapper = build_strategy({"type": name, "converters": converters}).prepare(Net(), SGD)
    batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(10):
        loss = model(batch)
        wrapper.update_params(loss)
        found.append(loss.item())
    return found


@ranks(2)
def test_losses_follow_those_in_full_precision_and_are_the_same_under_each_strategy():
    full, replicas, shards = losses("ddp"), losses("ddp", "float8"), losses("fsdp", "float8")
    assert shards == pytest.approx(replicas, rel=1e-5)
    assert replicas == pytest.approx(full, abs=0.01)  # of losses from 0.95 downwards
    assert replicas != full
    assert replicas[-1] < replicas[0] / 10


def test_which_layers_are_replaced():
    def replaced(*skip: str) -> list[str]:
        converter = {"type": "Float8", "skip": skip, "recipe": "rowwise"}
        model, _ = build_strategy({"type": "single", "converters": [converter]}).prepare(Net())
        return [name for name, layer in model.named_children() if type(layer) is not nn.Linear]

    assert replaced() == ["inner", "head"]
    assert replaced("h*d") == ["inner"]
    with pytest.raises(ConfigError, match="finds none in Net"):
        replaced("*")


class LowRank(nn.Linear):
    """Adds a product of two matrices to what it computes, as LoRA does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Parameter(torch.ones(1, inputs)), nn.Parameter(torch.ones(outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


def test_subclasses_and_what_is_on_a_layer_stay():
    model = nn.ModuleDict({"one": LowRank(16, 16), "two": nn.MultiheadAttention(16, 2), "three": nn.Linear(16, 16)})
    seen: list[str] = []
    model["three"].register_forward_hook(lambda *_: seen.append("called"))
    model["three"].register_buffer("mask", torch.ones(2))
    names = list(model.state_dict())
    model, _ = build_strategy({"type": "single", "converters": ["float8"]}).prepare(model)
    assert list(model.state_dict()) == names
    assert type(model["one"]) is LowRank
    assert [type(layer).__name__ for layer in (model["two"].out_proj, model["three"])] == [
        "NonDynamicallyQuantizableLinear", "Float8Linear",
    ]  # fmt: skip
    model["three"](torch.ones(2, 16))
    assert seen == ["called"]


def test_a_model_that_another_strategy_has_converted_stays_as_it_is():
    model, layer = Net(), None
    for _ in range(2):  # as for a Runner that tests what another one has trained
        build_strategy({"type": "single", "converters": ["float8"]}).prepare(model)
        assert layer is None or model.inner is layer
        layer = model.inner


def test_what_no_device_or_torchao_has_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"`recipe` must be 'tensorwise', 'rowwise' or 'row.*but is 'row-wise'"):
        Float8("row-wise")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(float8, "get_device", lambda: "cuda")
    with pytest.raises(ConfigError, match=r"compute capability 8\.9 or later, but this one has 8\.0 \(rank 0"):
        Float8()(Net())
    assert type(Float8(emulate=True)(Net()).head) is not nn.Linear


@pytest.mark.parametrize(("name", "fits"), [("gfx90a:sramecc+:xnack-", False), ("gfx942:sramecc+:xnack-", True)])
def test_a_device_of_amds_is_judged_by_its_architecture(name: str, fits: bool, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(gcnArchName=name))
    monkeypatch.setattr(float8, "get_device", lambda: "cuda")
    with (
        nullcontext() if fits else pytest.raises(ConfigError, match=rf"gfx94\*, gfx95\*, gfx12\*, but .* is {name[:6]}")
    ):
        assert type(Float8()(Net()).head) is not nn.Linear
