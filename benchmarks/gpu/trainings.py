"""One training by hand, and by lockstep, accelerate and Fabric, each as its documentation shows, in bfloat16."""

from __future__ import annotations

import gc
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.gpu.models import Repeated, Workload
from benchmarks.gpu.watch import Watch
from lockstep import Runner, Session, dist
from lockstep.device import get_device
from lockstep.hooks import Hook
from lockstep.runner import TrainRun

STRATEGIES = ("ddp", "fsdp")
_LR = 1e-4


@dataclass(frozen=True)
class Result:
    """What a training took, over all ranks.

    Attributes:
        model: what was trained.
        strategy: `ddp` or `fsdp`.
        by: the framework.
        ranks: number of ranks.
        unit: what `rate` counts.
        rate: tokens or images of all ranks per second, the median of the rounds; None if the training failed.
        step_seconds: seconds of a step, likewise.
        peak_bytes: the most memory that tensors took on a device, of all ranks.
        waits: how often the host waited for the device in ten steps, on the rank that waited most.
        where: the line of the first of these waits.
        error: why the training failed.
    """

    model: str
    strategy: str
    by: str
    ranks: int
    unit: str
    rate: float | None = None
    step_seconds: float | None = None
    peak_bytes: int | None = None
    waits: int | None = None
    where: str = ""
    error: str = ""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


Training = Callable[[Workload, str, DataLoader[tuple[Tensor, Tensor]], Watch], None]


def results(workload: Workload, strategy: str, rounds: int, small: bool) -> Iterator[Result]:
    """Train with everything in turn, in random order, some rounds. **Collective**."""
    watches: dict[str, list[Watch]] = {name: [] for name in TRAININGS}
    errors: dict[str, str] = {}
    for number in range(rounds):
        for name in Random(number).sample(list(TRAININGS), len(TRAININGS)):
            if name in errors:
                continue
            watch = Watch(small)
            try:
                TRAININGS[name](workload, strategy, loader_of(workload, watch.steps), watch)
                watches[name].append(watch)
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            finally:
                watch.close()
            gc.collect()
            if get_device() != "cpu":
                torch.accelerator.empty_cache()
    for name, seen in watches.items():
        own = Result(workload.name, strategy, name, dist.get_world_size(), workload.unit, error=errors.get(name, ""))
        yield own if own.error else _over_ranks(own, workload, seen)


def _over_ranks(own: Result, workload: Workload, watches: list[Watch]) -> Result:
    """Return the result of the slowest rank, and of the one that waited most."""
    last = watches[-1]
    everyone: list[Any] = [None] * own.ranks
    torch_dist.all_gather_object(
        everyone, ([watch.seconds for watch in watches], last.peak_bytes, last.waits, last.where)
    )
    times, peaks, waits, where = zip(*everyone, strict=True)
    seconds = median(max(same_round) for same_round in zip(*times, strict=True))
    return Result(
        own.model, own.strategy, own.by, own.ranks, own.unit,
        rate=workload.batch * workload.per_sample * own.ranks / seconds,
        step_seconds=seconds,
        peak_bytes=None if None in peaks else max(peaks),
        waits=None if None in waits else max(waits),
        where=next(filter(None, where), ""),
    )  # fmt: skip


def loader_of(workload: Workload, steps: int) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return this rank's batches: fetched by workers, and pinned, where there is a device to copy them to."""
    data = Repeated(workload, steps * workload.batch * dist.get_world_size())
    on_device = get_device() != "cpu"
    return DataLoader(
        data, workload.batch, sampler=DistributedSampler(data, shuffle=True, seed=0), drop_last=True,
        num_workers=4 if on_device else 0, pin_memory=on_device,
    )  # fmt: skip


def _fused() -> bool:
    return get_device() != "cpu"


def _autocast(workload: Workload, strategy: str) -> bool:
    return strategy == "ddp" or not workload.is_cast


def by_hand(workload: Workload, strategy: str, loader: DataLoader[Any], watch: Watch) -> None:
    device = torch.device(get_device())
    model = workload.make().to(device)
    if strategy == "ddp":
        # As under lockstep: else BatchNorm's buffers would be sent at each step, on several GPUs.
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    else:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if workload.is_cast else MixedPrecisionPolicy()
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, fused=_fused())
    model.train()
    for inputs, targets in loader:
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16) if _autocast(workload, strategy) else nullcontext():
            loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step()


