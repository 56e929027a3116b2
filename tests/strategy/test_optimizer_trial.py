"""Optimizers of unknown code under FSDP: what goes wrong on shards is refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Muon, Optimizer

from lockstep.dist import all_gather_object, get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.model.shards import UPDATES_SHARDS
from lockstep.strategy import FSDPStrategy
from lockstep.testing import ranks

pytestmark = pytest.mark.layouts

INPUTS = torch.randn(8, 6, generator=torch.Generator().manual_seed(4))


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(6, width)
        self.outer = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x))).square().mean()


class Own(Optimizer):
    """Divides each gradient by what `scale` says of it; keeps it in an attribute, as deepcopy would not."""

    def __init__(self, params: Any, scale: Callable[[Tensor, Tensor], Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.scale = scale
        self.calls = 0

    @torch.no_grad()
    def step(self) -> None:
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / self.scale(parameter, parameter.grad), alpha=group["lr"])


class Wrapping(Optimizer):
    """Holds another optimizer, as Lookahead and SAM do."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__([{"params": group["params"]} for group in inner.param_groups], {})
        self.param_groups = inner.param_groups

    def step(self) -> None:
        self.inner.step()


class NeedsTrainMode(SGD):
    training = False

    def train(self) -> None:
        self.training = True

    def step(self) -> None:
        assert self.training
        super().step()


class Estimating(SGD):
    """Estimates a step size from all gradients, of which nothing is seen in the first updates, as Prodigy does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["size"] = 0.0

    def step(self) -> None:
        for group in self.param_groups:
            self.param_groups[0]["size"] += sum(float(one.grad.square().sum()) for one in group["params"])
        super().step()


class FailsOnOneWhole(SGD):
    def step(self) -> None:
        if get_rank() == 1 and not isinstance(self.param_groups[0]["params"][0], DTensor):
            raise ValueError("no memory, or no such kernel, on this machine")
        super().step()


class Noisy(SGD):
    def step(self) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn(()), alpha=1e-3)


class ByIndex(SGD):
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data[parameter.grad > 0] = 0.0
                torch.linalg.eigh(parameter.data.view(-1)[:4].view(2, 2))


class DrawsAndMultiplies(Noisy):
    def step(self) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad @ torch.ones(parameter.shape[-1])


class MultipliesWhatIsWide(SGD):
    """Takes no small tensors, so that no trial can tell what it does to shards."""

    def step(self) -> None:
        super().step()
        first = self.param_groups[0]["params"][0]
        if first.shape[-1] < 6:
            raise ValueError("too small")
        first.grad @ torch.ones(6)


class ByRow(SGD):
    """Gives each row of a gradient the length 1, which a shard of whole rows is enough for."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                own, gradient = (getattr(x, "_local_tensor", x) for x in (parameter, parameter.grad))
                own.sub_(gradient / gradient.norm(dim=-1, keepdim=True) if own.dim() == 2 else gradient, alpha=0.1)


class FailsOnOneRank(SGD):
    def step(self) -> None:
        super().step()
        if get_rank() == 1 and any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]):
            raise ValueError("a shard that is too short")


def root(total: float) -> float:
    return total**0.5 + 1e-3


def by_float(own: Tensor, gradient: Tensor) -> float:
    return root(float((gradient**2).sum()))


def by_shard(own: Tensor, gradient: Tensor) -> float:
    return root(float(getattr(gradient, "_local_tensor", gradient).square().sum()))


def by_tensor(own: Tensor, gradient: Tensor) -> Tensor:
    return gradient.norm() / own.norm()


def by_full_sum(own: Tensor, gradient: Tensor) -> float:
    total = gradient.square().sum()
    return root(float(total.full_tensor() if isinstance(total, DTensor) else total))


def make_own(params: list[Tensor]) -> Optimizer:
    return Own(params, by_tensor)


def make_with_full_sum(params: list[Tensor]) -> Optimizer:
    return Own(params, by_full_sum)


def make_with_groups(params: list[Tensor]) -> Optimizer:
    return Own([{"params": params[:2], "lr": 0.0}, {"params": params[2:]}], by_tensor)


def make_wrapping(params: list[Tensor]) -> Optimizer:
    return Wrapping(AdamW(params, lr=0.1))


