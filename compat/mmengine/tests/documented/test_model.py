"""Models: steps, initial weights, averages, wrappers and metrics, as MMEngine's documentation shows them."""

from __future__ import annotations

import pytest
import torch
from documented.toys import Accuracy, Net
from environments import LOCKSTEP
from torch import nn

from mmengine.analysis import get_model_complexity_info
from mmengine.evaluator import BaseMetric, DumpResults, Evaluator, get_metric_value
from mmengine.fileio import load
from mmengine.model import (
    BaseDataPreprocessor,
    BaseModel,
    BaseModule,
    BaseTTAModel,
    ExponentialMovingAverage,
    ImgDataPreprocessor,
    ModuleDict,
    ModuleList,
    MomentumAnnealingEMA,
    Sequential,
    StochasticWeightAverage,
    bias_init_with_prob,
    constant_init,
    convert_sync_batchnorm,
    detect_anomalous_params,
    initialize,
    is_model_wrapper,
    kaiming_init,
    merge_dict,
    normal_init,
    revert_sync_batchnorm,
    stack_batch,
    uniform_init,
    xavier_init,
)
from mmengine.optim import OptimWrapper
from mmengine.registry import METRICS, MODELS
from mmengine.runner import CheckpointLoader, load_checkpoint, load_state_dict, save_checkpoint, weights_to_cpu
from mmengine.structures import BaseDataElement
from mmengine.utils.dl_utils import TimeCounter, has_batch_norm, is_norm


def batch():
    return torch.rand(4, 2), torch.tensor([0, 1, 1, 0])


