"""Loops: lockstep's, whose iterations, epochs or whole course a subclass may define anew, as in MMEngine.

Evaluations draw random numbers from those of the training, as there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Self

import torch

import lockstep.runner
from lockstep.dataset import batch_size_of, build_dataloader, set_epoch
from lockstep.launch.worker import note_trained
from lockstep.model import predict_step, step_of
from lockstep.runner import build
from lockstep.runner.arguments import named_loaders
from lockstep.runner.evaluation_loops import EvalLoop
from lockstep.runner.loops import TrainLoop, no_batches
from lockstep.runner.run import TrainRun
from lockstep.runner.seeds import random_state_kept
from lockstep.runner.uneven_inputs import Batch, buffers_kept
from mmengine.registry import EVALUATOR, LOOPS
from mmengine.runner.base_loop import BaseLoop, note_metrics
from mmengine.runner.data import as_mmengine

__all__ = ["EpochBasedTrainLoop", "IterBasedTrainLoop", "TestLoop", "ValLoop"]

_logger = logging.getLogger(__name__)


def own_methods(loop: Any, *names: str) -> list[str]:
    """Return which of these methods a loop has from a class of the user's, and say what does not hold then."""
    found = [name for name in names if getattr(getattr(loop, name, None), "__module__", __name__) != __name__]
    if found and loop.runner.rank == 0:
        _logger.warning(
            "%s has its own %s, called as in MMEngine. Not promised with it: stopping or saving on a signal, resuming "
            "within an epoch, and ranks with unequal numbers of batches",
            type(loop).__name__, " and ".join(f"{name}()" for name in found),
        )  # fmt: skip
    return found


def show_meta(loop: Any) -> None:
    """Hand the visualizer what the data set of a new loop says of itself, such as the names of its classes."""
    meta = getattr(getattr(loop.dataloader, "dataset", None), "metainfo", None)
    if meta is not None:
        loop.runner.visualizer.dataset_meta = meta


class CountsOwnBatches(TrainLoop):
    """A training loop in which a user's code may fetch the batches and call the hooks."""

    _batch: Batch | None = None  # the one that the loop has fetched

    def note_own_batch(self, batch: Any) -> None:
        """Count the samples of a batch with which the user's code has trained, for the records."""
        if self._batch is None:
            self.samples = 1 if batch is None else batch_size_of(batch)


class _OpenTrainLoop(CountsOwnBatches):
    """A training loop with the methods and attributes that a subclass may override or use in MMEngine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # In MMEngine an interval holds from the validation on that comes just before its milestone.
        self._intervals = [(max(begin - 1, 0), interval) for begin, interval in self._intervals]
        self._own = own_methods(self, "run", "run_epoch", "run_iter")
        self._is_prepared = False
        show_meta(self)

    @property
    def _iter(self) -> int:
        return self.iter

    @_iter.setter
    def _iter(self, value: int) -> None:
        self.iter = value

    @property
    def _epoch(self) -> int:
        return self.epoch

    @_epoch.setter
    def _epoch(self, value: int) -> None:
        if value == self.epoch + 1:
            self._complete_epoch()
        else:
            self.epoch = value

    @property
    def _max_iters(self) -> int:
        return self.max_iters

    @property
    def _max_epochs(self) -> int | None:
        return self.max_epochs

    def _decide_current_val_interval(self) -> None:
        """Set `val_interval` to what holds at present."""
        done = self.iter if self.max_epochs is None else self.epoch
        self.val_interval = next(interval for begin, interval in reversed(self._intervals) if done >= begin)

    def prepare_own(self) -> None:
        """Do what `run` begins with, in case that the subclass has its own."""
        if self._own:
            self._prepare()
            if "run" in self._own:
                self._restore_random_state()
            self._begin_training()

    def _prepare(self) -> None:
        if not self._is_prepared:  # a second time the window of accumulation would not be the one that was saved
            self._is_prepared = True
            super()._prepare()

    def _check_length(self, done: int, expected: int) -> None:
        if "run_epoch" not in self._own:
            super()._check_length(done, expected)  # type: ignore[misc]

    def _run_iter(self, batch_idx: int, fetched: Batch) -> None:
        """Run an iteration: the subclass's own, if it has one."""
        if "run_iter" not in self._own:
            super()._run_iter(batch_idx, fetched)
            return
        self._batch = fetched
        self._call_own_iter(batch_idx, fetched)
        self._batch = None

    def _call_own_iter(self, batch_idx: int, fetched: Batch) -> None:
        runner, before = self.runner, self.iter
        self.samples = fetched.samples
        runner.optim_wrapper.count_samples(fetched.samples, fetched.mean_samples)
        with nullcontext() if fetched.is_own else buffers_kept(runner.model):
            self._own_iter(batch_idx, fetched.data)
        self.iter = before + 1
        note_trained()
        runner.saving.collect()

    def _own_iter(self, batch_idx: int, batch: Any) -> None:
        raise NotImplementedError

    def _plain_iter(self, batch_idx: int, batch: Any) -> None:
        """Run an iteration as lockstep does, on a batch that may not be the one that the loop has fetched."""
        fetched = self._batch
        if fetched is None:
            samples = batch_size_of(batch)
            fetched = Batch(batch, samples, float(samples), True)
        TrainLoop._run_iter(self, batch_idx, fetched._replace(data=batch))


