"""Trainings with random options, compared with a loop by hand: python -m tests.runner.soak_numbers --cases 300.

Each case is trained by a Runner or a Session on one to three real ranks, and by `by_hand`: plain torch, in one process,
on the global batches. Losses, norms of gradients, rates, metrics, records, averages and parameters must be the same.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler

from lockstep import Runner, Session
from lockstep.dist import get_rank, get_world_size
from lockstep.evaluator import BaseMetric
from lockstep.hooks import Hook
from lockstep.model import unwrap_model
from lockstep.testing import RankFailure
from lockstep.testing.pool import run_body

from .soak import main

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


# What both ways of training are given


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


# The loop by hand: nothing of lockstep's


def order_of(case: dict[str, Any], epoch: int) -> list[int]:
    draws, size = torch.Generator().manual_seed(case["seed"] + epoch), case["size"]
    if case["trial"] is not None:  # shortens the data
        size = min(size, case["trial"] * case["batch"] * case["ranks"])
    if case["sampler"] == "weighted":
        weights = torch.arange(1.0, size + 1, dtype=torch.float64)
        return torch.multinomial(weights, size + 2, True, generator=draws).tolist()
    if case["sampler"] in ("list", "unequal"):
        return [(5 * i + 1) % size for i in range(size + 3)]
    if case["sampler"] in ("sequential", "stream"):
        return list(range(size))
    return torch.randperm(size, generator=draws).tolist()


def lists_of(case: dict[str, Any]) -> list[list[int]]:
    """Batches of different sizes."""
    lists, at = [], 0
    for length in (1, 3, 2, 4, 1, 2, 3, 3):
        if at < case["size"]:
            lists.append([i % case["size"] for i in range(at, at + length)])
        at += length
    return (lists * 3)[: max(len(lists), case["ranks"])]


def global_batches(case: dict[str, Any], epoch: int) -> list[list[int]]:
    """Return the indices of each global batch of a pass."""
    ranks, batch = case["ranks"], case["batch"]
    if case["sampler"] == "batches":
        lists = lists_of(case)
        return [[index for one in lists[at : at + ranks] for index in one] for at in range(0, len(lists), ranks)]
    order = order_of(case, epoch)
    if case["sampler"] not in ("unequal", "stream"):
        order += order[: -len(order) % ranks]
    shares = [order[rank::ranks] for rank in range(ranks)]
    if case["sampler"] == "unequal":  # the first rank has more
        shares = [share[: len(share) - rank] for rank, share in enumerate(shares)]
    stop = [len(share) // batch * batch if case["drop_last"] else len(share) for share in shares]
    return [
        [index for share, end in zip(shares, stop, strict=True) for index in share[at : min(at + batch, end)]]
        for at in range(0, max(stop), batch)
    ]


def all_batches(case: dict[str, Any]) -> Iterator[tuple[int, int, bool, list[int]]]:
    """Yield the epoch, the number in it, whether it is the last, and the indices of each global batch."""
    if case["sampler"] == "infinite":
        every = [
            index
            for epoch in range(100)
            for index in torch.randperm(
                case["size"], generator=torch.Generator().manual_seed(case["seed"] + epoch)
            ).tolist()
        ]
        whole = case["batch"] * case["ranks"]
        for number in range(case["iters"]):
            yield 0, number, False, every[number * whole : (number + 1) * whole]
        return
    done = 0
    for epoch in range(case["epochs"] if case["iters"] is None else 1000):
        batches = global_batches(case, epoch)
        assert batches
        if case["break"] is not None:
            batches = batches[: case["break"] + 1]
        for number, batch in enumerate(batches):
            yield epoch, number, number + 1 == len(batches), batch
            done += 1
            if done == case["iters"]:
                return
        if epoch == case["stop"]:
            return


def by_name(case: dict[str, Any], model: nn.Module) -> dict[str, tuple[float, float]]:
    """Return the factors of rate and weight decay of each parameter."""
    given, factors = case["paramwise"], {}
    for name, parameter in model.named_parameters():
        rate = decay = 1.0
        custom = [key for key in ("out.bias", "body", "out") if key in case["custom"] and key in name]
        if custom:
            options = case["custom"][max(custom, key=len)]
            factors[name] = options.get("lr_mult", 1.0), options.get("decay_mult", 1.0)
            continue
        module = model.get_submodule(name.rpartition(".")[0])
        is_norm = isinstance(module, nn.GroupNorm | nn.BatchNorm2d)
        is_bias = name.endswith("bias") and not is_norm
        is_depthwise = isinstance(module, nn.Conv2d) and module.groups > 1
        if is_bias:
            rate = given.get("bias_lr_mult", 1.0)
        for applies, key in (
            (is_norm, "norm_decay_mult"), (is_depthwise, "dwconv_decay_mult"),
            (is_bias and not is_depthwise, "bias_decay_mult"), (parameter.dim() == 1, "flat_decay_mult"),
        ):  # fmt: skip
            if applies and key in given:
                decay = given[key]
                break
        factors[name] = rate, decay
    return factors


def optimizer_of(case: dict[str, Any], model: nn.Module, prefix: str = "") -> torch.optim.Optimizer:
    kind, options = getattr(torch.optim, case["optimizer"].split()[0]), OPTIMIZERS[case["optimizer"]]
    factors = by_name(case, model)
    groups = [
        {"params": [one], "name": prefix + name, "lr": options["lr"] * factors[name][0],
         "weight_decay": options["weight_decay"] * factors[name][1]}
        for name, one in model.named_parameters()
    ]  # fmt: skip
    return kind(groups, **options)


def multiplier(kind: dict[str, Any], length: int, by: int, count: int) -> float:
    """Return the factor after so many counts of a schedule of torch's own."""
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    name = kind["type"]
    if name == "ConstantLR":
        made = lr_scheduler.ConstantLR(sgd, kind["factor"], kind.get("total_iters", (length - 1) / by) * by)
    elif name == "LinearLR":
        made = lr_scheduler.LinearLR(sgd, kind["start_factor"], 1.0, max(length - 1, 1))
    elif name == "StepLR":
        made = lr_scheduler.StepLR(sgd, kind["step_size"] * by, kind["gamma"])
    elif name == "MultiStepLR":
        made = lr_scheduler.MultiStepLR(sgd, [by * one for one in kind["milestones"]], kind["gamma"])
    elif name == "ExponentialLR":
        made = lr_scheduler.ExponentialLR(sgd, kind["gamma"] ** (1 / by))
    elif name.startswith("CosineAnnealing"):
        made = lr_scheduler.LambdaLR(
            sgd, lambda t: (1 + math.cos(math.pi * t / (kind["T_max"] * by if "T_max" in kind else length))) / 2
        )
    elif name == "PolyLR":
        made = lr_scheduler.PolynomialLR(sgd, max(length - 1, 1), kind["power"])
    else:
        if length < 2:
            return 1 / 25 if False else 1e-4 / 25 if count else 1 / 25
        made = lr_scheduler.OneCycleLR(sgd, 1.0, total_steps=length)
    for _ in range(count):
        made.step()
    return sgd.param_groups[0]["lr"]


