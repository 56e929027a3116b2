"""Averages of weights, against plain formulas."""

from __future__ import annotations

import copy
import logging
import math
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

from lockstep.dist import all_gather_object, get_rank
from lockstep.model import (
    BaseAveragedModel,
    ExponentialMovingAverage,
    MMDistributedDataParallel,
    MomentumAnnealingEMA,
    compile_in_place,
)
from lockstep.model.averaged import ShardedCopy, is_sharded
from lockstep.model.parts import checkpoint_activations
from lockstep.model.shards import own_shard
from lockstep.optim import OptimWrapper
from lockstep.registry import MODELS
from lockstep.strategy import build_strategy
from lockstep.testing import ranks


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def histories(length: int) -> list[nn.Module]:
    """Return one model at so many moments of a training."""
    generator = torch.Generator().manual_seed(0)
    model, moments = net(), []
    for _ in range(length):
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
            else:
                tensor += 1
        moments.append(copy.deepcopy(model))
    return moments


def blend(shares: list[float], tensors: list[Tensor]) -> Tensor:
    """Return where an average ends that begins at the first tensor and moves by a share towards each later one."""
    average = tensors[0].double()
    for share, tensor in zip(shares, tensors[1:], strict=True):
        average = average + share * (tensor.double() - average)
    return average


RULES = {
    "StochasticWeightAverage": ({}, lambda steps, counted: 1 / (counted + 1)),
    "ExponentialMovingAverage": ({"momentum": 0.3}, lambda steps, counted: 0.3),
    "MomentumAnnealingEMA": ({"momentum": 0.3, "gamma": 2}, lambda steps, counted: max(0.3, 2 / (2 + steps))),
}


@pytest.mark.parametrize("update_buffers", [False, True])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("kind", RULES)
def test_an_average_is_what_its_formula_says(kind, interval, update_buffers):
    options, share = RULES[kind]
    moments = histories(8)
    average = MODELS.build(
        {"type": kind, "interval": interval, "update_buffers": update_buffers, **options}, model=moments[0]
    )
    for moment in moments:
        average.update_parameters(moment)
    counted = moments[::interval]
    shares = [share(place * interval, place) for place in range(1, len(counted))]
    for name, value in average.module.state_dict().items():
        history = [moment.state_dict()[name] for moment in counted]
        is_averaged = name in dict(moments[0].named_parameters()) or (update_buffers and value.is_floating_point())
        wanted = blend(shares, history) if is_averaged else history[-1]
        assert torch.allclose(value.double(), wanted.double(), rtol=1e-5, atol=1e-6), name
    assert average.steps.item() == 8
    if kind == "StochasticWeightAverage":
        mean = torch.stack([moment[0].weight for moment in counted]).mean(0)
        assert torch.allclose(average.module[0].weight, mean, atol=1e-6)


