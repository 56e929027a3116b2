"""What a run saves and loads when it is asked to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockstep.runner import saving
from lockstep.runner.facts import RunFacts
from lockstep.runner.weights import REVISE_KEYS, Weights, load_weights
from lockstep.strategy import Strategy

if TYPE_CHECKING:
    from lockstep.runner.runner import Runner


class RunCheckpoints(RunFacts):
    """A run, as far as it can be asked to save and to load."""

    strategy: Strategy
    _load_from: Weights | None

    def save_checkpoint(
        self,
        out_dir: str | Path,
        filename: str | None = None,
        *,
        epoch: int | None = None,
        iteration: int | None = None,
        is_last: bool = True,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: Mapping[str, Any] | None = None,
        by_epoch: bool = True,
    ) -> Path:
        """Save what resuming needs in the folder `filename` of `out_dir`; one path alone begins at the run's folder.

        Args:
            out_dir: where.
            filename: name of the checkpoint.
            epoch: complete epochs; by default that is counted, see `by_epoch`.
            iteration: complete iterations; likewise.
            is_last: make it the one to resume from.
            save_optimizer: save the optimizer's state; a run that goes on without begins it anew.
            save_param_scheduler: MMEngine's; the few numbers are saved in any case.
            meta: further facts, in values that JSON knows.
            by_epoch: whether it is the end of an epoch; else that of an iteration, which counts as complete.

        **Collective**: every rank.
        """
        place = saving.place_of(cast("Runner", self), by_epoch, {"epoch": epoch, "iter": iteration})
        directory = self.run_dir / out_dir if filename is None else Path(out_dir) / filename
        return saving.save_run(
            cast("Runner", self), directory, place, is_last=is_last, with_optimizer=save_optimizer, notes=meta
        )

    def load_checkpoint(
        self,
        filename: str | Path,
        map_location: Any = "cpu",
        strict: bool | None = None,
        revise_keys: Sequence[tuple[str, str]] = REVISE_KEYS,
    ) -> None:
        """Load weights: now, or, where there is no model yet, when there is one.

        Args:
            filename: a checkpoint, or a file of weights.
            map_location: MMEngine's; does nothing, because weights go to where the model is.
            strict: refuse weights that are missing, unknown or of another shape; else tell of them. By default only
                a model that is to be trained further may lack some.
            revise_keys: patterns in the names of a file's weights, and what is put in their place.

        **Collective**: every rank.
        """
        weights = Weights(Path(filename), strict, revise_keys)
        if "hooks" in vars(self):
            load_weights(self.strategy, weights, training="train_loop" in vars(self))
        else:
            self._load_from = weights