class Rates:
    """The schedules of a Runner, by hand."""

    def __init__(self, case: dict[str, Any], optimizer: Any, epoch_length: int | None) -> None:
        self.case, self.optimizer = case, optimizer
        self.base = [dict(group) for group in optimizer.param_groups]
        self.epoch_length, self.iters, self.epochs = epoch_length, 0, 0
        self.plateau = None
        self.torchs = None
        for kind in case["schedule"]:
            if kind["type"] == "ReduceOnPlateauLR":
                self.plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.02)
            if kind["type"] == "session":
                self.torchs = torchs(kind["kind"], optimizer)
        self.set()

    def set(self) -> None:
        if self.plateau or self.torchs or not self.case["schedule"]:
            return
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            for option in ("lr", "momentum"):
                if option not in base:
                    continue
                value = base[option]
                for kind in self.case["schedule"]:
                    if kind["type"].endswith("Momentum") != (option == "momentum"):
                        continue
                    by = self.epoch_length if kind["by"] == "converted" else 1
                    count = self.epochs if kind["by"] == "epoch" else self.iters
                    last = (
                        self.case["epochs"]
                        if kind["by"] == "epoch"
                        else (self.case["iters"] or self.case["epochs"] * self.epoch_length)
                    )
                    begin, end = kind.get("begin", 0) * by, kind["end"] * by if "end" in kind else last
                    if count < begin or end <= begin:
                        continue
                    needs_end = (
                        kind["type"] in ("LinearLR", "PolyLR", "OneCycleLR")
                        or (kind["type"].startswith("Cosine") and "T_max" not in kind)
                        or "end" in kind
                    )
                    t = count - begin if not needs_end else min(count, end - 1) - begin
                    m = multiplier(kind, end - begin, by, t)
                    if kind["type"] == "OneCycleLR":
                        value = kind["eta_max"] * m
                    else:
                        value = kind.get("eta_min", 0.0) + (value - kind.get("eta_min", 0.0)) * m
                group[option] = value


