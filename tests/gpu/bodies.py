"""Trainings on whatever device there is, on any number of ranks: what an accelerator is to be tried with."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Session, dist
from lockstep.checkpoint import load_state, save_state
from lockstep.device import get_device
from lockstep.diagnostics.mfu import StepFlops
from lockstep.dist import get_world_size, init_dist
from lockstep.hooks import Hook, MemorySnapshotHook, MFUHook
from lockstep.model.shards import gather_full
from lockstep.runner import Runner
from lockstep.strategy import build_strategy
from lockstep.weights import load_checkpoint

from ..strategy.heads import Heads
from ..strategy.transformer import (
    ADAMW,
    BATCH,
    INPUTS,
    MAX_NORM,
    TARGETS,
    Losses,
    mean_over_ranks,
    optim_config,
    seeded,
    train_by_hand,
)
from .guard import NoSyncs, set_mode

# What is changed of a run in full precision, and by how much its losses may then differ from those of a plain loop on a
# CPU: because sums are made in another order, or because numbers are rounded to 8 bits.
EXACT, HALF = 2e-4, 0.1
CLIPPING = optim_config(1, True)
AMP = {name: {**CLIPPING, "type": "AmpOptimWrapper", "dtype": name} for name in ("bfloat16", "float16")}
TRACED = {"backend": "aot_eager"}
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "ddp": ({"strategy": "ddp"}, EXACT),
    "ddp-pinned": ({"strategy": "ddp", "pin_memory": True}, EXACT),
    "ddp-prefetching": ({"strategy": "ddp", "prefetch_to_device": True}, EXACT),
    "ddp-bf16": ({"strategy": "ddp", "optim_wrapper": AMP["bfloat16"]}, HALF),
    "ddp-fp16": ({"strategy": "ddp", "optim_wrapper": AMP["float16"]}, HALF),
    "ddp-accumulating": ({"strategy": "ddp", "optim_wrapper": optim_config(4, True)}, EXACT),
    "ddp-unfused": (
        {"strategy": "ddp", "optim_wrapper": {**CLIPPING, "optimizer": {"type": "AdamW", **ADAMW, "fused": False}}},
        EXACT,
    ),
    "ddp-compiled": ({"strategy": "ddp", "compile": TRACED}, EXACT),
    "fsdp": ({"strategy": "fsdp"}, EXACT),
    "fsdp-pinned": ({"strategy": "fsdp", "pin_memory": True}, EXACT),
    "fsdp-prefetching": ({"strategy": "fsdp", "prefetch_to_device": True}, EXACT),
    "fsdp-offloaded": ({"strategy": {"type": "fsdp", "cpu_offload": True}}, EXACT),
    "fsdp-bf16": ({"strategy": {"type": "fsdp", "mixed_precision": "bf16"}}, HALF),
    "fsdp-amp-bf16": ({"strategy": "fsdp", "optim_wrapper": AMP["bfloat16"]}, HALF),
    "fsdp-amp-fp16": ({"strategy": "fsdp", "optim_wrapper": AMP["float16"]}, HALF),
    "fsdp-accumulating": ({"strategy": "fsdp", "optim_wrapper": optim_config(4, True)}, EXACT),
    "fsdp-compiled": ({"strategy": "fsdp", "compile": TRACED}, EXACT),
}
# For one rank alone.
SINGLE: dict[str, tuple[dict[str, Any], float]] = {
    "single": ({"strategy": "single"}, EXACT),
    "single-pinned": ({"strategy": "single", "pin_memory": True}, EXACT),
    "single-bf16": ({"strategy": "single", "optim_wrapper": AMP["bfloat16"]}, HALF),
    "single-fp16": ({"strategy": "single", "optim_wrapper": AMP["float16"]}, HALF),
    "single-accumulating": ({"strategy": "single", "optim_wrapper": optim_config(4, True)}, EXACT),
    "single-compiled": ({"strategy": "single", "compile": TRACED}, EXACT),
}
# For so many ranks alone, of which so many see samples of their own.
MESHES: dict[str, tuple[int, int, Any]] = {
    "tensor-parallel": (2, 1, {"type": "fsdp", "tensor_parallel": 2}),
    "tensor-parallel in two replicas": (4, 2, {"type": "fsdp", "tensor_parallel": 2}),
    "hybrid": (4, 4, {"type": "fsdp", "device_mesh": (2, 2)}),
}
# Where the packages are: DeepSpeed by stage of ZeRO, ColossalAI by its plugin. DeepSpeed would leave every parameter of
# a model as small as this one whole.
SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0}
PINNED = {"device": "cpu", "pin_memory": True}
STAGES: dict[str, Any] = {
    "zero1": {"type": "deepspeed"},
    "zero2": {"type": "deepspeed", "zero_optimization": {"stage": 2}},
    "zero3": {"type": "deepspeed", "zero_optimization": SHARDED},
}
DEEPSPEED: dict[str, tuple[dict[str, Any], float]] = {
    **{name: ({"strategy": strategy}, EXACT) for name, strategy in STAGES.items()},
    "zero2-accumulating": ({"strategy": STAGES["zero2"], "optim_wrapper": optim_config(4, True)}, EXACT),
    "zero3-accumulating": ({"strategy": STAGES["zero3"], "optim_wrapper": optim_config(4, True)}, EXACT),
    "zero3-prefetching": ({"strategy": STAGES["zero3"], "prefetch_to_device": True}, EXACT),
    "zero1-bf16": ({"strategy": {**STAGES["zero1"], "bf16": True}}, HALF),
    "zero3-bf16": ({"strategy": {**STAGES["zero3"], "bf16": True}}, HALF),
    "zero1-offloaded": ({"strategy": {**STAGES["zero1"], "zero_optimization": {"offload_optimizer": PINNED}}}, EXACT),
    "zero3-offloaded": ({"strategy": {**STAGES["zero3"], "offload": True}}, EXACT),
}
# Not on a CPU. At DeepSpeed's own first scale, 2**16, it would leave out some updates.
FP16 = {"enabled": True, "initial_scale_power": 8}
DEEPSPEED_ON_DEVICE: dict[str, tuple[dict[str, Any], float]] = {
    f"{name}-fp16": ({"strategy": {**strategy, "fp16": FP16}}, HALF) for name, strategy in STAGES.items()
}
PLUGIN_ZERO2 = {"type": "colossalai", "stage": 2}
COLOSSALAI: dict[str, tuple[dict[str, Any], float]] = {
    "plugin-zero1": ({"strategy": "colossalai"}, EXACT),
    "plugin-zero2": ({"strategy": PLUGIN_ZERO2}, EXACT),
    "plugin-zero2-accumulating": ({"strategy": PLUGIN_ZERO2, "optim_wrapper": optim_config(4, True)}, EXACT),
}
# Of a run that goes on under another strategy, both.
STRATEGIES: dict[str, Any] = {
    **STAGES, "fsdp": "fsdp", "ddp": "ddp", "plugin-zero1": "colossalai", "plugin-zero2": PLUGIN_ZERO2
}  # fmt: skip
MOVES = {
    "deepspeed": [("zero1", "zero3"), ("zero3", "fsdp"), ("fsdp", "zero2"), ("zero3", "ddp")],
    "colossalai": [("plugin-zero1", "plugin-zero2"), ("plugin-zero2", "fsdp"), ("fsdp", "plugin-zero1")],
}
ALL = {**CASES, **SINGLE, **DEEPSPEED, **DEEPSPEED_ON_DEVICE, **COLOSSALAI}
# Compiled by torch's own backend; on a GPU, `reduce-overhead` records graphs.
TRANSLATED: dict[str, Any] = {
    "default": True,
    "reduce-overhead": {"mode": "reduce-overhead"},
}


class Norms(Hook):
    """Remembers the norm of each update's gradients."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.optim_wrapper.should_update():
            self.seen.append(runner.optim_wrapper.grad_norm.item())


