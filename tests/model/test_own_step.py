"""A model's own `train_step` under a wrapper: called, and with the numbers of one process on the whole batch."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F  # noqa: N812

from lockstep.dist import get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.model import (
    BaseModel,
    MMDistributedDataParallel,
    MMFullyShardedDataParallel,
    MMSeparateDistributedDataParallel,
    steps,
    train_step,
)
from lockstep.model.shards import gather_full
from lockstep.optim import OptimWrapper, OptimWrapperDict
from lockstep.testing import ranks


class Net(nn.Module):
    """Two layers, of which a step can call each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)
        self.steps = 0
        self.hooked = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())

    def train_step(self, data, optim_wrapper):
        self.steps += 1
        with optim_wrapper.optim_context(self):
            loss = self.loss_of(*data)
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


class Mixed(Net):
    def loss_of(self, x, y):
        return F.mse_loss(self(0.7 * x + 0.3 * x.flip(1)), y)


class CallsForward(Net):
    def loss_of(self, x, y):
        return F.mse_loss(self.forward(x), y)


class Penalised(Net):
    def loss_of(self, x, y):
        weight = getattr(self.head.weight, "full_tensor", lambda: self.head.weight)()
        return F.mse_loss(self(x), y) + 0.1 * weight.square().sum()


class SeveralForwards(Net):
    def loss_of(self, x, y):
        return F.mse_loss(self(x), y) + F.mse_loss(self(-x), -y) + self(x).square().mean()


class Parts(Net):
    def loss_of(self, x, y):
        return F.mse_loss(self.head(self.body(x)), y)


class OnePart(Net):
    def loss_of(self, x, y):
        return F.mse_loss(self.head(self.body(x).detach()), y)


class Distilled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(3, 1).requires_grad_(False)

    def loss_of(self, x, y):
        with torch.no_grad():
            target = self.teacher(x)
            self.teacher.weight.mul_(0.9).add_(0.1 * self.head.weight[:, :3])
        return F.mse_loss(self(x), y) + F.mse_loss(self(x), target)


class BackwardAndStep(Net):
    def train_step(self, data, optim_wrapper):
        self.steps += 1
        loss = F.mse_loss(self(data[0]), data[1])
        optim_wrapper.backward(loss)
        optim_wrapper.step()
        optim_wrapper.zero_grad()
        return {"loss": loss.detach()}


class RawBackward(BackwardAndStep):
    """As in a plain loop; the forward pass through the wrapper prepares the exchange."""

    def train_step(self, data, optim_wrapper):
        self.steps += 1
        loss = F.mse_loss(self(data[0]), data[1])
        loss.backward()
        optim_wrapper.step()
        optim_wrapper.zero_grad()
        return {"loss": loss.detach()}


class TwoUpdates(Net):
    def train_step(self, data, optim_wrapper):
        self.steps += 1
        for factor in (1.0, 2.0):
            loss = F.mse_loss(self(factor * data[0]), data[1])
            optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


class Gan(Net):
    """Two losses, of which each depends on parts of the parameters, and freezes the others while it is made."""

    def train_step(self, data, optim_wrapper):
        self.steps += 1
        x, y = data
        real = F.mse_loss(self.head(torch.cat([y, y, y, y], 1)), torch.ones_like(y))
        fake = self.head(self.body(x).detach()).square().mean()
        optim_wrapper["head"].update_params(real + fake)
        self.head.requires_grad_(False)
        loss = F.mse_loss(self.head(self.body(x)), torch.ones_like(y))
        optim_wrapper["body"].update_params(loss)
        self.head.requires_grad_(True)
        return {"loss": loss.detach()}


MODELS = [
    Mixed, CallsForward, Penalised, SeveralForwards, Parts, OnePart, Distilled, BackwardAndStep, RawBackward,
    TwoUpdates, Gan,
]  # fmt: skip


def optim_for(model: Net, counts: int = 1) -> OptimWrapper:
    def one(parameters) -> OptimWrapper:
        return OptimWrapper(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), counts)

    if isinstance(model, Gan):
        return OptimWrapperDict(body=one(model.body.parameters()), head=one(model.head.parameters()))
    return one(model.parameters())