def torchs(kind: int, optimizer: Any) -> Any:
    return (
        lr_scheduler.StepLR(optimizer, 2, 0.7), lr_scheduler.CosineAnnealingLR(optimizer, 9),
        lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 5)),
        lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2],
        ),
    )[kind]  # fmt: skip


class Window:
    """Accumulates gradients of the mean over all samples of a window, and updates."""

    def __init__(self, case: dict[str, Any], optimizer: Any, passes: int) -> None:
        self.case, self.optimizer, self.left = case, optimizer, passes
        self.made, self.counted, self.norm = 0, 0.0, None

    def add(self, loss: Tensor, count: float) -> bool:
        (loss * count).backward()
        self.made, self.counted, self.left = self.made + 1, self.counted + count, self.left - 1
        if self.made < self.case["window"] and self.left:
            return False
        parameters = [one for group in self.optimizer.param_groups for one in group["params"] if one.grad is not None]
        for one in parameters:
            one.grad /= self.counted or 1
        if (clip := self.case["clip"]) is not None:
            if "clip_value" in clip and parameters:
                nn.utils.clip_grad_value_(parameters, clip["clip_value"])
            elif parameters and "max_norm" in clip:
                self.norm = nn.utils.clip_grad_norm_(parameters, clip["max_norm"], clip.get("norm_type", 2.0)).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.made, self.counted = 0, 0.0
        return True


