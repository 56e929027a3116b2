"""Plans of models as transformers and peft make them: inside a wrapper, around adapters, and naming parameters."""

from __future__ import annotations

import ast
import re
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.dist import get_world_size
from lockstep.errors import ConfigError
from lockstep.strategy import FSDPStrategy, SingleDeviceStrategy
from lockstep.testing import ranks, run_ranks

from .heads import VOCABULARY, WIDTH, Attention, Heads
from .transformer import train_by_strategy


class Adapted(nn.Module):
    """A frozen layer and two trained factors of low rank, as peft's LoRA has them."""

    def __init__(self, layer: nn.Linear, magnitude: bool = False) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, layer.out_features, bias=False)})
        self.lora_magnitude = nn.Parameter(torch.ones(2)) if magnitude else None

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 0.5 * self.lora_B["default"](self.lora_A["default"](x))


class Kept(nn.Module):
    """A frozen layer beside the copy of it that is trained, as peft's `modules_to_save` keeps them."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.modules_to_save = nn.ModuleDict({"default": deepcopy(layer)})
        self.original_module = layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.modules_to_save["default"](x)


class Around(nn.Module):
    """Hands on the attributes of the model inside, whose names in it have a prefix, as peft's models do."""

    def __init__(self, magnitude: bool = False) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = Heads()
        for block in self.base_model.model.blocks:
            block.attn.q = Adapted(block.attn.q, magnitude)
            block.attn.k = Kept(block.attn.k)
            block.attn.o = Adapted(block.attn.o)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model.model, name)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.base_model.model(inputs, targets)


class Mixture(nn.Module):
    """Experts in one parameter each for the ways in and out, as transformers 5 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(0.1 * torch.randn(2, 2 * WIDTH, WIDTH))
        self.down = nn.Parameter(0.1 * torch.randn(2, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for expert in range(2):
            gate, up = nn.functional.linear(x, self.gate_up[expert]).chunk(2, -1)
            outputs.append(nn.functional.linear(gate.tanh() * up, self.down[expert]))
        return sum(outputs)


class Experts(nn.Module):
    _tp_plan = {
        "attn.[qkv]": "colwise",
        "attn.o": "rowwise",
        "mixture.gate_up": "packed_colwise",
        "mixture.down": "rowwise",
        "mixture": "moe_tp_experts",
        "mlp.gate": "colwise",  # for models of the family that have a dense layer instead
        "mlp.down": "rowwise",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.attn, self.mixture = Attention(4, False), Mixture()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(inputs)
        return (self.mixture(x + self.attn(x)) - self.embed(targets)).square().mean()


def trained(make: type[nn.Module], plan: Any = None) -> tuple[list[float], list[float]]:
    strategy = FSDPStrategy(tensor_parallel={"degree": 2, "plan": plan}) if get_world_size() > 1 else None
    return train_by_strategy(strategy or SingleDeviceStrategy(), clip=True, make=make, steps=6)


@pytest.mark.parametrize("size", [2, 4])
def test_adapters_are_split_with_the_layers_inside(size: int):
    losses, norms = run_ranks(1, trained, Around)[0]
    together = run_ranks(size, trained, Around)
    means = [sum(step) / size for step in zip(*(own for own, _ in together), strict=True)]
    assert means == pytest.approx(losses, abs=1e-5)
    assert together[0][1] == pytest.approx(norms, abs=1e-5)


@ranks(2)
def test_an_adapter_that_is_not_two_factors_is_refused():
    says = r"`base_model.model.blocks.0.attn.q`, a Adapted, has `.*q.lora_magnitude`. Leave it out by a plan"
    with pytest.raises(ConfigError, match=says):
        FSDPStrategy(tensor_parallel=2).prepare(Around(magnitude=True))


def refused() -> str:
    with pytest.raises(ConfigError, match=r"names a parameter, `mixture.gate_up`, of which a module reads") as caught:
        FSDPStrategy(tensor_parallel=2).prepare(Experts())
    return str(caught.value)


def test_a_plan_that_names_parameters_is_refused_with_one_that_works():
    says = run_ranks(2, refused)[0]
    plan = ast.literal_eval(re.search(r"by plan=(\{.*\}),", says)[1])
    assert plan == {"attn.[qkv]": "colwise", "attn.o": "rowwise"}
    losses, norms = run_ranks(1, trained, Experts)[0]
    for own_losses, own_norms in run_ranks(2, trained, Experts, plan):
        assert own_losses == pytest.approx(losses, abs=1e-5)
        assert own_norms == pytest.approx(norms, abs=1e-5)
