"""What is attached to parameters before FSDP replaces them by shards: hooks, attributes, references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils import clip_grad_norm_

from lockstep.dist import get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.model import MMFullyShardedDataParallel, train_step, unwrap_model
from lockstep.model.fsdp.parameters import Materializer
from lockstep.optim import OptimWrapper
from lockstep.strategy import FSDPStrategy, build_strategy
from lockstep.testing import ranks

INPUTS = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
MASK = torch.arange(30).reshape(5, 6) % 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 5)  # 5 rows: uneven over 2 ranks
        self.outer = nn.Linear(5, 1)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.listed: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        loss = self.outer(torch.tanh(self.inner(x))).square().mean()
        return loss + sum(each.square().sum() for each in self.listed)


def masked(net: Net) -> None:
    net.inner.weight.register_hook(lambda gradient: gradient * MASK)


def double(parameter: Tensor) -> None:
    parameter.grad.mul_(2)


def doubled_after(net: Net) -> None:
    net.inner.weight.register_post_accumulate_grad_hook(double)


def removed(net: Net) -> None:
    handles = [
        net.inner.weight.register_hook(torch.neg),
        net.inner.bias.register_post_accumulate_grad_hook(double),
    ]
    net.finish = lambda: [handle.remove() for handle in handles]


def registered_later(net: Net) -> None:
    net.finish = lambda: masked(net)


def weights_after_training(strategy: str, attach: Callable[[Net], None], counts: int = 1) -> list[Tensor]:
    net = Net()
    attach(net)
    prepared = build_strategy(strategy)
    model, optim_wrapper = prepared.prepare(
        net, {"optimizer": {"type": "SGD", "lr": 0.1}, "accumulative_counts": counts}
    )
    getattr(net, "finish", lambda: None)()
    for _ in range(4):
        train_step(model, INPUTS[get_rank() :: get_world_size()].clone(), optim_wrapper)
    return [getattr(own, "full_tensor", lambda own=own: own)() for own in prepared.model_state().values()]


@ranks(1, 2)
@pytest.mark.parametrize("counts", [1, 2])
@pytest.mark.parametrize("attach", [masked, doubled_after, removed, registered_later])
def test_hooks_on_parameters_have_the_effect_that_they_have_under_ddp(attach: Callable[[Net], None], counts: int):
    if counts == 2 and attach is doubled_after:
        return  # under DDP, the gradients of a window are accumulated before ranks average them, and are doubled twice
    plain = weights_after_training("ddp", lambda net: None, counts)
    hooked = weights_after_training("ddp", attach, counts)
    assert attach is removed or any(not torch.allclose(*pair) for pair in zip(hooked, plain, strict=True))
    for own, expected in zip(weights_after_training("fsdp", attach, counts), hooked, strict=True):
        assert torch.allclose(own, expected, rtol=1e-5, atol=1e-6)


@ranks(2)
def test_a_hook_stays_where_units_are_gathered_anew_and_tied_weights_have_it_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
            self.again = nn.Linear(6, 6, bias=False)
            self.first = nn.Linear(6, 6, bias=False)
            self.again.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.again(x).square().mean()

    calls = []
    net = Tied()
    for name in ("blocks.1.0.weight", "first.weight"):
        net.get_parameter(name).register_hook(lambda gradient, name=name: calls.append((name, gradient.shape)))
    model = MMFullyShardedDataParallel(net, auto_wrap_policy="Sequential")
    optim_wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        train_step(model, INPUTS.clone(), optim_wrapper)
    assert sorted(calls) == sorted([("blocks.1.0.weight", (6, 6)), ("first.weight", (6, 6))] * 3)


@ranks(1, 2)
def test_attributes_move_to_the_shard_and_to_the_gathered_parameter():
    net, seen = Net(), []
    net.inner.weight.no_decay = True
    net.outer.register_forward_hook(lambda *_: seen.append(net.inner.weight.no_decay))
    model = MMFullyShardedDataParallel(net)
    assert net.inner.weight.no_decay
    model(INPUTS)
    assert seen == [True]


@ranks(1, 2)
def test_a_reference_to_a_former_parameter_raises_an_error_that_names_it():
    net = Net()
    kept = list(net.parameters())
    net.listed = [net.inner.weight]
    net.inner.bias.register_hook(lambda gradient, own=net.inner.bias: gradient + own)
    model, optim_wrapper = FSDPStrategy().prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert [own.shape for own in kept] == [own.shape for own in net.parameters()]
    assert "the former parameter `inner.weight`" in repr(kept)
    says = rf"`inner.weight` must be looked up .* but `square` was called .*rank {get_rank()} of {get_world_size()}"
    with pytest.raises(ConfigError, match=says):
        train_step(model, INPUTS, optim_wrapper)
    net.listed = []
    with pytest.raises(ConfigError, match=r"`inner\.bias` must be looked up"):
        train_step(model, INPUTS, optim_wrapper)
    for use in (
        lambda: torch.optim.SGD(kept),
        lambda: clip_grad_norm_(kept, 1.0),
        lambda: kept[0].data.clamp_(0, 1),
        lambda: kept[0].requires_grad_(False),
        lambda: setattr(kept[0], "requires_grad", False),
    ):
        with pytest.raises(ConfigError, match=r"`(frozen|inner\.weight|outer\.weight)` must be looked up"):
            use()


@ranks(2)
def test_a_given_optimizer_and_a_layer_with_references_of_its_own_are_followed():
    def trained(strategy: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.LSTM(6, 4), Last())
        prepared = build_strategy(strategy)
        model, optim_wrapper = prepared.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in range(2):
            train_step(model, INPUTS[get_rank() :: get_world_size()].clone(), optim_wrapper)
        return prepared.model_state()

    for own, expected in zip(trained("fsdp").values(), trained("ddp").values(), strict=True):
        assert torch.allclose(own.full_tensor(), expected, atol=1e-6)


class Last(nn.Module):
    def forward(self, outputs: tuple[Tensor, object]) -> Tensor:
        return outputs[0].square().mean()


@ranks(2)
def test_a_hook_over_several_parameters_is_refused():
    net = Net()
    register_multi_grad_hook([net.inner.weight, net.outer.weight], lambda gradients: None)
    with pytest.raises(ConfigError, match=r"`inner\.weight` must have no hook of register_multi_grad_hook"):
        MMFullyShardedDataParallel(net)
    assert unwrap_model(net) is net


class OwnRoutes(nn.Module):
    """Has a parameter of dimension 0, which each rank's own loss reaches in its own way, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def loss(self, x: Tensor, rank: int, on_all: bool) -> Tensor:
        if rank == 0:
            return (self.first(x) + 0.1 * self.second(x)).sum() * self.scale
        scale = self.scale if on_all else 1.0
        return (self.first(x * scale) + 0.1 * self.second(x * scale)).sum()

    def train_step(self, x: Tensor, optim_wrapper: OptimWrapper) -> dict[str, Tensor]:
        loss = self.loss(x, get_rank(), not optim_wrapper.on_one)
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


