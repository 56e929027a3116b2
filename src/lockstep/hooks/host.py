"""What a hook may know of the run that calls it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from torch import nn

from lockstep.dataset import DataShard
from lockstep.evaluator import Evaluator
from lockstep.logging import JsonLinesSink, MessageHub
from lockstep.optim import OptimWrapper, ParamScheduler
from lockstep.strategy import Strategy
from lockstep.visualization import Visualizers


class TrainLoopLike(Protocol):
    """The training loop, as hooks see it.

    Attributes:
        samples: how many samples of this rank's batch count, in the present iteration.
        stop_training: set it, on every rank alike, to end the training after the present epoch or iteration.
    """

    samples: int
    stop_training: bool


class RunnerLike(Protocol):
    """A run, as its hooks see it. Read-only, but for what its parts allow."""

    @property
    def epoch(self) -> int:
        """Complete epochs: 0 at every point within the first one."""

    @property
    def iter(self) -> int:
        """Complete iterations: 0 both before and after the first `train_step`."""

    @property
    def max_epochs(self) -> int | None:
        """Length of the training; None in a loop by iterations."""

    @property
    def max_iters(self) -> int:
        """Length of the training in iterations."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    @property
    def share(self) -> DataShard:
        """Which of the samples this process sees."""

    @property
    def model(self) -> nn.Module:
        """The model as it is trained: on its device, and wrapped."""

    @property
    def strategy(self) -> Strategy:
        """How the model is laid over ranks."""

    @property
    def train_loop(self) -> TrainLoopLike:
        """The loop that trains."""

    @property
    def optim_wrapper(self) -> OptimWrapper:
        """What updates the model."""

    @property
    def param_schedulers(self) -> Sequence[ParamScheduler]:
        """What changes learning rates."""

    @property
    def train_dataloader(self) -> Any:
        """This rank's share of the training data."""

    @property
    def val_dataloader(self) -> Any:
        """This rank's share of the validation data."""

    @property
    def val_evaluator(self) -> Evaluator:
        """The metrics of the validation."""

    @property
    def work_dir(self) -> Path:
        """The folder of all runs of one experiment."""

    @property
    def run_dir(self) -> Path:
        """The folder of this run within it."""

    @property
    def logger(self) -> logging.Logger:
        """Shows messages on rank 0, and writes them to the run's folder."""

    @property
    def console(self) -> Console:
        """Where messages are shown; silent on all ranks but 0."""

    @property
    def records(self) -> JsonLinesSink:
        """The run's `metrics.jsonl`; rank 0 writes to it."""

    @property
    def visualizer(self) -> Visualizers:
        """Where else scalars, pictures and the config go; on all ranks but 0, nowhere."""

    @property
    def message_hub(self) -> MessageHub:
        """Where the parts of a run leave values for each other."""

    @property
    def seed(self) -> int:
        """What all random numbers begin with."""

    @property
    def timestamp(self) -> str:
        """When the run began, as in `20260131_235959`."""

    @property
    def experiment_name(self) -> str:
        """Name of the run's folder."""

    @property
    def cfg(self) -> Any:
        """The config that the run was made of; None where there is none."""

    def save_checkpoint(
        self,
        out_dir: str | Path,
        filename: str | None = None,
        *,
        epoch: int | None = None,
        iteration: int | None = None,
        is_last: bool = True,
        save_optimizer: bool = True,
    ) -> Path:
        """Save everything in the folder `filename` of `out_dir`, on every rank together.

        One path alone begins at the run's folder. `epoch` and `iteration` are what is complete, by default at the end
        of an epoch; `is_last` makes it the one to resume from.
        """
        ...
