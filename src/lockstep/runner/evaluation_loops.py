"""The loops that evaluate: one pass through each dataset, for validation or for a test, or to predict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, NamedTuple

import torch

from lockstep.dataset import batch_size_of, length_of
from lockstep.dataset.loader import drawn_from
from lockstep.dataset.position import CountedBatches, check_alike, deals_batches
from lockstep.dataset.sampler import ShardingSampler
from lockstep.device import get_device
from lockstep.errors import ConfigError
from lockstep.evaluator import Evaluator
from lockstep.model import ModelWrapper, outside_loss, predict_step, step_of, unwrap_model
from lockstep.model.compiling import begin_compiled_step, kept_outputs
from lockstep.optim.amp import half_dtype
from lockstep.registry import LOOPS
from lockstep.runner.arguments import named_loaders
from lockstep.runner.run import Run, TrainRun
from lockstep.runner.seeds import part_ranks, random_state_kept
from lockstep.runner.uneven_inputs import Batch, EvenBatches


class EvalSet(NamedTuple):
    """What one pass is about.

    Attributes:
        dataloader: this rank's shard of the data.
        evaluator: the metrics, which may be those of other sets, too.
        prefix: put before the names of the metrics, as in `clean/`; empty for the only set.
    """

    dataloader: Any
    evaluator: Evaluator
    prefix: str

    @property
    def dataset(self) -> Any:
        """The dataset, if the loader has one."""
        return getattr(self.dataloader, "dataset", None)

    def evaluate(self) -> dict[str, Any]:
        """Return the metrics by full name, the same on every rank. **Collective**: every rank."""
        size = len(self.dataset) if isinstance(self.dataset, Sized) else None
        return {self.prefix + name: value for name, value in self.evaluator.evaluate(size).items()}


@dataclass(eq=False, repr=False)
class EvalLoop:
    """One pass through each of the datasets of an evaluation.

    Args:
        runner: the run; its model predicts.
        dataloader: this rank's shard of the data; of several sets, a dict or a list of loaders.
        evaluator: the metrics; for several sets, in the same form as their loaders, or one for all.
        fp16: let the model, not the metrics, compute in half precision, in the operations for which autocast considers
            it safe.
        dtype: the half precision: `"float16"`, the default on accelerators, or `"bfloat16"`, the default on the CPU.
            Giving it implies `fp16=True`.

    Attributes:
        sets: what it goes through, one after the other.
        metrics: the results of the last pass. With several sets, the set is part of a name, as in `clean/accuracy`.
        at_iter: how many iterations of training were complete at the last pass; None before the first.
    """

    mode: ClassVar[str]
    # Training draws the same random numbers with or without validations in between.
    keeps_random_state: ClassVar[bool] = True

    runner: Run
    dataloader: Any
    evaluator: Any
    fp16: bool = False
    dtype: str | torch.dtype | None = None

    def __post_init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.at_iter: int | None = None
        self._dtype = half_dtype(self.dtype)
        if self.fp16 and self._dtype is None:
            self._dtype = torch.get_autocast_dtype(get_device())
        loaders, given = named_loaders(self.dataloader), self.evaluator
        if isinstance(given, list | tuple):
            given = {str(index): evaluator for index, evaluator in enumerate(given)}
        by_name = given if isinstance(given, Mapping) else dict.fromkeys(loaders, given)
        self.sets = [EvalSet(loader, by_name[name], f"{name}/" if name else "") for name, loader in loaders.items()]
        rank, size = self.runner.rank, self.runner.world_size
        for one in self.sets:
            # Each rank's part is of a dataset that all ranks have.
            is_shared = isinstance(drawn_from(one.dataloader)[0], ShardingSampler)
            if isinstance(one.dataset, Sized) and len(one.dataset) == 0 and (size == 1 or is_shared):
                which = f"['{one.prefix[:-1]}']" if one.prefix else ""
                raise ConfigError(
                    f"`{self.mode}_dataloader{which}` must have samples, but its dataset has none (rank {rank} of "
                    f"{size})"
                )
            one.evaluator.set_dataset_meta(getattr(one.dataset, "metainfo", None))

    @property
    def length(self) -> int | None:
        """Number of this rank's batches in all sets; None if it is not known."""
        lengths = [length_of(one.dataloader) for one in self.sets]
        return None if None in lengths else sum(length or 0 for length in lengths)

    @property
    def units(self) -> dict[str, str]:
        """The units of the metrics, by name."""
        return {one.prefix + name: unit for one in self.sets for name, unit in one.evaluator.units.items()}

    @property
    def metric_names(self) -> list[str] | None:
        """The names that the metrics will have; None if one of them is known only when it has been computed."""
        names = [(one.prefix, one.evaluator.value_names) for one in self.sets]
        if any(found is None for _, found in names):
            return None
        return [prefix + name for prefix, found in names for name in found or ()]

    @torch.no_grad()
    def run(self) -> dict[str, Any]:
        """Return the metrics, the same on every rank."""
        with random_state_kept() if self.keeps_random_state else nullcontext():  # also from hooks that draw numbers
            return self._run()

    def _run(self) -> dict[str, Any]:
        runner, mode = self.runner, self.mode
        runner.set_optimizer_mode(training=False)
        runner.call_hook(f"before_{mode}")
        runner.call_hook(f"before_{mode}_epoch")
        runner.model.eval()
        self.metrics, counter = {}, count()
        for one in self.sets:
            if len(self.sets) > 1:  # an evaluator may be that of another set, too
                one.evaluator.set_dataset_meta(getattr(one.dataset, "metainfo", None))
            one.evaluator.reset(deals_batches(one.dataloader))
            kept = random_state_kept() if self.keeps_random_state else nullcontext()  # each set draws as if alone
            with kept, runner.agreement.evaluation() if self._may_stop else nullcontext():
                if runner.iter == 0:  # else the training has done so
                    part_ranks(runner.args.randomness, runner.seed, runner.data_shard.rank)
                self._predict(one.dataloader, one.evaluator, counter)
            check_alike(one.dataloader)  # not above, where a rank that is done would wait here for one that stops
            self.metrics |= one.evaluate()
        self.at_iter = runner.iter
        runner.last_evaluation = self
        runner.call_hook(f"after_{mode}_epoch", metrics=self.metrics)
        runner.call_hook(f"after_{mode}")
        if self._stops_after:
            runner.agreement.stop_if_asked()
        return self.metrics

    def _predict(self, dataloader: Any, evaluator: Evaluator, counter: Iterator[int]) -> None:
        """Pass a prediction for each batch to an evaluator; `counter` numbers the batches of all sets."""
        runner, mode = self.runner, self.mode
        step = step_of(runner.model, f"{mode}_step", predict_step)
        autocast = nullcontext() if self._dtype is None else torch.autocast(get_device(), dtype=self._dtype)
        for batch, batch_idx in zip(self._batches(dataloader), counter, strict=False):
            data_batch = batch.data
            if batch.is_own:
                runner.call_hook(f"before_{mode}_iter", batch_idx=batch_idx, data_batch=data_batch)
            moved = runner.to_device(data_batch)
            begin_compiled_step()
            with autocast:  # not around metrics and hooks, whose own products would also be in half precision
                outputs = step(moved)
            if batch.is_own:  # else the other ranks needed this rank's forward pass
                outputs = kept_outputs(outputs)
                if runner.data_shard.is_first:
                    evaluator.begin_batch(int(batch.samples), batch.indices)
                    evaluator.process(data_samples=outputs, data_batch=data_batch)
                runner.call_hook(f"after_{mode}_iter", batch_idx=batch_idx, data_batch=data_batch, outputs=outputs)
            del moved, outputs  # before the next forward pass: logits may fill a device

    @property
    def _may_stop(self) -> bool:
        """Whether a stop may come now. It waits for the update of an open window, whose gradients are not saved."""
        return not self._has_open_window and not self._stops_after

    @property
    def _stops_after(self) -> bool:
        """Whether a stop waits for the end, because a training that resumes would not make up for this evaluation."""
        runner = self.runner
        return isinstance(runner, TrainRun) and not runner.train_loop.makes_up_validations and not self._has_open_window

    @property
    def _has_open_window(self) -> bool:
        return isinstance(self.runner, TrainRun) and self.runner.optim_wrapper.has_open_window

    def _batches(self, dataloader: Any) -> Iterator[Batch]:
        """Yield this rank's batches, and stand-ins if the model's forward pass needs all ranks; see `EvenBatches`."""
        model, may_stop = self.runner.model, self._may_stop
        if self.runner.world_size > 1 and isinstance(model, ModelWrapper) and model.forward_is_collective:
            batches = EvenBatches(dataloader).iterate()
        else:
            batches = _own_batches(CountedBatches(dataloader))
        for batch in batches:
            if may_stop:
                self.runner.agreement.stop_if_asked()
            yield batch


@LOOPS.register_module()
class ValLoop(EvalLoop):
    """One pass through the validation data."""

    mode = "val"


@LOOPS.register_module()
class TestLoop(EvalLoop):
    """One pass through the test data."""

    __test__ = False  # pytest would take it for a test because of its name
    mode = "test"


class PredictLoop(TestLoop):
    """One pass through a dataset that only predicts: `Predictions` keeps what the model returns."""

    def run(self) -> dict[str, Any]:
        """Predict; there are no metrics."""
        loss = outside_loss(unwrap_model(self.runner.model))
        if loss is None:
            return super().run()
        loss.needs_targets = False
        try:
            return super().run()
        finally:
            loss.needs_targets = True


def _own_batches(batches: CountedBatches) -> Iterator[Batch]:
    """Yield this rank's batches; if reading fails, end the workers first; see `CountedBatches.shut_down`."""
    try:
        for batch in batches:
            size = batch_size_of(batch) if batches.samples is None else batches.samples
            yield Batch(batch, size, size, True, batches.indices)
    except Exception:
        batches.shut_down()
        raise
