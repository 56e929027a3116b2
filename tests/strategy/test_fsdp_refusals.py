"""Optimizers and layers that torch gets wrong over shards are refused before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.dist import get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.model.shards import gather_full
from lockstep.strategy import FSDPStrategy
from lockstep.testing import ranks

pytestmark = pytest.mark.layouts

INPUTS = torch.randn(8, 6, generator=torch.Generator().manual_seed(4))
COMPLEX = torch.complex64


class Net(nn.Module):
    def __init__(
        self, rows: int = 4, dtype: torch.dtype = torch.float32, bias: bool = True, scalar: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(6, rows, bias, dtype=dtype)
        self.outer = nn.Linear(rows, 4, bias, dtype=dtype)
        self.scale = nn.Parameter(torch.tensor(2.0)) if scalar else 1.0  # which FSDP leaves whole

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * self.outer(self.inner(x.to(self.inner.weight.dtype)))).abs().square().mean()


def optimizer(kind: str, **options: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "lr": 0.01, **options}}


@ranks(2)
@pytest.mark.parametrize(
    ("net", "options", "says"),
    [
        ({}, optimizer("Adafactor"), "shards.* under FSDP, but Adafactor .* or strategy 'ddp'"),
        ({}, optimizer("Rprop"), "shards.* under FSDP, but Rprop "),
        ({}, optimizer("LBFGS"), "is LBFGS, which works on all parameters in one vector"),
        (
            {"rows": 1, "bias": False},
            optimizer("Muon"),
            "can update shards under FSDP, but Muon can't: its first steps raise",
        ),
        (
            {"rows": 5, "dtype": COMPLEX},
            optimizer("AdamW"),
            "shards.* under FSDP, but AdamW ",
        ),
        ({"rows": 5, "dtype": COMPLEX}, optimizer("RMSprop"), "shards.* under FSDP, but RMSprop "),
    ],
)
def test_optimizers_that_go_wrong_over_shards_are_refused(net: dict, options: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        FSDPStrategy().prepare(Net(**net), options)


def trained(net: dict, options: dict) -> dict[str, Tensor]:
    strategy = FSDPStrategy()
    model, optim_wrapper = strategy.prepare(Net(**net), options)
    for _ in range(3):
        model.train_step(INPUTS[get_rank() :: get_world_size()], optim_wrapper)
    return {name: gather_full(value) for name, value in strategy.model_state().items()}


@ranks(2)
@pytest.mark.parametrize(
    ("net", "options", "tolerance"),
    [
        ({"dtype": COMPLEX}, optimizer("AdamW"), 1e-6),
        ({"rows": 5, "dtype": COMPLEX}, optimizer("SGD", momentum=0.9), 1e-6),
        ({"scalar": True}, optimizer("AdamW", foreach=True), 1e-6),
        ({"scalar": True}, optimizer("AdamW", fused=True), 1e-6),
        ({"rows": 3, "bias": False}, optimizer("Muon"), 2e-3),  # orthogonalizes in bfloat16; weights move by 2e-2
    ],
    ids=["complex, even", "complex, SGD", "foreach, some whole", "fused, some whole", "Muon, uneven"],
)
def test_what_is_let_through_trains_as_in_one_process(net: dict, options: dict, tolerance: float):
    model = Net(**net)
    alone = getattr(torch.optim, options["optimizer"]["type"])(
        model.parameters(), **{key: value for key, value in options["optimizer"].items() if key != "type"}
    )
    for _ in range(3):
        alone.zero_grad()
        model(INPUTS).backward()
        alone.step()
    for name, value in trained(net, options).items():
        assert torch.allclose(value, model.get_parameter(name), atol=tolerance), name


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4, sparse=sparse)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * self.words(x)).mean()


@ranks(2)
def test_sparse_gradients_are_refused():
    with pytest.raises(ConfigError, match=r"`words.sparse` must be False under FSDP.* or use strategy 'ddp'"):
        FSDPStrategy().prepare(Words(sparse=True))
    with pytest.raises(ConfigError, match=r"^`sparse` must be False under FSDP"):
        FSDPStrategy().prepare(nn.Embedding(5, 4, sparse=True))
    FSDPStrategy(ignored_modules=[]).prepare(Words(sparse=False), optimizer("AdamW"))


@ranks(2)
def test_a_module_that_ddp_has_wrapped_is_refused():
    wrapped = nn.parallel.DistributedDataParallel(Net())
    with pytest.raises(ConfigError, match=r"must not be wrapped in DistributedDataParallel.*rank \d of 2"):
        FSDPStrategy().prepare(wrapped, optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}})