def test_a_training_step_returns_the_losses():
    model = Net()
    wrapper = OptimWrapper(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.layers[0].weight.detach().clone()
    log = model.train_step(batch(), wrapper)
    assert set(log) == {"loss"}
    assert not torch.equal(before, model.layers[0].weight)


def test_steps_of_validation_and_test_predict():
    model = Net()
    scores, labels = model.val_step(batch())
    assert scores.shape == (4, 2)
    assert torch.equal(model.test_step(batch())[1], labels)


def test_losses_are_added_up():
    loss, log = Net().parse_losses(
        {"loss_a": torch.tensor([1.0, 3.0]), "loss_b": [torch.tensor(1.0), torch.tensor(2.0)], "acc": torch.tensor(5.0)}
    )
    assert loss == 5
    assert log["loss"] == 5
    assert (log["loss_a"], log["loss_b"], log["acc"]) == (2, 3, 5)
    with pytest.raises(TypeError):
        Net().parse_losses({"loss": "high"})


def test_a_model_must_define_forward():
    class Empty(BaseModel):
        pass

    with pytest.raises((TypeError, NotImplementedError)):
        Empty()(torch.ones(1))


def test_preprocessors_are_built_and_replaced():
    assert isinstance(Net().data_preprocessor, BaseDataPreprocessor)
    built = Net(data_preprocessor=dict(type="BaseDataPreprocessor", non_blocking=True))
    assert isinstance(built.data_preprocessor, BaseDataPreprocessor)
    own = ImgDataPreprocessor(mean=[0.0] * 3, std=[1.0] * 3)
    assert Net(data_preprocessor=own).data_preprocessor is own
    with pytest.raises(TypeError):
        Net(data_preprocessor=3)


def test_data_of_any_form_goes_to_the_device():
    moved = BaseDataPreprocessor()(dict(a=torch.ones(1), b=[torch.ones(2), "text"], c=(3, None)))
    assert moved["b"][1] == "text"
    assert moved["c"][0] == 3


def test_images_are_normalised_padded_and_stacked():
    preprocessor = ImgDataPreprocessor(mean=[1.0, 2.0, 3.0], std=[2.0] * 3, bgr_to_rgb=True, pad_size_divisor=4)
    image = torch.stack([torch.full((3, 5), float(value)) for value in (3, 2, 1)]).to(torch.uint8)
    inputs = preprocessor(dict(inputs=[image, image[:, :2]]))["inputs"]
    assert inputs.shape == (2, 3, 4, 8)
    assert torch.equal(inputs[0, :, 0, 0], torch.zeros(3))
    stacked = torch.stack([image, image]).float()
    assert preprocessor(dict(inputs=stacked))["inputs"].shape == (2, 3, 4, 8)


def test_a_batch_of_different_sizes():
    assert stack_batch([torch.ones(1, 2, 3), torch.ones(1, 3, 2)], pad_value=7).shape == (2, 1, 3, 3)
    with pytest.raises(AssertionError):
        stack_batch([torch.ones(1, 2, 3), torch.ones(2, 3)])


def test_dicts_are_merged():
    assert merge_dict(dict(a=1), dict(b=2)) == dict(a=1, b=2)


# Initial weights.


class Block(BaseModule):
    def __init__(self, init_cfg=None):
        super().__init__(init_cfg)
        self.conv = nn.Conv2d(1, 1, 1)
        self.linear = nn.Linear(1, 2)
        self.reg = nn.Linear(1, 1)


def test_layers_are_initialised_by_their_kind():
    block = Block(dict(type="Constant", layer=["Conv2d", "Linear"], val=1.0, bias=2.0))
    block.init_weights()
    assert (block.conv.weight.item(), block.linear.bias[0].item()) == (1, 2)


def test_different_layers_differently():
    block = Block([dict(type="Constant", layer="Conv2d", val=1.0), dict(type="Constant", layer="Linear", val=2.0)])
    block.init_weights()
    assert (block.conv.weight.item(), block.reg.weight.item()) == (1, 2)


def test_one_layer_overrides_the_others():
    override = dict(type="Constant", name="reg", val=3.0, bias=4.0)
    block = Block(dict(type="Constant", layer=["Conv2d", "Linear"], val=1.0, bias=2.0, override=override))
    block.init_weights()
    assert (block.reg.weight.item(), block.reg.bias.item(), block.linear.bias[0].item()) == (3, 4, 2)


def test_a_parent_comes_before_its_children():
    class Parent(BaseModule):
        def __init__(self):
            super().__init__(dict(type="Constant", layer="Linear", val=1.0))
            self.own = nn.Linear(1, 1)
            self.child = Block(dict(type="Constant", layer="Linear", val=5.0))

    parent = Parent()
    parent.init_weights()
    assert (parent.own.weight.item(), parent.child.linear.weight[0].item()) == (1, 5)


def test_init_weights_of_ones_own():
    class Own(BaseModule):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

        def init_weights(self):
            super().init_weights()
            nn.init.ones_(self.weight)

    own = Own()
    own.init_weights()
    assert own.weight.tolist() == [1, 1]


def test_weights_of_a_checkpoint_are_initial_weights(tmp_path):
    trained = Block()
    save_checkpoint(dict(state_dict=trained.state_dict()), str(tmp_path / "trained.pth"))
    block = Block(dict(type="Pretrained", checkpoint=str(tmp_path / "trained.pth")))
    block.init_weights()
    assert torch.equal(block.conv.weight, trained.conv.weight)
    part = nn.Linear(1, 2)
    initialize(part, dict(type="Pretrained", checkpoint=str(tmp_path / "trained.pth"), prefix="linear."))
    assert torch.equal(part.weight, trained.linear.weight)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (constant_init, dict(val=3.0)),
        (normal_init, dict(mean=3.0, std=1e-6)),
        (uniform_init, dict(a=2.999, b=3.001)),
    ],
)
def test_initial_values_by_function(function, arguments):
    layer = nn.Linear(3, 3)
    function(layer, bias=1, **arguments)
    torch.testing.assert_close(layer.weight.detach(), torch.full((3, 3), 3.0), atol=2e-3, rtol=0)
    assert layer.bias.tolist() == [1, 1, 1]


def test_other_initial_values():
    layer = nn.Linear(30, 30)
    xavier_init(layer, bias=0.5, distribution="uniform")
    assert layer.weight.abs().max() <= (6 / 60) ** 0.5
    kaiming_init(layer)
    assert layer.bias.tolist() == [0] * 30
    assert bias_init_with_prob(0.01) == pytest.approx(-4.5951, abs=1e-3)