def by_hand(case: dict[str, Any]) -> dict[str, Any]:
    model, loss_of = model_of(case), LossOf(case)
    told: dict[str, Any] = {"train": [], "val": []}
    x, y = data_of(case, case["size"], case["seed"]).tensors
    steps = list(all_batches(case))
    passes = len(steps) * (2 if case["model"] == "two updates" else case["steps"])
    if case["model"] == "gan":
        optimizers = {name: optimizer_of(case, getattr(model, name), f"{name}.") for name in ("body", "out")}
    else:
        optimizers = {"": optimizer_of(case, model)}
    windows = {name: Window(case, one, passes) for name, one in optimizers.items()}
    length = None if case["iters"] is not None else len(global_batches(case, 0))
    rates = [Rates(case, one, length) for one in optimizers.values()]
    average: dict[str, Tensor] = {}
    averaged = 0
    model.train()
    for done, (epoch, number, is_last, indices) in enumerate(steps):
        # An epoch that is left counts as a whole one.
        at = done if case["break"] is None else epoch * (length or 0) + number
        batch = (x[indices], y[indices])
        count = float(loss_of.count(batch)) if loss_of.is_counted else float(len(indices))
        now = [
            [group["name"], group["lr"], group.get("momentum", 0.0)]
            for one in optimizers.values() for group in one.param_groups
        ]  # fmt: skip
        told_now: dict[str, Any] = {"iter": at, "count": count}
        for window in windows.values():
            window.norm = None
        updated = False
        if case["model"] == "gan":
            loss = cross_entropy(model.out(model.body(batch[0]).tanh().detach()), batch[1])
            windows["out"].add(loss, count)
            model.out.requires_grad_(False)
            other = -model(batch[0]).square().mean()
            updated = windows["body"].add(other, count)
            model.out.requires_grad_(True)
            values = {"loss": loss.item(), "other": other.item()}
        elif case["model"] == "losses":
            for repeat in range(case["steps"]):
                parts = parts_of_loss(model(batch[0] * (1 - 0.5 * repeat)), batch[1])
                parts["loss_size"] = sum(parts["loss_size"])
                loss = parts["loss_class"] + parts["loss_size"]
                updated |= windows[""].add(loss, count)
                values = {name: one.item() for name, one in parts.items()} | {"loss": loss.item()}
        else:
            for number in range(2 if case["model"] == "two updates" else case["steps"]):
                loss = loss_of(model(batch[0] * (1 - 0.5 * number) if number else batch[0]), batch[1])
                updated = windows[""].add(loss, count)
                values = {"loss": loss.item()}
        told_now |= {"values": values, "rates": now, "norms": [one.norm for one in windows.values()]}
        told["train"].append(told_now)
        kind = case["ema"]
        in_iteration = case["api"] == "session" and case["iters"] is not None
        if in_iteration and case["val_sets"] and is_due(case, done + 1, case["iters"]):
            told["val"].append([done + 1, validation_by_hand(case, model, loss_of, average)])
        if kind is not None and (kind != "ema later" or done + 1 >= 3):
            if averaged == 0:
                average = {name: one.detach().clone() for name, one in model.named_parameters()}
            elif kind != "ema every 2" or averaged % 2 == 0:
                for name, one in model.named_parameters():
                    momentum = 1 / (averaged + 1) if kind == "swa" else 0.3
                    average[name] += momentum * (one.detach() - average[name])
            averaged += 1
        for one in rates:
            one.iters += 1
            if one.torchs is not None and case["schedule"][0]["by"] == "iter" and updated:
                one.torchs.step()
            one.set()
        if is_last and case["iters"] is None:
            for one in rates:
                one.epochs += 1
                one.set()
        if case["iters"] is None and is_last:
            counted, last = epoch + 1, case["epochs"] if case["stop"] is None else case["stop"] + 1
        elif case["iters"] is not None:
            counted, last = done + 1, case["iters"]
        else:
            continue
        if case["val_sets"] and not in_iteration and is_due(case, counted, last):
            metrics = validation_by_hand(case, model, loss_of, average)
            told["val"].append([done + 1 if case["break"] is None else (epoch + 1) * (length or 0), metrics])
            for one in rates:
                if one.plateau is not None:
                    one.plateau.step(metrics[monitored(case)])
        for one in rates:
            if one.torchs is not None and case["schedule"][0]["by"] == "epoch" and is_last:
                one.torchs.step()
    told["final"] = {name: one.detach().tolist() for name, one in model.named_parameters()}
    told["buffers"] = {name: one.tolist() for name, one in model.named_buffers()}
    told["average"] = {name: one.tolist() for name, one in average.items()}
    return told


def is_due(case: dict[str, Any], counted: int, last: int) -> bool:
    """Return whether a validation follows so many epochs or iterations."""
    interval = case["val_interval"]
    for begin, new in case["dynamic"] or []:
        if counted >= begin:
            interval = new
    return counted >= case["val_begin"] and (counted % interval == 0 or counted == last)


def monitored(case: dict[str, Any]) -> str:
    name = {"loss": "loss", "Accuracy": "accuracy", "own": "total"}[case["metrics"][0]]
    return f"a/{name}" if case["val_sets"] == 2 else name


def validation_by_hand(
    case: dict[str, Any], model: nn.Module, loss_of: LossOf, average: dict[str, Tensor]
) -> dict[str, float]:
    trained = {name: one.detach().clone() for name, one in model.named_parameters()}
    metrics: dict[str, float] = {}
    model.eval()
    with torch.no_grad():
        for name, one in model.named_parameters():
            one.copy_(average.get(name, one))
        for number in range(case["val_sets"]):
            x, y = data_of(case, case["val_size"] + number, case["seed"] + 100 + number).tensors
            scores = model(x)
            found: dict[str, float] = {"loss": whole_loss(case, loss_of, scores, y)}
            if case["metrics"] != ["loss"]:
                found["accuracy"] = 100 * (scores.argmax(1) == y).double().mean().item()
                found["total"] = scores.amax(1).sum().item()
            prefix = "ab"[number] + "/" if case["val_sets"] == 2 else ""
            metrics |= {prefix + key: value for key, value in found.items()}
        for name, one in model.named_parameters():
            one.copy_(trained[name])
    model.train()
    return metrics


