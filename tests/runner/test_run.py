"""What a run tells of itself, and what MMEngine's keys of a config do."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.dist import get_rank, get_world_size
from lockstep.errors import ConfigError
from lockstep.evaluator import BaseMetric, Evaluator
from lockstep.hooks import Hook
from lockstep.logging import MessageHub
from lockstep.model import BaseModel, MMDistributedDataParallel, MMSeparateDistributedDataParallel
from lockstep.runner import EpochBasedTrainLoop, Runner
from lockstep.testing import ranks

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


class Net(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 1)

    def init_weights(self) -> None:
        nn.init.constant_(self.linear.weight, 0.5)

    def forward(self, x: Tensor, mode: str = "tensor"):
        out = self.linear(self.norm(x))
        return out.square().mean() if mode == "loss" else (out.expand(-1, 2), torch.zeros(len(x)))


class Data(TensorDataset):
    metainfo = {"classes": ("a", "b")}


def make(work_dir: str | Path, **changes: Any) -> Runner:
    return Runner(
        **{
            "model": Net(),
            "work_dir": work_dir,
            "train_dataloader": {"dataset": Data(X), "batch_size": 2},
            "train_cfg": {"max_epochs": 1},
            "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.0}},
            "default_hooks": {"checkpoint": None},
            "randomness": {"seed": 3},
            "visualizer": [],
            **changes,
        }
    )


class Asking(Hook):
    def __init__(self) -> None:
        self.told: dict[str, Any] = {}
        self.infos: list[tuple[int, int]] = []

    def before_train(self, runner) -> None:
        names = ("seed", "distributed", "max_epochs", "max_iters")
        self.told = {name: getattr(runner, name) for name in names}
        self.told["experiment_name"] = MessageHub.get_current_instance().get_info("experiment_name")

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        hub = MessageHub.get_current_instance()
        assert hub is runner.message_hub
        self.infos.append((hub.get_info("iter"), hub.get_info("max_iters")))
        assert hub.get_info("dataset_meta") == Data.metainfo


@ranks(1, 2)
def test_hooks_and_models_learn_where_and_what_a_run_is(tmp_path: Path):
    asking = Asking()
    runner = make(tmp_path, custom_hooks=[asking], experiment_name="exp")
    runner.train()
    iters = 4 // get_world_size()
    assert asking.told == {
        "seed": 3,
        "distributed": get_world_size() > 1,
        "max_epochs": 1,
        "max_iters": iters,
        "experiment_name": runner.run_dir.name,
    }
    assert asking.infos == [(index, iters) for index in range(iters)]
    assert torch.equal(runner.model.state_dict()[[*runner.model.state_dict()][-2]], torch.full((1, 3), 0.5))


@ranks(1, 2)
@pytest.mark.parametrize(
    ("keys", "wrapper"),
    [
        ({"find_unused_parameters": True}, MMDistributedDataParallel),
        ({"model_wrapper_cfg": {"type": "MMSeparateDistributedDataParallel"}}, MMSeparateDistributedDataParallel),
        ({"model_wrapper_cfg": {"find_unused_parameters": True}}, MMDistributedDataParallel),
        ({}, MMDistributedDataParallel),
    ],
)
def test_a_config_says_how_the_model_is_wrapped(keys, wrapper, tmp_path: Path):
    runner = make(tmp_path, cfg={**keys, "work_dir": "elsewhere"})
    runner.train()
    if get_world_size() == 1:
        assert type(runner.model) is Net
    else:
        assert type(runner.model) is wrapper
        if wrapper is MMDistributedDataParallel:
            assert runner.model.find_unused_parameters is bool(keys)


@ranks(2)
def test_a_strategy_decides_in_place_of_a_wrapper(tmp_path: Path):
    runner = make(tmp_path, cfg={"model_wrapper_cfg": {"find_unused_parameters": True}}, strategy="ddp")
    runner.train()
    assert not runner.model.find_unused_parameters
    if get_rank() == 0:
        assert "do nothing beside `strategy`, which decides" in (runner.run_dir / "log.txt").read_text()


@ranks(1)
@pytest.mark.parametrize("scope", ["", "lockstep."])
def test_a_config_may_ask_for_fsdp(tmp_path: Path, scope: str):
    wrapper = {"type": f"{scope}MMFullyShardedDataParallel", "auto_wrap_policy": None}
    runner = make(tmp_path, cfg={"model_wrapper_cfg": wrapper})
    runner.train()
    assert type(runner.model).__name__ == "MMFullyShardedDataParallel"


def test_on_one_rank_a_norm_over_ranks_becomes_a_plain_one(tmp_path: Path):
    net = Net()
    net.norm = nn.SyncBatchNorm(3)
    make(tmp_path, model=net).train()  # which SyncBatchNorm would refuse on the CPU
    assert not isinstance(net.norm, nn.SyncBatchNorm)


@ranks(2)
@pytest.mark.parametrize("batches", [(2, 1), (1, 1)])
def test_norms_over_ranks_are_warned_of_where_ranks_run_out(batches, tmp_path: Path):
    loader = [(X[:2],)] * batches[get_rank()]
    runner = make(tmp_path, train_dataloader=loader, cfg={"sync_bn": "torch"}, strategy="fsdp")
    runner.train()
    if get_rank() == 0:
        log = (runner.run_dir / "log.txt").read_text()
        assert ("1 SyncBatchNorms (norm, ...) normalise over the samples of all ranks" in log) == (batches == (2, 1))


@ranks(2)
def test_a_norm_of_torchs_over_ranks_trains_on_the_cpu(tmp_path: Path):
    net = Net()
    net.norm = nn.SyncBatchNorm(3)
    runner = make(tmp_path, model=net)
    runner.train()
    assert type(net.norm).__name__ == "CpuSyncBatchNorm"


def test_the_settings_of_a_machine_are_applied(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        env_cfg = {"resource_limit": 300, "mp_cfg": {"opencv_num_threads": 0}, "cudnn_benchmark": False}
        make(tmp_path, env_cfg=env_cfg).train()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@ranks(2, fresh=True)
def test_nccl_gives_way_where_there_is_no_gpu(tmp_path: Path):
    runner = make(tmp_path, launcher="pytorch", env_cfg={"dist_cfg": {"backend": "nccl"}})
    runner.train()
    assert torch.distributed.get_backend() == "gloo"


@pytest.mark.parametrize(
    "cfg", [{"metrics": {"type": "Accuracy"}}, {"type": "Evaluator", "metrics": [{"type": "Accuracy"}]}]
)
def test_metrics_may_be_those_of_an_evaluators_config(cfg, tmp_path: Path):
    data = {"dataset": Data(X), "batch_size": 2}
    runner = make(tmp_path, val_dataloader=data, val_evaluator=cfg, test_dataloader=data, test_evaluator=cfg)
    assert runner.val().keys() == runner.test().keys() == {"accuracy"}
    assert type(runner.val_loop.evaluator) is type(runner.test_loop.evaluator) is Evaluator


def test_a_tilde_is_the_home_of_the_user(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    make("~/runs", default_hooks={}).train()
    runner = make(Path("~/runs"), load_from="~/runs", resume=True, train_cfg={"max_epochs": 2})
    runner.train()
    assert runner.run_dir.parent == tmp_path / "runs"
    assert runner.iter == 8
    assert [entry.name for entry in tmp_path.iterdir()] == ["runs"]


class ByClass(BaseMetric):
    def process(self, data_batch, data_samples) -> None:
        self.results += data_samples[1].tolist()

    def compute_metrics(self, results):
        return {"mean": torch.tensor(results).mean(), "by_class": torch.tensor([1.0, 0.5])}


class Kept:
    """A visualizer that converts to numbers, as most do."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add_scalars(self, scalar_dict, step=0) -> None:
        self.values |= {name: float(value) for name, value in scalar_dict.items()}