class _Steps(Hook):
    # After the hooks that work at each step, before the one that saves at the end of training.
    priority = 80

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def after_train_iter(
        self, runner: TrainRun, batch_idx: int, data_batch: object = None, outputs: object = None
    ) -> None:
        self.watch.step()


def _strategy(workload: Workload, strategy: str) -> Any:
    return {"type": "fsdp", "mixed_precision": "bf16"} if strategy == "fsdp" and workload.is_cast else strategy


def with_runner(
    workload: Workload, strategy: str, loader: DataLoader[Any], watch: Watch, prefetches: bool = False
) -> None:
    wrapper: dict[str, Any] = {"optimizer": {"type": "AdamW", "lr": _LR}}
    if _autocast(workload, strategy):
        wrapper |= {"type": "AmpOptimWrapper", "dtype": "bfloat16"}
    # What it prints is part of its work, but would drown the table.
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        Runner(
            workload.make, folder, train_dataloader=loader, optim_wrapper=wrapper,
            train_cfg={"by_epoch": False, "max_iters": watch.steps}, strategy=_strategy(workload, strategy),
            custom_hooks=[_Steps(watch)], default_hooks={"checkpoint": None}, prefetch_to_device=prefetches,
        ).train()  # fmt: skip


def with_session(workload: Workload, strategy: str, loader: DataLoader[Any], watch: Watch) -> None:
    amp = "bfloat16" if _autocast(workload, strategy) else None
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        session = Session(folder, strategy=_strategy(workload, strategy), amp=amp, default_hooks={"checkpoint": None})
        model = workload.make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, fused=_fused())
        model, _, loader = session.prepare(model, optimizer, loader)
        for _ in session.epochs(1):
            for inputs, targets in loader:
                session.step(model(inputs, targets))
                watch.step()


def with_accelerate(workload: Workload, strategy: str, loader: DataLoader[Any], watch: Watch) -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)  # it keeps the choices of the first one
    plugin = None
    if strategy == "fsdp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=_units(workload)
        )
    accelerator = Accelerator(cpu=get_device() == "cpu", mixed_precision="bf16", fsdp_plugin=plugin)
    if strategy == "fsdp" and accelerator.distributed_type != DistributedType.FSDP:
        raise ValueError(f"accelerate does not shard a model here, but trains as {accelerator.distributed_type}")
    model: nn.Module = workload.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, fused=_fused())
    model, optimizer, loader = accelerator.prepare(model, optimizer, _unsharded(loader))
    model.train()
    for inputs, targets in loader:
        loss = model(inputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        watch.step()


def with_fabric(workload: Workload, strategy: str, loader: DataLoader[Any], watch: Watch) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import FSDPStrategy

    model: nn.Module = workload.make()
    chosen: Any = "ddp"
    if strategy == "fsdp":
        chosen = FSDPStrategy(auto_wrap_policy={type(model.blocks[0])})  # type: ignore[index]
    fabric = Fabric(
        accelerator="cpu" if get_device() == "cpu" else "auto", devices=dist.get_world_size(), strategy=chosen,
        precision="bf16-mixed",
    )  # fmt: skip
    fabric.launch()
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=_LR, fused=_fused()))
    batches = fabric.setup_dataloaders(_unsharded(loader))
    model.train()
    for inputs, targets in batches:
        loss = model(inputs, targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        watch.step()


def _units(workload: Workload) -> list[str]:
    return [type(workload.make().blocks[0]).__name__]  # type: ignore[index]


def _unsharded(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the loader as one process would make it; these frameworks share it out among the ranks."""
    return DataLoader(
        loader.dataset, loader.batch_size, shuffle=True, drop_last=True, num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
    )  # fmt: skip


TRAININGS: dict[str, Training] = {
    "by hand": by_hand,
    "Runner": with_runner,
    "Runner, prefetching": partial(with_runner, prefetches=True),
    "Session": with_session,
    "accelerate": with_accelerate,
    "Fabric": with_fabric,
}


def quiet() -> None:
    """Keep the frameworks from saying what would drown the table."""
    warnings.simplefilter("ignore")
    for name in ("lightning.fabric", "lightning.pytorch", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