def whole_loss(case: dict[str, Any], loss_of: LossOf, scores: Tensor, y: Tensor) -> float:
    if case["model"] == "losses":
        parts = parts_of_loss(scores, y)
        return (parts["loss_class"] + sum(parts["loss_size"])).item()
    return loss_of(scores, y).item()


# The same by lockstep


class Own(Sampler[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class Ranked(Own):
    rank = 0  # knows ranks


class Stream(IterableDataset[Any]):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(len(self.data)))


class Total(BaseMetric):
    """The sum of the highest scores."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        scores = data_samples["logits"] if isinstance(data_samples, dict) else data_samples[0]
        self.results.extend(scores.amax(1).tolist())

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"total": sum(results)}


class Returns(nn.Module):
    """Returns its loss itself."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.net, self.loss_of, self.several = model_of(case), LossOf(case), case["model"] == "losses"

    def forward(self, x: Tensor, y: Tensor) -> Any:
        scores = self.net(x)
        if self.training and self.several:
            return parts_of_loss(scores, y)
        parts = parts_of_loss(scores, y) if self.several else {}
        loss = parts["loss_class"] + sum(parts["loss_size"]) if parts else self.loss_of(scores, y)
        return {"loss": loss} if self.training else {"loss": loss, "logits": scores}


class TwoUpdates(Net):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Any]:
        x, y = data
        for factor in (1.0, 0.5):
            with optim_wrapper.optim_context(self):
                loss = cross_entropy(self(x * factor), y)
            optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


class GanSteps(Gan):
    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Any]:
        x, y = data
        loss = cross_entropy(self.out(self.body(x).tanh().detach()), y)
        optim_wrapper["out"].update_params(loss)
        self.out.requires_grad_(False)
        other = -self(x).square().mean()
        optim_wrapper["body"].update_params(other)
        self.out.requires_grad_(True)
        return {"loss": loss.detach(), "other": other.detach()}


class Sees(Hook):
    """Notes what an update was made of."""

    priority = "VERY_HIGH"

    def __init__(self, told: dict[str, Any]) -> None:
        self.told, self.norms, self.is_inside = told, [], False

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.is_inside, wrappers = True, self.wrappers(runner)
        self.now = rates_of(runner.model, wrappers)
        self.norms = [one.grad_norm for one in wrappers]

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.is_inside = False
        norms = [one.grad_norm for one in self.wrappers(runner)]
        new = [None if now is None or now is was else now.item() for now, was in zip(norms, self.norms, strict=True)]
        self.told["train"].append({"iter": runner.iter, "rates": self.now, "norms": new})

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        if isinstance(metrics, dict) and metrics:
            self.told["val"].append([runner.iter, dict(metrics)])

    @staticmethod
    def wrappers(runner: Any) -> list[Any]:
        own = runner.optim_wrapper
        return [own[name] for name in ("body", "out")] if hasattr(own, "keys") else [own]


def rates_of(model: nn.Module, wrappers: list[Any]) -> list[Any]:
    names = {id(one): name for name, one in unwrap_model(model).named_parameters()}
    return [
        [group.get("name") or names[id(one)].removeprefix("net."), group["lr"], group.get("momentum", 0.0)]
        for wrapper in wrappers for group in wrapper.param_groups for one in group["params"]
    ]  # fmt: skip


def loader_of(case: dict[str, Any]) -> Any:
    data = data_of(case, case["size"], case["seed"])
    how: dict[str, Any] = {"batch_size": case["batch"], "drop_last": case["drop_last"]}
    kind = case["sampler"]
    if kind == "stream":
        return {"dataset": Stream(data), "batch_size": case["batch"]}
    if kind == "infinite":
        return {"dataset": data, "batch_size": case["batch"], "sampler": {"type": "InfiniteSampler"}}
    if kind == "batches":
        return DataLoader(data, batch_sampler=Own(lists_of(case)))
    if kind == "list":
        how["sampler"] = Own(order_of(case, 0))
    elif kind == "unequal":
        share = order_of(case, 0)[get_rank() :: get_world_size()]
        how["sampler"] = Ranked(share[: len(share) - get_rank()])
    elif kind == "weighted":
        weights = torch.arange(1.0, case["size"] + 1, dtype=torch.float64)
        how["sampler"] = WeightedRandomSampler(weights, case["size"] + 2)
    else:
        how["shuffle"] = kind == "shuffled"
    if case["config"]:
        return {"dataset": data, **how, **({"num_batch_per_epoch": case["trial"]} if case["trial"] else {})}
    return DataLoader(data, **how)