@LOOPS.register_module()
class EpochBasedTrainLoop(_OpenTrainLoop, lockstep.runner.EpochBasedTrainLoop):
    """A loop that trains for a number of passes; see `lockstep.runner.EpochBasedTrainLoop`.

    A subclass may override `run`, `run_epoch` and `run_iter`, and count in `_epoch` and `_iter`.
    """

    def run(self) -> Any:
        """Train until `max_epochs`, validating in between, and return the model."""
        super().run()
        return self.runner.model

    def run_epoch(self) -> None:
        """Train for one epoch."""
        lockstep.runner.EpochBasedTrainLoop._run_epoch(self)

    def run_iter(self, idx: int, data_batch: Any) -> None:
        """Train with one batch, the `idx`-th of the epoch from 0, calling the hooks."""
        self._plain_iter(idx, data_batch)

    def _run_epoch(self) -> None:
        self.run_epoch()

    def _own_iter(self, batch_idx: int, batch: Any) -> None:
        self.run_iter(batch_idx, batch)


@LOOPS.register_module()
class IterBasedTrainLoop(_OpenTrainLoop, lockstep.runner.IterBasedTrainLoop):
    """A loop that trains for a number of iterations; see `lockstep.runner.IterBasedTrainLoop`.

    A subclass may override `run` and `run_iter`, and count in `_iter`.
    """

    def run(self) -> Any:
        """Train until `max_iters`, validating in between, and return the model."""
        super().run()
        return self.runner.model

    def run_iter(self, data_batch: Any) -> None:
        """Train with one batch, calling the hooks."""
        self._plain_iter(self.iter, data_batch)

    @property
    def dataloader_iterator(self) -> _InfiniteDataloaderIterator:
        """The batches of pass after pass, for a subclass's own `run`."""
        if "_iterator" not in vars(self):
            self._iterator = _InfiniteDataloaderIterator(self.dataloader)
        return self._iterator

    @dataloader_iterator.setter
    def dataloader_iterator(self, iterator: Any) -> None:
        self._iterator = iterator

    def resume(self, iteration: int, epoch: int, begin: Any) -> None:
        """Go on after so many iterations and passes."""
        super().resume(iteration, epoch, begin)
        self._draw_at_passes()

    def _complete_epoch(self) -> None:
        super()._complete_epoch()
        self._draw_at_passes()

    def _draw_at_passes(self) -> None:
        """Let each pass begin with a number of torch's global generator, as torch does; that of the first is drawn."""
        cfg = self.runner.args.train_dataloader
        if isinstance(cfg, Mapping) and cfg.get("generator") is None:
            self.dataloader.generator = None

    def _own_iter(self, batch_idx: int, batch: Any) -> None:
        self.run_iter(batch)


