"""Options of some parameters: whose they are, how they are grouped, and that checkpoints keep them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import TensorDataset

from lockstep.dist import get_world_size
from lockstep.errors import ConfigError
from lockstep.optim import DefaultOptimWrapperConstructor, OptimWrapper, OptimWrapperDict, build_optim_wrapper
from lockstep.optim.constructor import param_sites
from lockstep.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS, BuildError, Registry
from lockstep.runner import Runner
from lockstep.strategy import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from lockstep.testing import ranks, run_ranks
from lockstep.weights.description import sized_on_loading, tied_names

from ..runs import Losses


class LlamaRMSNorm(nn.Module):
    """A norm that torch does not know of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class ModulatedDeformConv2dPack(nn.Module):
    """Has the parameters of a deformable convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
        self.conv_offset = nn.Conv2d(2, 2, 1)


class Parts(nn.Module):
    """One parameter of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.conv = nn.Conv2d(2, 2, 1)
        self.depthwise = nn.Conv2d(2, 2, 1, groups=2)
        self.bn = nn.BatchNorm2d(2)
        self.rms = LlamaRMSNorm(2)
        self.dcn = ModulatedDeformConv2dPack()


LR, DECAY = 0.5, 0.25


def options(model: nn.Module, paramwise: dict[str, Any], **optimizer: Any) -> dict[str, tuple[float, float]]:
    """Return by what learning rate and weight decay of each parameter are multiplied, where that is not 1."""
    cfg = {"optimizer": {"type": "SGD", "lr": LR, "weight_decay": DECAY, **optimizer}, "paramwise_cfg": paramwise}
    wrapper = build_optim_wrapper(model, cfg)
    of = {
        id(param): (group["lr"] / LR, group["weight_decay"] / DECAY)
        for group in wrapper.param_groups
        for param in group["params"]
    }
    every = {site.name: of[id(site.parameter)] for site in param_sites(model)}
    return {name: mults for name, mults in every.items() if mults != (1, 1)}


BIASES = {"conv.bias", "depthwise.bias", "dcn.bias"}
NORMS = {"bn.weight", "bn.bias", "rms.weight"}
DEPTHWISE = {"depthwise.weight", "depthwise.bias"}
OFFSETS = {"dcn.conv_offset.weight", "dcn.conv_offset.bias"}


@pytest.mark.parametrize(
    ("paramwise", "expected"),
    [
        ({}, {}),
        ({"bias_lr_mult": 2}, dict.fromkeys(BIASES, (2, 1))),
        ({"bias_decay_mult": 0}, dict.fromkeys(BIASES - DEPTHWISE, (1, 0))),
        ({"norm_decay_mult": 0}, dict.fromkeys(NORMS, (1, 0))),
        ({"dwconv_decay_mult": 0.5}, dict.fromkeys(DEPTHWISE, (1, 0.5))),
        ({"flat_decay_mult": 0}, dict.fromkeys({"scale"} | NORMS | BIASES, (1, 0))),
        ({"dcn_offset_lr_mult": 0.5}, dict.fromkeys(OFFSETS, (0.5, 1))),
        (
            {"flat_decay_mult": 0, "norm_decay_mult": 0.5, "bias_lr_mult": 2},
            {"scale": (1, 0), **dict.fromkeys(NORMS, (1, 0.5)), **dict.fromkeys(BIASES, (2, 0))},
        ),
        (
            {"bias_decay_mult": 0, "custom_keys": {"conv": {"lr_mult": 0.5}, "conv_offset": {"decay_mult": 0.5}}},
            {"conv.weight": (0.5, 1), "conv.bias": (0.5, 1), "dcn.bias": (1, 0), **dict.fromkeys(OFFSETS, (1, 0.5))},
        ),
        ({"custom_keys": {"bn": {"lr_mult": 0.0}, "rms": {"lr_mult": 1.0}}}, {"bn.weight": (0, 1), "bn.bias": (0, 1)}),
        # Of several keys of one length the first in the alphabet decides.
        (
            {"custom_keys": {"ms.weight": {"lr_mult": 0.5}, "rms.weigh": {"lr_mult": 0.25}}},
            {"rms.weight": (0.5, 1)},
        ),
    ],
)
def test_each_option_reaches_its_parameters(paramwise, expected):
    assert options(Parts(), paramwise) == expected