def trained(make: Callable[[Any], Optimizer]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights after three steps in one process, and under FSDP."""
    alone = Net()
    optimizer = make(list(alone.parameters()))
    strategy, net = FSDPStrategy(), Net()
    given = make(list(net.parameters()))
    state = torch.get_rng_state()
    model, optim_wrapper = strategy.prepare(net, given)
    assert torch.equal(torch.get_rng_state(), state)
    assert not given.state
    assert getattr(given, "calls", 0) == 0
    for _ in range(3):
        optimizer.zero_grad()
        alone(INPUTS).backward()
        optimizer.step()
        model.train_step(INPUTS[get_rank() :: get_world_size()].clone(), optim_wrapper)
    state_dict = strategy.model_state()
    return dict(alone.state_dict()), {name: value.full_tensor() for name, value in state_dict.items()}


@ranks(2)
@pytest.mark.parametrize("scale", [by_float, by_shard])
@pytest.mark.parametrize("is_inside", [False, True])
def test_an_optimizer_that_reads_a_part_for_the_whole_is_refused(is_inside: bool, scale: Callable[..., Any]):
    net = Net()
    optimizer = Own(net.parameters(), scale)
    with pytest.raises(ConfigError, match=r"must update shards as it updates .* (Own|Wrapping) does not: .* by \d+%"):
        FSDPStrategy().prepare(net, Wrapping(optimizer) if is_inside else optimizer)


@ranks(2)
def test_an_optimizer_is_refused_whose_estimates_are_those_of_a_shard():
    net = Net()
    says = r"rank 0 computes \S+ for \S+ as its option `size`"
    with pytest.raises(ConfigError, match=says):
        FSDPStrategy().prepare(net, Estimating(net.parameters()))


@ranks(2)
def test_each_sharding_is_tried_for_itself():
    plan = {"inner": "colwise", "outer": "rowwise"}
    strategy, net = FSDPStrategy(tensor_parallel={"degree": 2, "plan": plan}), Net(width=6)
    with pytest.raises(ConfigError, match=r"must update shards as it updates whole .* ByRow does not"):
        strategy.prepare(net, ByRow(net.parameters(), lr=0.1))


@ranks(2)
def test_an_optimizer_that_fails_on_one_ranks_shards_is_refused_on_all():
    net = Net()
    with pytest.raises(ConfigError, match="FailsOnOneRank can't: its first steps raise ValueError: a shard that is"):
        FSDPStrategy().prepare(net, FailsOnOneRank(net.parameters(), lr=0.1))


@ranks(2)
def test_what_one_rank_cannot_try_is_let_through_on_all():
    net = Net()
    _, optim_wrapper = FSDPStrategy().prepare(net, FailsOnOneWhole(net.parameters(), lr=0.1))
    assert get_rank() in all_gather_object(get_rank())  # no rank waits for another one's trial
    assert type(optim_wrapper.optimizer) is FailsOnOneWhole


@ranks(1, 2)
def test_an_optimizer_that_fails_on_shards_is_refused_with_its_error():
    net = Net()
    says = r"can update shards under FSDP, but ByIndex can't: its first steps raise \w+: .*, or strategy 'ddp'"
    with pytest.raises(ConfigError, match=says):
        FSDPStrategy().prepare(net, ByIndex(net.parameters(), lr=0.1))


class ByForeach(Optimizer):
    """Copies its gradients by an operation on lists that torch can't distribute, unless `foreach` is off."""

    def __init__(self, params: Any, foreach: bool | None = None):
        super().__init__(params, {"lr": 0.1, "foreach": foreach})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            grads = [param.grad for param in group["params"]]
            kept = [torch.zeros_like(grad) for grad in grads]
            if group["foreach"] is False:
                for mine, grad in zip(kept, grads, strict=True):
                    mine.copy_(grad)
            else:
                torch._foreach_copy_(kept, grads)
            for param, mine in zip(group["params"], kept, strict=True):
                param.add_(mine, alpha=-group["lr"])


@ranks(2)
def test_an_optimizer_whose_operations_on_lists_fail_is_told_to_go_without_them():
    net = Net()
    with pytest.raises(ConfigError, match=r"ByForeach can't: .*_foreach_copy_.*\. Try it with foreach=False, or use"):
        FSDPStrategy().prepare(net, ByForeach(net.parameters()))
    net = Net()
    _, optim_wrapper = FSDPStrategy().prepare(net, ByForeach(net.parameters(), foreach=False))
    assert type(optim_wrapper.optimizer) is ByForeach


class Silent(AdamW):
    """Refuses shards without a word."""

    def step(self, closure: Any = None) -> Any:
        if isinstance(self.param_groups[0]["params"][0], DTensor):
            raise AssertionError
        return super().step(closure)


@ranks(2)
def test_an_error_without_words_is_named_by_its_kind():
    net = Net()
    with pytest.raises(ConfigError, match=r"first steps raise AssertionError\. Use AdamW"):
        FSDPStrategy().prepare(net, Silent(net.parameters(), lr=0.1))


@ranks(1, 2)
def test_one_that_draws_random_numbers_is_refused_if_it_fails_on_shards():
    net = Net()
    with pytest.raises(ConfigError, match=r"DrawsAndMultiplies can't: its first steps raise RuntimeError: .*DTensor"):
        FSDPStrategy().prepare(net, DrawsAndMultiplies(net.parameters(), lr=0.1))


@ranks(1, 2)
def test_an_optimizer_that_no_trial_can_tell_is_at_fault_where_it_fails_on_shards():
    net = Net()
    model, optim_wrapper = FSDPStrategy().prepare(net, MultipliesWhatIsWide(net.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="DTensor") as raised:
        model.train_step(INPUTS, optim_wrapper)
    assert "in the optimizer's update, whose parameters are shards (DTensor) under FSDP" in raised.value.__notes__[0]


class CopiesEveryFifthStep(SGD):
    """As Lookahead does, by an operation on lists that torch can't distribute: after the steps of the trial."""

    steps = 0

    def step(self) -> None:
        super().step()
        self.steps += 1
        if self.steps == 5:
            parameters = [parameter.data for parameter in self.param_groups[0]["params"]]
            torch._foreach_copy_(parameters, [torch.zeros_like(parameter) for parameter in parameters])


@ranks(2)
@pytest.mark.parametrize("kind", ["OptimWrapper", "AmpOptimWrapper"])
def test_an_update_that_fails_later_says_that_it_is_one_of_shards_in_a_loop_by_hand(kind: str):
    net = Net()
    optimizer = CopiesEveryFifthStep(net.parameters(), lr=0.1)
    cfg = {"type": kind, "optimizer": optimizer, **({"dtype": "float16"} if kind == "AmpOptimWrapper" else {})}
    model, optim_wrapper = FSDPStrategy().prepare(net, cfg)

    def train(updates: int) -> None:
        for _ in range(updates):
            with optim_wrapper.optim_context(model):
                loss = model(INPUTS)
            optim_wrapper.update_params(loss)

    with pytest.raises(NotImplementedError, match="sharding strategy") as raised:
        train(6)
    assert [note for note in raised.value.__notes__ if "shards (DTensor) under FSDP" in note] == [UPDATES_SHARDS]


@ranks(1, 2)
@pytest.mark.parametrize("make", [make_own, make_with_full_sum, make_with_groups, make_wrapping])
def test_what_is_let_through_trains_as_in_one_process(make: Callable[[Any], Optimizer]):
    alone, sharded = trained(make)
    for name, value in sharded.items():
        assert torch.allclose(value, alone[name], atol=1e-5), name


@ranks(3)
@pytest.mark.parametrize("width", [14, 15, 16])
def test_rounding_within_an_optimizer_is_no_difference(width: int):
    net = Net(width)
    matrices = [net.inner.weight, net.outer.weight]
    _, optim_wrapper = FSDPStrategy().prepare(net, [Muon(matrices), AdamW([net.inner.bias, net.outer.bias])])
    assert [type(part) for part in optim_wrapper.optimizer.parts] == [Muon, AdamW]


@ranks(3)
def test_an_optimizer_that_fails_on_an_empty_shard_is_refused_with_the_shape():
    net = Net(2)
    says = r"but Muon can't: .* a parameter that has no rows for some ranks, as one of shape \(2, 6\), give such"
    with pytest.raises(ConfigError, match=says):
        FSDPStrategy().prepare(net, [Muon([net.inner.weight, net.outer.weight])])


@ranks(2)
@pytest.mark.parametrize("kind", [NeedsTrainMode, Noisy])
def test_modes_are_switched_and_random_numbers_are_let_through(kind: type):
    net = Net()
    given = kind(net.parameters(), lr=0.1)
    FSDPStrategy().prepare(net, given)
    assert not getattr(given, "training", False)
    assert all(isinstance(own, DTensor) for own in given.param_groups[0]["params"])
