"""Optim wrappers and their constructors, as MMEngine's documentation of them shows."""

from __future__ import annotations

import warnings

import pytest
import torch
from environments import LOCKSTEP
from torch import nn
from torch.optim import SGD, Adam

from mmengine.optim import (
    AmpOptimWrapper,
    DefaultOptimWrapperConstructor,
    OptimWrapper,
    OptimWrapperDict,
    build_optim_wrapper,
)
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS

# MMEngine asserts; lockstep raises what Python raises for a wrong type or value.
WRONG = (AssertionError, AttributeError, TypeError, ValueError)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(2, 1, bias=False)


def loss_of(model, scale=1.0):
    return model(torch.tensor([[1.0, 2.0]])).sum() * scale


def test_update_params_is_backward_step_and_zero_grad(model):
    wrapper = OptimWrapper(optimizer=SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    wrapper.update_params(loss_of(model))
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * torch.tensor([[1.0, 2.0]]))
    assert model.weight.grad is None or not model.weight.grad.any()


def test_the_three_steps_by_hand_are_the_same(model):
    twin = nn.Linear(2, 1, bias=False)
    twin.load_state_dict(model.state_dict())
    one = OptimWrapper(optimizer=SGD(model.parameters(), lr=0.1))
    two = OptimWrapper(optimizer=SGD(twin.parameters(), lr=0.1))
    one.update_params(loss_of(model))
    two.backward(loss_of(twin))
    two.step()
    two.zero_grad()
    assert torch.equal(model.weight, twin.weight)


def test_gradients_are_accumulated(model):
    wrapper = OptimWrapper(optimizer=SGD(model.parameters(), lr=0.1), accumulative_counts=2)
    before = model.weight.detach().clone()
    with wrapper.optim_context(model):
        wrapper.update_params(loss_of(model))
    assert torch.equal(model.weight, before)
    with wrapper.optim_context(model):
        wrapper.update_params(loss_of(model, 3.0))
    expected = before - 0.1 * torch.tensor([[1.0, 2.0]]) * (1 + 3) / 2
    torch.testing.assert_close(model.weight.detach(), expected)


def test_the_last_accumulation_may_be_shorter(model):
    wrapper = OptimWrapper(optimizer=SGD(model.parameters(), lr=0.1), accumulative_counts=2)
    wrapper.initialize_count_status(model, 0, 3)
    before = model.weight.detach().clone()
    for _ in range(3):
        wrapper.update_params(loss_of(model))
    torch.testing.assert_close(model.weight.detach(), before - 2 * 0.1 * torch.tensor([[1.0, 2.0]]))


@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        (dict(max_norm=1.0), torch.tensor([[1.0, 2.0]]) / 5**0.5),
        (dict(type="norm", max_norm=1.0, norm_type=1), torch.tensor([[1.0, 2.0]]) / 3),
        (dict(type="value", clip_value=1.5), torch.tensor([[1.0, 1.5]])),
    ],
)
def test_gradients_are_clipped(model, clip, expected):
    wrapper = OptimWrapper(optimizer=SGD(model.parameters(), lr=1.0), clip_grad=clip)
    before = model.weight.detach().clone()
    wrapper.update_params(loss_of(model))
    torch.testing.assert_close(before - model.weight.detach(), expected, rtol=1e-4, atol=1e-5)


def test_clipping_of_an_unknown_kind_is_an_error(model):
    with pytest.raises(ValueError):
        OptimWrapper(optimizer=SGD(model.parameters(), lr=1.0), clip_grad=dict(type="nonsense", clip_value=1.0))
    with pytest.raises(WRONG):
        OptimWrapper(optimizer=SGD(model.parameters(), lr=1.0), clip_grad=3)


def test_learning_rates_and_momenta_of_all_groups():
    layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    groups = [dict(params=layers[0].parameters(), lr=0.1), dict(params=layers[1].parameters(), lr=0.2)]
    wrapper = OptimWrapper(optimizer=SGD(groups, lr=0.3, momentum=0.9))
    assert wrapper.get_lr()["lr"] == [0.1, 0.2]
    assert wrapper.get_momentum() == {"momentum": [0.9, 0.9]}
    adam = OptimWrapper(optimizer=Adam(layers.parameters(), lr=0.01, betas=(0.8, 0.99)))
    assert adam.get_momentum() == {"momentum": [0.8]}


