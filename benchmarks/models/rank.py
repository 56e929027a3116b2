"""What every rank does for one task: a training from the beginning, or on from a checkpoint."""

from __future__ import annotations

import logging
import os
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.models.columns import BY_NAME as COLUMNS
from benchmarks.models.data import OutputSize
from benchmarks.models.processes import DEVICE
from benchmarks.models.row import EPOCH_STEPS, EPOCHS, GLOBAL_BATCH, MAX_NORM, Row
from benchmarks.models.rows import BY_NAME as ROWS
from benchmarks.parity.rank import whole
from lockstep import Runner, dist
from lockstep.config import Config
from lockstep.errors import LockstepError
from lockstep.hooks import Hook
from lockstep.optim import OptimWrapperDict
from lockstep.runner import TrainRun


class Recorder(Hook):
    """Writes down what a training is compared by, and saves it on the way.

    Attributes:
        losses: of each update by name, over all ranks.
        norms: of each update by the part of the model; None where the optim wrapper knows none.
        state: weights at the end, whole.
    """

    priority = "LOWEST"

    def __init__(self, row: Row, checkpoint: Path | None) -> None:
        self.counts, self.saved_after = row.counts, row.saved_after
        self.checkpoint = checkpoint
        self.losses: list[dict[str, float]] = []
        self.norms: list[dict[str, float | None]] = []
        self.state: dict[str, Any] = {}

    def after_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        weight = 1 if self.counts is None else self.counts(data_batch)
        losses = {name: outputs[name] for name in sorted(outputs) if "loss" in name}
        self.losses.append({name: _mean_over_ranks(loss, weight) for name, loss in losses.items()})
        wrapper = runner.optim_wrapper
        parts = dict(wrapper.items()) if isinstance(wrapper, OptimWrapperDict) else {"": wrapper}
        norms = {part: one.grad_norm for part, one in parts.items()}
        self.norms.append({part: None if norm is None else float(norm) for part, norm in norms.items()})
        if runner.iter + 1 == self.saved_after != EPOCH_STEPS:
            self._save(runner)

    def after_train_epoch(self, runner: TrainRun) -> None:
        if runner.epoch == 0 and self.saved_after == EPOCH_STEPS:
            self._save(runner)

    def _save(self, runner: TrainRun) -> None:
        if self.checkpoint is not None:
            runner.save_checkpoint(self.checkpoint.parent, self.checkpoint.name)

    def after_train(self, runner: TrainRun) -> None:
        self.state = whole(runner.strategy.model_state())


def _mean_over_ranks(value: Tensor, weight: int) -> float:
    """Return the mean of what each rank found for so many samples. **Collective**."""
    weighted = torch.stack([value.detach().cpu().double() * weight, torch.tensor(float(weight), dtype=torch.float64)])
    dist.all_reduce(weighted, "sum")
    total, weights = weighted.tolist()
    return float(total / weights)