class _OpenEvalLoop(EvalLoop):
    """A loop that evaluates, with the method that a subclass may override in MMEngine."""

    keeps_random_state = False

    def __post_init__(self) -> None:
        if isinstance(self.dataloader, Mapping) and "dataset" in self.dataloader:
            seed, shard = self.runner.seed, self.runner.data_shard[:2]
            cfg = as_mmengine(self.dataloader, seed)
            self.dataloader = build_dataloader(cfg, seed=seed, evaluation=True, shard=shard)
        given: Any = self.evaluator
        is_single = "" in named_loaders(self.dataloader)
        if is_single and isinstance(given, Mapping | list | tuple):  # configs, where the user's code makes the loop
            given = given if isinstance(given, Mapping) and "metrics" in given else {"metrics": given}
            self.evaluator = EVALUATOR.build({"type": "Evaluator", **given})
        super().__post_init__()
        show_meta(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__ != __name__:
            note_metrics(cls)

    def run(self) -> dict[str, Any]:
        """Return the metrics, the same on every rank."""
        if isinstance(self.runner, TrainRun):
            self._start_workers_again(self.runner.train_loop)
        return super().run()

    def _start_workers_again(self, loop: TrainLoop) -> None:
        """Start persistent workers that a run without interruption would have from an earlier validation.

        torch draws a number where it starts some. Drawn once more, it would change all that a resumed training draws.
        """
        loaders = [one.dataloader for one in self.sets if getattr(one.dataloader, "persistent_workers", False)]
        lost = [one for one in loaders if one._iterator is None]
        done = loop.iter if self.runner.max_epochs is None else loop.epoch
        if lost and any(loop._is_validation_due(earlier, 0) for earlier in range(1, done)):
            with random_state_kept():
                for loader in lost:
                    iter(loader)

    @torch.no_grad()
    def run_iter(self, idx: int, data_batch: Any) -> None:
        """Predict for one batch, the `idx`-th from 0, and pass it to the metrics, calling the hooks."""
        runner, mode = self.runner, self.mode
        runner.call_hook(f"before_{mode}_iter", batch_idx=idx, data_batch=data_batch)
        outputs = step_of(runner.model, f"{mode}_step", predict_step)(data_batch)
        if runner.data_shard.is_first:
            self.evaluator.process(data_samples=outputs, data_batch=data_batch)
        runner.call_hook(f"after_{mode}_iter", batch_idx=idx, data_batch=data_batch, outputs=outputs)

    def _predict(self, dataloader: Any, evaluator: Any, counter: Iterator[int]) -> None:
        if type(self).run_iter is _OpenEvalLoop.run_iter:
            super()._predict(dataloader, evaluator, counter)
            return
        runner = self.runner
        for fetched, batch_idx in zip(self._batches(dataloader), counter, strict=False):
            if fetched.is_own:
                self.run_iter(batch_idx, fetched.data)
            else:  # the other ranks need this rank's forward pass
                step_of(runner.model, f"{self.mode}_step", predict_step)(fetched.data)


@LOOPS.register_module()
class ValLoop(_OpenEvalLoop):
    """One pass through the validation data. A subclass may override `run_iter` and `run`."""

    mode = "val"


@LOOPS.register_module()
class TestLoop(_OpenEvalLoop):
    """One pass through the test data. A subclass may override `run_iter` and `run`."""

    __test__ = False
    mode = "test"


class _InfiniteDataloaderIterator:
    """The batches of a data loader, pass after pass without an end; each pass is an epoch to its sampler.

    Args:
        dataloader: the data loader.
    """

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        self._iterator = iter(dataloader)
        self._epoch = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._epoch += 1
            set_epoch(self._dataloader, self._epoch)
            self._iterator = iter(self._dataloader)
        for batch in self._iterator:
            return batch
        raise no_batches(self._dataloader)


class _LoopAround(CountsOwnBatches):
    """A training loop of a user's that is no `TrainLoop`, as the run, its hooks and its checkpoints know one.

    Args:
        runner: the run.
        own: the user's loop; its attributes are those of this one.
    """

    def __init__(self, runner: TrainRun, own: BaseLoop) -> None:
        self.own: Any = own
        super().__init__(
            runner, own.dataloader, getattr(own, "val_begin", 1), getattr(own, "val_interval", 1), None, None
        )
        self.max_epochs = getattr(own, "max_epochs", None)
        self.max_iters = getattr(own, "max_iters", 0)
        own_methods(own, "run")

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["own"], name)

    @property
    def iter(self) -> int:
        """Complete iterations, as the user's loop counts them."""
        return int(getattr(self.own, "_iter", 0))

    @iter.setter  # noqa: A003
    def iter(self, value: int) -> None:
        self.own._iter = value

    @property
    def epoch(self) -> int:
        """Complete epochs, as the user's loop counts them."""
        return int(getattr(self.own, "_epoch", 0))

    @epoch.setter
    def epoch(self, value: int) -> None:
        self.own._epoch = value

    def position(self, epoch: int, iteration: int) -> dict[str, Any]:
        """Return the position at the beginning of an epoch: within one it is not known."""
        return self.even_batches.position(epoch, 0)

    def run(self) -> Any:
        """Let the user's loop train."""
        self._prepare()
        self._restore_random_state()
        self._begin_training()
        return self.own.run()


def build_train_loop(cfg: Mapping[str, Any], run: TrainRun) -> TrainLoop:
    """Return the loop that `train_cfg` describes; one that is only a `BaseLoop` is led as the others are."""
    kind = cfg.get("type")
    if isinstance(kind, str):
        with LOOPS.switch_scope_and_registry(cfg.get("_scope_")) as there:
            kind = there.get(kind)
    if isinstance(kind, type) and issubclass(kind, BaseLoop):
        return _LoopAround(run, LOOPS.build({**cfg, "runner": run, "dataloader": run.train_dataloader}))
    return build.build_train_loop(cfg, run)