def batches(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(count)]


def own_part(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return tuple(part[get_rank() :: get_world_size()] for part in batch)


def check_alike(wrap, model: Net, counts: int = 1) -> None:
    alone, wrapped = deepcopy(model), wrap(model)
    alone_optim, optim = optim_for(alone, counts), optim_for(model, counts)
    model.register_forward_hook(lambda module, *_: setattr(module, "hooked", module.hooked + 1))
    alone.register_forward_hook(lambda module, *_: setattr(module, "hooked", module.hooked + 1))
    for batch in batches():
        wrapped.train_step(own_part(batch), optim)
        alone.train_step(batch, alone_optim)
    assert model.steps == alone.steps
    if not isinstance(model, CallsForward):  # which passes hooks by, where there is no wrapper
        assert model.hooked == alone.hooked
    wrapped.train()
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(gather_full(mine.detach()), theirs.detach(), rtol=1e-5, atol=1e-6, msg=name)
    assert not {"forward", "_compiled_call_impl"} & vars(model).keys()


@ranks(2)
@pytest.mark.parametrize("wrap", [MMDistributedDataParallel, MMFullyShardedDataParallel])
@pytest.mark.parametrize("kind", MODELS)
def test_an_own_step_trains_on_two_ranks_as_in_one_process(kind, wrap):
    torch.manual_seed(0)
    check_alike(wrap, kind())


@ranks(2)
@pytest.mark.parametrize("wrap", [MMDistributedDataParallel, MMFullyShardedDataParallel])
@pytest.mark.parametrize("kind", [Mixed, Parts])
def test_gradients_accumulate_in_an_own_step(kind, wrap):
    torch.manual_seed(0)
    check_alike(wrap, kind(), counts=2)


@ranks(2)
@pytest.mark.parametrize("options", [{"broadcast_buffers": True}, {"comm_hook": allreduce_hook}])
def test_options_of_the_wrapper_hold_in_an_own_step(options):
    torch.manual_seed(0)
    check_alike(lambda model: MMDistributedDataParallel(model, **options), Parts())


@ranks(2)
def test_a_wrapper_for_each_part_lets_an_own_step_exchange_gradients():
    torch.manual_seed(0)
    check_alike(MMSeparateDistributedDataParallel, Gan())


@ranks(2)
def test_a_compiled_model_is_called_through_the_wrapper():
    torch.manual_seed(0)
    model = Mixed()
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    wrapped = MMDistributedDataParallel(model)
    wrapped.train_step(own_part(batches()[0]), optim_for(model))
    assert model.steps == 1
    assert model._compiled_call_impl is compiled


class NeverExchanged(Net):
    def train_step(self, data, optim_wrapper):
        loss = F.mse_loss(self.head(self.body(data[0])), data[1])
        loss.backward()
        optim_wrapper.step()
        return {"loss": loss.detach()}


@ranks(2)
def test_updates_with_gradients_of_one_rank_are_refused():
    torch.manual_seed(0)
    model = NeverExchanged()
    wrapped = MMDistributedDataParallel(model)
    with pytest.raises(
        RuntimeError, match=r"`body\.weight` must be the same on all ranks, .*optim_wrapper\.update_params"
    ):
        wrapped.train_step(own_part(batches()[0]), optim_for(model))


class OwnWrapper(MMDistributedDataParallel):
    def train_step(self, data, optim_wrapper):
        return {"loss": torch.tensor(42.0)}


@ranks(2)
def test_a_wrapper_that_defines_the_step_has_the_last_word():
    model = Mixed()
    assert OwnWrapper(model).train_step(batches()[0], optim_for(model))["loss"] == 42
    assert model.steps == 0


def test_the_default_step_of_a_base_model_is_no_own_step():
    class Plain(BaseModel):
        def forward(self, x, mode="tensor"):
            return x

    class Own(Plain):
        def train_step(self, data, optim_wrapper):
            return super().train_step(data, optim_wrapper)

    assert not steps.defines_step(Plain(), "train_step")
    assert steps.defines_step(Own(), "train_step")
    assert not steps.defines_step(nn.Linear(1, 1), "train_step")


class Loses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.used(x) if get_rank() else self.used(x) + self.unused(x), y)


