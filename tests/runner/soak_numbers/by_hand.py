"""A case trained by hand: plain torch, in one process, on the global batches; nothing of lockstep's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler

from .cases import OPTIMIZERS, LossOf, data_of, model_of, parts_of_loss


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