@pytest.mark.parametrize("on_one", [False, True])
@ranks(2)
def test_ranks_may_reach_a_parameter_of_dimension_0_by_different_routes(on_one: bool):
    alone = OwnRoutes()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    strategy = FSDPStrategy(find_unused_parameters=on_one)
    model, optim_wrapper = strategy.prepare(OwnRoutes(), {"optimizer": {"type": "SGD", "lr": 0.1}})
    optim_wrapper.on_one = on_one
    for _ in range(3):
        optimizer.zero_grad()
        sum(alone.loss(torch.ones(1, 2), rank, not on_one) / 2 for rank in range(2)).backward()
        optimizer.step()
        train_step(model, torch.ones(1, 2), optim_wrapper)
    torch.testing.assert_close(unwrap_model(model).scale, alone.scale)


class HalfOnMeta(nn.Module):
    """Has a parameter without values and a buffer with some, as where weights alone are made on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, device="meta"))
        self.register_buffer("frequencies", torch.arange(4.0) + 1, persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.frequencies


@ranks(1, 2)
def test_values_beside_meta_tensors_are_kept():
    model = MMFullyShardedDataParallel(nn.Sequential(HalfOnMeta(), nn.Linear(4, 1)))
    assert unwrap_model(model)[0].frequencies.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert unwrap_model(model)[0].weight.full_tensor().tolist() == [1.0] * 4


class Masked(nn.Module):
    """Gives values to its weight through `.data`, as older code does, and to its other tensors if it is told to."""

    def __init__(self, left_out: str) -> None:
        super().__init__()
        self.left_out = left_out
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("mask", torch.empty(4, 4, dtype=torch.bool), persistent=False)
        self.register_buffer("none", torch.empty(0))

    def reset_parameters(self) -> None:
        self.weight.data.uniform_(-1, 1)
        if self.left_out != "scale":
            nn.init.ones_(self.scale)
        if self.left_out != "mask":
            self.mask = torch.ones(4, 4, dtype=torch.bool, device=self.mask.device).tril()


@ranks(1)
@pytest.mark.parametrize("left_out", ["scale", "mask"])
def test_what_reset_parameters_gives_no_values_is_named(left_out: str):
    with torch.device("meta"):
        whole, lacking = Masked(""), Masked(left_out)
    MMFullyShardedDataParallel(whole, device_id="cpu")
    with pytest.raises(ValueError, match=f"its reset_parameters gives no values to '{left_out}'"):
        MMFullyShardedDataParallel(lacking, device_id="cpu")


def test_a_buffer_on_the_meta_device_that_modules_share_stays_one():
    class Counts(nn.Module):
        def __init__(self, steps: Tensor) -> None:
            super().__init__()
            self.register_buffer("steps", steps)

        def reset_parameters(self) -> None:
            self.steps.zero_()

    steps = torch.empty(2, device="meta")
    net = nn.Sequential(nn.Sequential(Counts(steps), Counts(steps)), Counts(steps))
    materializer = Materializer(torch.device("cpu"), None, None)
    for unit in (net[0], net):  # the inner one first, as units are sharded
        materializer.materialize(unit)
    assert net[0][0].steps is net[0][1].steps is net[1].steps
    assert net[1].steps.tolist() == [0, 0]


@ranks(2)
def test_ignored_modules_keep_their_buffers_as_they_keep_their_parameters():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    nn.init.constant_(net[1].weight, get_rank() + 1.0)
    net[1].running_mean.fill_(get_rank() + 1.0)
    MMFullyShardedDataParallel(net, ignored_modules=[net[1]], sync_module_states=True)
    assert net[1].weight.tolist() == net[1].running_mean.tolist() == [get_rank() + 1.0] * 2


class Places(nn.Module):
    """Returns its parameter, a view of it, or a copy."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.weight = form, nn.Parameter(torch.ones(6, 4))

    def forward(self) -> torch.Tensor:
        return {"itself": self.weight, "view": self.weight[:4], "copy": self.weight[:4].clone()}[self.form]


class Placed(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.places, self.layer = Places(form), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.places()[:4]).square().mean()


@ranks(2)
@pytest.mark.parametrize(("form", "frees"), [("itself", True), ("view", True), ("copy", True), ("itself", False)])
def test_a_unit_that_is_freed_may_not_return_its_parameters(form: str, frees: bool) -> None:
    model = MMFullyShardedDataParallel(Placed(form), auto_wrap_policy={Places}, reshard_after_forward=frees)
    if frees and form != "copy":
        with pytest.raises(ConfigError, match=r"`places` must not return its parameter `places.weight`.*weight.clone"):
            model(torch.ones(4, 4))
    else:
        assert model(torch.ones(4, 4)).isfinite()
