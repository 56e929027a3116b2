"""Loops with random options that are stopped at random moments: python -m tests.runner.soak_resume --cases 300.

Each case is trained once without a stop, and once with one or two, after each of which it resumes. Both must see the
same samples, rates, losses and validations, and leave the same weights, states, random numbers, records, checkpoints.
So it is again with kills, after which it resumes from the last checkpoint.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from lockstep import Session
from lockstep.checkpoint import is_checkpoint
from lockstep.dataset.random_state import random_state
from lockstep.errors import Preempted
from lockstep.hooks import Hook

from .soak import main

MEASURED = {"utc", "time", "data_time", "samples_per_second", "memory_mib", "timestamp"}
SCHEDULES = {
    "StepLR": lambda of: lr_scheduler.StepLR(of, 1, 0.9),
    "CosineAnnealingLR": lambda of: lr_scheduler.CosineAnnealingLR(of, 7),
    "OneCycleLR": lambda of: lr_scheduler.OneCycleLR(of, 0.1, total_steps=99, cycle_momentum=False),
    "LambdaLR": lambda of: lr_scheduler.LambdaLR(of, lambda n: 1 / (n + 1)),
    "SequentialLR": lambda of: lr_scheduler.SequentialLR(
        of, [lr_scheduler.LinearLR(of, 0.1, total_iters=2), lr_scheduler.StepLR(of, 1, 0.9)], [2]
    ),
}


class Samples(Dataset[Any]):
    def __init__(self, size: int, draws: bool) -> None:
        self.x, self.draws = torch.randn(size, 4, generator=torch.Generator().manual_seed(size)), draws

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(()).item() + random.random() + np.random.rand() if self.draws else 0.0
        return self.x[index] + noise, self.x[index].sum(0, keepdim=True), index


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(dropout), nn.Linear(4, 1))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
        return self.layers(x - self.mean)


class Counts(Hook):
    """Has a state of its own: how often it was called."""

    def __init__(self) -> None:
        self.counts = {"iters": 0, "epochs": 0, "validations": 0}

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.counts["iters"] += 1

    def after_train_epoch(self, runner: Any) -> None:
        self.counts["epochs"] += 1

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        self.counts["validations"] += 1

    def before_save_checkpoint(self, runner: Any, checkpoint: Any) -> None:
        checkpoint["meta"]["counts"] = dict(self.counts)

    def after_load_checkpoint(self, runner: Any, checkpoint: Any) -> None:
        self.counts.update(checkpoint["meta"]["counts"])


def drawn(seed: int) -> dict[str, Any]:
    """Return the options of a case."""
    draw = random.Random(seed)
    pick, some = draw.choice, lambda p: draw.random() < p
    workers, places = pick([0] * 12 + [2]), ("begin", "inner", "before step", "end", "end again")
    case: dict[str, Any] = {
        "seed": seed, "by_epoch": some(0.8), "size": draw.randint(7, 16), "batch": draw.randint(2, 5),
        "shuffle": some(0.8), "drop_last": some(0.3), "workers": workers, "draws": not workers and some(0.5),
        "weighted": not workers and some(0.15), "dropout": pick([0.0, 0.3]), "epochs": draw.randint(2, 4),
        "window": pick([1, 1, 2, 3]), "optimizer": pick(["SGD", "AdamW", "Adagrad"]), "several": some(0.15),
        "clip": some(0.3), "ema": some(0.3), "buffers": some(0.5), "val": [one for one in places if some(0.3)],
        "schedule": pick([None, "begin", "step", "first", "last", "plateau", "mixed"]), "type": pick([*SCHEDULES]),
        "decay": pick([None, None, "begin", "step", "first", "last"]), "every": draw.randint(2, 3),
        "early": some(0.2), "best": some(0.4), "keep": pick([-1, 1, 2]), "interval": draw.randint(1, 3),
        "saves_by_iter": some(0.25), "log_every": pick([1, 1, 2]), "save": pick([None, None, "inner", "rest", "end"]),
        "break": pick([None, None, None, 1]), "stop_at": draw.randint(1, 9) if some(0.15) else None,
        "across": some(0.5),
    }  # fmt: skip
    if not case["val"]:
        case |= {"early": False, "best": False, "schedule": case["schedule"] if case["schedule"] != "plateau" else None}
    return case


def hooks_of(case: dict[str, Any]) -> dict[str, Any]:
    custom: list[Any] = [Counts()]
    if case["ema"]:
        custom.append({"type": "EMAHook", "momentum": 0.3, "update_buffers": case["buffers"]})
    if case["early"]:
        custom.append({"type": "EarlyStoppingHook", "monitor": "score", "rule": "less", "patience": 2})
    checkpoint = {"max_keep_ckpts": case["keep"], "interval": case["interval"]}
    if case["saves_by_iter"] or not case["by_epoch"]:
        checkpoint |= {"by_epoch": False, "interval": case["interval"] + 1}
    if case["best"]:
        checkpoint |= {"save_best": "score", "rule": "less"}
    return {
        "custom_hooks": custom,
        "default_hooks": {"checkpoint": checkpoint, "logger": {"interval": case["log_every"]}},
    }


class Killed(BaseException):
    """In place of a SIGKILL, which would end this process."""


def train(
    case: dict[str, Any], folder: Path, told: dict[str, Any], moment: Any = None, *, kills: bool = False, **options: Any
) -> None:
    """Train a case, and tell what is seen; a stop, or a kill, comes at `moment`."""
    session = Session(
        folder, randomness={"seed": case["seed"]}, log_level="CRITICAL", accumulative_counts=case["window"],
        accumulate_across_epochs=case["across"],
        clip_grad={"max_norm": 0.5} if case["clip"] else None, **hooks_of(case), **options,
    )  # fmt: skip
    names = ["a", "b"] if case["several"] else ["a"]
    models = {name: Net(case["dropout"]) for name in names}
    own = {name: getattr(torch.optim, case["optimizer"])(models[name].parameters(), lr=0.02) for name in names}
    make = SCHEDULES[case["type"]]
    if case["schedule"] == "plateau":
        make = lambda of: lr_scheduler.ReduceLROnPlateau(of, factor=0.5, patience=0)  # noqa: E731
    schedules = [make(one) for one in own.values()] if case["schedule"] else []
    weighted = WeightedRandomSampler([1.0] * case["size"], case["size"])
    order = {"sampler": weighted} if case["weighted"] else {"shuffle": case["shuffle"]}
    how = {"batch_size": case["batch"], "num_workers": case["workers"], "drop_last": case["drop_last"]}
    loader = DataLoader(Samples(case["size"], case["draws"]), **how, **order)
    given = (models, own) if case["several"] else (models["a"], own["a"])
    model, wrapper, batches = session.prepare(*given, loader, schedulers=schedules)
    parts = [model[name] for name in names] if case["several"] else [model]
    held_out = session.prepare_evaluation(DataLoader(Samples(9, case["draws"]), batch_size=4))
    epoch = 0

    def at(*place: Any) -> None:
        told["moments"].append(place)
        if place == moment and kills:
            raise Killed
        if place == moment:
            session.run.agreement.ask("a stop")

    def validate(tag: str) -> float:
        score = 0.0
        model.eval()
        with torch.no_grad():
            for number, (x, y, _) in enumerate(held_out):
                at("validation", tag, session.iter, number)
                score += sum(session.gather((part(x) - y).square()).sum().item() for part in parts) + random.random()
        model.train()
        told["val"][tag, epoch if tag in ("begin", "end", "end again") else session.iter] = score
        at("validated", tag, session.iter)
        session.log_metrics(score=score)
        return score

    def change(tag: str) -> None:
        for one in own.values():
            one.param_groups[0]["weight_decay"] += 0.01 * (case["decay"] == tag)
        is_update = all(wrapper[n].should_update() for n in names) if case["several"] else session.is_update
        if (tag == case["schedule"] or (case["schedule"] == "mixed" and tag in ("step", "first"))) and (
            tag != "step" or is_update
        ):
            for one in schedules:
                one.step()

    def step(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> None:
        at("step", session.iter)
        if "before step" in case["val"] and session.iter % case["every"] == 0:
            validate("before step")
        losses = [
            (part(x) - y).square().mean() * (1 + 0.1 * random.random() + 0.1 * np.random.rand()) for part in parts
        ]
        for name, loss in zip(names, losses, strict=True):
            wrapper[name].update_params(loss) if case["several"] else session.step(loss)
        session.log(drawn=torch.rand(()), iteration=session.iter)
        rates = [[group["lr"], group["weight_decay"]] for one in own.values() for group in one.param_groups]
        told["train"].append((session.iter, epoch, index.tolist(), [loss.item() for loss in losses], rates))
        if "inner" in case["val"] and (session.iter + 1) % case["every"] == 0:
            validate("inner")
        change("step")
        if case["save"] == "inner" and session.iter % 3 == 1:
            session.save(f"asked_{session.iter}")
        if case["stop_at"] == session.iter:
            session.stop()
        at("stepped", session.iter)

    for batch in [] if case["by_epoch"] else session.iterations(2 * case["epochs"] + 3):
        step(*batch)
    for epoch in session.epochs(case["epochs"]) if case["by_epoch"] else []:
        if epoch:
            change("begin")
        at("begin", epoch)
        if "begin" in case["val"]:
            validate("begin")
        for batch in batches:
            step(*batch)
            if session.batch_idx == case["break"]:
                break
        at("rest", epoch)
        change("first")
        if case["save"] == "rest":
            session.save(f"asked_rest_{epoch}")
        scores = [validate(tag) for tag in ("end", "end again") if tag in case["val"]]
        for one in schedules if case["schedule"] == "plateau" else []:
            one.step(scores[-1] if scores else 1.0)
        change("last")
        if case["save"] == "end":
            session.save(f"asked_end_{epoch}")
        at("end", epoch)
    states = [one.state_dict() for one in schedules]
    hooks = {type(one).__name__: one for one in session.run.hooks}
    averages = [one.tolist() for one in hooks["EMAHook"].ema_model.parameters()] if case["ema"] else None
    told["left"] = {
        "model": plain(model.state_dict()), "optimizers": plain([one.state_dict() for one in own.values()]),
        "schedules": plain([{k: v for k, v in one.items() if k != "lr_lambdas"} for one in states]), "ema": averages,
        "random": plain(random_state()), "at": (session.iter, session.epoch), "counts": hooks["Counts"].counts,
        "best": getattr(session.best_checkpoint, "name", None),
    }  # fmt: skip


def plain(value: Any) -> Any:
    """Return a value in which each difference shows."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def left_in(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Return the records, each once, and the names of the checkpoints that the loop or a hook has asked for."""
    lines = [line for path in sorted(folder.glob("*/metrics.jsonl")) for line in path.read_text().splitlines()]
    modes = ("val", "train", "epoch") if case["log_every"] == 1 else ("val",)  # a stop makes a record of its own
    records = [{k: v for k, v in one.items() if k not in MEASURED} for one in map(json.loads, lines)]
    names = {path.name for path in folder.glob("*/*") if is_checkpoint(path)}
    regular = sorted(name for name in names if name.startswith(("asked_", "epoch_") if case["keep"] < 0 else "asked_"))
    return {
        "records": sorted(json.dumps(one) for one in records if one["mode"] in modes and one["iter"]),
        "checkpoints": regular,
    }


