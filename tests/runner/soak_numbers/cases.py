"""What a case is: its options, drawn at random, and the model, the data and the loss that they name."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

CLASSES = 3
SAMPLERS = ["shuffled", "sequential", "list", "weighted", "batches", "unequal", "infinite", "stream"]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05},
    "SGD nesterov": {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.02},
    "SGD dampening": {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.02},
    "AdamW": {"lr": 0.03, "weight_decay": 0.2},
    "Adam": {"lr": 0.03, "amsgrad": True, "weight_decay": 0.01},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1, "eps": 1e-6, "weight_decay": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "eps": 1e-6, "weight_decay": 0.01},
    "NAdam": {"lr": 0.02, "weight_decay": 0.01, "decoupled_weight_decay": True},
    "Adamax": {"lr": 0.02, "weight_decay": 0.01},
}  # fmt: skip


def drawn(seed: int) -> dict[str, Any]:
    """Return the options of a case."""
    draw = random.Random(seed)
    pick, some = draw.choice, lambda p: draw.random() < p
    ranks = pick([1, 2, 2, 3])
    strategy = pick(["single", "ddp", "fsdp"] if ranks == 1 else ["ddp", "ddp", "fsdp"])
    case: dict[str, Any] = {
        "seed": seed, "ranks": ranks, "strategy": strategy, "api": pick(["runner", "runner", "session"]),
        "model": pick([
            "linear", "conv", "conv eval", "conv train", "tokens", "tied", "twice", "frozen", "spare", "branch",
            "losses", "two updates", "gan",
        ]),
        "dtype": pick([torch.float64] * 7 + [torch.float32]),
        "loss": pick(["mean", "mean", "smooth", "weighted", "left out"]),
        "size": draw.randint(max(3, ranks), 23), "batch": draw.randint(1, 4), "drop_last": some(0.25),
        "sampler": pick(["shuffled"] * 3 + SAMPLERS), "config": some(0.4), "trial": pick([None] * 4 + [2, 3]),
        "window": pick([1, 1, 2, 3, 4]), "optimizer": pick([*OPTIMIZERS]), "returns": some(0.3),
        "clip": pick([None, None, {"max_norm": 0.2}, {"max_norm": 0.3, "norm_type": 1},
                      {"max_norm": 0.1, "norm_type": 3.0}, {"max_norm": 0.05, "norm_type": math.inf},
                      {"type": "value", "clip_value": 0.03}]),
        "epochs": draw.randint(1, 4), "iters": pick([None, None, draw.randint(3, 12)]),
        "val_begin": pick([1, 1, 2, 3]), "val_interval": pick([1, 1, 2, 3]),
        "dynamic": pick([None, None, [[2, 1]], [[2, 2], [4, 1]]]), "val_sets": pick([0, 1, 1, 2]),
        "val_size": draw.randint(2, 11), "val_batch": draw.randint(1, 4), "val_order": some(0.3),
        "metrics": pick([["loss"], ["Accuracy"], ["Accuracy", "own"], ["own"]]),
        "ema": pick([None, None, None, "ema", "swa", "ema later", "ema every 2"]),
        "break": pick([None, None, 0, 1]), "stop": pick([None, None, 0, 1, 2]), "steps": pick([1, 1, 1, 2]),
        "log": pick([1, 1, 2, 3]),
    }  # fmt: skip
    units = ["epoch", "iter", "converted"]
    case["schedule"] = drawn_schedules(draw, case, units)
    case["paramwise"] = {
        key: pick([0.0, 0.5, 3.0])
        for key in ("bias_lr_mult", "bias_decay_mult", "norm_decay_mult", "flat_decay_mult", "dwconv_decay_mult")
        if some(0.3)
    } if some(0.4) else {}  # fmt: skip
    if some(0.2):
        case["custom"] = {
            "out": {"lr_mult": 0.3, "decay_mult": 0.0},
            "out.bias": {"lr_mult": 2.0},
            "body": {"decay_mult": 4.0},
        }
    else:
        case["custom"] = {}
    return fitting(case)


def drawn_schedules(draw: random.Random, case: dict[str, Any], units: list[str]) -> list[dict[str, Any]]:
    pick = draw.choice
    by = pick(units)
    kinds: list[dict[str, Any]] = [
        {"type": "ConstantLR", "factor": 0.3, "total_iters": 2}, {"type": "LinearLR", "start_factor": 0.1, "end": 3},
        {"type": "StepLR", "step_size": 2, "gamma": 0.5}, {"type": "ExponentialLR", "gamma": 0.8},
        {"type": "MultiStepLR", "milestones": [1, 3, 3], "gamma": 0.6}, {"type": "CosineAnnealingLR"},
        {"type": "CosineAnnealingLR", "T_max": 3, "eta_min": 0.004}, {"type": "PolyLR", "power": 0.9},
        {"type": "OneCycleLR", "eta_max": 0.1}, {"type": "CosineAnnealingMomentum", "begin": 1},
        {"type": "ReduceOnPlateauLR", "patience": 0, "factor": 0.5, "threshold": 0.02},
    ]  # fmt: skip
    warm = {"type": "LinearLR", "start_factor": 0.2, "by": "iter", "begin": 0, "end": draw.randint(2, 5)}
    return pick([
        [], [{"by": by, **pick(kinds)}], [{"by": by, **pick(kinds)}],
        [warm, {"type": "CosineAnnealingLR", "by": "epoch"}],
        [warm, {"type": "MultiStepLR", "milestones": [1, 2], "gamma": 0.5, "by": "epoch"}],
        [warm, {"type": "CosineAnnealingLR", "by": "iter", "begin": warm["end"], "eta_min": 0.002}],
        [{"type": "ConstantLR", "factor": 0.5, "by": "epoch", "end": 1},
         {"type": "CosineAnnealingLR", "by": "converted", "begin": 1}],
    ])  # fmt: skip


def fitting(case: dict[str, Any]) -> dict[str, Any]:
    """Return a case without what does not go together."""
    model, own_steps = case["model"], case["model"] in ("two updates", "gan")
    session = case["api"] == "session"
    if model == "conv train" and case["ranks"] > 1:
        case["model"] = model = "conv"
    if model == "branch" and case["strategy"] == "fsdp":
        case["strategy"] = "ddp"
    if session and case["strategy"] == "fsdp" and case["optimizer"] == "Adagrad":
        case["strategy"] = "ddp"  # it has a state from the first, and must be given as a config
    if model == "branch" and case["sampler"] in ("batches", "unequal", "stream"):
        # What only a batch that counts for nothing reaches gets a gradient of 0, so that weight decay moves it.
        case["sampler"] = "list"
    if model in ("tokens", "tied"):
        case |= {"loss": "left out", "steps": 1}
    if model == "losses" or own_steps:
        case["loss"] = "mean"
    case["returns"] = case["returns"] and not session and not own_steps
    if model == "losses" and not session:
        case["returns"] = True
    if case["sampler"] in ("infinite", "stream") and case["iters"] is None:
        case["iters"] = 7
    if case["sampler"] in ("infinite", "stream"):
        case |= {"config": True, "trial": None, "drop_last": False}
    if case["sampler"] in ("batches", "unequal", "list", "weighted"):
        case |= {"config": False, "trial": None}
    if case["sampler"] == "batches":
        case["drop_last"] = False
    if not case["config"]:
        case["trial"] = None
    if case["drop_last"] and case["size"] // case["ranks"] < case["batch"]:
        case["drop_last"] = False
    if case["iters"] is not None:
        for one in case["schedule"]:
            if one["by"] != "iter":
                one["by"] = "iter"
                one |= {"begin": 0} if len(case["schedule"]) > 1 else {}
        if len(case["schedule"]) > 1:
            case["schedule"] = case["schedule"][:1]
    if own_steps or (session and model == "losses"):
        case["val_sets"] = 0
    if not case["val_sets"]:
        case["schedule"] = [one for one in case["schedule"] if one["type"] != "ReduceOnPlateauLR"]
    if case["loss"] == "left out" and model in ("tokens", "tied"):
        case["metrics"] = ["loss"]
    if "momentum" not in OPTIMIZERS[case["optimizer"]]:
        case["schedule"] = [one for one in case["schedule"] if not one["type"].endswith("Momentum")]
    if session:
        case |= {"paramwise": {}, "custom": {}, "dynamic": None, "val_begin": 1, "metrics": ["loss", "Accuracy"]}
        if case["schedule"]:
            case["schedule"] = [
                {
                    "type": "session",
                    "kind": case["seed"] % 4,
                    "by": "epoch" if case["iters"] is None and case["seed"] % 2 else "iter",
                }
            ]
        if case["window"] > 1 or case["iters"] is not None:
            case |= {"break": None, "stop": None}
        if model in ("tokens", "tied"):
            case["metrics"] = ["loss"]
    else:
        case |= {"break": None, "stop": None, "steps": 1}
    if model == "gan":
        case["steps"] = 1
        case |= {"paramwise": {}, "custom": {}}
    if model not in ("linear", "twice", "frozen"):
        case["custom"] = {}
    return case


class Net(nn.Module):
    """A small model of many kinds, which returns scores of classes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        inputs = 4
        if kind.startswith("conv"):
            norm = nn.GroupNorm(2, 4) if kind == "conv" else nn.BatchNorm2d(4)
            self.body = nn.Sequential(nn.Conv2d(1, 4, 2), norm, nn.Tanh(), nn.Conv2d(4, 4, 2, groups=4))
            if kind == "conv eval":
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2)
        elif kind in ("tokens", "tied"):
            self.body = nn.Embedding(7, 4)
        else:
            self.body = nn.Linear(4, 4)
        classes = 7 if kind in ("tokens", "tied") else CLASSES
        if kind == "frozen":
            self.body.requires_grad_(False)
        if kind in ("spare", "branch"):
            self.expert = nn.Linear(4, 4)
        self.out = nn.Linear(inputs, classes)
        if kind == "tied":
            self.out.weight = self.body.weight

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        if self.kind == "conv eval":
            self.body[1].eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.kind.startswith("conv"):
            return self.out(self.body(x.view(-1, 1, 4, 4)).flatten(2).mean(2))
        if self.kind in ("tokens", "tied"):
            return self.out(self.body(x).tanh()).movedim(-1, 1)
        h = self.body(x).tanh()
        if self.kind == "twice":
            h = self.body(h).tanh()
        if self.kind == "branch" and (chosen := x[:, 0] > 0.8).any():
            h = h + torch.zeros_like(h).index_put((chosen,), self.expert(h[chosen]))
        return self.out(h)