def test_equal_options_share_a_group_in_the_order_of_the_model():
    model = Parts()
    model.conv.weight.requires_grad_(False)
    paramwise = {"norm_decay_mult": 0.0, "bias_decay_mult": 0.0, "custom_keys": {"rms": {"decay_mult": 0.0}}}
    cfg = {"optimizer": {"type": "AdamW", "lr": 0.1, "weight_decay": 0.1}, "paramwise_cfg": paramwise}
    groups = build_optim_wrapper(model, cfg).param_groups
    names = {id(param): name for name, param in model.named_parameters()}
    assert [[names[id(param)] for param in group["params"]] for group in groups] == [
        ["scale", "conv.weight", "depthwise.weight", "depthwise.bias", "dcn.weight", "dcn.conv_offset.weight",
         "dcn.conv_offset.bias"],
        ["conv.bias", "bn.weight", "bn.bias", "rms.weight", "dcn.bias"],
    ]  # fmt: skip
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_without_options_there_is_one_group_in_the_order_of_the_model():
    model = Parts()
    (group,) = build_optim_wrapper(model, {"optimizer": {"type": "Adam"}}).param_groups
    assert [id(param) for param in group["params"]] == [id(param) for param in model.parameters()]


def test_other_options_of_the_optimizer_may_be_given_by_name():
    paramwise = {"custom_keys": {"dcn": {"momentum": 0.5}, "bn": {"momentum": 0.5, "nesterov": True}}}
    cfg = {"optimizer": {"type": "SGD", "lr": 1, "momentum": 0.9}, "paramwise_cfg": paramwise}
    groups = build_optim_wrapper(Parts(), cfg).param_groups
    assert [(g["momentum"], g["nesterov"], len(g["params"])) for g in groups] == [
        (0.9, False, 6), (0.5, True, 2), (0.5, False, 4),
    ]  # fmt: skip


def test_the_optimizers_own_defaults_are_multiplied():
    cfg = {"optimizer": {"type": "AdamW"}, "paramwise_cfg": {"bias_lr_mult": 2, "norm_decay_mult": 0.5}}
    groups = build_optim_wrapper(Parts(), cfg).param_groups
    assert {(group["lr"], group["weight_decay"]) for group in groups} == {(1e-3, 1e-2), (2e-3, 1e-2), (1e-3, 5e-3)}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight


OF_LIBRARY = Registry("optimizer", scope="optim_tests", parent=OPTIMIZERS)


