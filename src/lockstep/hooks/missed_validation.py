"""The validation that was due at a checkpoint, and that the checkpoint knows nothing of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.hooks.host import RunnerLike


class MissedValidation:
    """Lets a hook that judges by metrics see those of each validation, also over an interruption.

    A checkpoint is written before the validation that is due at its time, whose metrics are lost to whoever goes on
    from it. Each hook that needs them asks for that validation before the training goes on; it is run once for all.
    """

    def __init__(self) -> None:
        self._validated_iter: int | None = None
        self._is_owed = False

    def saw(self, runner: RunnerLike) -> None:
        """Note that the hook has seen the metrics of a validation."""
        self._validated_iter = runner.iter
        self._is_owed = False

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to know."""
        return {"validated_iter": self._validated_iter}

    def restore(self, runner: RunnerLike, state: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Find out whether metrics are missing.

        Args:
            runner: that goes on from a checkpoint.
            state: what `state` returned, or an empty dict.
            meta: of the checkpoint.
        """
        self._validated_iter = state.get("validated_iter")
        loop: Any = runner.train_loop
        done = runner.iter if runner.max_epochs is None else runner.epoch
        was_due = done >= loop.val_begin and done % loop.val_interval == 0 and meta["batches_into_epoch"] == 0
        self._is_owed = was_due and self._validated_iter != meta["iter"]

    def make_up(self, runner: RunnerLike) -> None:
        """Run the validation, where it is missing.

        **Collective**: every rank.
        """
        validation: Any = getattr(runner, "val_loop", None)
        if self._is_owed and validation is not None:
            runner.logger.info("the validation that was due after the checkpoint is made up for")
            validation.run()
        self._is_owed = False
