"""`Hook`: the points of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, ClassVar

from lockstep.hooks.host import RunnerLike

PRIORITIES: Mapping[str, int] = {
    "HIGHEST": 0,
    "VERY_HIGH": 10,
    "HIGH": 30,
    "ABOVE_NORMAL": 40,
    "NORMAL": 50,
    "BELOW_NORMAL": 60,
    "LOW": 70,
    "VERY_LOW": 90,
    "LOWEST": 100,
}


class Hook:
    """Something that happens at points of a run, in this order.

    ```
    before_run
    before_train
    for epoch in epochs:
        before_train_epoch
        for batch_idx, data_batch in enumerate(train_dataloader):
            before_train_iter
            outputs = model.train_step(data_batch, optim_wrapper)
            after_train_iter
        after_train_epoch
        if validation is due:
            before_val, before_val_epoch
            for batch_idx, data_batch in enumerate(val_dataloader):
                before_val_iter
                outputs = model.val_step(data_batch)
                after_val_iter
            after_val_epoch(metrics), after_val
    after_train
    after_run
    ```

    Testing has the points of validation, with `test` in their names. A loop by iterations counts as one long epoch.
    Every point is called on every rank; a point that a hook does not override costs nothing. A hook that does the same
    in training, validation and testing overrides `_before_epoch`, `_after_epoch`, `_before_iter` or `_after_iter`,
    whose `mode` is `"train"`, `"val"` or `"test"`.

    Attributes:
        priority: name from `PRIORITIES`, or a number: lower goes first. Equal ones go in the order of registration.
        main_only: the hook exists on rank 0 alone. It must not take part in collectives.
    """

    priority: str | int = "NORMAL"
    main_only: ClassVar[bool] = False

    def before_run(self, runner: RunnerLike) -> None:
        """Happen before everything else."""

    def after_run(self, runner: RunnerLike) -> None:
        """Happen after everything else."""

    def before_train(self, runner: RunnerLike) -> None:
        """Happen once before training."""

    def after_train(self, runner: RunnerLike) -> None:
        """Happen once after training."""

    def before_val(self, runner: RunnerLike) -> None:
        """Happen before each validation."""

    def after_val(self, runner: RunnerLike) -> None:
        """Happen after each validation."""

    def before_test(self, runner: RunnerLike) -> None:
        """Happen before testing."""

    def after_test(self, runner: RunnerLike) -> None:
        """Happen after testing."""

    def before_train_epoch(self, runner: RunnerLike) -> None:
        """Happen before each pass through the training data."""
        self._before_epoch(runner, mode="train")

    def after_train_epoch(self, runner: RunnerLike) -> None:
        """Happen after each pass through the training data."""
        self._after_epoch(runner, mode="train")

    def before_val_epoch(self, runner: RunnerLike) -> None:
        """Happen before the pass through the validation data."""
        self._before_epoch(runner, mode="val")

    def after_val_epoch(self, runner: RunnerLike, metrics: dict[str, Any] | None = None) -> None:
        """Happen after the pass through the validation data."""
        self._after_epoch(runner, mode="val")

    def before_test_epoch(self, runner: RunnerLike) -> None:
        """Happen before the pass through the test data."""
        self._before_epoch(runner, mode="test")

    def after_test_epoch(self, runner: RunnerLike, metrics: dict[str, Any] | None = None) -> None:
        """Happen after the pass through the test data."""
        self._after_epoch(runner, mode="test")

    def before_train_iter(self, runner: RunnerLike, batch_idx: int, data_batch: Any = None) -> None:
        """Happen when a training batch is there."""
        self._before_iter(runner, batch_idx, data_batch, mode="train")

    def after_train_iter(
        self,
        runner: RunnerLike,
        batch_idx: int,
        data_batch: Any = None,
        outputs: dict[str, Any] | None = None,
    ) -> None:
        """Happen when a training batch is done; `outputs` are the values to log."""
        self._after_iter(runner, batch_idx, data_batch, outputs, mode="train")

    def before_val_iter(self, runner: RunnerLike, batch_idx: int, data_batch: Any = None) -> None:
        """Happen when a validation batch is there."""
        self._before_iter(runner, batch_idx, data_batch, mode="val")

    def after_val_iter(self, runner: RunnerLike, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Happen when a validation batch is done; `outputs` are the predictions."""
        self._after_iter(runner, batch_idx, data_batch, outputs, mode="val")

    def before_test_iter(self, runner: RunnerLike, batch_idx: int, data_batch: Any = None) -> None:
        """Happen when a test batch is there."""
        self._before_iter(runner, batch_idx, data_batch, mode="test")

    def after_test_iter(self, runner: RunnerLike, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Happen when a test batch is done; `outputs` are the predictions."""
        self._after_iter(runner, batch_idx, data_batch, outputs, mode="test")

    def before_save_checkpoint(self, runner: RunnerLike, checkpoint: dict[str, Any]) -> None:
        """Happen before a checkpoint is written: add tensors to `checkpoint`, facts to `checkpoint["meta"]`."""

    def before_load_checkpoint(self, runner: RunnerLike, checkpoint: dict[str, Any]) -> None:
        """Happen before training resumes from a checkpoint, of which `checkpoint["meta"]` is there already.

        To have what `before_save_checkpoint` added, put tensors of its names and shapes there; they are filled.
        """

    def after_load_checkpoint(self, runner: RunnerLike, checkpoint: dict[str, Any]) -> None:
        """Happen when training resumes from a checkpoint; `checkpoint["meta"]` is what was saved."""

    def _before_epoch(self, runner: RunnerLike, mode: str = "train") -> None:
        """Happen at `before_train_epoch`, `before_val_epoch` and `before_test_epoch` that are not overridden."""

    def _after_epoch(self, runner: RunnerLike, mode: str = "train") -> None:
        """Happen at `after_train_epoch`, `after_val_epoch` and `after_test_epoch` that are not overridden."""

    def _before_iter(self, runner: RunnerLike, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None:
        """Happen at `before_train_iter`, `before_val_iter` and `before_test_iter` that are not overridden."""

    def _after_iter(
        self, runner: RunnerLike, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        """Happen at `after_train_iter`, `after_val_iter` and `after_test_iter` that are not overridden."""

    def close(self) -> None:
        """Let go of what the hook holds. Called at the end of a run even if it has failed."""

    @staticmethod
    def every_n_epochs(runner: RunnerLike, n: int, start: int = 0) -> bool:
        """Return whether the epoch that is ending is number `start`, or an n-th one after it."""
        done = runner.epoch + 1 - start
        return n > 0 and done >= 0 and done % n == 0

    @staticmethod
    def every_n_train_iters(runner: RunnerLike, n: int, start: int = 0) -> bool:
        """Return whether the iteration that is ending is number `start`, or an n-th one after it."""
        done = runner.iter + 1 - start
        return n > 0 and done >= 0 and done % n == 0

    @staticmethod
    def every_n_inner_iters(batch_idx: int, n: int) -> bool:
        """Return whether the iteration that is ending is an n-th one of its epoch."""
        return n > 0 and (batch_idx + 1) % n == 0

    @staticmethod
    def end_of_epoch(dataloader: Sized, batch_idx: int) -> bool:
        """Return whether the batch is the last one of this rank's in a pass through a data loader."""
        return batch_idx + 1 == len(dataloader)

    @staticmethod
    def is_last_train_epoch(runner: RunnerLike) -> bool:
        """Return whether the present epoch is the last one."""
        return runner.max_epochs is not None and runner.epoch + 1 == runner.max_epochs

    @staticmethod
    def is_last_train_iter(runner: RunnerLike) -> bool:
        """Return whether the present iteration is the last one."""
        return runner.iter + 1 == runner.max_iters