def test_a_wrapper_shows_its_optimizer(model):
    optimizer = SGD(model.parameters(), lr=0.1)
    wrapper = OptimWrapper(optimizer=optimizer)
    assert wrapper.optimizer is optimizer
    assert wrapper.param_groups is optimizer.param_groups
    assert wrapper.defaults["lr"] == 0.1
    wrapper.param_groups[0]["lr"] = 0.5
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_wrapper_has_the_state_of_its_optimizer(model):
    wrapper = OptimWrapper(optimizer=SGD(model.parameters(), lr=0.1, momentum=0.9))
    wrapper.update_params(loss_of(model))
    state = wrapper.state_dict()
    assert set(state) >= {"state", "param_groups"}
    other = OptimWrapper(optimizer=SGD(model.parameters(), lr=9.0, momentum=0.9))
    other.load_state_dict(state)
    assert other.get_lr() == {"lr": [0.1]}
    torch.testing.assert_close(other.optimizer.state[model.weight]["momentum_buffer"], torch.tensor([[1.0, 2.0]]))


def test_only_optimizers_are_wrapped():
    with pytest.raises(WRONG):
        OptimWrapper(optimizer="SGD")


def test_accumulative_counts_are_positive(model):
    with pytest.raises(WRONG):
        OptimWrapper(optimizer=SGD(model.parameters(), lr=0.1), accumulative_counts=-1)


@pytest.mark.skipif(not LOCKSTEP, reason="MMEngine's needs an accelerator")
def test_mixed_precision_computes_in_bfloat16(model):
    wrapper = AmpOptimWrapper(optimizer=SGD(model.parameters(), lr=0.1), dtype="bfloat16", loss_scale="dynamic")
    with wrapper.optim_context(model):
        assert model(torch.ones(1, 2)).dtype == torch.bfloat16


@pytest.mark.skipif(not LOCKSTEP, reason="MMEngine's needs an accelerator")
def test_the_state_of_mixed_precision_has_the_scale(model):
    wrapper = AmpOptimWrapper(optimizer=SGD(model.parameters(), lr=0.1), dtype="float16")
    state = wrapper.state_dict()
    assert "loss_scaler" in state
    wrapper.load_state_dict(state)


@pytest.mark.skipif(not LOCKSTEP, reason="MMEngine's needs an accelerator")
def test_loss_scale_of_another_type_is_a_type_error(model):
    with pytest.raises(TypeError):
        AmpOptimWrapper(optimizer=SGD(model.parameters(), lr=0.1), loss_scale="static")


# Several optimizers, as for a GAN.


@pytest.fixture
def pair():
    generator, discriminator = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    wrappers = OptimWrapperDict(
        generator=OptimWrapper(optimizer=Adam(generator.parameters(), lr=0.1)),
        discriminator=OptimWrapper(optimizer=SGD(discriminator.parameters(), lr=0.2, momentum=0.5)),
    )
    return wrappers, generator, discriminator


def test_each_part_is_updated_by_its_name(pair):
    wrappers, generator, discriminator = pair
    before = generator.weight.item(), discriminator.weight.item()
    with wrappers["discriminator"].optim_context(discriminator):
        wrappers["discriminator"].update_params(discriminator(torch.ones(1, 1)).sum())
    assert generator.weight.item() == before[0]
    assert discriminator.weight.item() == pytest.approx(before[1] - 0.2)


def test_rates_of_several_optimizers_have_the_name_before_them(pair):
    wrappers, *_ = pair
    assert wrappers.get_lr() == {"generator.lr": [0.1], "discriminator.lr": [0.2]}
    assert wrappers.get_momentum() == {"generator.momentum": [0.9], "discriminator.momentum": [0.5]}


def test_several_optimizers_are_a_mapping(pair):
    wrappers, *_ = pair
    assert list(wrappers.keys()) == ["generator", "discriminator"]
    assert [name for name, _ in wrappers.items()] == list(wrappers.keys())
    assert wrappers["generator"] is next(iter(wrappers.values()))
    assert "generator" in wrappers
    assert len(wrappers) == 2
    with pytest.raises((AssertionError, KeyError)):
        wrappers["nobody"]


