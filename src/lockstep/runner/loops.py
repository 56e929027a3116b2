"""The loops: fetch, step, hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lockstep.dataset import length_of, set_epoch, skip_batches
from lockstep.errors import ConfigError
from lockstep.evaluator import Evaluator
from lockstep.model import predict_step, train_step
from lockstep.registry import LOOPS
from lockstep.runner.together import in_step

if TYPE_CHECKING:
    from lockstep.runner.runner import Runner

Step: TypeAlias = Callable[..., Any]


class TrainLoop(ABC):
    """What loops by epochs and by iterations have in common.

    Attributes:
        epoch: complete passes through the data.
        iter: complete iterations.
        stop_training: set it to end the training after the present epoch or iteration.
    """

    max_epochs: int | None
    max_iters: int

    def __init__(self, runner: Runner, dataloader: Any, val_begin: int, val_interval: int) -> None:
        self.runner = runner
        self.dataloader = dataloader
        self.val_begin = val_begin
        self.val_interval = val_interval
        self.epoch = 0
        self.iter = 0
        self.stop_training = False

    @abstractmethod
    def run(self) -> None:
        """Train until the end."""

    def _prepare(self) -> None:
        runner = self.runner
        runner.optim_wrapper.initialize_count_status(runner.model, self.iter, self.max_iters)
        self._step = _step_of(runner.model, "train_step", train_step)

    def _run_iter(self, batch_idx: int, data_batch: Any) -> None:
        runner = self.runner
        runner.call_hook("before_train_iter", batch_idx=batch_idx, data_batch=data_batch)
        outputs = self._step(data_batch, optim_wrapper=runner.optim_wrapper)
        runner.call_hook("after_train_iter", batch_idx=batch_idx, data_batch=data_batch, outputs=outputs)
        self.iter += 1

    def _validate_if_due(self, done: int, last: int) -> None:
        loop = self.runner.val_loop
        if loop is None or done < self.val_begin:
            return
        if done % self.val_interval == 0 or done == last or self.stop_training:
            loop.run()
            self.runner.model.train()


@LOOPS.register_module()
class EpochBasedTrainLoop(TrainLoop):
    """Train for a number of passes through the data.

    Args:
        runner: whose model is trained.
        dataloader: this rank's share of the data, with a length.
        max_epochs: number of passes.
        val_begin: the epoch after which the first validation may come.
        val_interval: number of epochs from one validation to the next; the last epoch always ends
            in one.
    """

    def __init__(
        self,
        runner: Runner,
        dataloader: Any,
        max_epochs: int,
        val_begin: int = 1,
        val_interval: int = 1,
    ) -> None:
        super().__init__(runner, dataloader, val_begin, val_interval)
        batches = length_of(dataloader)
        if batches is None:
            raise ConfigError(
                "`train_dataloader` must have a length to be counted in epochs, but "
                f"{type(dataloader).__name__} has none. Use train_cfg=dict(by_epoch=False, "
                "max_iters=...)"
            )
        self.max_epochs: int = _positive("max_epochs", max_epochs)
        self.max_iters = self.max_epochs * batches

    def run(self) -> None:
        """Train until `max_epochs`, validating in between."""
        self._prepare()
        self.runner.call_hook("before_train")
        while self.epoch < self.max_epochs and not self.stop_training:
            self._run_epoch()
            self._validate_if_due(self.epoch, self.max_epochs)
        self.runner.call_hook("after_train")

    def _run_epoch(self) -> None:
        self.runner.call_hook("before_train_epoch")
        self.runner.model.train()
        done = self.iter - self.epoch * len(self.dataloader)
        for batch_idx, data_batch in enumerate(_batches_from(self.dataloader, done), start=done):
            self._run_iter(batch_idx, data_batch)
        self.runner.call_hook("after_train_epoch")
        self.epoch += 1


@LOOPS.register_module()
class IterBasedTrainLoop(TrainLoop):
    """Train for a number of iterations, passing through the data as often as it takes.

    Args:
        runner: whose model is trained.
        dataloader: this rank's share of the data.
        max_iters: number of iterations.
        val_begin: the iteration after which the first validation may come.
        val_interval: number of iterations from one validation to the next; the last iteration
            always ends in one.
    """

    max_epochs = None

    def __init__(
        self,
        runner: Runner,
        dataloader: Any,
        max_iters: int,
        val_begin: int = 1,
        val_interval: int = 1000,
    ) -> None:
        super().__init__(runner, dataloader, val_begin, val_interval)
        self.max_iters = _positive("max_iters", max_iters)

    def run(self) -> None:
        """Train until `max_iters`, validating in between."""
        self._prepare()
        batches = self._endless_batches()
        self.runner.call_hook("before_train")
        self.runner.call_hook("before_train_epoch")
        self.runner.model.train()
        while self.iter < self.max_iters and not self.stop_training:
            self._run_iter(self.iter, next(batches))
            self._validate_if_due(self.iter, self.max_iters)
        self.runner.call_hook("after_train_epoch")
        self.runner.call_hook("after_train")

    def _endless_batches(self) -> Iterator[Any]:
        done = self.iter
        if batches := length_of(self.dataloader):
            self.epoch, done = divmod(self.iter, batches)
        while True:
            set_epoch(self.dataloader, self.epoch)
            empty = True
            for batch in _batches_from(self.dataloader, done):
                empty = False
                yield batch
            if empty and not done:
                raise ConfigError("`train_dataloader` must yield at least one batch per pass, but yields none")
            done = 0
            self.epoch += 1


class EvalLoop:
    """One pass through data that is only looked at."""

    mode: str

    def __init__(self, runner: Runner, dataloader: Any, evaluator: Evaluator) -> None:
        self.runner = runner
        self.dataloader = dataloader
        self.evaluator = evaluator
        self.metrics: dict[str, Any] = {}
        dataset = getattr(dataloader, "dataset", None)
        self._size = len(dataset) if isinstance(dataset, Sized) else None
        evaluator.set_dataset_meta(getattr(dataset, "metainfo", None))

    @torch.no_grad()
    def run(self) -> dict[str, Any]:
        """Return the metrics, the same on every rank."""
        runner, mode = self.runner, self.mode
        step = _step_of(runner.model, f"{mode}_step", predict_step)
        runner.call_hook(f"before_{mode}")
        runner.call_hook(f"before_{mode}_epoch")
        runner.model.eval()
        for batch_idx, (data_batch, is_own) in enumerate(self._batches()):
            if not is_own:
                step(data_batch)  # for the sake of the other ranks
                continue
            runner.call_hook(f"before_{mode}_iter", batch_idx=batch_idx, data_batch=data_batch)
            outputs = step(data_batch)
            self.evaluator.process(data_samples=outputs, data_batch=data_batch)
            runner.call_hook(f"after_{mode}_iter", batch_idx=batch_idx, data_batch=data_batch, outputs=outputs)
        self.metrics = self.evaluator.evaluate(self._size)
        runner.last_evaluation = self
        runner.call_hook(f"after_{mode}_epoch", metrics=self.metrics)
        runner.call_hook(f"after_{mode}")
        return self.metrics

    def _batches(self) -> Iterator[tuple[Any, bool]]:
        """Yield batches, and whether each is this rank's own; see `in_step`."""
        if self.runner.world_size > 1 and getattr(self.runner.model, "forward_is_collective", False):
            return in_step(self.dataloader)
        return ((batch, True) for batch in self.dataloader)


@LOOPS.register_module()
class ValLoop(EvalLoop):
    """One pass through the validation data."""

    mode = "val"


@LOOPS.register_module()
class TestLoop(EvalLoop):
    """One pass through the test data."""

    __test__ = False  # its name makes pytest think it was a test
    mode = "test"


def _step_of(model: torch.nn.Module, name: str, otherwise: Step) -> Step:
    """Return the model's own step of that name, or the one for any module."""
    own: Step | None = getattr(model, name, None)
    return partial(otherwise, model) if own is None else own


def _batches_from(dataloader: Any, start: int) -> Iterator[Any]:
    """Yield the batches of one pass from the `start`-th on."""
    skipped = start == 0 or skip_batches(dataloader, start)
    for batch_idx, batch in enumerate(dataloader):
        if skipped or batch_idx >= start:
            yield batch


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"`{name}` must be an int of at least 1, but is {value!r}")
    return value
