"""Settings of loops and hooks that configs of MMEngine use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.errors import ConfigError
from lockstep.hooks import Hook, LoggerHook
from lockstep.model import BaseDataPreprocessor, BaseModel
from lockstep.registry import MODELS
from lockstep.runner import Runner
from lockstep.testing import ranks

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()


@MODELS.register_module(name="DoublingForTests")
class Doubling(BaseDataPreprocessor):
    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, data: Any, training: bool = False) -> Any:
        x, y = self.cast_data(data)
        return x * self.factor, y


class Net(BaseModel):
    def __init__(self, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor)
        self.linear = nn.Linear(3, 2)
        self.seen: list[Any] = []

    def forward(self, x: Tensor, y: Tensor, mode: str = "tensor"):
        scores = self.linear(x)
        self.seen.append((mode, scores.dtype, x))
        return nn.functional.cross_entropy(scores, y) if mode == "loss" else (scores, y)


class Validations(Hook):
    def __init__(self) -> None:
        self.at: list[int] = []

    def before_val(self, runner) -> None:
        self.at.append(runner.iter)


class Scalars:
    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {}

    def add_scalars(self, scalar_dict, step) -> None:
        for name in scalar_dict:
            self.steps.setdefault(name, []).append(step)


def make(folder: Path, **changes: Any) -> Runner:
    data = {"dataset": TensorDataset(X, Y), "batch_size": 6}
    return Runner(
        **{
            "model": Net(),
            "work_dir": folder,
            "train_dataloader": data,
            "val_dataloader": data,
            "val_evaluator": {"type": "Accuracy", "topk": (1, 2)},
            "train_cfg": {"max_epochs": 2},
            "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}},
            "visualizer": [],
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        ({"max_epochs": 7, "val_interval": 3, "dynamic_intervals": [(5, 1)]}, [3, 5, 6, 7]),
        ({"max_epochs": 6, "val_begin": 4, "dynamic_intervals": [[2, 2], [5, 3]]}, [4, 6]),
        ({"max_iters": 12, "val_interval": 5, "dynamic_intervals": [(6, 3)]}, [5, 6, 9, 12]),
    ],
)
def test_the_interval_of_validation_changes_on_the_way(cfg, expected, tmp_path: Path):
    validations = Validations()
    loader = {"dataset": TensorDataset(X, Y), "batch_size": 24}
    make(tmp_path, train_cfg=cfg, train_dataloader=loader, custom_hooks=[validations]).train()
    assert validations.at == expected


@pytest.mark.parametrize(
    ("cfg", "says"),
    [
        ({"dynamic_intervals": [3]}, r"pairs \(from when on, interval\), but holds 3"),
        ({"dynamic_intervals": [(3, 0)]}, "`dynamic_intervals` must be an int of at least 1, but is 0"),
        ({"dynamic_intervals": [(3, 1), (2, 1)]}, "must be in order of time"),
        ({"val_begin": "1"}, "`val_begin` must be an int of at least 0, but is '1'"),
    ],
)
def test_wrong_intervals_are_refused(cfg, says, tmp_path: Path):
    with pytest.raises(ConfigError, match=says):
        make(tmp_path, train_cfg={"max_epochs": 1, **cfg}).train()


@ranks(1, 2)
@pytest.mark.parametrize(
    ("cfg", "dtype"),
    [
        (None, torch.float32),
        ({"fp16": True}, torch.bfloat16),  # what autocast takes on the CPU
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": torch.bfloat16}, torch.bfloat16),
    ],
)
def test_validation_in_half_precision(cfg, dtype, tmp_path: Path):
    model = Net()
    make(tmp_path, model=model, val_cfg=cfg, train_cfg={"max_epochs": 1}).train()
    assert {kind for mode, kind, _ in model.seen if mode == "predict"} == {dtype}
    assert {kind for mode, kind, _ in model.seen if mode == "loss"} == {torch.float32}


def test_what_is_no_half_precision(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"`dtype` must be 'float16', 'bfloat16', .* but is 'int8'"):
        make(tmp_path, val_cfg={"dtype": "int8"}).val()


@pytest.mark.parametrize(
    ("model", "preprocessor", "factor"),
    [
        (Net, {"type": "DoublingForTests", "factor": 3.0}, 3.0),
        (lambda: {"type": Net}, {"type": "DoublingForTests"}, 2.0),
        (lambda: {"type": Net, "data_preprocessor": {"type": "DoublingForTests"}}, Doubling(5.0), 2.0),
        (Net, None, 1.0),
    ],
)
def test_a_preprocessor_beside_the_model(model, preprocessor, factor, tmp_path: Path):
    runner = make(tmp_path, model=model(), data_preprocessor=preprocessor)
    runner.val()
    seen = torch.cat([x for _, _, x in runner.model.seen])
    torch.testing.assert_close(seen, X * factor)


@ranks(2)
def test_a_preprocessor_that_is_none(tmp_path: Path):
    with pytest.raises(
        TypeError, match=r"`data_preprocessor` must be a torch.nn.Module, a config dict or None, but is 3"
    ):
        make(tmp_path, data_preprocessor=3)
    with pytest.raises(TypeError, match=r"`data_preprocessor` must build a torch\.nn\.Module"):
        make(tmp_path, data_preprocessor={"type": dict}).val()


@pytest.mark.parametrize(("by_epoch", "steps"), [(False, [4, 8]), (True, [1, 2])])
def test_metrics_stand_at_their_iteration_or_at_their_epoch(by_epoch, steps, tmp_path: Path):
    scalars = Scalars()
    logger = {"interval": 2, "log_metric_by_epoch": by_epoch}
    runner = make(tmp_path, default_hooks={"logger": logger}, visualizer=scalars)
    runner.train()
    assert scalars.steps["val/accuracy/top1"] == steps
    assert scalars.steps["train/loss"] == [2, 4, 6, 8]


@pytest.mark.parametrize(("ignored", "recorded"), [(False, [3, 4, 6, 8]), (True, [3, 6])])
def test_what_is_left_at_the_end_of_an_epoch(ignored, recorded, tmp_path: Path):
    runner = make(tmp_path, default_hooks={"logger": LoggerHook(interval=3, ignore_last=ignored)})
    runner.train()
    lines = map(json.loads, (runner.run_dir / "metrics.jsonl").read_text().splitlines())
    assert [line["iter"] for line in lines if line["mode"] == "train"] == recorded


@ranks(2)
def test_the_message_hub_tells_where_the_run_is(tmp_path: Path):
    seen: list[Any] = []

    class Look(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
            seen.append(tuple(runner.message_hub.get_info(key) for key in ("epoch", "iter", "max_epochs", "max_iters")))
            assert runner.message_hub.get_info("loop_stage") == "train"

    runner = make(tmp_path, default_hooks={"runtime_info": {"type": "RuntimeInfoHook"}}, custom_hooks=[Look()])
    runner.train()
    assert seen == [(0, 0, 2, 4), (0, 1, 2, 4), (1, 2, 2, 4), (1, 3, 2, 4)]
    assert runner.message_hub.get_scalar("val/accuracy/top2").current() == 100.0
    assert runner.message_hub.get_scalar("train/lr").current() == runner.optim_wrapper.get_lr()["lr"][0]


def test_after_an_evaluation_the_message_hub_tells_the_loop_around_it(tmp_path: Path):
    stages: list[Any] = []

    class Tests(Hook):
        def after_train_epoch(self, runner) -> None:
            for mode in ("val", "test"):
                for point in (f"before_{mode}", f"after_{mode}"):
                    runner.call_hook(point)
                    stages.append(runner.message_hub.get_info("loop_stage"))

    hooks = {"default_hooks": {"runtime_info": {"type": "RuntimeInfoHook"}}, "custom_hooks": [Tests()]}
    make(tmp_path, train_cfg={"max_epochs": 1}, **hooks).train()
    assert stages == ["val", "train", "test", "train"]