def test_several_optimizers_have_a_state_by_name(pair):
    wrappers, *_ = pair
    state = wrappers.state_dict()
    assert list(state) == ["generator", "discriminator"]
    state["generator"]["param_groups"][0]["lr"] = 0.7
    wrappers.load_state_dict(state)
    assert wrappers.get_lr()["generator.lr"] == [0.7]
    with pytest.raises((AssertionError, KeyError)):
        wrappers.load_state_dict({"nobody": {}})


@pytest.mark.parametrize("name", ["update_params", "backward"])
def test_several_optimizers_are_not_updated_at_once(pair, name):
    with pytest.raises(NotImplementedError):
        getattr(pair[0], name)(torch.ones(()))


def test_several_optimizers_do_not_step_at_once(pair):
    with pytest.raises(NotImplementedError):
        pair[0].step()


def test_param_groups_of_several_optimizers(pair):
    wrappers, *_ = pair
    groups = wrappers.param_groups
    values = groups.values() if isinstance(groups, dict) else groups
    assert len(list(values)) == 2


def test_only_optim_wrappers_are_put_together(pair):
    with pytest.raises(WRONG):
        OptimWrapperDict(one=SGD([nn.Parameter(torch.ones(1))], lr=0.1))


# Building.


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.ModuleDict(dict(conv0=nn.Conv2d(1, 1, 1), conv1=nn.Conv2d(1, 1, 1), norm=nn.BatchNorm2d(1)))
        self.head = nn.Linear(1, 1)
        self.query = nn.Embedding(2, 2)


def rates(wrapper, model, key="lr"):
    names = {id(one): name for name, one in model.named_parameters()}
    # MMEngine adds a group for the settings of the config, whose only parameter is none of the model's.
    pairs = [(one, group[key]) for group in wrapper.param_groups for one in group["params"]]
    return {names[id(one)]: value for one, value in pairs if id(one) in names}


def test_a_config_builds_a_wrapper(model):
    cfg = dict(type="OptimWrapper", optimizer=dict(type="SGD", lr=0.1), accumulative_counts=4)
    wrapper = build_optim_wrapper(model, cfg)
    assert type(wrapper.optimizer) is SGD
    before = model.weight.detach().clone()
    for _ in range(4):
        assert torch.equal(model.weight, before)
        wrapper.update_params(loss_of(model))
    assert not torch.equal(model.weight, before)
    assert cfg["optimizer"] == dict(type="SGD", lr=0.1)


def test_a_config_without_type_is_the_plain_wrapper(model):
    assert isinstance(build_optim_wrapper(model, dict(optimizer=dict(type="Adam", lr=0.1))), OptimWrapper)


def test_rates_by_the_kind_of_a_layer():
    net = Net()
    cfg = dict(
        optimizer=dict(type="SGD", lr=0.01, weight_decay=0.0001),
        paramwise_cfg=dict(norm_decay_mult=0.0, bias_lr_mult=2.0, bias_decay_mult=0.5),
    )
    wrapper = build_optim_wrapper(net, cfg)
    decay, lr = rates(wrapper, net, "weight_decay"), rates(wrapper, net)
    assert decay["backbone.norm.weight"] == decay["backbone.norm.bias"] == 0
    assert (lr["head.bias"], decay["head.bias"]) == (0.02, 0.00005)
    assert (lr["head.weight"], decay["head.weight"]) == (0.01, 0.0001)
    assert lr["backbone.norm.bias"] == 0.01


def test_rates_by_name():
    net = Net()
    cfg = dict(
        optimizer=dict(type="SGD", lr=0.01, weight_decay=0.0001),
        paramwise_cfg=dict(
            custom_keys={
                "backbone.conv0": dict(lr_mult=0, decay_mult=0),
                "backbone": dict(lr_mult=1, decay_mult=10),
                ".absolute_pos_embed": dict(decay_mult=0),  # which other models have
            }
        ),
    )
    wrapper = build_optim_wrapper(net, cfg)
    lr, decay = rates(wrapper, net), rates(wrapper, net, "weight_decay")
    assert (lr["backbone.conv0.weight"], decay["backbone.conv0.weight"]) == (0, 0)
    assert (lr["backbone.conv1.weight"], decay["backbone.conv1.weight"]) == (0.01, 0.001)
    assert (lr["head.weight"], decay["head.weight"]) == (0.01, 0.0001)


