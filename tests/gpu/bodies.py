"""Training on one rank, on whatever device there is: what a machine with an accelerator is to be tried with."""

from __future__ import annotations

import json
import pickle
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lockstep.checkpoint import load_state, save_state
from lockstep.device import get_device
from lockstep.hooks import Hook, MemorySnapshotHook, MFUHook
from lockstep.hooks.flops import StepFlops
from lockstep.model.full_params import gather_full
from lockstep.runner import Runner
from lockstep.strategy import build_strategy

from ..strategy.heads import Heads
from ..strategy.transformer import ADAMW, BATCH, INPUTS, TARGETS, Losses, optim_config, seeded, train_by_hand

# What is changed of a run in full precision on a single device, and by how much its losses may then differ from those
# of a plain loop on a CPU: because sums are made in another order, or because numbers are rounded to 8 bits.
EXACT, HALF = 2e-4, 0.1
CLIPPING = optim_config(1, True)
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "single": ({"strategy": "single"}, EXACT),
    "ddp": ({"strategy": "ddp"}, EXACT),
    "fsdp": ({"strategy": "fsdp"}, EXACT),
    "fsdp-offloaded": ({"strategy": {"type": "fsdp", "cpu_offload": True}}, EXACT),
    "tensor-parallel": ({"strategy": {"type": "fsdp", "tensor_parallel": 1}}, EXACT),
    "fsdp-bf16": ({"strategy": {"type": "fsdp", "mixed_precision": "bf16"}}, HALF),
    "autocast-bf16": ({"optim_wrapper": {**CLIPPING, "type": "AmpOptimWrapper", "dtype": "bfloat16"}}, HALF),
    "unfused": ({"optim_wrapper": {**CLIPPING, "optimizer": {"type": "AdamW", **ADAMW, "fused": False}}}, EXACT),
    "compiled": ({"compile": {"backend": "aot_eager"}}, EXACT),
    "fsdp-compiled": ({"strategy": "fsdp", "compile": {"backend": "aot_eager"}}, EXACT),
    "accumulating": ({"strategy": "fsdp", "optim_wrapper": optim_config(4, True)}, EXACT),
}


class Norms(Hook):
    """Remembers the norm of each update's gradients."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.optim_wrapper.should_update():
            self.seen.append(runner.optim_wrapper.grad_norm.item())


def train(case: str, work_dir: Path, compile_: Any = None) -> tuple[str, list[float], list[float]]:
    """Return the kind of device, the losses and the gradient norms of a run."""
    # torch's own, while it compiles, and for norms under autocast.
    warnings.filterwarnings(
        "ignore", message=r"The \.grad attribute of a Tensor|Mismatch dtype between input and weight"
    )
    torch._dynamo.reset()
    changes = CASES[case][0] | ({} if compile_ is None else {"compile": compile_})
    counts = changes.get("optim_wrapper", {}).get("accumulative_counts", 1)
    losses, norms = Losses(), Norms()
    runner = Runner(
        seeded(Heads),
        work_dir,
        train_dataloader={
            "dataset": TensorDataset(INPUTS, TARGETS), "batch_size": BATCH // counts, "shuffle": False,
        },
        train_cfg={"max_epochs": 1},
        custom_hooks=[losses, norms],
        **{"optim_wrapper": CLIPPING, **changes},
    )  # fmt: skip
    model = runner.train()
    return next(model.parameters()).device.type if "offload" not in case else get_device(), losses.seen, norms.seen


def train_on_cpu(case: str) -> tuple[list[float], list[float]]:
    """Return the losses and gradient norms of a plain loop on the CPU."""
    counts = CASES[case][0].get("optim_wrapper", {}).get("accumulative_counts", 1)
    return train_by_hand(counts, True, Heads)


def save(strategy: str, path: Path) -> tuple[dict[str, Tensor], float]:
    """Save a model on this device; return its weights on the CPU, and a loss."""
    made = build_strategy(strategy)
    model, _ = made.prepare(seeded(Heads), optim_config())
    state = made.model_state()
    save_state(path, {"model": state}, {})
    weights = {name: gather_full(value.detach()).cpu() for name, value in state.items()}
    return weights, model(INPUTS[:4].to(get_device()), TARGETS[:4].to(get_device())).item()


def load(strategy: str, path: Path) -> tuple[dict[str, Tensor], float]:
    """Load a model on this device; return its weights on the CPU, and a loss."""
    torch.manual_seed(99)  # other weights
    made = build_strategy(strategy)
    model, _ = made.prepare(Heads(), optim_config())
    made.load_state(load_state(path, {"model": made.model_state()})["model"])
    weights = {name: gather_full(value.detach()).cpu() for name, value in made.model_state().items()}
    return weights, model(INPUTS[:4].to(get_device()), TARGETS[:4].to(get_device())).item()


def save_from_cpu(path: Path) -> tuple[dict[str, Tensor], float]:
    """Save a model that lies on the CPU, whatever else there is."""
    model = seeded(Heads)
    save_state(path, {"model": model.state_dict()}, {})
    return model.state_dict(), model(INPUTS[:4], TARGETS[:4]).item()


def load_to_cpu(path: Path) -> tuple[dict[str, Tensor], float]:
    """Load a model that lies on the CPU, whatever else there is."""
    model = Heads()
    model.load_state_dict(load_state(path, {"model": model.state_dict()})["model"])
    return model.state_dict(), model(INPUTS[:4], TARGETS[:4]).item()


def five_iterations(work_dir: Path, *hooks: Hook) -> Runner:
    """Return a runner with these hooks."""
    return Runner(
        seeded(Heads),
        work_dir,
        train_dataloader={"dataset": TensorDataset(INPUTS, TARGETS), "batch_size": BATCH},
        train_cfg={"max_iters": 5},
        optim_wrapper=optim_config(),
        custom_hooks=list(hooks),
    )


def snapshots(work_dir: Path) -> tuple[list[str], dict[str, Any]]:
    """Run out of memory in the fourth iteration; return the names of the snapshots, and the content of the last."""

    class Greedy(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
            if runner.iter == 3:
                torch.empty(2**50, device=get_device())

    runner = five_iterations(work_dir, MemorySnapshotHook(iterations=[2]), Greedy())
    with suppress(torch.OutOfMemoryError):
        runner.train()
    files = sorted((runner.run_dir / "memory").iterdir())
    return [path.name for path in files], pickle.loads(files[-1].read_bytes())


def utilization(work_dir: Path) -> tuple[float, dict[str, Any]]:
    """Return the FLOPs of a sample, and the last record of a run with MFU."""
    runner = five_iterations(work_dir, MFUHook(peak_flops="measure"))
    runner.train()
    record = json.loads((runner.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    return record["flops_per_second"] / record["samples_per_second"], record


def flops_on_cpu() -> float:
    """Return the FLOPs of a sample, counted on the CPU."""
    with StepFlops() as counted:
        seeded(Heads)(INPUTS[:BATCH], TARGETS[:BATCH]).backward()
    return counted.total / BATCH