@OF_LIBRARY.register_module(name=["AdamW", "Own"])
class Own(torch.optim.AdamW):
    """Has the name of an optimizer of torch, and another default."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, lr=lr)


@pytest.mark.parametrize("name", ["AdamW", "Own"])
def test_defaults_are_those_of_the_optimizer_in_the_scope_of_its_config(name):
    wrapper = build_optim_wrapper(
        nn.Linear(2, 1),
        {"optimizer": {"type": name, "_scope_": "optim_tests"}, "paramwise_cfg": {"bias_lr_mult": 2}},
    )
    assert type(wrapper.optimizer) is Own
    assert wrapper.get_lr() == {"lr": [0.5, 1.0]}


def test_a_shared_parameter_has_one_set_of_options():
    assert options(Tied(), {"custom_keys": {"weight": {"lr_mult": 2}}}) == {
        "embedding.weight": (2, 1), "head.weight": (2, 1),
    }  # fmt: skip
    different = {"custom_keys": {"head": {"lr_mult": 2}}}
    with pytest.raises(ConfigError, match=r"same of embedding.weight and head.weight.*says {} and {'lr': 1.0}"):
        options(Tied(), different)
    assert options(Tied(), {**different, "bypass_duplicate": True}) == {}


@pytest.mark.parametrize(
    ("paramwise", "optimizer", "says"),
    [
        ({"bias_lr": 2}, {}, "unknown key 'bias_lr': did you mean `bias_lr_mult`"),
        ({"bias_lr_mult": "2"}, {}, "`bias_lr_mult` must be a finite number of at least 0, but is '2'"),
        ({"bias_lr_mult": math.nan}, {}, "`bias_lr_mult` must be a finite number of at least 0, but is nan"),
        ({"custom_keys": ["bn"]}, {}, "`custom_keys` must be a dict such as"),
        ({"custom_keys": {"depthwice": {}}}, {}, "'depthwice' is part of none: did you mean `depthwise`"),
        ({"custom_keys": {"backbone": {}}}, {}, "'backbone' is part of none"),
        ({"custom_keys": {"dcn.conv_ofset": {}}}, {}, "is part of none: did you mean `dcn.conv_offset`"),
        ({"custom_keys": {"bn": 0.1}}, {}, r"must be a dict such as dict\(lr_mult=0.1\), but is 0.1"),
        ({"custom_keys": {"bn": {"lr_mul": 1}}}, {}, "unknown key 'lr_mul': did you mean `lr_mult`"),
        ({"custom_keys": {"bn": {"decay_mult": -1}}}, {}, "at least 0, but is -1"),
        ({"bias_decay_mult": 0}, {"type": "Rprop", "lr": 1}, "needs an optimizer with a `weight_decay`"),
    ],
)
def test_wrong_options_are_refused(paramwise, optimizer, says):
    cfg = {"optimizer": {"type": "SGD", "lr": 1, **optimizer}, "paramwise_cfg": paramwise}
    with pytest.raises(ConfigError, match=says):
        build_optim_wrapper(Parts(), cfg)


def test_an_optimizer_that_is_built_has_its_options_already():
    model = Parts()
    with pytest.raises(ConfigError, match=r"`paramwise_cfg` needs the config of an optimizer.*SGD"):
        build_optim_wrapper(
            model, {"optimizer": torch.optim.SGD(model.parameters()), "paramwise_cfg": {"bias_lr_mult": 2}}
        )
    with pytest.raises(TypeError, match="`paramwise_cfg` must be a dict or None, but is 3"):
        build_optim_wrapper(model, {"optimizer": {"type": "SGD"}, "paramwise_cfg": 3})


def test_parts_of_a_model_have_their_own():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(2, 1), nn.Linear(2, 1)

    wrapper = build_optim_wrapper(
        Pair(),
        {
            "left": {
                "optimizer": {"type": "SGD", "lr": 1.0},
                "paramwise_cfg": {"custom_keys": {"bias": {"lr_mult": 2}}},
            },
            "right": {"optimizer": {"type": "Adam"}, "constructor": "DefaultOptimWrapperConstructor"},
        },
    )
    assert isinstance(wrapper, OptimWrapperDict)
    assert [group["lr"] for group in wrapper.param_groups] == [1.0, 2.0, 1e-3]


class ByDepth(DefaultOptimWrapperConstructor):
    """Fills the groups in its own way, as constructors written for MMEngine do."""

    def add_params(self, params, module, **kwargs):
        for depth, child in enumerate(module.children()):
            params.append(
                {"params": list(child.parameters()), "lr": self.base_lr * self.paramwise_cfg["rate"] ** depth}
            )


def test_another_constructor_may_be_named():
    OPTIM_WRAPPER_CONSTRUCTORS.register_module(module=ByDepth, force=True)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    cfg = {"optimizer": {"type": "SGD", "lr": 0.5}, "paramwise_cfg": {"rate": 0.5}}
    for kind in ("ByDepth", ByDepth):
        wrapper = build_optim_wrapper(model, {**cfg, "constructor": kind})
        assert [group["lr"] for group in wrapper.param_groups] == [0.5, 0.25]
    with pytest.raises(KeyError, match=r"no optim wrapper constructor `ByDept`.*did you mean `ByDepth`"):
        build_optim_wrapper(model, {**cfg, "constructor": "ByDept"})
    with pytest.raises(TypeError, match="must return an OptimWrapper, but returned None"):
        build_optim_wrapper(model, {**cfg, "constructor": builds_nothing})
    plain = {"optimizer": cfg["optimizer"], "constructor": None}
    assert isinstance(build_optim_wrapper(model, plain), OptimWrapper)
    with pytest.raises(BuildError, match="unknown argument `rate`"):
        build_optim_wrapper(model, {**plain, "rate": 1})
    with pytest.raises(BuildError, match="unknown argument `bf16`") as caught:
        build_optim_wrapper(model, {**plain, "bf16": True})
    assert "AmpOptimWrapper" in caught.value.__notes__[0]


def builds_nothing(optim_wrapper_cfg, paramwise_cfg):
    return lambda model: None


class Net(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.head(self.backbone(x)) - y).square().mean()


def net() -> Net:
    torch.manual_seed(5)
    return Net()


CFG = {
    "optimizer": {"type": "AdamW", "lr": 0.05, "weight_decay": 0.1},
    "paramwise_cfg": {
        "norm_decay_mult": 0.0,
        "bias_decay_mult": 0.0,
        "custom_keys": {"backbone.2": {"lr_mult": 0.1}, "head": {"betas": [0.8, 0.9], "decay_mult": 2.0}},
    },
}


def group_names(strategy: Any, model: nn.Module) -> list[tuple[list[str], float, float]]:
    strategy.prepare(model, CFG)
    return [(group["params"], group["lr"], group["weight_decay"]) for group in strategy.optim_state()["param_groups"]]


GROUPS = [
    (["backbone.0.weight"], 0.05, 0.1),
    (["backbone.0.bias", "backbone.1.weight", "backbone.1.bias"], 0.05, 0.0),
    (["backbone.2.weight", "backbone.2.bias"], pytest.approx(0.005), 0.1),
    (["head.weight", "head.bias"], 0.05, 0.2),
]


@ranks(2)
@pytest.mark.parametrize("kind", [DDPStrategy, FSDPStrategy])
def test_names_are_those_of_the_users_module(kind):
    assert group_names(kind(), net()) == GROUPS


def test_names_are_looked_up_through_what_torch_puts_around_modules():
    plain, around = net(), net()
    around.backbone = checkpoint_wrapper(torch.compile(around.backbone, backend="eager"))
    around = torch.compile(around, backend="eager")
    assert [site.name for site in param_sites(around)] == [name for name, _ in plain.named_parameters()]
    wrapper = build_optim_wrapper(around, CFG)
    assert [len(group["params"]) for group in wrapper.param_groups] == [len(names) for names, *_ in GROUPS]
    assert group_names(SingleDeviceStrategy(), plain) == GROUPS


def test_children_with_wrappers_of_their_own_keep_their_names():
    (names,) = run_ranks(1, separate_names)
    assert names == GROUPS


def separate_names() -> list[tuple[list[str], float, float]]:
    from lockstep.model import MMSeparateDistributedDataParallel

    model = MMSeparateDistributedDataParallel(net())
    names = {id(site.parameter): site.name for site in param_sites(model)}
    groups = build_optim_wrapper(model, CFG).param_groups
    return [([names[id(p)] for p in group["params"]], group["lr"], group["weight_decay"]) for group in groups]


X = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))


def train(work_dir: Path, strategy: str, stop_after: int | None = None, **changes: Any):
    losses = Losses(stop_after)
    runner = Runner(
        net(), work_dir, train_dataloader={
            "dataset": TensorDataset(X, X.sum(1, keepdim=True)), "batch_size": 8 // get_world_size(),
        },
        train_cfg={"max_iters": 8}, strategy=strategy, randomness={"seed": 7}, visualizer=[], optim_wrapper=CFG,
        param_scheduler=[
            {"type": "LinearMomentum", "by_epoch": False},
            {"type": "PolyLR", "by_epoch": False, "eta_min_ratio": 0.1},
        ],
        default_hooks={"checkpoint": {"by_epoch": False, "interval": 3}}, custom_hooks=[losses], **changes,
    )  # fmt: skip
    try:
        runner.train()
    except KeyboardInterrupt:
        assert stop_after is not None
    return losses.by_iter, [(group["lr"], *group["betas"]) for group in runner.optim_wrapper.param_groups]


@pytest.mark.parametrize(("size", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_a_resumed_run_keeps_the_options_of_each_group(size: int, strategy: str, tmp_path: Path):
    whole = run_ranks(size, train, tmp_path / "whole", strategy)
    first = run_ranks(size, train, tmp_path / "parts", strategy, 4)
    second = run_ranks(size, train, tmp_path / "parts", strategy, resume=True)
    for (one, _), (other, rates), (all_of_it, expected) in zip(first, second, whole, strict=True):
        assert min(other) == 3
        assert one | other == all_of_it
        assert rates == expected
        assert len(set(rates)) == 3


def test_a_checkpoint_goes_to_another_strategy_with_its_groups(tmp_path: Path):
    run_ranks(2, train, tmp_path, "fsdp", 4)
    ((losses, rates),) = run_ranks(1, train, tmp_path, "single", resume=True)
    ((whole, expected),) = run_ranks(1, train, tmp_path / "whole", "single")
    assert rates == expected
    assert list(losses.values()) == pytest.approx([whole[index] for index in losses], rel=1e-4)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class HalvedHead(DefaultOptimWrapperConstructor):
    """Changes the groups in the way of MMEngine's users."""

    def add_params(self, params, module, prefix="", is_dcn_module=None) -> None:
        super().add_params(params, module, prefix=prefix, is_dcn_module=is_dcn_module)
        params[0]["lr"] = self.base_lr / 2