@ranks(2)
def test_unused_parameters_are_refused_before_the_first_update_on_every_rank():
    torch.manual_seed(0)
    model = Loses()
    before = deepcopy(model.state_dict())
    wrapped = MMDistributedDataParallel(model)
    with pytest.raises(ConfigError, match=r"not on 2 of them on rank 1 of 2: unused\.weight, unused\.bias\. Freeze"):
        wrapped.train_step(own_part(batches()[0]), OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@ranks(2)
def test_unused_parameters_are_named_where_a_loop_by_hand_meets_them():
    model = Loses()
    wrapped = MMDistributedDataParallel(model)
    x, y = own_part(batches()[0])
    if get_rank():
        wrapped(x, y).backward()
        with pytest.raises(ConfigError, match=r"rank 1 of 2: unused\.weight, unused\.bias\. Freeze"):
            wrapped(x, y)


class Thawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.body(x).tanh()), y)


@ranks(2)
@pytest.mark.parametrize("find_unused", [False, True])
def test_parameters_are_unfrozen_and_frozen_on_the_way(find_unused):
    torch.manual_seed(0)
    model = Thawing()
    alone = deepcopy(model)
    wrapped = MMDistributedDataParallel(model, find_unused_parameters=find_unused)
    optim, alone_optim = (OptimWrapper(torch.optim.AdamW(m.parameters(), lr=0.1)) for m in (model, alone))
    for number, batch in enumerate(batches(12)):
        for each in (model, alone):
            each.body.requires_grad_(2 <= number < 5)
            each.head.requires_grad_(number != 4)
            each.head.bias.requires_grad_(number < 4 or number % 2 == 0)
            each.zero_grad()
        wrapped.train_step(own_part(batch), optim)
        train_step(alone, batch, alone_optim)
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=name)


@ranks(2)
@pytest.mark.parametrize("find_unused", [False, True])
def test_what_is_frozen_within_a_window_keeps_the_gradients_of_its_first_batches(find_unused):
    torch.manual_seed(0)
    model = Thawing()
    alone = deepcopy(model)
    wrapped = MMDistributedDataParallel(model, find_unused_parameters=find_unused)
    optim, alone_optim = (
        OptimWrapper(torch.optim.SGD(m.parameters(), lr=0.1), accumulative_counts=4) for m in (model, alone)
    )
    for number, batch in enumerate(batches(12)):
        for each in (model, alone):
            each.body.requires_grad_(number % 4 < 2)
        wrapped.train_step(own_part(batch), optim)
        train_step(alone, batch, alone_optim)
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=name)


@ranks(2)
def test_hooks_of_the_wrapper_outlast_a_change_of_what_is_trained():
    model = Thawing()
    wrapped = MMDistributedDataParallel(model)
    seen = []
    wrapped.register_forward_pre_hook(lambda module, args, kwargs: seen.append(sorted(kwargs)), with_kwargs=True)
    x, y = own_part(batches()[0])
    for trained in (False, True):
        model.body.requires_grad_(trained)
        wrapped.eval()
        wrapped(x=x, y=y).backward()
        assert not wrapped.training
    assert seen == [["x", "y"]] * 2


class PenalisedOutside(Net):
    def loss_of(self, x, y):
        return F.mse_loss(self(x), y) + self.head.weight.square().sum()


@ranks(2)
def test_a_penalty_on_sharded_weights_is_refused_with_the_way_to_gather_them():
    model = PenalisedOutside()
    wrapped = MMFullyShardedDataParallel(model)
    with pytest.raises(RuntimeError, match=r"weights must be used inside the forward .* weight\.full_tensor\(\)"):
        wrapped.train_step(own_part(batches()[0]), optim_for(model))