class Gan(nn.Module):
    """Two parts with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x).tanh())


def model_of(case: dict[str, Any]) -> nn.Module:
    torch.manual_seed(case["seed"])
    model = Gan() if case["model"] == "gan" else Net(case["model"])
    return model.to(case["dtype"])


def data_of(case: dict[str, Any], size: int, seed: int) -> TensorDataset:
    draws = torch.Generator().manual_seed(seed)
    if case["model"] in ("tokens", "tied"):
        x, y = (torch.randint(0, 7, (size, 5), generator=draws) for _ in range(2))
        y[torch.rand(y.shape, generator=draws) < 0.3] = -100
        y[0, 0] = 3
        if seed % 3:
            y[1:2] = -100
        return TensorDataset(x, y)
    width = 16 if case["model"].startswith("conv") else 4
    x = torch.randn(size, width, generator=draws, dtype=torch.float64).to(case["dtype"])
    y = torch.randint(0, CLASSES, (size,), generator=draws)
    if case["loss"] == "left out":
        y[1::3] = -100
    return TensorDataset(x, y)


class LossOf:
    """The loss of a case: of outputs and targets; `count` is what a batch counts for."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.kind, self.weights = case["loss"], torch.tensor([0.2, 1.0, 2.5], dtype=case["dtype"])

    def __call__(self, scores: Tensor, y: Tensor) -> Tensor:
        if self.kind == "smooth":
            return cross_entropy(scores, y, label_smoothing=0.1)
        if self.kind == "weighted":
            return cross_entropy(scores, y, weight=self.weights)
        return cross_entropy(scores, y)

    def count(self, batch: Any) -> float:
        y = batch[1]
        if self.kind == "weighted":
            return self.weights[y].sum().item()
        return int((y != -100).sum()) if self.kind == "left out" else len(y)

    @property
    def is_counted(self) -> bool:
        return self.kind in ("weighted", "left out")


def parts_of_loss(scores: Tensor, y: Tensor) -> dict[str, Any]:
    """Several losses, and a value that is none."""
    return {
        "loss_class": cross_entropy(scores, y), "loss_size": [scores.square().mean(), 0.1 * scores.abs().mean()],
        "highest": scores.amax(1).mean(),
    }  # fmt: skip
