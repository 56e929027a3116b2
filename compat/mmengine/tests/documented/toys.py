"""A small model with data and a metric, written as MMEngine's documentation writes them."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import nn
from torch.utils.data import DataLoader, Dataset

from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel


class Points(Dataset):
    """Points in the plane, of which those above the diagonal are of class 1."""

    METAINFO = {"classes": ("below", "above")}

    def __init__(self, size=12):
        self.points = torch.rand(size, 2, generator=torch.Generator().manual_seed(0))
        self.metainfo = dict(self.METAINFO)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        x, y = self.points[index]
        return self.points[index], int(y > x)


class Net(BaseModel):
    def __init__(self, width=8, data_preprocessor=None, init_cfg=None):
        super().__init__(data_preprocessor=data_preprocessor, init_cfg=init_cfg)
        self.layers = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, points, labels, mode="tensor"):
        scores = self.layers(points)
        if mode == "loss":
            return {"loss": F.cross_entropy(scores, labels)}
        if mode == "predict":
            return scores, labels
        return scores


class Accuracy(BaseMetric):
    default_prefix = "toy"

    def process(self, data_batch, data_samples):
        scores, labels = data_samples
        self.results.append({"size": len(labels), "right": int((scores.argmax(1) == labels).sum())})

    def compute_metrics(self, results):
        return {"accuracy": sum(one["right"] for one in results) / sum(one["size"] for one in results)}


def loader(size=12, batch_size=4, shuffle=False):
    return DataLoader(Points(size), batch_size=batch_size, shuffle=shuffle)


def arguments(work_dir, **kwargs):
    """Return the arguments of a Runner that trains, validates and tests."""
    given = {
        "model": Net(),
        "work_dir": str(work_dir),
        "train_dataloader": loader(),
        "train_cfg": dict(by_epoch=True, max_epochs=2, val_interval=1),
        "optim_wrapper": dict(optimizer=dict(type="SGD", lr=0.1)),
        "val_dataloader": loader(8),
        "val_cfg": {},
        "val_evaluator": dict(type=Accuracy),
        "test_dataloader": loader(8),
        "test_cfg": {},
        "test_evaluator": dict(type=Accuracy),
        "randomness": dict(seed=3),
        "experiment_name": f"documented_{len(str(work_dir))}_{abs(hash(str(work_dir)))}",
    }
    return {name: value for name, value in {**given, **kwargs}.items() if value is not None}


def training_only(work_dir, **kwargs):
    parts = [f"{mode}_{part}" for mode in ("val", "test") for part in ("dataloader", "cfg", "evaluator")]
    return arguments(work_dir, **{**dict.fromkeys(parts), **kwargs})