def test_a_constructor_of_ones_own_may_have_mmengines_signature():
    cfg = {"optimizer": {"type": "SGD", "lr": 0.5}, "constructor": "HalvedHead"}
    assert build_optim_wrapper(nn.Linear(2, 1), cfg).get_lr() == {"lr": [0.25]}
    construct = DefaultOptimWrapperConstructor({"optimizer": {"type": "SGD", "lr": 0.5}})
    with pytest.raises(ConfigError, match="`prefix` must be empty, but is 'backbone'"):
        construct.add_params([], nn.Linear(2, 1), prefix="backbone")


def test_the_keys_that_a_layer_alone_could_have_are_named():
    optimizer = {"type": "SGD", "lr": 0.1}
    construct = DefaultOptimWrapperConstructor({"optimizer": optimizer}, {"custom_keys": {"head": {"lr_mult": 2}}})
    with pytest.raises(ConfigError, match=r"'head' is part of none\. Known: `bias`, `weight`\."):
        construct(nn.Linear(1, 1))


class OfMetaLearning(nn.Linear):
    """Names its parameters by a method of its own, with the signature of early torch."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:
        return super().named_parameters(prefix, recurse)

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Any:
        return super().named_buffers(prefix, recurse)


def test_methods_of_a_modules_own_are_not_asked_for_its_names():
    model = nn.Sequential(OfMetaLearning(2, 2), nn.Linear(2, 2))
    assert [site.name for site in param_sites(model)] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    model[1].weight = model[0].weight
    assert tied_names(model) == [["0.weight", "1.weight"]]
    assert sized_on_loading(model) == set()


def test_a_convolution_is_depthwise_also_where_its_weight_is_computed():
    convolution = nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 1, groups=2))
    names = {f"0.{name}" for name, _ in convolution.named_parameters()}
    assert len(names) == 3
    assert options(nn.Sequential(convolution), {"dwconv_decay_mult": 0.5}) == dict.fromkeys(names, (1, 0.5))