def test_containers_are_base_modules():
    chain = Sequential(nn.Linear(1, 1), nn.Linear(1, 1), init_cfg=dict(type="Constant", layer="Linear", val=2.0))
    chain.init_weights()
    assert chain[1].weight.item() == 2
    assert isinstance(ModuleList([Block()]), BaseModule)
    assert isinstance(ModuleDict(dict(a=Block())), BaseModule)


# Averages of weights, and other functions.


def test_an_exponential_average():
    model = nn.Linear(1, 1)
    average = ExponentialMovingAverage(model, momentum=0.25)
    first = model.weight.detach().clone()
    average.update_parameters(model)
    model.weight.data.add_(4.0)
    average.update_parameters(model)
    torch.testing.assert_close(average.module.weight.detach(), first + 1.0)
    assert average(torch.ones(1)).shape == (1,)


def test_other_averages():
    model = nn.Linear(1, 1)
    mean = StochasticWeightAverage(model)
    annealed = MomentumAnnealingEMA(model, gamma=10)
    for _ in range(3):
        mean.update_parameters(model)
        annealed.update_parameters(model)
        model.weight.data.add_(1.0)
    torch.testing.assert_close(mean.module.weight.detach(), model.weight.detach() - 2.0)


def test_averages_of_buffers():
    model = nn.BatchNorm1d(1)
    average = ExponentialMovingAverage(model, momentum=0.5, update_buffers=True)
    average.update_parameters(model)
    model.running_mean.fill_(2.0)
    average.update_parameters(model)
    assert average.module.running_mean.item() == 1.0


def test_synchronised_norms_become_plain_ones():
    model = nn.Sequential(nn.SyncBatchNorm(3), nn.ReLU())
    assert type(revert_sync_batchnorm(model)[0]).__name__ != "SyncBatchNorm"
    converted = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3)))[0]
    assert type(converted).__name__.endswith("SyncBatchNorm")


def test_what_a_module_is():
    assert not is_model_wrapper(nn.Linear(1, 1))
    assert is_model_wrapper(nn.DataParallel(nn.Linear(1, 1)))
    assert is_norm(nn.GroupNorm(1, 1))
    assert has_batch_norm(nn.Sequential(nn.BatchNorm1d(1)))
    assert not has_batch_norm(nn.Linear(1, 1))


def test_parameters_without_a_gradient_are_found():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x):
            return self.used(x)

    model = Half()
    detect_anomalous_params(model(torch.ones(1)).sum(), model)


def test_a_test_time_model_needs_merge_preds():
    with pytest.raises((TypeError, NotImplementedError)):
        BaseTTAModel(Net()).merge_preds([])


def test_operations_and_parameters_are_counted():
    counted = get_model_complexity_info(nn.Linear(10, 5, bias=False), (10,))
    assert counted["params"] == 50
    assert counted["flops"] == 50
    assert "out_table" in counted


def test_a_function_is_timed(capsys):
    @TimeCounter(log_interval=1, warmup_interval=1)
    def slow():
        return 3

    assert slow() == 3


# Checkpoints of one file.


def test_a_file_of_weights_is_written_and_read(tmp_path):
    one, two = Block(), Block()
    save_checkpoint(dict(state_dict=weights_to_cpu(one.state_dict()), meta=dict(epoch=3)), str(tmp_path / "x.pth"))
    loaded = load_checkpoint(two, str(tmp_path / "x.pth"), map_location="cpu")
    assert loaded["meta"]["epoch"] == 3
    assert torch.equal(one.reg.weight, two.reg.weight)
    assert CheckpointLoader.load_checkpoint(str(tmp_path / "x.pth"))["meta"] == {"epoch": 3}


def test_names_of_weights_are_revised(tmp_path):
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    state = {f"module.{name}": value for name, value in one.state_dict().items()}
    torch.save(dict(state_dict=state), tmp_path / "x.pth")
    load_checkpoint(two, str(tmp_path / "x.pth"))
    assert torch.equal(one.weight, two.weight)
    state = {f"head.{name}": value for name, value in one.state_dict().items()}
    torch.save(state, tmp_path / "y.pth")
    three = nn.Linear(1, 1)
    load_checkpoint(three, str(tmp_path / "y.pth"), revise_keys=[(r"^head\.", "")], strict=True)
    assert torch.equal(one.weight, three.weight)


