"""The interfaces of the parts of a run that refer to the run themselves: its hooks and its loops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from lockstep.evaluator import Evaluator
from lockstep.runner.uneven_inputs import Passes, Place


class AnyHooks(Protocol):
    """The hooks of a run; implemented by `HookList`."""

    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def register(self, hook: Any, priority: str | int | None = None) -> None:
        """Add a hook, or the config of one, which is called from now on."""

    def call(self, point: str, run: Any, **kwargs: Any) -> None:
        """Call every hook of a `Run` at `point`."""

    def close(self) -> None:
        """Let every hook release what it holds."""


class AnyTrainLoop(Protocol):
    """The interface of a training loop for the run, its hooks and its checkpoints; see `TrainLoop`."""

    dataloader: Any
    passes: Passes
    epoch: int
    iter: int
    max_epochs: int | None
    max_iters: int
    epoch_length: int | None
    epoch_begin: int
    epoch_end: int | None
    val_begin: int
    val_interval: int
    samples: int
    stop_training: bool

    def run(self) -> None:
        """Train until the end."""

    def position(self, epoch: int, iteration: int) -> dict[str, Any]:
        """Return the position in the data after so many complete epochs and iterations, in JSON values."""

    def restore(self, iteration: int, position: Mapping[str, Any]) -> Place | None:
        """Continue there; None says that the present epoch begins anew."""


class AnyEvalLoop(Protocol):
    """A loop that validates or tests; see `EvalLoop`."""

    dataloader: Any
    evaluator: Evaluator
    metrics: dict[str, Any]
    at_iter: int | None

    def run(self) -> dict[str, Any]:
        """Return the metrics, the same on every rank."""