def loader(batch: int, pin_memory: bool = False, shards: int | None = None) -> dict[str, Any]:
    return {
        "dataset": TensorDataset(INPUTS, TARGETS),
        "batch_size": batch // (shards or get_world_size()),
        "shuffle": False,
        "pin_memory": pin_memory and get_device() != "cpu",  # torch warns where there is nothing to pin it for
    }


def let_torch_warn() -> None:
    """Ignore torch's own warnings, while it compiles, and of norms under autocast."""
    warnings.filterwarnings(
        "ignore", message=r"The \.grad attribute of a Tensor|Mismatch dtype between input and weight"
    )
    warnings.filterwarnings("ignore", message=r".*torch\.jit\.script_method.* is deprecated")  # 2.11, of itself


def train(case: str, work_dir: Path, compile_: Any = None) -> tuple[str, list[float], list[float]]:
    """Return the kind of device, the losses of the global batches and the gradient norms of a run."""
    let_torch_warn()
    torch._dynamo.reset()
    changes = ALL[case][0] | ({} if compile_ is None else {"compile": compile_})
    counts = changes.get("optim_wrapper", {}).get("accumulative_counts", 1)
    losses, norms = Losses(), Norms()
    runner = Runner(
        seeded(Heads),
        work_dir,
        train_dataloader=loader(BATCH // counts, changes.pop("pin_memory", False)),
        train_cfg={"max_epochs": 1},
        custom_hooks=[losses, norms],
        **{"optim_wrapper": CLIPPING, **changes},
    )
    model = runner.train()
    kind = next(model.parameters()).device.type if "offload" not in case else get_device()
    return kind, mean_over_ranks(losses.seen), norms.seen


def train_on_mesh(case: str, work_dir: Path) -> tuple[str, list[float], list[float]]:
    """Return the kind of device, the losses of the global batches and the gradient norms of a run on a mesh."""
    _, shards, strategy = MESHES[case]
    losses, norms = Losses(), Norms()
    model = Runner(
        seeded(Heads),
        work_dir,
        train_dataloader=loader(BATCH, shards=shards),
        train_cfg={"max_epochs": 1},
        custom_hooks=[losses, norms],
        optim_wrapper=CLIPPING,
        strategy=strategy,
    ).train()
    return next(model.parameters()).device.type, mean_over_ranks(losses.seen), norms.seen


def train_translated(strategy: str, mode: str, work_dir: Path) -> tuple[str, list[float], list[float]]:
    """Train with torch's own compiler, in processes of its own, because it keeps some running."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work_dir / "cache")
    init_dist("pytorch")
    return train(strategy, work_dir, TRANSLATED[mode])


def train_on_cpu(case: str) -> tuple[list[float], list[float]]:
    """Return the losses and gradient norms of a plain loop in one process, on the CPU."""
    counts = ALL[case][0].get("optim_wrapper", {}).get("accumulative_counts", 1)
    return train_by_hand(counts, True, Heads)


def train_in_own_loop(strategy: str, amp: str | None, work_dir: Path) -> list[float]:
    """Return the losses of a loop by hand over a Session."""
    let_torch_warn()
    session = Session(work_dir, strategy=strategy, amp=amp, clip_grad={"max_norm": MAX_NORM})
    model = seeded(Heads)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    model, _, batches = session.prepare(model, optimizer, DataLoader(**loader(BATCH)))
    losses = []
    for _ in session.epochs(1):
        for inputs, targets in batches:
            loss = model(inputs, targets)
            session.step(loss)
            losses.append(loss.item())
    return mean_over_ranks(losses)


MOMENTUM = 0.1


def averaged(strategy: str, device: str | None, work_dir: Path) -> dict[str, Tensor]:
    """Return the averaged weights of a run, on the CPU; they are kept on `device`."""
    runner = Runner(
        seeded(Heads),
        work_dir,
        train_dataloader=loader(BATCH),
        train_cfg={"max_epochs": 1},
        optim_wrapper=CLIPPING,
        strategy=strategy,
        custom_hooks=[{"type": "EMAHook", "momentum": MOMENTUM, **({} if device is None else {"device": device})}],
    )
    runner.train()
    model = Heads()
    load_checkpoint(model, runner.run_dir / "epoch_1")
    return {name: value.detach() for name, value in model.named_parameters()}


def averaged_by_hand() -> dict[str, Tensor]:
    """Return the averaged weights of a plain loop, on the CPU."""
    model = seeded(Heads)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    average: dict[str, Tensor] = {}
    for inputs, targets in zip(INPUTS.split(BATCH), TARGETS.split(BATCH), strict=True):
        model(inputs, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            value = parameter.detach().clone()
            average[name] = torch.lerp(average.get(name, value), value, MOMENTUM)
    return average


def go_on(strategies: Sequence[Any], amp: str | None, work_dir: Path, async_save: bool) -> list[float]:
    """Return the losses of a run that stops in the middle of an epoch under one strategy, and goes on under another."""
    let_torch_warn()
    seen = []
    for strategy, end, resume in zip(strategies, (7, len(INPUTS) // BATCH), (False, True), strict=True):
        losses = Losses()
        Runner(
            seeded(Heads),
            work_dir,
            train_dataloader=loader(BATCH),
            train_cfg={"by_epoch": False, "max_iters": end},
            optim_wrapper=CLIPPING if amp is None else AMP[amp],
            strategy=strategy,
            default_hooks={"checkpoint": {"interval": 3, "async_save": async_save}},
            custom_hooks=[losses],
            resume=resume,
        ).train()
        seen += losses.seen
    return mean_over_ranks(seen)


def train_without_syncs(case: str, work_dir: Path) -> list[float]:
    """Return the recorded losses of a run in which some iterations between two records may not wait for the device."""
    let_torch_warn()
    changes = dict(GUARDED[case])
    hooks = changes.pop("custom_hooks", [])
    counts = changes.get("optim_wrapper", {}).get("accumulative_counts", 1)
    runner = Runner(
        seeded(Heads),
        work_dir,
        train_dataloader=loader(BATCH // counts, pin_memory=True),
        train_cfg={"max_epochs": 1},
        custom_hooks=[*hooks, NoSyncs(12, 19)],
        **{"optim_wrapper": CLIPPING, **changes},
    )
    try:
        runner.train()
    finally:
        set_mode("default")
    return [record["loss"] for record in records_of(runner)]


GUARDED: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "ddp, prefetching": {"strategy": "ddp", "prefetch_to_device": True},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, prefetching": {"strategy": "fsdp", "prefetch_to_device": True},
    "ddp, bf16": {"strategy": "ddp", "optim_wrapper": AMP["bfloat16"]},
    "ddp, fp16": {"strategy": "ddp", "optim_wrapper": AMP["float16"]},
    "fsdp, fp16": {"strategy": "fsdp", "optim_wrapper": AMP["float16"]},
    "ddp, accumulating": {"strategy": "ddp", "optim_wrapper": optim_config(2, True)},
    "ddp, averaging": {"strategy": "ddp", "custom_hooks": [{"type": "EMAHook", "momentum": MOMENTUM}]},
    "fsdp, averaging": {"strategy": "fsdp", "custom_hooks": [{"type": "EMAHook", "momentum": MOMENTUM}]},
}


def records_of(runner: Runner) -> list[dict[str, Any]]:
    lines = (runner.run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if "loss" in (record := json.loads(line))]


def described(strategy: str, work_dir: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return what a run says of this rank's device, its last record, and the bytes of its weights."""
    runner = Runner(
        seeded(Heads),
        work_dir,
        train_dataloader=loader(BATCH),
        train_cfg={"max_epochs": 1},
        optim_wrapper=CLIPPING,
        strategy=strategy,
    )
    runner.train()
    environment = json.loads((runner.run_dir / "environment.json").read_text())
    size = sum(x.numel() * x.element_size() for x in Heads().parameters())
    return environment["ranks"][dist.get_rank()], records_of(runner)[-1], size


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
    runner = five_iterations(work_dir, MFUHook(peak_flops=1e15))
    runner.train()
    record = json.loads((runner.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    return record["flops_per_second"] / record["samples_per_second"], record


def flops_on_cpu() -> float:
    """Return the FLOPs of a sample, counted on the CPU."""
    with StepFlops() as counted:
        seeded(Heads)(INPUTS[:BATCH], TARGETS[:BATCH]).backward()
    return counted.total / BATCH
