"""`RunnerTestCase`: a unittest.TestCase with configs of small runs."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from copy import deepcopy
from typing import Any, ClassVar
from unittest import TestCase

import torch
from torch import nn
from torch.utils.data import Dataset

from lockstep.dist import destroy_dist
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, METRICS, MODELS


class ToyModel(BaseModel):
    """Two linear layers over vectors of two numbers."""

    def __init__(self, data_preprocessor: Any = None) -> None:
        super().__init__(data_preprocessor=data_preprocessor)
        self.linear1 = nn.Linear(2, 32)
        self.linear2 = nn.Linear(32, 1)

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "tensor") -> Any:
        """Return the loss, or the outputs."""
        if isinstance(inputs, list):
            inputs = torch.stack(inputs)
        if isinstance(data_samples, list):
            data_samples = torch.stack(data_samples)
        outputs = self.linear2(self.linear1(inputs)).squeeze(-1)
        return {"loss": (data_samples - outputs).square().mean()} if mode == "loss" else outputs


class ToyDataset(Dataset[Any]):
    """Twelve vectors of two random numbers, all with the label 1."""

    METAINFO: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.data = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
        self.label = torch.ones(12)

    @property
    def metainfo(self) -> dict[str, Any]:
        """What is said of the dataset."""
        return self.METAINFO

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": self.data[index], "data_samples": self.label[index]}


class ToyMetric(BaseMetric):
    """Returns fixed values.

    Args:
        dummy_metrics: the values.
    """

    def __init__(self, collect_device: str = "cpu", dummy_metrics: dict[str, Any] | None = None) -> None:
        super().__init__(collect_device=collect_device)
        self.dummy_metrics = dummy_metrics or {"acc": 1.0}

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Keep one result for each sample."""
        self.results.extend({"acc": 1} for _ in data_samples)

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Return the fixed values."""
        return self.dummy_metrics


class RunnerTestCase(TestCase):
    """A test of a Runner: has configs of small runs, a folder of its own, and cleans up.

    Attributes:
        epoch_based_cfg: the config of a run of two epochs.
        iter_based_cfg: the config of a run of twelve iterations.
        temp_dir: the folder, in which runs have their work_dir.
    """

    dist_cfg: ClassVar[dict[str, Any]] = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29600,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }

    def setUp(self) -> None:
        """Make the folder and the configs."""
        self.temp_dir = tempfile.mkdtemp()
        for registry, kind in ((MODELS, ToyModel), (DATASETS, ToyDataset), (METRICS, ToyMetric)):
            registry.register_module(module=kind, force=True)
        loader = {
            "dataset": {"type": "ToyDataset"},
            "sampler": {"type": "DefaultSampler", "shuffle": False},
            "batch_size": 3,
            "num_workers": 0,
        }
        metrics = [{"type": "ToyMetric"}]
        shared = {
            "work_dir": self.temp_dir,
            "model": {"type": "ToyModel"},
            "train_dataloader": {**loader, "sampler": {"type": "DefaultSampler", "shuffle": True}},
            "val_dataloader": loader,
            "val_evaluator": metrics,
            "val_cfg": {},
            "test_dataloader": loader,
            "test_evaluator": metrics,
            "test_cfg": {},
            "optim_wrapper": {"type": "OptimWrapper", "optimizer": {"type": "SGD", "lr": 0.1}},
            "default_hooks": {"logger": {"type": "LoggerHook", "interval": 1}},
        }
        by_epoch = {"by_epoch": True, "max_epochs": 2, "val_interval": 1}
        by_iteration = {"by_epoch": False, "max_iters": 12, "val_interval": 4}
        self.epoch_based_cfg = Config(deepcopy({**shared, "train_cfg": by_epoch}))
        self.iter_based_cfg = Config(deepcopy({**shared, "train_cfg": by_iteration}))

    def tearDown(self) -> None:
        """End the process group, and remove the folder."""
        destroy_dist()
        self.clear_work_dir()
        for name in self.dist_cfg:
            os.environ.pop(name, None)

    @property
    def experiment_name(self) -> str:
        """A name that no other run of this process has."""
        return f"{self._testMethodName}-{time.time_ns()}"

    def build_runner(self, cfg: Any) -> Any:
        """Return the runner of a config, under a name of its own."""
        from mmengine.runner import Runner

        own = deepcopy(cfg)
        own.experiment_name = self.experiment_name
        return Runner.from_cfg(own)

    def setup_dist_env(self) -> None:
        """Set the variables of a group of one process, on a port of its own."""
        type(self).dist_cfg = {**self.dist_cfg, "MASTER_PORT": self.dist_cfg["MASTER_PORT"] + 1}
        os.environ.update({name: str(value) for name, value in self.dist_cfg.items()})

    def clear_work_dir(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.temp_dir, ignore_errors=True)