def test_the_copy_is_called_and_neither_trains_nor_shares_memory():
    model = net()
    average = ExponentialMovingAverage(model)
    assert torch.equal(average.eval()(torch.ones(2, 3)), copy.deepcopy(model).eval()(torch.ones(2, 3)))
    assert not any(parameter.requires_grad for parameter in average.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    before = average.module[0].weight.clone()
    with torch.no_grad():
        model[0].weight.add_(1)
    assert torch.equal(average.module[0].weight, before)


def test_state_is_saved_with_steps_and_goes_on():
    moments = histories(6)
    whole, first, second = (ExponentialMovingAverage(moments[0], momentum=0.2) for _ in range(3))
    for place, moment in enumerate(moments):
        whole.update_parameters(moment)
        if place < 3:
            first.update_parameters(moment)
    assert first.state_dict()["steps"].item() == 3
    second.load_state_dict(first.state_dict())
    for moment in moments[3:]:
        second.update_parameters(moment)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def test_tied_weights_enter_once():
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    model[1].weight = model[0].weight
    average = ExponentialMovingAverage(model, momentum=0.25, update_buffers=True)
    for value in (0.0, 4.0):
        nn.init.constant_(model[0].weight, value)
        average.update_parameters(model)
    assert average.module[1].weight is average.module[0].weight
    assert average.module[0].weight.eq(1.0).all()


def test_steps_stay_on_the_cpu_wherever_the_average_goes():
    average = ExponentialMovingAverage(net(), device="cpu").to("meta")
    assert average.module[0].weight.device.type == "meta"
    assert average.steps.device.type == "cpu"


def test_an_average_may_be_finer_than_its_model():
    model = net().bfloat16()
    average = ExponentialMovingAverage(model, momentum=0.001).float()
    for value in (0.0, 1.0):
        nn.init.constant_(model[0].weight, value)
        average.update_parameters(model)
    assert torch.allclose(average.module[0].weight, torch.tensor(0.001))


class OwnRule(ExponentialMovingAverage):
    """A rule over single tensors, as libraries write them."""

    def avg_func(self, averaged_param: Tensor, source_param: Tensor, steps: Tensor) -> None:
        share = (1 - self.momentum) * math.exp(-float(1 + steps) / 2) + self.momentum
        averaged_param.mul_(1 - share).add_(source_param, alpha=share)


class Latest(BaseAveragedModel):
    def avg_func(self, averaged_param: Tensor, source_param: Tensor, steps: Tensor) -> None:
        averaged_param.copy_(source_param)


def test_rules_of_ones_own_are_used():
    moments = histories(3)
    own, latest = OwnRule(moments[0], momentum=0.1), Latest(moments[0])
    for moment in moments:
        own.update_parameters(moment)
        latest.update_parameters(moment)
    shares = [0.9 * math.exp(-(1 + steps) / 2) + 0.1 for steps in (1, 2)]
    wanted = blend(shares, [moment[0].weight.detach() for moment in moments])
    assert torch.allclose(own.module[0].weight.double(), wanted, atol=1e-6)
    assert torch.equal(latest.module[0].weight, moments[-1][0].weight)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ExponentialMovingAverage(net(), momentum=0.0), "`momentum` must be above 0 and below 1, but is 0.0"),
        (lambda: ExponentialMovingAverage(net(), momentum=1.0), "but is 1.0"),
        (lambda: ExponentialMovingAverage(net(), interval=0), "`interval` must be an int of at least 1, but is 0"),
        (lambda: MomentumAnnealingEMA(net(), gamma=0), "`gamma` must be above 0, but is 0"),
        (
            lambda: ExponentialMovingAverage(net()).update_parameters(nn.Linear(3, 2)),
            "the Sequential that is averaged, with 4 parameters of its shapes and 3 buffers, .* is a Linear with 2 ",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_a_momentum_that_was_meant_as_decay_is_told(caplog):
    with caplog.at_level(logging.WARNING, "lockstep.model.averaged"):
        ExponentialMovingAverage(net(), momentum=0.999)
        ExponentialMovingAverage(net(), momentum=0.5)
    assert [record.getMessage().endswith("where a decay of 0.999 was meant, it is 0.001") for record in caplog.records]
    assert len(caplog.records) == 1


def test_a_copy_of_shards_has_the_models_names_and_shares_what_it_shares():
    norm = nn.BatchNorm1d(2)
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "n": norm, "again": nn.Sequential(norm)})
    model["b"].weight = model["a"].weight
    model["b"].register_buffer("hidden", torch.ones(1), persistent=False)
    model["a"].bias.requires_grad_(False)
    copied = ShardedCopy(model)
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in copied.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert list(copied.state_dict()) == list(model.state_dict())
    for mine, theirs in zip(all_tensors(copied), all_tensors(model), strict=True):
        assert torch.equal(mine, theirs)
        assert mine is not theirs
    assert copied.b.weight is copied.a.weight
    assert getattr(copied.again, "0") is copied.n
    assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in model.parameters()]


def all_tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