def test_a_validation_may_report_values_by_class(tmp_path: Path, capsys):
    shown = Kept()
    loader = {"dataset": Data(X), "batch_size": 2}
    runner = make(tmp_path, val_dataloader=loader, val_evaluator=ByClass(), visualizer=[shown])
    runner.train()
    records = [json.loads(line) for line in (runner.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(one["mean"], one["by_class"]) for one in records if one["mode"] == "val"] == [(0.0, [1.0, 0.5])]
    assert shown.values["val/mean"] == 0.0
    assert "val/by_class" not in shown.values
    assert "result  mean 0\n" in capsys.readouterr().out


class OwnLoop(EpochBasedTrainLoop):
    def run_iter(self, idx, data_batch) -> None: ...


class OwnRun(OwnLoop):
    def run(self) -> None:
        self.runner.ran = True


def test_steps_of_a_loop_that_nobody_would_call_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="OwnLoop must not rely on run_iter, which `run` does not call"):
        make(tmp_path, train_cfg={"type": OwnLoop, "max_epochs": 1}).train()
    runner = make(tmp_path, train_cfg={"type": OwnRun, "max_epochs": 1})
    runner.train()
    assert runner.run.ran


@pytest.mark.parametrize(("argument", "value"), [("default_scope", 3), ("resume", "auto")])
def test_wrong_kinds_are_refused(argument, value, tmp_path: Path):
    with pytest.raises(TypeError, match=f"`{argument}` must be"):
        make(tmp_path, **{argument: value})
    with pytest.raises(ConfigError, match="`val_dataloader` must be given"):
        make(tmp_path).val()
