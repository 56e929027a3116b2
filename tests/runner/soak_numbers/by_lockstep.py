"""A case trained by a Runner or a Session, on one rank of several."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler

from lockstep import Runner, Session
from lockstep.dist import get_rank, get_world_size
from lockstep.evaluator import BaseMetric
from lockstep.hooks import Hook
from lockstep.model import unwrap_model

from .by_hand import is_due, lists_of, monitored, optimizer_of, order_of, torchs
from .cases import OPTIMIZERS, Gan, LossOf, Net, data_of, model_of, parts_of_loss


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