@ranks(2)
def test_replicas_have_equal_averages():
    torch.manual_seed(0)
    wrapped = MMDistributedDataParallel(nn.Linear(3, 1))
    optim_wrapper = OptimWrapper(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    average = ExponentialMovingAverage(wrapped.module, momentum=0.1)
    for step in range(4):
        loss = wrapped(torch.full((2, 3), float(step + get_rank()))).square().mean()
        optim_wrapper.update_params(loss)
        average.update_parameters(wrapped)  # wrapped or not
    mine, other = all_gather_object(average.module.state_dict())
    assert torch.equal(mine["weight"], other["weight"])
    assert not torch.equal(mine["weight"], wrapped.module.weight)


@ranks(2, warnings="default")
def test_shards_are_averaged_where_they_are():
    from torch.distributed.fsdp import fully_shard

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    sharded, plain = build(), build()
    for part in (sharded[0], sharded[2], sharded):
        fully_shard(part)
    assert is_sharded(sharded)
    averages = []
    for model in (sharded, plain):
        average = MomentumAnnealingEMA(model, momentum=0.2, gamma=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.arange(6.0).reshape(2, 3) + step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        averages.append(average)
    assert isinstance(averages[0].module, ShardedCopy)
    state, wanted = (average.module.state_dict() for average in averages)
    assert list(state) == list(wanted)
    for name, value in state.items():
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.allclose(full, wanted[name], atol=1e-5), name
    with pytest.raises(TypeError, match="can't be called"):
        averages[0](torch.ones(2, 3))
    with pytest.raises(ValueError, match="`device` must be None for a sharded model"):
        ExponentialMovingAverage(sharded, device="cpu")


def test_an_average_needs_a_rule():
    with pytest.raises(TypeError, match="avg_func"):
        BaseAveragedModel(net())


@ranks(1, 2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_whose_weights_are_computed_from_others_is_averaged_after_a_step(strategy: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old form keeps the computed weight in an attribute
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2)), nn.Linear(2, 1))
    wrapped, _ = build_strategy(strategy).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped(torch.ones(2, 3)).mean().backward()
    wrapped.train()  # under FSDP, this frees the gathered parameters
    average = ExponentialMovingAverage(model, momentum=0.5)
    average.update_parameters(wrapped)
    expected = [own_shard(parameter).clone() for parameter in wrapped.parameters()]
    for own, other in zip(average.module.parameters(), expected, strict=True):
        assert torch.equal(own_shard(own), other)
    if strategy == "ddp":
        assert torch.equal(average(torch.ones(2, 3)), model(torch.ones(2, 3)))


def test_weights_of_another_dtype_are_averaged_in_that_of_the_average():
    model = nn.ParameterList([torch.randn(n, dtype=torch.bfloat16) for n in (30, 1)])
    ema = ExponentialMovingAverage(model, momentum=0.25).float()
    for weights in (model, nn.ParameterList([4 * weight for weight in model])):
        ema.update_parameters(weights)
    for average, weight in zip(ema.module, model, strict=True):
        torch.testing.assert_close(average, 1.75 * weight.float())


@ranks(2)
def test_buffers_that_are_dtensors_are_averaged_and_whole_numbers_are_copied():
    model = nn.BatchNorm1d(2, affine=False)
    model.register_parameter("codes", nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False))
    distribute_module(model, init_device_mesh("cpu", (2,)))
    average = ExponentialMovingAverage(model, momentum=0.5, update_buffers=True)
    average.update_parameters(model)
    with torch.no_grad():
        model.running_mean.to_local().fill_(1.0)
        model.codes.to_local().fill_(7)
    average.update_parameters(model)
    assert own_shard(average.module.running_mean).tolist() == [0.5, 0.5]
    assert own_shard(average.module.codes).tolist() == [7, 7]


@torch.no_grad()
@pytest.mark.parametrize("recomputed", [False, True])
def test_copies_of_a_model_whose_parts_are_compiled_compute_with_their_own_weights(recomputed: bool):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    compile_in_place(model, list(model), {"backend": "eager"})
    if recomputed:
        checkpoint_activations(model, nn.Linear)
    x = torch.ones(1, 2)
    before = model(x)
    average = ExponentialMovingAverage(model, momentum=0.25)
    copies = [average, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(copy.deepcopy(model))]
    for parameter in model.parameters():
        parameter.add_(1)
    assert not torch.equal(model(x), before)
    for each in copies:
        assert torch.equal(each(x), before)
