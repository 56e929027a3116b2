"""What every rank of one strategy does: runs that save, and that resume. Started by `python -m benchmarks.resume`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.parity.rank import EXAMPLE, MODEL, largest_difference, run_jobs, whole
from lockstep import Runner, dist
from lockstep.config import Config
from lockstep.hooks import EMAHook, Hook
from lockstep.runner import TrainRun

WINDOWS, GLOBAL_BATCH, EPOCHS = 40, 12, 4  # four iterations in an epoch; the last one has 4 samples
SAVED, COMPARED = 6, 10  # saved in the middle of the second epoch; as many iterations are compared after it


class Comparing(Hook):
    """Writes a state down when it is saved, or compares with it what was restored; notes losses.

    Attributes:
        found: losses of each iteration, over all ranks; largest differences of the state from the saved one.
    """

    priority = "LOWEST"

    def __init__(self, digest: Path, *, saves: bool) -> None:
        self.digest, self.saves = digest, saves
        self.found: dict[str, Any] = {"losses": []}

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        samples = float(runner.train_loop.samples)
        total = torch.tensor([outputs["loss"].item() * samples, samples], dtype=torch.float64)
        dist.all_reduce(total)
        self.found["losses"].append((total[0] / total[1]).item())

    def before_save_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        if self.saves and checkpoint["meta"]["iter"] == SAVED:
            state = _state(runner)
            if dist.is_main_process():
                torch.save(state, self.digest)

    def after_load_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        wanted, present = torch.load(self.digest, weights_only=True), _state(runner)
        for key in ("model", "optimizer", "average"):
            self.found[key] = largest_difference(wanted[key], present[key], key)
        self.found["schedules"] = 0.0 if wanted["schedules"] == present["schedules"] else 1.0


def _state(runner: TrainRun) -> dict[str, Any]:
    """Return everything that is compared, in full on each rank. **Collective**."""
    state = {"model": runner.strategy.model_state(), "optimizer": runner.strategy.optim_state(), "average": {}}
    for hook in runner.hooks:
        if isinstance(hook, EMAHook):
            saved: dict[str, Any] = {"model": dict(state["model"]), "meta": {}}
            hook.before_save_checkpoint(runner, saved)
            state["average"] = saved["model"]
    rates = [group["lr"] for group in runner.optim_wrapper.param_groups]
    return {**whole(state), "schedules": json.dumps([[one.state_dict() for one in runner.param_schedulers], rates])}


def train(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run one training of the example; return what was noted. **Collective**."""
    config = Config.fromfile(EXAMPLE)
    config.merge_from_dict(
        {
            "model": {**MODEL, "dropout": job["dropout"]},
            "train_dataloader": {"batch_size": GLOBAL_BATCH // job["data_ranks"], "drop_last": False},
            "train_dataloader.dataset.windows": WINDOWS,
            "optim_wrapper": {"clip_grad": {"max_norm": 0.5}},
            "strategy": job["strategy"],
            "visualizer": [],
        }
    )
    for key in ("val_dataloader", "val_evaluator"):
        config.pop(key)
    config.train_dataloader["sampler"] = {"round_up": False}
    # Of the average, only what is restored is compared.
    config.train_cfg = {"max_epochs": 2 if job["averages"] else EPOCHS}
    config.param_scheduler = [
        {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "end": 5},
        {"type": "CosineAnnealingLR", "by_epoch": False, "begin": 5},
    ]
    saving = {"by_epoch": False, "interval": SAVED, "save_last": False}
    config.default_hooks = {"checkpoint": saving if job["saves"] else None, "progress": None}
    comparing = Comparing(Path(job["digest"]), saves=job["saves"])
    config.custom_hooks = [*([{"type": "EMAHook"}] if job["averages"] else []), comparing]
    config.work_dir, config.log_level = job["work_dir"], "ERROR"
    config.load_from, config.resume = job.get("resume_from"), bool(job.get("resume_from"))
    Runner.from_cfg(config).train()
    return comparing.found


if __name__ == "__main__":
    run_jobs(train)