def differences(seed: int, folder: Path, *, kills: bool = False) -> Iterator[str]:
    """Train a case with and without stops, or kills; yield how it differs."""
    case, draw = drawn(seed), random.Random(seed + 1)
    if kills:  # what has been trained since the last checkpoint is trained again; a window that is open is lost
        # What is saved within an iteration lacks the rest of it.
        case |= {"across": False, "window": 1, "save": case["save"] if case["save"] != "inner" else None}
        case["val"] = [one for one in case["val"] if one in ("begin", "end", "end again") or not case["best"]]
        case |= {"break": None if case["saves_by_iter"] else case["break"], "stop_at": None}
    whole: dict[str, Any] = {"train": [], "val": {}, "moments": []}
    train(case, folder / "whole", whole)
    kind = draw.choice(sorted({one[0] for one in whole["moments"]}))  # rare ones as often as the steps
    moments = [draw.choice([one for one in whole["moments"] if one[0] == kind])]
    moments += [draw.choice(whole["moments"])] * (draw.random() < 0.4)
    told: dict[str, Any] = {"train": [], "val": {}, "moments": []}
    for number, moment in enumerate([*moments, None]):
        try:
            train(case, folder / "work", told, moment, kills=kills, resume=number > 0)
            break
        except (Preempted, Killed):
            pass
    whole["left"] |= left_in(folder / "whole", case)
    told["left"] |= left_in(folder / "work", case)
    # A validation before the batches runs again in an epoch that goes on: it sees other weights, and is not recorded.
    for one in (whole, told):
        one["left"]["val"] = {key: value for key, value in one["val"].items() if key[0] != "begin"}
        one["left"]["train"] = [*{step[0]: step for step in one["train"]}.values()] if kills else one["train"]
        one["left"]["records"] = sorted({*one["left"]["records"]}) if kills else one["left"]["records"]
    for name, value in whole["left"].items():
        if told["left"][name] != value:
            yield f"{name} after stops at {moments}, of {case}:\n  {told['left'][name]}\n  {value}"[:3000]


def all_differences(seed: int, folder: Path) -> Iterator[str]:
    """Train a case with stops, and with kills; yield how they differ from the whole."""
    yield from differences(seed, folder / "stops")
    yield from differences(seed, folder / "kills", kills=True)


if __name__ == "__main__":
    sys.exit(main(__doc__, all_differences))
