"""mmengine.model: init_cfg, the modules that carry one, TTA, and small functions.

`reference/` holds what MMEngine 0.10.7 with torch 2.13 gave for the same seeds.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from mmengine.model import (
    BaseDataPreprocessor,
    BaseModel,
    BaseModule,
    BaseTTAModel,
    ConstantInit,
    ImgDataPreprocessor,
    ModuleDict,
    ModuleList,
    PretrainedInit,
    Sequential,
    bias_init_with_prob,
    caffe2_xavier_init,
    constant_init,
    detect_anomalous_params,
    initialize,
    kaiming_init,
    merge_dict,
    normal_init,
    stack_batch,
    trunc_normal_init,
    uniform_init,
    update_init_info,
    xavier_init,
)
from mmengine.model.weight_init import trunc_normal_
from mmengine.registry import MODELS, WEIGHT_INITIALIZERS

REFERENCE = Path(__file__).parent / "reference"
LAYERS = ["Conv2d", "Linear", "ConvTranspose2d"]
CONFIGS = [
    {"type": "Xavier", "layer": LAYERS},
    {"type": "Xavier", "layer": LAYERS, "distribution": "uniform", "gain": 2.0},
    {"type": "Normal", "layer": LAYERS, "mean": 1, "std": 0.01},
    {"type": "TruncNormal", "layer": LAYERS, "std": 0.02},
    {"type": "TruncNormal", "layer": LAYERS, "mean": 1, "std": 2, "a": 0, "b": 1.5, "bias": 0.5},
    {"type": "Uniform", "layer": LAYERS, "a": -1, "b": 1},
    {"type": "Kaiming", "layer": LAYERS},
    {
        "type": "Kaiming",
        "layer": LAYERS,
        "a": 0.1,
        "mode": "fan_in",
        "nonlinearity": "leaky_relu",
        "distribution": "uniform",
        "bias": 1,
    },
    {"type": "Caffe2Xavier", "layer": LAYERS},
    [
        {"type": "Constant", "val": 1, "layer": "_BatchNorm"},
        {"type": "Kaiming", "layer": "Conv2d", "override": {"type": "Xavier", "name": "2", "bias_prob": 0.1}},
    ],
    {"type": "Normal", "override": {"name": "2"}},
]


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(2, 2))


def value(parameter: torch.Tensor) -> float:
    """The one value that a constant parameter has everywhere."""
    (found,) = set(parameter.flatten().tolist())
    return found


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_initial_weights_are_those_of_mmengine(number: int) -> None:
    torch.manual_seed(7)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.Linear(5, 6)),
        nn.ConvTranspose2d(4, 2, 2, bias=False),
    )
    initialize(net, CONFIGS[number])
    own = [[float(p.detach().double().sum()), float(p.detach().double().square().sum())] for p in net.parameters()]
    theirs = json.loads((REFERENCE / "initial_weights.json").read_text())[number]
    # The numbers are equal bit by bit; the order in which a processor adds them may differ.
    for sums, expected in zip(own, theirs, strict=True):
        assert sums == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        (lambda layer: constant_init(layer, 0.5, bias=2), (0.5, 0.0, 2)),
        (lambda layer: normal_init(layer, mean=3, std=0.1, bias=1), (3.0, 0.1, 1)),
        (lambda layer: uniform_init(layer, a=2, b=4), (3.0, 0.58, 0)),
        (lambda layer: xavier_init(layer, gain=2, bias=0.1), (0.0, 2 * (2 / 600) ** 0.5, 0.1)),
        (lambda layer: xavier_init(layer, distribution="uniform"), (0.0, (2 / 600) ** 0.5, 0)),
        (lambda layer: kaiming_init(layer, bias=4), (0.0, (2 / 400) ** 0.5, 4)),
        (lambda layer: kaiming_init(layer, mode="fan_in", distribution="uniform"), (0.0, (2 / 200) ** 0.5, 0)),
        (lambda layer: caffe2_xavier_init(layer), (0.0, (1 / 200) ** 0.5, 0)),
        (lambda layer: trunc_normal_init(layer, std=10, a=-1, b=1, bias=3), (0.0, 0.577, 3)),
    ],
)
def test_functions_give_the_distribution_they_name(init, expected) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(200, 400)
    init(layer)
    mean, std, bias = expected
    assert layer.weight.mean().item() == pytest.approx(mean, abs=0.01)
    assert layer.weight.std().item() == pytest.approx(std, rel=0.02, abs=1e-6)
    assert value(layer.bias) == pytest.approx(bias)


def test_functions_leave_out_what_a_module_lacks() -> None:
    layer = nn.Linear(2, 2, bias=False)
    constant_init(layer, 1.0, bias=5)
    assert value(layer.weight) == 1.0
    normal_init(nn.ReLU())
    kaiming = nn.BatchNorm2d(2, affine=False)
    constant_init(kaiming, 3)


def test_truncated_normal_stays_between_its_bounds() -> None:
    drawn = trunc_normal_(torch.empty(4000), mean=0.5, std=1, a=0, b=1)
    assert 0 <= drawn.min().item() < 0.01
    assert 0.99 < drawn.max().item() <= 1
    with pytest.warns(UserWarning, match="two standard deviations"):
        trunc_normal_(torch.empty(3), mean=9, std=1, a=0, b=1)


def test_a_prior_becomes_a_bias() -> None:
    assert torch.sigmoid(torch.tensor(bias_init_with_prob(0.01))).item() == pytest.approx(0.01)


def test_a_wrong_distribution_is_refused() -> None:
    with pytest.raises(AssertionError, match="distribution"):
        xavier_init(nn.Linear(1, 1), distribution="cauchy")


class TestInitCfg:
    def test_layers_are_chosen_by_the_name_of_their_class(self) -> None:
        net = two_layers()
        before = net[1].weight.clone()
        initialize(net, {"type": "Constant", "val": 1, "bias": 2, "layer": "Conv2d"})
        assert (value(net[0].weight), value(net[0].bias)) == (1, 2)
        assert torch.equal(net[1].weight, before)

    def test_or_of_a_direct_base(self) -> None:
        net = two_layers()
        initialize(net, {"type": "Constant", "val": 1, "layer": "_ConvNd"})
        assert value(net[0].weight) == 1

    def test_several_layers_or_several_steps(self) -> None:
        net = two_layers()
        initialize(net, {"type": "Constant", "val": 1, "layer": ["Conv2d", "Linear"]})
        assert value(net[0].weight) == value(net[1].weight) == 1
        initialize(
            net, [{"type": "Constant", "val": 3, "layer": "Conv2d"}, {"type": "Constant", "val": 4, "layer": "Linear"}]
        )
        assert (value(net[0].weight), value(net[1].weight)) == (3, 4)

    def test_an_override_by_its_own_type(self) -> None:
        net = two_layers()
        other = {"type": "Constant", "name": "1", "val": 5, "bias": 6}
        initialize(net, {"type": "Constant", "val": 1, "layer": "Conv2d", "override": other})
        assert (value(net[0].weight), value(net[1].weight), value(net[1].bias)) == (1, 5, 6)

    def test_an_override_with_only_a_name_and_without_layer(self) -> None:
        net = two_layers()
        before = net[0].weight.clone()
        initialize(net, {"type": "Constant", "val": 1, "bias": 2, "override": {"name": "1"}})
        assert (value(net[1].weight), value(net[1].bias)) == (1, 2)
        assert torch.equal(net[0].weight, before)

    def test_several_overrides(self) -> None:
        net = two_layers()
        overrides = [{"name": "1"}, {"type": "Constant", "name": "0", "val": 9}]
        initialize(net, {"type": "Constant", "val": 1, "layer": "Conv2d", "override": overrides})
        assert (value(net[0].weight), value(net[1].weight)) == (9, 1)

    def test_bias_prob(self) -> None:
        net = two_layers()
        initialize(net, {"type": "Normal", "layer": "Linear", "bias_prob": 0.01})
        assert value(net[1].bias) == pytest.approx(-4.5951, abs=1e-4)

    def test_the_config_is_not_changed(self) -> None:
        cfg = {"type": "Constant", "val": 1, "layer": "Conv2d", "override": {"name": "1"}}
        initialize(two_layers(), cfg)
        assert cfg == {"type": "Constant", "val": 1, "layer": "Conv2d", "override": {"name": "1"}}

    def test_without_layer_nothing_is_initialised_and_a_warning_says_so(self) -> None:
        net = two_layers()
        before = net[0].weight.clone()
        with pytest.warns(UserWarning, match="neither `layer` nor `override`"):
            initialize(net, {"type": "Constant", "val": 1})
        assert torch.equal(net[0].weight, before)

    @pytest.mark.parametrize(
        ("cfg", "error", "match"),
        [
            (5, TypeError, "dict or a list of dicts"),
            ({"val": 1, "layer": "Linear"}, KeyError, "type"),
            ({"type": "Nothing", "layer": "Linear"}, KeyError, "Nothing"),
            ({"type": "Constant", "layer": "Linear"}, TypeError, "val"),
            ({"type": "Constant", "val": 1, "layer": 3}, TypeError, "layer"),
            ({"type": "Constant", "val": 1, "layer": "Linear", "bias": "x"}, TypeError, "bias"),
            ({"type": "Constant", "val": 1, "layer": "Linear", "bias_prob": 1}, TypeError, "bias_prob"),
            ({"type": "Constant", "val": 1, "override": {"type": "Constant", "val": 2}}, ValueError, "name"),
            ({"type": "Constant", "val": 1, "layer": "Linear", "override": {}}, ValueError, "name"),
            ({"type": "Constant", "val": 1, "override": {"name": "1", "val": 5}}, ValueError, "type"),
            ({"type": "Constant", "val": 1, "override": {"name": "head"}}, RuntimeError, "head"),
            ({"type": "Constant", "val": 1, "override": 3}, TypeError, "override"),
        ],
    )
    def test_wrong_configs(self, cfg, error, match) -> None:
        with pytest.raises(error, match=match):
            initialize(two_layers(), cfg)

    def test_an_initializer_of_ones_own(self) -> None:
        @WEIGHT_INITIALIZERS.register_module(name="Sevens", force=True)
        class Sevens:
            def __call__(self, module: nn.Module) -> None:
                for parameter in module.parameters():
                    nn.init.constant_(parameter, 7)

        net = two_layers()
        initialize(net, {"type": "Sevens"})
        assert all(value(parameter) == 7 for parameter in net.parameters())

    def test_an_initializer_is_a_function_of_a_module(self) -> None:
        net = two_layers()
        ConstantInit(val=2, layer="Linear")(net)
        assert value(net[1].weight) == 2


class Block(BaseModule):
    def __init__(self, init_cfg=None) -> None:
        super().__init__(init_cfg or {"type": "Constant", "val": 3, "layer": "Linear"})
        self.linear = nn.Linear(1, 1)


class Net(BaseModule):
    def __init__(self, init_cfg=None) -> None:
        super().__init__(init_cfg)
        self.conv = nn.Conv2d(1, 1, 1)
        self.plain = nn.Sequential(Block())
        self.block = Block()


class TestBaseModule:
    def test_its_own_config_comes_before_its_childrens(self) -> None:
        net = Net({"type": "Constant", "val": 7, "bias": 1, "layer": ["Conv2d", "Linear"]})
        net.init_weights()
        assert (value(net.conv.weight), value(net.block.linear.weight)) == (7, 3)
        assert net.is_init
        assert net.block.is_init

    def test_modules_in_a_plain_container_keep_to_the_outer_config(self) -> None:
        net = Net({"type": "Constant", "val": 7, "layer": "Linear"})
        net.init_weights()
        assert value(net.plain[0].linear.weight) == 7

    @pytest.mark.parametrize(
        "container",
        [
            lambda: ModuleList([Block()], init_cfg={"type": "Constant", "val": 1, "bias": 4, "layer": "Linear"}),
            lambda: Sequential(Block(), init_cfg={"type": "Constant", "val": 1, "bias": 4, "layer": "Linear"}),
            lambda: ModuleDict({"0": Block()}, init_cfg={"type": "Constant", "val": 1, "bias": 4, "layer": "Linear"}),
        ],
    )
    def test_containers_with_a_config_reach_what_is_in_them(self, container) -> None:
        modules = container()
        modules.init_weights()
        block = modules["0"] if isinstance(modules, ModuleDict) else modules[0]
        assert value(block.linear.weight) == 3

    def test_a_second_call_changes_nothing(self) -> None:
        net = Block()
        net.init_weights()
        nn.init.constant_(net.linear.weight, 5)
        net.init_weights()
        assert value(net.linear.weight) == 5

    def test_a_module_that_is_initialised_already_is_left_alone(self) -> None:
        net = Net()
        nn.init.constant_(net.block.linear.weight, 5)
        net.block.is_init = True
        net.init_weights()
        assert value(net.block.linear.weight) == 5

    def test_a_subclass_may_initialise_more(self) -> None:
        class Own(Block):
            def init_weights(self) -> None:
                super().init_weights()
                nn.init.constant_(self.linear.bias, 9)

        net = ModuleList([Own()])
        net.init_weights()
        assert (value(net[0].linear.weight), value(net[0].linear.bias)) == (3, 9)

    def test_the_config_is_copied_and_shown(self) -> None:
        cfg = {"type": "Constant", "val": 3, "layer": "Linear"}
        net = Block(cfg)
        cfg["val"] = 4
        assert net.init_cfg["val"] == 3
        assert repr(net).endswith("init_cfg={'type': 'Constant', 'val': 3, 'layer': 'Linear'}")

    def test_nothing_of_the_notes_is_left(self) -> None:
        net = Net()
        net.init_weights()
        assert all("_params_init_info" not in vars(module) for module in net.modules())
        with pytest.raises(AssertionError, match="init_weights"):
            update_init_info(net, "by hand")

    def test_the_notes_say_what_initialised_each_parameter(self) -> None:
        told: dict[str, str] = {}

        class Watching(Net):
            def _init_once(self) -> None:
                super()._init_once()
                notes = self._params_init_info
                told.update({name: notes[parameter]["init_info"] for name, parameter in self.named_parameters()})

        class Own(Block):
            def init_weights(self) -> None:
                super().init_weights()
                self.linear.bias.data.fill_(9)

        net = Watching({"type": "Normal", "std": 0.1, "layer": "Conv2d"})
        net.block = Own()
        net.init_weights()
        assert told["conv.weight"] == "NormalInit: mean=0, std=0.1, bias=0"
        assert told["block.linear.weight"] == "ConstantInit: val=3, bias=0"
        assert told["block.linear.bias"] == "initialised by `init_weights` of Own"
        assert told["plain.0.linear.weight"] == "as before `init_weights` of Watching"

    def test_a_runner_of_lockstep_takes_it_for_its_own(self) -> None:
        import lockstep.model

        assert issubclass(BaseModule, lockstep.model.BaseModule)
        assert issubclass(BaseModel, lockstep.model.BaseModel)


class TestPretrained:
    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> str:
        pytest.importorskip("mmengine.runner.checkpoint")
        path = str(tmp_path / "some.pth")
        weights = {"conv.weight": torch.full((1, 1, 1, 1), 9.0), "block.linear.bias": torch.full((1,), 8.0)}
        torch.save({"state_dict": weights, "meta": {}}, path)
        return path

    @pytest.mark.parametrize("place", [0, 1])
    def test_what_is_loaded_replaces_what_is_drawn(self, checkpoint: str, place: int) -> None:
        steps = [{"type": "Constant", "val": 1, "layer": ["Conv2d", "Linear"]}]
        steps.insert(place, {"type": "Pretrained", "checkpoint": checkpoint})
        net = Net(steps)
        net.init_weights()
        assert (value(net.conv.weight), value(net.block.linear.bias)) == (9, 8)
        assert value(net.block.linear.weight) == 3
        assert value(net.conv.bias) == 0

    def test_with_a_prefix(self, checkpoint: str) -> None:
        block = Block({"type": PretrainedInit, "checkpoint": checkpoint, "prefix": "block"})
        block.init_weights()
        assert value(block.linear.bias) == 8


class TestBaseModel:
    class Net(BaseModel):
        def __init__(self, **kwargs) -> None:
            super().__init__(**kwargs)
            self.linear = nn.Linear(2, 1)

        def forward(self, inputs, data_samples=None, mode="tensor"):
            return {"loss": self.linear(inputs).sum()} if mode == "loss" else self.linear(inputs)

    def test_its_preprocessor_is_built_from_a_config(self) -> None:
        assert type(self.Net().data_preprocessor) is BaseDataPreprocessor
        net = self.Net(data_preprocessor={"type": "ImgDataPreprocessor", "mean": [1.0], "std": [2.0]})
        assert isinstance(net.data_preprocessor, ImgDataPreprocessor)
        own = BaseDataPreprocessor()
        assert self.Net(data_preprocessor=own).data_preprocessor is own
        with pytest.raises(TypeError, match="data_preprocessor"):
            self.Net(data_preprocessor=3)

    def test_it_has_an_init_cfg(self) -> None:
        net = self.Net(init_cfg={"type": "Constant", "layer": "Linear", "val": 2})
        net.init_weights()
        assert value(net.linear.weight) == 2

    def test_its_steps(self) -> None:
        net = self.Net()
        assert torch.equal(net.val_step({"inputs": torch.ones(3, 2)}), net.linear(torch.ones(3, 2)))
        assert net.test_step((torch.ones(3, 2),)).shape == (3, 1)
        loss, values = net.parse_losses({"loss_a": torch.ones(2), "acc": torch.tensor(0.5), "loss_b": [torch.ones(1)]})
        assert loss.item() == 2.0
        assert values["loss"].item() == 2.0
        assert values["acc"].item() == 0.5


def test_images_are_normalised_and_padded() -> None:
    images = [torch.full((3, 4, 5), 10, dtype=torch.uint8), torch.full((3, 2, 6), 20, dtype=torch.uint8)]
    preprocessor = ImgDataPreprocessor(mean=[10, 10, 10], std=[5, 5, 5], pad_size_divisor=4, pad_value=1)
    batch = preprocessor({"inputs": images, "data_samples": ["a", "b"]})
    assert batch["inputs"].shape == (2, 3, 4, 8)
    assert batch["inputs"][1, 0, 0].tolist() == [2, 2, 2, 2, 2, 2, 1, 1]
    assert dict(preprocessor.named_buffers()).keys() == {"mean", "std"}
    assert not preprocessor.state_dict()


def test_subclasses_may_set_what_mmengines_have() -> None:
    class Video(ImgDataPreprocessor):
        def __init__(self) -> None:
            super().__init__(mean=[1.0], std=[1.0])
            self.register_buffer("mean", torch.zeros(1, 1, 1, 1), persistent=False)
            self._channel_conversion = True

    preprocessor = Video()
    assert preprocessor._enable_normalize
    assert preprocessor.mean.dim() == 4


class TestTestTimeAugmentation:
    class Net(BaseModel):
        def forward(self, inputs, data_samples=None, mode="tensor"):
            return [2 * sample for sample in inputs]

    class Mean(BaseTTAModel):
        def merge_preds(self, data_samples_list):
            return [sum(forms) / len(forms) for forms in data_samples_list]

    def test_forms_of_a_sample_are_merged(self) -> None:
        model = self.Mean(self.Net())
        assert model.test_step({"inputs": [[1.0, 10.0], [3.0, 30.0]]}) == [4.0, 40.0]
        assert model.test_step(([[1.0, 10.0], [3.0, 30.0]],)) == [4.0, 40.0]

    def test_the_model_may_be_a_config(self) -> None:
        MODELS.register_module(name="TtaNet", module=self.Net, force=True)
        model = self.Mean({"type": "TtaNet"}, data_preprocessor={"type": "ImgDataPreprocessor"})
        assert isinstance(model.module.data_preprocessor, ImgDataPreprocessor)

    def test_wrong_arguments(self) -> None:
        with pytest.raises(TypeError, match="module"):
            self.Mean(3)
        with pytest.raises(AssertionError, match="test_step"):
            self.Mean(nn.Linear(1, 1))
        with pytest.raises(TypeError, match="data"):
            self.Mean(self.Net()).test_step(3)


class TestFunctions:
    def test_stacking_pads_to_the_greatest_size(self) -> None:
        batch = stack_batch([torch.ones(1, 2, 3), torch.ones(1, 3, 2)], pad_size_divisor=4, pad_value=5)
        assert batch.shape == (2, 1, 4, 4)
        assert batch[0, 0].tolist() == [[1, 1, 1, 5], [1, 1, 1, 5], [5, 5, 5, 5], [5, 5, 5, 5]]
        assert stack_batch([torch.ones(2, 3), torch.ones(2, 4)]).shape == (2, 2, 4)

    @pytest.mark.parametrize(
        ("tensors", "error"),
        [
            (torch.ones(3), AssertionError),
            ([], AssertionError),
            ([torch.ones(1, 2), torch.ones(1, 2, 3)], AssertionError),
            ([torch.ones(1, 2, 2), torch.ones(2, 2, 2)], RuntimeError),
        ],
    )
    def test_what_cannot_be_stacked(self, tensors, error) -> None:
        with pytest.raises(error, match="tensor_list"):
            stack_batch(tensors)

    def test_dicts_are_merged(self) -> None:
        assert merge_dict({"a": 1}, {"b": 2}, {"a": 3}) == {"a": 3, "b": 2}

    def test_parameters_without_a_gradient_are_named(self, caplog) -> None:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for logger in (logging.getLogger("mmengine"), logging.getLogger("lockstep")):
            logger.addHandler(caplog.handler)
        try:
            detect_anomalous_params(net[1](torch.ones(2)).sum(), net)
        finally:
            for logger in (logging.getLogger("mmengine"), logging.getLogger("lockstep")):
                logger.removeHandler(caplog.handler)
        assert "`0.weight`" in caplog.text
        assert "`1.weight`" not in caplog.text