def common(case: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    hooks: list[Any] = [Sees(told)]
    if case["ema"] is not None:
        hooks.append({
            "ema": {"type": "EMAHook", "momentum": 0.3},
            "swa": {"type": "EMAHook", "ema_type": "StochasticWeightAverage"},
            "ema later": {"type": "EMAHook", "momentum": 0.3, "begin_iter": 3},
            "ema every 2": {"type": "EMAHook", "momentum": 0.3, "interval": 2},
        }[case["ema"]])  # fmt: skip
    strategy: Any = case["strategy"]
    if strategy == "ddp" and case["model"] in ("spare", "branch"):
        strategy = {"type": "ddp", "find_unused_parameters": True}
    return {
        "strategy": strategy, "custom_hooks": hooks, "randomness": {"seed": case["seed"]}, "log_level": "ERROR",
        "default_hooks": {"checkpoint": None, "progress": None, "logger": {"interval": case["log"]}},
        "visualizer": {"type": "Visualizer", "vis_backends": []},
    }  # fmt: skip


def by_lockstep(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = {"train": [], "val": []}
    run = (by_session if case["api"] == "session" else by_runner)(case, folder, told)
    state = run.strategy.model_state()
    whole = {name.removeprefix("net."): getattr(one, "full_tensor", one.clone)() for name, one in state.items()}
    names = {name.removeprefix("net.") for name, _ in unwrap_model(run.model).named_parameters()}
    buffers = {name.removeprefix("net.") for name, _ in unwrap_model(run.model).named_buffers()}
    told["final"] = {name: one.tolist() for name, one in whole.items() if name in names}
    told["buffers"] = {name: one.tolist() for name, one in whole.items() if name in buffers}
    hooks = {type(one).__name__: one for one in run.hooks}
    told["average"] = None
    if case["ema"] is not None and case["strategy"] != "fsdp":
        average = unwrap_model(hooks["EMAHook"].ema_model).named_parameters()
        own = {name.removeprefix("module.").removeprefix("net."): one.tolist() for name, one in average}
        told["average"] = own
    lines = (run.run_dir / "metrics.jsonl").read_text().splitlines() if get_rank() == 0 else []
    told["records"] = [json.loads(line) for line in lines]
    return told


def by_runner(case: dict[str, Any], folder: Path, told: dict[str, Any]) -> Any:
    loss_of, arguments = LossOf(case), common(case, told)
    kind = case["model"]
    if kind in ("gan", "two updates"):
        torch.manual_seed(case["seed"])
        model: nn.Module = (GanSteps() if kind == "gan" else TwoUpdates(kind)).to(case["dtype"])
    elif case["returns"]:
        model = Returns(case)
    else:
        model, arguments["loss"] = model_of(case), loss_of
    optimizer = {"type": case["optimizer"].split()[0], **OPTIMIZERS[case["optimizer"]]}
    wrapper: dict[str, Any] = {"optimizer": optimizer, "accumulative_counts": case["window"], "clip_grad": case["clip"]}
    paramwise = dict(case["paramwise"])
    if case["custom"]:
        paramwise["custom_keys"] = case["custom"]
    if paramwise:
        wrapper["paramwise_cfg"] = paramwise | ({"bypass_duplicate": True} if kind == "tied" else {})
    schedules = []
    for one in case["schedule"]:
        made = {key: value for key, value in one.items() if key != "by"} | {"by_epoch": one["by"] != "iter"}
        if one["by"] == "converted":
            made["convert_to_iter_based"] = True
        if one["type"] == "ReduceOnPlateauLR":
            made["monitor"] = monitored(case)
            made.pop("convert_to_iter_based", None)
        schedules.append(made)
    arguments["optim_wrapper"] = {"body": wrapper, "out": wrapper} if kind == "gan" else wrapper
    arguments["param_scheduler"] = {"body": schedules, "out": schedules} if kind == "gan" and schedules else schedules
    arguments["train_cfg"] = {"max_epochs": case["epochs"]} if case["iters"] is None else {"max_iters": case["iters"]}
    if loss_of.is_counted:
        arguments["train_cfg"]["batch_size_of"] = loss_of.count
    if case["val_sets"]:
        arguments["train_cfg"] |= {
            "val_begin": case["val_begin"],
            "val_interval": case["val_interval"],
            "dynamic_intervals": case["dynamic"],
        }
        sets = {
            "ab"[n]: DataLoader(
                data_of(case, case["val_size"] + n, case["seed"] + 100 + n),
                batch_size=case["val_batch"],
                shuffle=case["val_order"],
            )
            for n in range(case["val_sets"])
        }
        arguments["val_dataloader"] = sets if case["val_sets"] == 2 else sets["a"]
        metrics = [
            {"loss": {"type": "LossMetric"}, "Accuracy": {"type": "Accuracy"}, "own": {"type": Total}}[one]
            for one in case["metrics"]
        ]
        if case["metrics"] != ["loss"]:
            arguments["val_evaluator"] = metrics
    runner = Runner(model, folder, train_dataloader=loader_of(case), **arguments)
    runner.train()
    return runner


def by_session(case: dict[str, Any], folder: Path, told: dict[str, Any]) -> Any:
    loss_of, kind = LossOf(case), case["model"]
    session = Session(
        folder, accumulative_counts=case["window"], clip_grad=case["clip"],
        batch_size_of=loss_of.count if loss_of.is_counted else None, **common(case, told),
    )  # fmt: skip
    model: Any = model_of(case)
    models = {"body": model.body, "out": model.out} if kind == "gan" else {"": model}
    own = {name: optimizer_of(case, one, f"{name}." if name else "") for name, one in models.items()}
    schedules = [torchs(case["schedule"][0]["kind"], one) for one in own.values()] if case["schedule"] else []
    given = (models, own) if kind == "gan" else (model, own[""])
    model, wrapper, batches = session.prepare(*given, loader_of(case), schedulers=schedules)
    sets = {
        "ab"[n]: session.prepare_evaluation(
            DataLoader(data_of(case, case["val_size"] + n, case["seed"] + 100 + n), batch_size=case["val_batch"])
        )
        for n in range(case["val_sets"])
    }
    told["steps"] = []

    def step(x: Tensor, y: Tensor) -> None:
        if kind == "gan":
            loss = cross_entropy(model["out"](model["body"](x).tanh().detach()), y)
            wrapper["out"].update_params(loss)
            model["out"].requires_grad_(False)
            other = -model["out"](model["body"](x).tanh()).square().mean()
            wrapper["body"].update_params(other)
            model["out"].requires_grad_(True)
            session.log(loss=loss, other=other)
            is_update = wrapper["body"].should_update()
        else:
            is_update = False
            for number in range(2 if kind == "two updates" else case["steps"]):
                scores = model(x * (1 - 0.5 * number) if number else x)
                session.step(parts_of_loss(scores, y) if kind == "losses" else loss_of(scores, y))
                is_update = session.is_update
        for one in schedules:
            if case["schedule"][0]["by"] == "iter" and is_update:
                one.step()
        if case["iters"] is not None:
            validate(session.iter + 1, case["iters"])

    def validate(counted: int, last: int) -> None:
        if not sets or not is_due(case, counted, last):
            return
        metrics = {}
        for name, loader in sets.items():
            model.eval()
            with torch.no_grad():
                found = [(session.gather(model(x)), session.gather(y)) for x, y in loader]
            scores, y = (torch.cat(parts) for parts in zip(*found, strict=True))
            prefix = f"{name}/" if len(sets) == 2 else ""
            metrics[f"{prefix}loss"] = loss_of(scores, y).item()
            if "Accuracy" in case["metrics"]:
                metrics[f"{prefix}accuracy"] = 100 * (scores.argmax(1) == y).double().mean().item()
            model.train()
        session.log_metrics(**metrics)
        told["val"] = [one for one in told["val"] if one[1] is not metrics]

    if case["iters"] is not None:
        for x, y in session.iterations(case["iters"]):
            step(x, y)
    else:
        for epoch in session.epochs(case["epochs"]):
            for x, y in batches:
                step(x, y)
                if session.batch_idx == case["break"]:
                    break
            last = case["epochs"] if case["stop"] is None else case["stop"] + 1
            validate(epoch + 1, last)
            for one in schedules:
                if case["schedule"][0]["by"] == "epoch":
                    one.step()
            if epoch == case["stop"]:
                session.stop()
    return session.run


# The comparison


def faults_in(found: Any, expected: Any, tolerance: float, where: str = "") -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(found, dict):
        if found.keys() != expected.keys():
            yield f"{where}: {sorted(found)} for {sorted(expected)}"
            return
        for key, value in expected.items():
            yield from faults_in(found[key], value, tolerance, f"{where}.{key}")
    elif isinstance(expected, list) and isinstance(found, list):
        if len(found) != len(expected):
            yield f"{where}: {len(found)} for {len(expected)}: {found} for {expected}"[:600]
            return
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from faults_in(one, other, tolerance, f"{where}[{number}]")
    elif isinstance(expected, float) and isinstance(found, float | int | None):
        found = math.nan if found is None else found
        same = math.isnan(expected) and math.isnan(found)
        if not same and not abs(found - expected) <= tolerance * (1 + abs(expected)):
            yield f"{where}: {found} for {expected}"
    elif found != expected:
        yield f"{where}: {found} for {expected}"


def differences(seed: int, folder: Path) -> Iterator[str]:
    """Yield the first faults of a case, after its options."""
    case = drawn(seed)
    if found := [*compared(case, folder)]:
        yield from [str(case), *found[:6]]


def compared(case: dict[str, Any], folder: Path) -> Iterator[str]:
    """Yield how a training by lockstep differs from that by hand."""
    try:
        told = run_body(by_lockstep, (case, folder), {}, size=case["ranks"], warnings="default", timeout=120)
    except RankFailure as failure:
        yield f"{failure}"[:3000]
        return
    expected = by_hand(case)
    tolerance = 1e-9 if case["dtype"] == torch.float64 else 3e-4
    yield from faults_in(*recorded(case, told[0]["records"], expected), tolerance, "records")
    for rank, one in enumerate(told):
        trained = [
            {"iter": now["iter"], "rates": sorted(now["rates"]), "norms": now["norms"]} for now in expected["train"]
        ]
        for now in one["train"]:
            now["rates"] = sorted(now["rates"])
        yield from faults_in(one["train"], trained, tolerance, f"rank {rank}: train")
        names = {name for _, metrics in one["val"] for name in metrics}
        vals = [[at, {k: v for k, v in metrics.items() if k in names}] for at, metrics in expected["val"]]
        yield from faults_in(one["val"], vals, tolerance, f"rank {rank}: val")
        for key in ("final", "buffers"):
            yield from faults_in(one[key], expected[key], tolerance, f"rank {rank}: {key}")
        if one["average"] is not None:
            average = expected["average"] or expected["final"]
            if expected["average"]:
                yield from faults_in(one["average"], average, tolerance, f"rank {rank}: average")


def recorded(case: dict[str, Any], records: list[Any], expected: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the records of iterations and epochs, and what they must be."""
    found, wanted = [], []
    names = expected["train"][0]["values"]
    for one in records:
        if one["mode"] != "train":
            continue
        found.append({"iter": one["iter"], **{name: one.get(name) for name in names}})
    begin = 0
    for end in [one["iter"] for one in found]:
        rows = [row for row in expected["train"] if begin <= row["iter"] < end and row["count"]]
        begin, count = end, sum(row["count"] for row in rows)
        means = {name: sum(row["values"][name] * row["count"] for row in rows) / (count or 1) for name in names}
        wanted.append({"iter": end, **(means if count else dict.fromkeys(names, math.nan))})
    return found, wanted


if __name__ == "__main__":
    sys.exit(main(__doc__, differences))
