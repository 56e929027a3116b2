"""`Hook`, which defines the hook points of a run, and `HookList`, which calls the hooks that act at a point."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack
from difflib import get_close_matches
from typing import Any, ClassVar

from lockstep.dist import get_dist_info
from lockstep.errors import ConfigError
from lockstep.registry import HOOKS
from lockstep.runner.run import Run, TrainRun

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
"""The names of priorities; hooks with lower numbers are called first."""
_logger = logging.getLogger(__name__)


class Hook:
    """An object that acts at certain points of a run, called in this order.

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

    Testing has the same points as validation, with `test` in their names. An iteration-based loop counts as one long
    epoch. Every point is called on every rank; a point that a hook does not override costs nothing. A hook that does
    the same in training, validation and testing overrides `_before_epoch`, `_after_epoch`, `_before_iter` or
    `_after_iter`; their `mode` is `"train"`, `"val"` or `"test"`.

    The argument `runner` is a `Run`; at the points of training and of checkpoints it is a `TrainRun`. A hook may set
    its own attributes on it.

    Attributes:
        priority: a name from `PRIORITIES`, or a number: hooks with lower numbers are called first. Hooks of equal
            priority are called in the order of registration.
        main_only: the hook exists on rank 0 alone. It must not take part in collectives.
        writes_checkpoints: it writes them into `out_dir/WORK_DIR` if its attribute `out_dir` is not None, so that a run
            that resumes looks for them there, too.
    """

    priority: str | int = "NORMAL"
    main_only: ClassVar[bool] = False
    writes_checkpoints: ClassVar[bool] = False

    def before_run(self, runner: Run) -> None:
        """Act before everything else, also before weights are loaded and a checkpoint is resumed from."""

    def after_run(self, runner: Run) -> None:
        """Act after everything else."""

    def before_train(self, runner: TrainRun) -> None:
        """Act once before training."""

    def after_train(self, runner: TrainRun) -> None:
        """Act once after training."""

    def before_val(self, runner: Run) -> None:
        """Act before each validation."""

    def after_val(self, runner: Run) -> None:
        """Act after each validation."""

    def before_test(self, runner: Run) -> None:
        """Act before testing."""

    def after_test(self, runner: Run) -> None:
        """Act after testing."""

    def before_train_epoch(self, runner: TrainRun) -> None:
        """Act before each pass through the training data."""
        self._before_epoch(runner, mode="train")

    def after_train_epoch(self, runner: TrainRun) -> None:
        """Act after each pass through the training data."""
        self._after_epoch(runner, mode="train")

    def before_val_epoch(self, runner: Run) -> None:
        """Act before the pass through the validation data."""
        self._before_epoch(runner, mode="val")

    def after_val_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Act after the pass through the validation data."""
        self._after_epoch(runner, mode="val")

    def before_test_epoch(self, runner: Run) -> None:
        """Act before the pass through the test data."""
        self._before_epoch(runner, mode="test")

    def after_test_epoch(self, runner: Run, metrics: dict[str, Any] | None = None) -> None:
        """Act after the pass through the test data."""
        self._after_epoch(runner, mode="test")

    def before_train_iter(self, runner: TrainRun, batch_idx: int, data_batch: Any = None) -> None:
        """Act before each training step."""
        self._before_iter(runner, batch_idx, data_batch, mode="train")

    def after_train_iter(
        self, runner: TrainRun, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Act after each training step; `outputs` are the values to log."""
        self._after_iter(runner, batch_idx, data_batch, outputs, mode="train")

    def before_val_iter(self, runner: Run, batch_idx: int, data_batch: Any = None) -> None:
        """Act before each validation step."""
        self._before_iter(runner, batch_idx, data_batch, mode="val")

    def after_val_iter(self, runner: Run, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Act after each validation step; `outputs` are the predictions."""
        self._after_iter(runner, batch_idx, data_batch, outputs, mode="val")

    def before_test_iter(self, runner: Run, batch_idx: int, data_batch: Any = None) -> None:
        """Act before each test step."""
        self._before_iter(runner, batch_idx, data_batch, mode="test")

    def after_test_iter(self, runner: Run, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Act after each test step; `outputs` are the predictions."""
        self._after_iter(runner, batch_idx, data_batch, outputs, mode="test")

    def before_save_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Act before a checkpoint is written: add what must outlive a resume to `checkpoint`.

        It may be tensors, arrays of numpy, numbers, strings and None, in dicts and lists, under a name of the hook's.
        One value of each name is saved, whichever rank's: put what differs between ranks under `str(runner.rank)`, too.
        """

    def before_load_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Act before training resumes from a checkpoint; so far only `checkpoint["meta"]` has been read.

        What `before_save_checkpoint` added comes back whole, in CPU memory, if its tensors have at most 256 MiB. Larger
        ones, or shards, are filled in place: put tensors with the same names and shapes into `checkpoint`.
        """

    def after_load_checkpoint(self, runner: TrainRun, checkpoint: dict[str, Any]) -> None:
        """Act when training resumes from a checkpoint, which has what `before_save_checkpoint` added."""

    def after_load_weights(self, runner: Run) -> None:
        """Act when weights have been loaded into the model of a run that has been built, such as the best ones."""

    def _before_epoch(self, runner: Run, mode: str = "train") -> None:
        """Act at `before_train_epoch`, `before_val_epoch` and `before_test_epoch` if they are not overridden."""

    def _after_epoch(self, runner: Run, mode: str = "train") -> None:
        """Act at `after_train_epoch`, `after_val_epoch` and `after_test_epoch` if they are not overridden."""

    def _before_iter(self, runner: Run, batch_idx: int, data_batch: Any = None, mode: str = "train") -> None:
        """Act at `before_train_iter`, `before_val_iter` and `before_test_iter` if they are not overridden."""

    def _after_iter(
        self, runner: Run, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        """Act at `after_train_iter`, `after_val_iter` and `after_test_iter` if they are not overridden."""

    def close(self) -> None:
        """Release what the hook holds. Called at the end of a run, even if the run has failed."""

    @staticmethod
    def every_n_epochs(runner: Run, n: int, start: int = 0) -> bool:
        """Return whether the epoch that is ending is number `start`, or a multiple of `n` epochs later."""
        return is_due(runner.epoch + 1, n, start)

    @staticmethod
    def every_n_train_iters(runner: Run, n: int, start: int = 0) -> bool:
        """Return whether the iteration that is ending is number `start`, or a multiple of `n` iterations later."""
        return is_due(runner.iter + 1, n, start)

    @staticmethod
    def every_n_inner_iters(batch_idx: int, n: int) -> bool:
        """Return whether the number of iterations done in the present epoch is a multiple of `n`."""
        return n > 0 and (batch_idx + 1) % n == 0

    @staticmethod
    def end_of_epoch(dataloader: Sized, batch_idx: int) -> bool:
        """Return whether the batch is this rank's last one in a pass through a data loader."""
        return batch_idx + 1 == len(dataloader)

    @staticmethod
    def is_last_train_epoch(runner: Run) -> bool:
        """Return whether the present epoch is the last one."""
        return runner.max_epochs is not None and runner.epoch + 1 == runner.max_epochs

    @staticmethod
    def is_last_train_iter(runner: Run) -> bool:
        """Return whether the present iteration is the last one."""
        return runner.iter + 1 == runner.max_iters


def is_due(number: int, n: int, start: int = 0) -> bool:
    """Return whether `number` is `start`, or a multiple of `n` more."""
    return n > 0 and number >= start and (number - start) % n == 0


def require_epochs(runner: TrainRun, example: str) -> None:
    """Check that a hook which counts epochs is in a loop that does.

    Args:
        runner: the run.
        example: the hook, told to count iterations, such as `ProfilerHook(by_epoch=False)`.

    Raises:
        ConfigError: the loop counts iterations.
    """
    if runner.max_epochs is None:
        name = example.partition("(")[0]
        raise ConfigError(f"`by_epoch` of {name} must be False in a loop by iterations, but is True. Use {example}")


POINTS = tuple(name for name in vars(Hook) if name.startswith(("before_", "after_")))
# Methods that Lightning calls, of a module or of a callback.
OF_LIGHTNING = re.compile(
    r"on_(fit|train|validation|test|predict|sanity|before|after)_\w+|on_(save|load)_checkpoint|on_exception"
    r"|configure_gradient_clipping|lr_scheduler_step|optimizer_(step|zero_grad)"
)
# The method for all modes that a point calls if a hook does not override the point.
_FOR_ALL_MODES = {
    f"{when}_{mode}_{what}": f"_{when}_{what}"
    for when in ("before", "after")
    for mode in ("train", "val", "test")
    for what in ("epoch", "iter")
}


class HookList:
    """The hooks of a run, in the order in which they are called.

    Args:
        hooks: hooks and configs, in order of registration; they are sorted by priority.
        owner: number of the Runner whose hooks these are; those that were another's are refused.
    """

    def __init__(self, hooks: Iterable[Hook | Mapping[str, Any]] = (), owner: int | None = None) -> None:
        self.hooks: list[Hook] = []
        self._owner = owner
        self._calls: dict[str, list[Callable[..., None]]] = {point: [] for point in POINTS}
        for hook in hooks:
            self.register(hook)

    def __iter__(self) -> Iterator[Hook]:
        return iter(self.hooks)

    def __len__(self) -> int:
        return len(self.hooks)

    def __getitem__(self, index: int) -> Hook:
        return self.hooks[index]

    def register(self, hook: Hook | Mapping[str, Any], priority: str | int | None = None) -> None:
        """Add a hook, or the config of one; a `priority` overrides the hook's own.

        It is called from the next point on. A hook with `main_only` is left out on all ranks but 0.

        Raises:
            TypeError: it is no hook, or its method for a point can't take what hooks are given there.
            ConfigError: its priority has no such name.
            RuntimeError: it has been a hook of another Runner.
        """
        built = _build_hook(hook)
        if self._owner is not None and vars(built).setdefault("_owner", self._owner) != self._owner:
            raise RuntimeError(
                f"this {type(built).__name__} has served another Runner already, whose counts and best values it may "
                "keep. Make another one for each Runner, or give its config, as dict(type=...)"
            )
        if priority is not None:
            built.priority = priority
        _require_parameters(built)
        if built.main_only and get_dist_info()[0] != 0:
            return
        _warn_of_misspelt_points(built)
        self.hooks = sorted([*self.hooks, built], key=_priority_of)
        self._calls = {point: [getattr(each, point) for each in self.hooks if acts_at(each, point)] for point in POINTS}

    def call(self, point: str, run: Run, **kwargs: Any) -> None:
        """Call every hook that acts at `point`, which may be a method of a project's own hooks.

        An error in a hook is raised with a note that names the hook, the point and the rank.
        """
        methods = self._calls.get(point)
        if methods is None:
            methods = self._calls[point] = [getattr(hook, point) for hook in self.hooks if hasattr(hook, point)]
            if not methods and (close := get_close_matches(point, POINTS, n=1, cutoff=0.8)):
                _logger.warning("`call_hook` calls `%s`, which no hook has: did you mean `%s`?", point, close[0])
        for method in methods:
            try:
                method(run, **kwargs)
            except Exception as error:
                owner = type(getattr(method, "__self__", method)).__name__
                error.add_note(f"in {owner}.{point} (rank {run.rank} of {run.world_size})")
                raise

    def close(self) -> None:
        """Let every hook release what it holds, also where that fails for another one."""
        with ExitStack() as stack:
            for hook in reversed(self.hooks):
                stack.callback(hook.close)


def _build_hook(item: Any) -> Hook:
    hook = item
    if isinstance(item, Mapping):
        arguments = dict(item)
        priority = arguments.pop("priority", None)
        hook = HOOKS.build(arguments)
        if priority is not None:
            hook.priority = priority
    if not isinstance(hook, Hook):
        raise TypeError(
            f"a hook must be a Hook or a config dict, but is {hook!r}. docs/side-by-side.md says what the "
            "callbacks of Lightning are here, docs/huggingface.md those of the Trainer"
        )
    return hook


def acts_at(hook: Hook, point: str) -> bool:
    """Return whether a hook overrides a point, or the method for all modes that the point calls."""
    names = (point, _FOR_ALL_MODES.get(point, point))
    return any(getattr(type(hook), name) is not getattr(Hook, name) for name in names)


def _require_parameters(hook: Hook) -> None:
    """Refuse a method that can't take what its point gives, by name."""
    for point in POINTS:
        if getattr(type(hook), point) is getattr(Hook, point):
            continue
        signature = inspect.signature(getattr(hook, point))
        wanted = [*inspect.signature(getattr(Hook, point)).parameters]
        try:
            signature.bind(None, **dict.fromkeys(wanted[2:]))  # all but `self` and `runner` by name
        except TypeError as error:
            raise TypeError(
                f"`{point}` of {type(hook).__name__} must be {point}({', '.join(wanted)}), but its parameters are "
                f"{signature}: {error}"
            ) from None


def _warn_of_misspelt_points(hook: Hook) -> None:
    for name in dir(type(hook)):
        close = []
        if name.startswith(("before_", "after_")) and name not in POINTS:
            close = get_close_matches(name, POINTS, n=1, cutoff=0.8)
        if close:
            hint = f"did you mean `{close[0]}`?"
        elif OF_LIGHTNING.fullmatch(name) or name in ("state_dict", "load_state_dict"):
            hint = "see docs/side-by-side.md for what Lightning's callbacks are here"
        else:
            continue
        _logger.warning("`%s` of %s is not a hook point, which only your own `call_hook` calls: %s",
                        name, type(hook).__name__, hint)  # fmt: skip


def _priority_of(hook: Hook) -> int:
    priority = hook.priority
    if isinstance(priority, str):
        if priority.upper() not in PRIORITIES:
            raise ConfigError(
                f"`priority` of {type(hook).__name__} must be a number or one of "
                f"{', '.join(PRIORITIES)}, but is {priority!r}"
            )
        return PRIORITIES[priority.upper()]
    return priority
