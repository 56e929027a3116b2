"""The base class of users' own loops."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any

from lockstep.dataset import length_of

__all__ = ["BaseLoop", "note_metrics"]


def note_metrics(loop: Any) -> None:
    """Let the `run` that a class of loops defines, which returns metrics, leave them where a run looks for them."""
    own = vars(loop).get("run")
    if own is None:
        return

    @wraps(own)
    def run(self: Any) -> Any:
        metrics = own(self)
        if isinstance(metrics, Mapping):
            self.metrics, self.at_iter = dict(metrics), self.runner.iter
            self.runner.last_evaluation = self
        return metrics

    loop.run = run


class BaseLoop(metaclass=ABCMeta):
    """Base class of loops; a subclass implements `run`. One that trains counts in `_iter` and `_epoch`.

    Args:
        runner: whose loop it is.
        dataloader: a data loader, or the config of one.
    """

    dataloader: Any = None  # a loop over several loaders may keep them elsewhere, and not call `__init__`
    metrics: Mapping[str, Any] = {}
    at_iter: int | None = None
    metric_names: Sequence[str] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        note_metrics(cls)

    def __init__(self, runner: Any, dataloader: Any) -> None:
        self._runner = runner
        if isinstance(dataloader, dict):
            from mmengine.runner.runner import Runner

            dataloader = Runner.build_dataloader(dataloader, seed=runner.seed)
        self.dataloader = dataloader

    @property
    def runner(self) -> Any:
        """Whose loop it is."""
        return self._runner

    @property
    def length(self) -> int | None:
        """Number of this rank's batches in a pass; None if it is not known."""
        return length_of(self.dataloader)

    @property
    def units(self) -> Mapping[str, str]:
        """The units of the metrics, by name."""
        return getattr(getattr(self, "evaluator", None), "units", {})

    @abstractmethod
    def run(self) -> Any:
        """Run the loop."""