def test_flat_and_depthwise_parameters_have_rates_of_their_own():
    net = nn.ModuleDict(dict(depthwise=nn.Conv2d(2, 2, 1, groups=2, bias=False), linear=nn.Linear(2, 2)))
    cfg = dict(
        optimizer=dict(type="SGD", lr=0.01, weight_decay=0.1),
        paramwise_cfg=dict(dwconv_decay_mult=0.5, flat_decay_mult=0.0, bias_decay_mult=None),
    )
    decay = rates(build_optim_wrapper(net, cfg), net, "weight_decay")
    assert decay["depthwise.weight"] == 0.05
    assert decay["linear.weight"] == 0.1
    assert decay["linear.bias"] == 0


def test_a_parameter_that_is_used_twice():
    net = nn.ModuleDict(dict(one=nn.Linear(1, 1)))
    net["two"] = net["one"]
    cfg = dict(optimizer=dict(type="SGD", lr=0.1), paramwise_cfg=dict(bias_lr_mult=2.0, bypass_duplicate=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MMEngine warns of what was asked for
        wrapper = build_optim_wrapper(net, cfg)
    assert sum(one.requires_grad for group in wrapper.param_groups for one in group["params"]) == 2


def test_a_constructor_of_ones_own():
    @OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
    class LayerDecayConstructor(DefaultOptimWrapperConstructor):
        def add_params(self, params, module, prefix="", **kwargs):
            for depth, one in enumerate(module.parameters()):
                params.append(dict(params=[one], lr=self.base_lr * self.paramwise_cfg["decay_rate"] ** depth))

    net = nn.Linear(2, 2)
    cfg = dict(
        type="OptimWrapper",
        optimizer=dict(type="SGD", lr=1.0),
        constructor="LayerDecayConstructor",
        paramwise_cfg=dict(decay_rate=0.5),
    )
    assert build_optim_wrapper(net, cfg).get_lr()["lr"] == [1.0, 0.5]


def test_a_constructor_for_several_optimizers():
    @OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
    class MultipleOptimizerConstructor:
        def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
            self.optim_wrapper_cfg, self.constructors = optim_wrapper_cfg, {}
            for name, cfg in optim_wrapper_cfg.items():
                self.constructors[name] = DefaultOptimWrapperConstructor(cfg, paramwise_cfg)

        def __call__(self, module):
            made = {name: make(getattr(module, name)) for name, make in self.constructors.items()}
            return OptimWrapperDict(**made)

    net = nn.ModuleDict(dict(generator=nn.Linear(1, 1), critic=nn.Linear(1, 1)))
    net.generator, net.critic = net["generator"], net["critic"]
    cfg = dict(
        generator=dict(type="OptimWrapper", optimizer=dict(type="Adam", lr=0.1)),
        critic=dict(type="OptimWrapper", optimizer=dict(type="SGD", lr=0.2)),
        constructor="MultipleOptimizerConstructor",
    )
    assert build_optim_wrapper(net, cfg).get_lr() == {"generator.lr": [0.1], "critic.lr": [0.2]}


def test_an_optimizer_of_ones_own(model):
    @OPTIMIZERS.register_module(force=True)
    class HalfSGD(SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr=lr / 2)

    assert build_optim_wrapper(model, dict(optimizer=dict(type="HalfSGD", lr=1.0))).get_lr() == {"lr": [0.5]}


def test_a_wrapper_of_ones_own(model):
    @OPTIM_WRAPPERS.register_module(force=True)
    class CountingWrapper(OptimWrapper):
        steps = 0

        def step(self, **kwargs):
            super().step(**kwargs)
            self.steps += 1

    wrapper = build_optim_wrapper(model, dict(type="CountingWrapper", optimizer=dict(type="SGD", lr=1.0)))
    wrapper.update_params(loss_of(model))
    assert wrapper.steps == 1


def test_an_unknown_optimizer_is_an_error(model):
    with pytest.raises((KeyError, TypeError)):
        build_optim_wrapper(model, dict(optimizer=dict(type="NoSuchOptimizer")))
