"""Models with parameters of two dtypes and with scalar parameters train sharded as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lockstep.checkpoint import load_state, save_state
from lockstep.dist import all_gather, get_rank
from lockstep.errors import ConfigError
from lockstep.model import MMFullyShardedDataParallel, train_step
from lockstep.model.fsdp import parameters
from lockstep.model.shards import gather_full
from lockstep.strategy import FSDPStrategy, SingleDeviceStrategy
from lockstep.testing import ranks, run_ranks

pytestmark = pytest.mark.layouts

INPUTS = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
OPTIM = {"optimizer": {"type": "AdamW", "lr": 0.05}, "clip_grad": {"max_norm": 0.5}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6).double()
        self.gate = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.norm(self.linear(x).double()).float()


class Net(nn.Module):
    """Computes in float32, but for its norms and its head; has scalars, of which one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.scale.exp() * self.head(x.double())).square().mean()


def prepared(options: dict[str, Any] | None, counts: int) -> tuple[Any, nn.Module, Any]:
    torch.manual_seed(get_rank())
    net = Net()
    net.unused.requires_grad_(False)
    strategy = SingleDeviceStrategy() if options is None else FSDPStrategy(**options)
    return strategy, *strategy.prepare(net, {**OPTIM, "accumulative_counts": counts})


def two_steps(strategy: Any, model: nn.Module, optim_wrapper: Any, counts: int) -> list[float]:
    step = getattr(model, "train_step", lambda *args: train_step(model, *args))
    rank, shares = strategy.data_shard
    norms = []
    for _ in range(2):
        for part in INPUTS[rank::shares].chunk(counts):
            step(part, optim_wrapper)
        norms.append(optim_wrapper.grad_norm.item())
    return norms


def run(options: dict[str, Any] | None, counts: int, path: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Train, save, go on with a model that has loaded what was saved."""
    begun = prepared(options, counts)
    norms = two_steps(*begun, counts)
    strategy = begun[0]
    save_state(path, {"model": strategy.model_state(), "optimizer": strategy.optim_state()}, {})
    torch.manual_seed(99)
    resumed = prepared(options, counts)
    strategy = resumed[0]
    state = load_state(path, {"model": strategy.model_state(), "optimizer": strategy.optim_state()})
    strategy.load_state(state["model"], state["optimizer"])
    norms += two_steps(*resumed, counts)
    return norms, {name: gather_full(value).clone() for name, value in strategy.model_state().items()}


@pytest.mark.parametrize(
    ("size", "options", "counts"),
    [
        (2, {}, 2),
        (2, {"cpu_offload": True, "auto_wrap_policy": None}, 1),
        (4, {"device_mesh": (2, 2)}, 2),
        (4, {"tensor_parallel": {"degree": 2, "plan": {"blocks.*.linear": "colwise_rep"}}}, 1),
    ],
    ids=str,
)
def test_dtypes_and_scalars_train_clip_and_resume_as_in_one_process(size, options, counts, tmp_path: Path):
    norms, weights = run_ranks(1, run, None, counts, tmp_path / "alone")[0]
    for own_norms, own_weights in run_ranks(size, run, options, counts, tmp_path / "sharded"):
        assert own_norms == pytest.approx(norms, abs=1e-5)
        for name, value in weights.items():
            assert torch.allclose(own_weights[name], value, atol=1e-6), name


@ranks(2)
def test_units_are_cut_by_dtype_and_scalars_stay_whole():
    torch.manual_seed(get_rank())
    model = MMFullyShardedDataParallel(Net(), auto_wrap_policy="Block")
    units = [name for name, part in model.module.named_modules() if isinstance(part, FSDPModule)]
    # The head has the most numbers of those that no block holds: the outermost unit has its dtype.
    assert units == ["", "blocks.0", "blocks.0.norm", "blocks.1", "blocks.1.norm"]
    whole = [name for name, parameter in model.module.named_parameters() if not isinstance(parameter, DTensor)]
    assert whole == ["scale", "unused", "blocks.0.gate", "blocks.1.gate"]
    for name in whole:
        assert torch.equal(*all_gather(model.module.get_parameter(name).detach()))
    with patch.object(parameters, "all_reduce", wraps=parameters.all_reduce) as reductions:
        model(INPUTS[get_rank() :: 2]).backward()  # by hand
    assert reductions.call_count == 1
    gradients = [model.module.get_parameter(name).grad for name in whole]
    assert [gradient is None for gradient in gradients] == [False, True, False, False]
    assert torch.equal(*all_gather(gradients[0]))
    with model.no_sync():
        model(INPUTS[get_rank() :: 2]).backward()
    assert not torch.equal(*all_gather(gradients[0]))


@ranks(2)
def test_a_module_that_owns_two_dtypes_is_refused():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Parameter(torch.ones(4))
            self.right = nn.Parameter(torch.ones(4, dtype=torch.float64))

    net = nn.Sequential(nn.Linear(2, 2), Both())
    with pytest.raises(ConfigError, match=r"`1.left` and `1.right` of one Both must have one dtype.*or use strategy"):
        FSDPStrategy().prepare(net)
    net[1].right.requires_grad_(False)
    FSDPStrategy().prepare(net)
    shared = nn.ModuleDict({"a": nn.Linear(4, 4).double(), "b": nn.Linear(4, 4), "c": nn.Linear(40, 40)})
    shared["b"].weight = shared["a"].weight
    with pytest.raises(ConfigError, match=r"`a.weight` must have the dtype .* shares a parameter with another part"):
        FSDPStrategy().prepare(shared)
