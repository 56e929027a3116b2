"""Which optimizers are fused by default, and that a checkpoint does not change it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lockstep.dist import get_world_size
from lockstep.optim import build_optim_wrapper, constructor
from lockstep.strategy import DDPStrategy, FSDPStrategy, SingleDeviceStrategy, Strategy
from lockstep.testing import ranks, run_ranks


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def is_fused(model: nn.Module, **optimizer) -> bool:
    (group,) = build_optim_wrapper(model, {"optimizer": {"lr": 0.1, **optimizer}}).param_groups
    return bool(group["fused"])


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_on_the_cpu_nothing_is_fused_unless_asked_for(kind):
    assert not is_fused(net(), type=kind)
    assert is_fused(net(), type=kind, fused=True)


@pytest.fixture
def _as_on_an_accelerator(monkeypatch):
    """Let the CPU, whose fused kernels are real, count as one."""
    monkeypatch.setattr(constructor, "_DEVICES", ("cpu",))


@pytest.mark.usefixtures("_as_on_an_accelerator")
def test_elsewhere_what_can_be_is_unless_something_else_is_asked_for():
    for kind in ("SGD", "Adam", torch.optim.AdamW):
        assert is_fused(net(), type=kind)
        assert not is_fused(net(), type=kind, fused=False)
        assert not is_fused(net(), type=kind, foreach=True)
        assert not is_fused(nn.Linear(2, 1, dtype=torch.complex64), type=kind)
    assert not is_fused(net(), type="Adagrad")
    for_some = {"optimizer": {"type": "SGD", "lr": 0.1}, "paramwise_cfg": {"custom_keys": {"0": {"foreach": True}}}}
    assert not any(group["fused"] for group in build_optim_wrapper(net(), for_some).param_groups)
    assert not is_fused(nn.Sequential(nn.Embedding(2, 2, sparse=True), nn.Linear(2, 1)), type="SGD")
    assert "fused" not in build_optim_wrapper(net(), {"optimizer": {"type": "RMSprop"}}).param_groups[0]


class OfThatName(nn.Module):
    """Has something called `sparse` that is no option of an embedding."""

    def __init__(self, sparse: Tensor | nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.sparse = nn.Buffer(sparse) if isinstance(sparse, Tensor) else sparse


@pytest.mark.usefixtures("_as_on_an_accelerator")
@pytest.mark.parametrize("sparse", [torch.ones(3), nn.Linear(2, 1)])
def test_what_is_called_sparse_may_be_a_part_of_the_model(sparse):
    assert is_fused(OfThatName(sparse), type="SGD")


@ranks(2)
def test_shards_are_where_all_lie_on_one_mesh():
    whole, sharded = net(), net()
    fully_shard(sharded)
    mixed, meshes = nn.ModuleList([net(), sharded]), nn.ModuleList([net(), net()])
    for part in meshes:
        fully_shard(part, mesh=init_device_mesh("cpu", (get_world_size(),)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constructor, "_DEVICES", ("cpu",))
        assert [is_fused(model, type="AdamW") for model in (whole, sharded, mixed)] == [True, True, False]
        assert [is_fused(model, type="SGD") for model in (whole, sharded)] == [True, False]
        for model in (mixed, meshes):
            wrapper = build_optim_wrapper(model, {"optimizer": {"type": "Adam", "lr": 0.1}})
            for part in model:
                part(torch.ones(2, 4)).sum().backward()
            wrapper.step()
            wrapper.zero_grad()


def trained(strategy: Strategy, state: tuple[dict, dict] | None, fused_: bool | None, kind: str):
    """Train a step more from a state; return it with whole tensors, and whether the optimizer is fused."""
    cfg = {"optimizer": {"type": kind, "lr": 0.1, "momentum" if kind == "SGD" else "eps": 0.01, "fused": fused_}}
    model, wrapper = strategy.prepare(net(), cfg)
    if state is not None:
        strategy.load_state(*state)
    wrapper.update_params(model(torch.ones(2, 4)).square().mean())
    whole = torch.utils._pytree.tree_map(
        lambda item: item.full_tensor() if hasattr(item, "full_tensor") else item,
        (strategy.model_state(), strategy.optim_state()),
    )
    return whole, [group["fused"] for group in wrapper.param_groups]


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("AdamW", (DDPStrategy, True), (FSDPStrategy, None)),
        ("AdamW", (FSDPStrategy, None), (DDPStrategy, True)),
        ("SGD", (DDPStrategy, True), (FSDPStrategy, None)),  # whose shards fused SGD would refuse
    ],
)
def test_an_optimizer_keeps_its_own_implementation_when_it_loads_a_state(kind, first, second):
    (state, was), _ = run_ranks(2, trained, first[0](), None, first[1], kind)
    (after, now), _ = run_ranks(2, trained, second[0](), state, second[1], kind)
    assert (was, now) == ([first[1]], [second[1]])
    ((once, _),) = run_ranks(1, trained, SingleDeviceStrategy(), None, None, kind)
    ((twice, _),) = run_ranks(1, trained, SingleDeviceStrategy(), once, None, kind)
    for name, value in twice[0].items():
        assert isinstance(value, Tensor)
        assert torch.allclose(value, after[0][name], rtol=1e-5, atol=1e-6)
