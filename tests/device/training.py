"""Short trainings, on whatever device there is."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep import Runner, Session
from lockstep.hooks import EMAHook, Hook
from lockstep.model import ExponentialMovingAverage
from lockstep.model.fsdp.parameters import Materializer
from lockstep.model.shards import digests, gather_full
from lockstep.model.tensor_parallel import _differences, _TrialRun
from lockstep.optim.amp import LossScaler
from lockstep.strategy.native import _moved

EPOCH = 6  # steps on two ranks
PLAN = {"up": "colwise", "down": "rowwise"}
TENSOR_PARALLEL = {"type": "FSDPStrategy", "tensor_parallel": {"degree": 2, "plan": PLAN}}
BOTH = ("float32", "bfloat16")
# By number of ranks: names, strategies, and in which precisions each is trained.
STRATEGIES: dict[int, dict[str, tuple[Any, tuple[str, ...]]]] = {
    2: {"ddp": ("ddp", BOTH), "fsdp": ("fsdp", BOTH), "tp": (TENSOR_PARALLEL, BOTH)},
    4: {
        "hsdp": ({"type": "FSDPStrategy", "device_mesh": (2, 2)}, BOTH),
        "tp of two groups": (TENSOR_PARALLEL, ("float32",)),
    },
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(2, 8), nn.Linear(8, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.last(self.down(self.up(x).tanh())) - y).square().mean()}


class Losses(Hook):
    """Remembers the loss of each step."""

    priority = "LOWEST"

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.seen.append(outputs["loss"].detach().clone())


def loader() -> dict[str, Any]:
    data = TensorDataset(torch.arange(16.0 * EPOCH).view(-1, 2).sin(), torch.ones(8 * EPOCH, 1))
    return {"dataset": data, "batch_size": 4, "shuffle": False}


def train(folder: Path, strategy: Any, precision: str) -> dict[str, Any]:
    """Train for an epoch, save while the training goes on, and train for another one from what was saved.

    Returns the kind of device, this rank's losses, all weights and their averages at the end, and what was recorded.
    """
    losses: list[float] = []
    for epochs in (1, 2):
        torch.manual_seed(epochs)
        seen, average = Losses(), EMAHook(momentum=0.1)
        optim_wrapper: dict[str, Any] = {
            "optimizer": {"type": "AdamW", "lr": 0.05},
            "clip_grad": {"max_norm": 1.0},
            "accumulative_counts": 2,
        }
        if precision != "float32":
            optim_wrapper |= {"type": "AmpOptimWrapper", "dtype": precision}
        runner = Runner(
            Net(),
            folder,
            train_dataloader=loader(),
            train_cfg={"max_epochs": epochs},
            optim_wrapper=optim_wrapper,
            strategy=strategy,
            default_hooks={"checkpoint": {"interval": 1, "async_save": True}, "logger": {"interval": 3}},
            custom_hooks=[seen, average, {"type": "ReplicaCheckHook", "interval": 3}],
            resume=epochs == 2,
            log_level="ERROR",
        )
        model = runner.train()
        losses += [x.item() for x in seen.seen]
    run_dir = max(folder.glob("*/metrics.jsonl"))
    records = [json.loads(line) for line in run_dir.read_text().splitlines()]
    return {
        "device": seen.seen[0].device.type,
        "losses": losses,
        "weights": _values(model),
        "average": _values(average.ema_model.module),
        "records": [[record["iter"], record["loss"]] for record in records if record.get("mode") == "train"],
    }


def _values(model: nn.Module) -> list[float]:
    whole = [gather_full(parameter.detach()).cpu() for parameter in model.parameters()]
    return [value for one in whole for value in one.flatten().tolist()]


def by_hand(folder: Path, strategy: str) -> list[float]:
    """Return the losses of a loop over a Session."""
    torch.manual_seed(0)
    model = Net()
    session = Session(folder, strategy=strategy, log_level="ERROR")
    model, _, batches = session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05), loader())
    losses = []
    for _ in session.epochs(1):
        for x, y in batches:
            loss = model(x, y)["loss"]
            session.step(loss)
            losses.append(loss.detach().clone())
    return [float(loss) for loss in losses]


def averaged(device: str) -> list[float]:
    """Return an average that is kept on the CPU, of a layer on a device whose weights grow."""
    layer = nn.Linear(2, 1).to(device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(1.0)
    average = ExponentialMovingAverage(layer, momentum=0.5, device="cpu")
    for _ in range(3):
        average.update_parameters(layer)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(1.0)
    return [value for one in average.module.parameters() for value in one.detach().flatten().tolist()]


def offloaded(device: str) -> list[float]:
    """Return gradients in the memory of the host, of losses that a device scales, as they are unscaled."""
    shard = nn.Parameter(torch.zeros(2))
    optimizer, scaler = torch.optim.SGD([shard]), LossScaler(device, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    shard.grad = torch.full((2,), 8.0)
    scaler.unscale_(optimizer)
    return [*shard.grad.tolist(), float(scaler.has_skipped)]


def digested(device: str) -> list[int]:
    """Return digests of a tensor of the host and of one of a device."""
    return digests([torch.arange(3.0), torch.arange(4.0).to(device)]).tolist()  # type: ignore[no-any-return]


def trial(device: str) -> list[float]:
    """Return how far a copy of a layer is from the layer, in the way in which plans are tried."""
    torch.manual_seed(0)
    layer = nn.Linear(2, 3)
    inputs = (torch.ones(4, 2, device=device),), {}
    runs = [_TrialRun(copy.deepcopy(layer).to(device), inputs) for _ in range(2)]
    return _differences(*runs).tolist()


def moved(device: str) -> list[str]:
    """Return where FSDP puts layers before it sends values: one that is on the first device, one that it ignores."""
    layers = nn.Sequential(nn.BatchNorm1d(2).to(f"{device}:0"), nn.BatchNorm1d(2))
    Materializer(torch.device(device), None, None, [layers[1]]).materialize(layers)
    return [str(tensor.device) for tensor in (*layers.parameters(), *layers.buffers())]


def hooked(device: str) -> list[float]:
    """Return the gradient of a parameter whose hook doubles it, before and after the hook is removed.

    torch replaces parameters that go to a device whose tensors are of another kind than the CPU's.
    """
    layer, seen = nn.Linear(1, 1, bias=False), []
    handle = layer.weight.register_hook(lambda grad: 2 * grad)
    layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.item()))
    _moved(layer, torch.device(device))
    for is_hooked in (True, False):
        layer(torch.ones(1, 1, device=device)).backward()
        if is_hooked:
            handle.remove()
        layer.weight.grad = None
    return seen


def train_all(folder: Path, size: int) -> dict[str, Any]:
    """Return what each training of as many ranks gives, and on two ranks each loop by hand."""
    found: dict[str, Any] = {}
    for name, (strategy, precisions) in STRATEGIES[size].items():
        for precision in precisions:
            found[f"{name}, {precision}"] = train(folder / f"{name}_{precision}", strategy, precision)
    if size == 2:
        for name in ("ddp", "fsdp"):
            found[f"{name}, by hand"] = by_hand(folder / f"{name}_by_hand", name)
    return found
