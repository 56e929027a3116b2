"""What a run tells of itself, under the names that hooks know."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

from torch import nn

from lockstep.dist import infer_launcher
from lockstep.logging import MessageHub
from lockstep.model import unwrap_model
from lockstep.runner.arguments import Arguments
from lockstep.runner.loops import TrainLoop

# Facts that the message hub gives out, too.
_FACTS = ("epoch", "iter", "max_epochs", "max_iters", "seed", "experiment_name")


class RunFacts:
    """How far a run is, what it is called and where it is kept."""

    given: Arguments
    model: nn.Module
    rank: int
    world_size: int
    run_dir: Path
    train_loop: TrainLoop

    def tell_hub(self, hub: MessageHub) -> None:
        """Let a message hub give out facts, as they are when somebody asks, and make it the current one."""
        run = ref(self)  # the hub outlives the run
        for name in _FACTS:
            hub.provide_info(name, partial(_fact, run, name))
        hub.provide_info("dataset_meta", lambda: _metainfo(_fact(run, "train_dataloader")))
        hub.make_current()

    @property
    def epoch(self) -> int:
        """Complete epochs."""
        return self.train_loop.epoch if "train_loop" in vars(self) else 0

    @property
    def iter(self) -> int:
        """Complete iterations."""
        return self.train_loop.iter if "train_loop" in vars(self) else 0

    @property
    def max_epochs(self) -> int | None:
        """Length of the training; None in a loop by iterations."""
        return self.train_loop.max_epochs if "train_loop" in vars(self) else None

    @property
    def max_iters(self) -> int:
        """Length of the training in iterations."""
        return self.train_loop.max_iters if "train_loop" in vars(self) else 0

    @property
    def val_begin(self) -> int:
        """The epoch or iteration after which the first validation may come."""
        return self.train_loop.val_begin

    @property
    def val_interval(self) -> int:
        """Epochs or iterations from one validation to the next."""
        return self.train_loop.val_interval

    @property
    def distributed(self) -> bool:
        """Whether there are several ranks."""
        return self.world_size > 1

    @property
    def launcher(self) -> str:
        """Who started the ranks."""
        return self.given.launcher or infer_launcher()

    @property
    def deterministic(self) -> bool:
        """Whether only algorithms that repeat exactly may be used."""
        return bool((self.given.randomness or {}).get("deterministic"))

    @property
    def model_name(self) -> str:
        """Class of the user's own model."""
        return type(unwrap_model(self.model)).__name__

    @property
    def timestamp(self) -> str:
        """When the run began, as in `20260131_235959`; it is part of its folder's name."""
        times: list[str] = re.findall(r"\d{8}_\d{6}", self.run_dir.name)
        return times[-1]

    @property
    def experiment_name(self) -> str:
        """Name of the run's folder: the experiment's, where it was given one, and the time."""
        return self.run_dir.name

    @property
    def log_dir(self) -> Path:
        """The run's folder."""
        return self.run_dir


def _fact(run: ref[RunFacts], name: str) -> Any:
    return getattr(run(), name, None)


def _metainfo(dataloader: Any) -> Any:
    return getattr(getattr(dataloader, "dataset", None), "metainfo", None)