def train(task: Mapping[str, Any], column_name: str, recorder: Recorder) -> dict[str, Any]:
    """Train one model to the end, from its beginning or from a checkpoint, and compare. **Collective**."""
    row, column = ROWS[task["row"]], COLUMNS[column_name]
    resumes = task["kind"] == "resume"
    # What is resumed begins with other weights, so that nothing is right that was not loaded.
    model = row.build(seed=100 if resumes else 0)
    counted = {} if row.counts is None else {"batch_size_of": row.counts}
    loader = {"batch_size": GLOBAL_BATCH // column.data_ranks, "shuffle": False}
    runner = Runner(
        model=model,
        work_dir=task["work_dir"],
        train_dataloader={**loader, "dataset": row.samples(training=True)},
        val_dataloader={**loader, "dataset": row.samples(training=False)},
        val_evaluator=OutputSize(),
        train_cfg={"by_epoch": True, "max_epochs": EPOCHS, "val_interval": EPOCHS, **counted},
        optim_wrapper=_optim_wrapper(row),
        strategy=column.strategy_for(row.plan, row.options),
        default_hooks={"checkpoint": None, "progress": None, "logger": None},
        custom_hooks=[recorder, *(make() for make in row.hooks)],
        visualizer=[],
        log_level="ERROR",
        load_from=task["checkpoint"] if resumes else None,
        resume=resumes,
        cfg=Config(dict(row.cfg)),
    )
    with _listening() as told:
        runner.train()
    assert runner.val_loop is not None
    device = os.environ.get(DEVICE, "cpu")
    assert all(parameter.device.type == device for parameter in model.parameters()), f"not all of it is on {device}"
    found: dict[str, Any] = {"steps": getattr(model, "steps_taken", None)}
    if dist.is_main_process():
        wanted = torch.load(task["reference"], weights_only=True)
        found |= _compared(wanted, recorder, runner.val_loop.metrics["output_size"], told)
    return found


@contextmanager
def _listening() -> Iterator[list[str]]:
    """Note what is said of parameters that a strategy trains otherwise than the others."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lockstep.strategy")
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)


def _optim_wrapper(row: Row) -> dict[str, Any]:
    one: dict[str, Any] = {"optimizer": dict(row.optimizer), "accumulative_counts": row.accumulative_counts}
    if row.clips:
        one["clip_grad"] = {"max_norm": MAX_NORM}
    return dict.fromkeys(row.parts, one) or one


def _compared(wanted: Mapping[str, Any], recorder: Recorder, validated: float, told: Sequence[str]) -> dict[str, Any]:
    """Return the largest relative differences from the loop by hand, whose last updates these are.

    Weights that a warning has named, as those which an engine trains otherwise, are left out; the warning comes along.
    """
    begin = EPOCHS * EPOCH_STEPS - len(recorder.losses)
    weights = {name: _relative(tensor, recorder.state.get(name)) for name, tensor in wanted["state"].items()}
    weights |= dict.fromkeys(recorder.state.keys() - weights.keys(), float("inf"))
    named = {name: text for name in weights for text in told if name in re.findall(r"[\w.]*\w", text)}
    weights = {name: difference for name, difference in weights.items() if name not in named}
    worst = max(weights, key=lambda name: weights[name])
    return {
        **({"told": next(iter(named.values()))} if named else {}),
        "loss": _largest(wanted["losses"][begin:], recorder.losses),
        "norm": _largest(wanted["norms"][begin:], recorder.norms),
        "weights": weights[worst],
        "worst_weight": worst,
        "validated": abs(validated - wanted["validated"]) / abs(wanted["validated"]),
        "updates": len(recorder.losses),
    }


def _largest(wanted: list[dict[str, float]], present: list[dict[str, Any]]) -> float | None:
    """Return the largest relative difference; None where one of the values is not there."""
    differences = []
    for one, other in zip(wanted, present, strict=True):
        for name, value in one.items():
            if other.get(name) is None:
                return None
            differences.append(abs(other[name] - value) / abs(value))
    return _finite_max(differences)


def _relative(wanted: Any, present: Any) -> float:
    if not isinstance(present, Tensor) or present.shape != wanted.shape:
        return float("inf")
    kind = torch.complex128 if wanted.is_complex() else torch.float64
    difference = (wanted.to(kind) - present.cpu().to(kind)).abs()
    scale = wanted.to(kind).abs().max()
    return _finite_max([(difference / scale).max().item() if scale else difference.max().item()])


def _finite_max(differences: list[float]) -> float | None:
    """Return the largest of some differences, among which a NaN is infinite."""
    return max((x if x == x else float("inf") for x in differences), default=None)


def attempt(task: Mapping[str, Any], column_name: str) -> dict[str, Any]:
    """Do one task as one rank, and return how it went: its figures, a refusal, or a failure with its traceback."""
    recorder = Recorder(ROWS[task["row"]], Path(task["checkpoint"]) if task["kind"] == "train" else None)
    try:
        dist.init_dist("pytorch")
        found = train(task, column_name, recorder)
        dist.destroy_dist()
    except LockstepError as error:
        if len(recorder.losses) > ROWS[task["row"]].updates_before:  # too late for a refusal
            return {"failed": traceback.format_exc()}
        return {"refused": str(error)}
    except Exception:
        return {"failed": traceback.format_exc()}
    return found
