"""What every rank of one row does: some trainings, one after the other. Started by `python -m benchmarks.parity`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lockstep import Runner, dist
from lockstep.config import Config
from lockstep.errors import ConfigError
from lockstep.hooks import Hook
from lockstep.runner import TrainRun

EXAMPLE = Path(__file__).parents[2] / "examples" / "language_model" / "config.py"
STEPS, SAVED_STEP, GLOBAL_BATCH, MAX_NORM = 20, 10, 8, 0.5
MODEL = {"width": 64, "layers": 2}


class Recorder(Hook):
    """Writes down what the ranks' trainings are compared by.

    Attributes:
        found: losses of each batch, over all ranks; norms of each update; states' differences from a file.
    """

    priority = "LOWEST"

    def __init__(self, reference: Path | None, digest: Path | None) -> None:
        self.reference, self.digest = reference, digest
        self.found: dict[str, Any] = {"losses": [], "norms": []}

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        loss = outputs["loss"].detach().double().clone()
        dist.all_reduce(loss, "mean")
        self.found["losses"].append(loss.item())
        wrapper = runner.optim_wrapper
        if wrapper.should_update() and wrapper.grad_norm is not None:
            self.found["norms"].append(float(wrapper.grad_norm))

    def before_save_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        if self.digest is not None and checkpoint["meta"]["iter"] == SAVED_STEP:
            state = whole({key: checkpoint[key] for key in ("model", "optimizer")})
            if dist.is_main_process():
                torch.save(state, self.digest)

    def after_load_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        assert self.reference is not None
        present = whole({"model": runner.strategy.model_state(), "optimizer": runner.strategy.optim_state()})
        wanted = torch.load(self.reference, weights_only=True)
        for key in ("model", "optimizer"):
            self.found[f"{key}_difference"] = largest_difference(wanted[key], present[key], key)

    def after_train(self, runner: TrainRun) -> None:
        own = sum(moment_bytes(optimizer) for optimizer in runner.optim_wrapper.optimizers)
        state = whole(runner.strategy.optim_state())["state"]
        total = sum(x.nbytes for one in state.values() for x in one.values() if isinstance(x, Tensor) and x.dim())
        self.found["optimizer_share"] = own / total


def whole(state: Any) -> Any:
    """Return a nested state with tensors in full, on the CPU. **Collective**."""
    if isinstance(state, Mapping):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        state = state.full_tensor()
    return state.detach().cpu().clone() if isinstance(state, Tensor) else state


def largest_difference(wanted: Any, present: Any, path: str) -> float:
    """Return the largest absolute difference of two nested states. **Raises**: AssertionError for other keys."""
    if isinstance(wanted, Mapping):
        assert wanted.keys() == present.keys(), f"{path}: {sorted(wanted.keys() ^ present.keys())}"
        return max((largest_difference(wanted[key], present[key], f"{path}.{key}") for key in wanted), default=0.0)
    if isinstance(wanted, Tensor):
        assert wanted.shape == torch.as_tensor(present).shape, path
        return (wanted.double() - torch.as_tensor(present).double()).abs().max().item() if wanted.numel() else 0.0
    return 0.0


def moment_bytes(optimizer: Any) -> int:
    """Return the bytes of the optimizer's moments on this rank; engines hide torch's optimizer in their own."""
    while not (isinstance(optimizer, Optimizer) and optimizer.state):
        optimizer = optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer.optim
    moments = [x for one in optimizer.state.values() for x in one.values() if isinstance(x, Tensor) and x.dim()]
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in moments)


def train(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run one training of the example; return what was recorded. **Collective**."""
    counts = job["counts"]
    config = Config.fromfile(EXAMPLE)
    config.merge_from_dict(
        {
            "model": MODEL,
            "train_dataloader.batch_size": GLOBAL_BATCH // job["data_ranks"],
            "train_dataloader.dataset.windows": 4096,
            "train_cfg": {"max_iters": STEPS * counts},
            "optim_wrapper": {"accumulative_counts": counts, "clip_grad": {"max_norm": MAX_NORM}},
            "param_scheduler": None,
            "strategy": job["strategy"],
            "default_hooks": {
                "checkpoint": {"by_epoch": False, "interval": SAVED_STEP, "save_last": False}
                if job.get("digest")
                else None,
                "progress": None,
            },
            "visualizer": [],
        }
    )
    config.merge_from_dict(job.get("overrides", {}))
    for key in ("val_dataloader", "val_evaluator"):
        config.pop(key)
    recorder = Recorder(*(Path(job[key]) if job.get(key) else None for key in ("reference", "digest")))
    config.work_dir = job["work_dir"]
    config.custom_hooks = [recorder]
    config.load_from, config.resume = job.get("resume_from"), bool(job.get("resume_from"))
    Runner.from_cfg(config).train()
    return recorder.found


def run_jobs(train: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Run the jobs of the file named first, and write what they find, by name, into the file named second."""
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    dist.init_dist("pytorch")
    found: dict[str, Any] = {}
    for name, job in jobs.items():
        try:
            found[name] = train(job)
        except ConfigError as error:  # a strategy that says what it can't do is right to do so
            found[name] = {"refused": str(error)}
        if dist.is_main_process():
            out.write_text(json.dumps(found))
    dist.destroy_dist()


if __name__ == "__main__":
    run_jobs(train)