def test_weights_that_do_not_fit(tmp_path):
    model = nn.Linear(2, 1)
    load_state_dict(model, {"weight": torch.ones(1, 2), "other": torch.ones(1)})
    assert model.weight.tolist() == [[1, 1]]
    with pytest.raises(RuntimeError):
        load_state_dict(model, {"weight": torch.ones(1, 2)}, strict=True)


def test_a_missing_file_of_weights(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_checkpoint(nn.Linear(1, 1), str(tmp_path / "nothing.pth"))


def test_a_loader_of_ones_own():
    @CheckpointLoader.register_scheme(prefixes="documented://", force=True)
    def load_documented(filename, map_location=None):
        return {"state_dict": {"weight": torch.full((1, 1), 9.0)}}

    model = nn.Linear(1, 1)
    load_checkpoint(model, "documented://anything")
    assert model.weight.item() == 9


@pytest.mark.skipif(not LOCKSTEP, reason="MMEngine asks its table on the internet")
def test_names_of_mmengines_table_say_what_to_do():
    with pytest.raises(ValueError, match="Give the file's address or path"):
        CheckpointLoader.load_checkpoint("open-mmlab://resnet50")


# Metrics.


def test_a_metric_is_evaluated():
    metric = Accuracy()
    metric.process(None, (torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])))
    assert metric.evaluate(1) == {"toy/accuracy": 0.5}
    assert metric.results == []


def test_a_metric_without_a_prefix():
    class Count(BaseMetric):
        def process(self, data_batch, data_samples):
            self.results.append(len(data_samples))

        def compute_metrics(self, results):
            return {"count": sum(results)}

    metric = Count(prefix="my")
    metric.process(None, [1, 2])
    assert metric.evaluate(1) == {"my/count": 2}


def test_metrics_see_elements_as_dicts():
    seen = []

    @METRICS.register_module(force=True)
    class DocumentedLook(BaseMetric):
        def process(self, data_batch, data_samples):
            seen.extend(data_samples)
            self.results.extend(data_samples)

        def compute_metrics(self, results):
            return {"number": len(results)}

    evaluator = Evaluator([dict(type="DocumentedLook")])
    evaluator.dataset_meta = dict(classes=("a",))
    evaluator.process(data_samples=[BaseDataElement(score=1), BaseDataElement(score=2)], data_batch=None)
    assert evaluator.evaluate(2) == {"number": 2}
    assert seen == [{"score": 1}, {"score": 2}]
    assert evaluator.metrics[0].dataset_meta == dict(classes=("a",))
    assert evaluator.offline_evaluate([BaseDataElement(score=3)] * 5, chunk_size=2) == {"number": 5}


def test_two_metrics_with_one_name_are_an_error():
    evaluator = Evaluator([Accuracy(), Accuracy()])
    evaluator.process(data_samples=(torch.eye(2), torch.tensor([0, 1])), data_batch=None)
    with pytest.raises(ValueError, match="toy/accuracy"):
        evaluator.evaluate(1)


def test_predictions_are_dumped(tmp_path):
    metric = DumpResults(out_file_path=str(tmp_path / "out.pkl"))
    metric.process(None, [dict(score=torch.ones(1))])
    metric.evaluate(1)
    assert load(str(tmp_path / "out.pkl"))[0]["score"].tolist() == [1]
    with pytest.raises(ValueError, match="pkl"):
        DumpResults(out_file_path="out.json")


def test_a_value_among_metrics():
    assert get_metric_value("acc", {"toy/acc": 1, "toy/f1": 2}) == 1
    assert get_metric_value("toy/f1", {"toy/acc": 1, "toy/f1": 2}) == 2
    with pytest.raises(ValueError):
        get_metric_value("nothing", {"toy/acc": 1})


def test_a_model_is_built_from_nested_configs():
    MODELS.register_module(name="DocumentedBlock", module=Block, force=True)
    built = MODELS.build([dict(type="DocumentedBlock"), dict(type="DocumentedBlock")])
    assert isinstance(built, Sequential)
