"""The loops that evaluate: one pass through a dataset, for validation or for a test."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lockstep.dataset import batch_size_of
from lockstep.dataset.position import CountedBatches
from lockstep.dataset.sampler import ShardingSampler, drawn_from
from lockstep.dataset.stream import check_alike
from lockstep.device import get_device
from lockstep.errors import ConfigError
from lockstep.evaluator import Evaluator
from lockstep.model import ModelWrapper, predict_step, step_of
from lockstep.model.compiling import begin_compiled_step, kept_outputs
from lockstep.registry import LOOPS
from lockstep.runner.run import Run
from lockstep.runner.seeds import part_ranks, random_state_kept
from lockstep.runner.uneven_inputs import Batch, EvenBatches


@dataclass(eq=False, repr=False)
class EvalLoop:
    """One pass through a dataset for evaluation.

    Args:
        runner: the run; its model predicts.
        dataloader: this rank's shard of the data.
        evaluator: the metrics.
        fp16: let the model compute in half precision, in the operations for which autocast considers it safe.
        dtype: the half precision: `"float16"`, the default on accelerators, or `"bfloat16"`, the default on the CPU.
            Giving it implies `fp16=True`.

    Attributes:
        metrics: the results of the last pass.
        at_iter: how many iterations of training were complete at the last pass; None before the first.
    """

    mode: ClassVar[str]
    # Training draws the same random numbers with or without validations in between.
    keeps_random_state: ClassVar[bool] = True

    runner: Run
    dataloader: Any
    evaluator: Evaluator
    fp16: bool = False
    dtype: str | torch.dtype | None = None

    def __post_init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.at_iter: int | None = None
        self._dtype = _half(self.dtype) if self.fp16 or self.dtype is not None else None
        dataset = getattr(self.dataloader, "dataset", None)
        self._size = len(dataset) if isinstance(dataset, Sized) else None
        rank, size = self.runner.rank, self.runner.world_size
        is_dealt = isinstance(drawn_from(self.dataloader)[0], ShardingSampler)  # from the same dataset on all ranks
        if self._size == 0 and (size == 1 or is_dealt):
            raise ConfigError(
                f"`{self.mode}_dataloader` must have samples, but its dataset has none (rank {rank} of {size})"
            )
        self.evaluator.set_dataset_meta(getattr(dataset, "metainfo", None))

    @torch.no_grad()
    def run(self) -> dict[str, Any]:
        """Return the metrics, the same on every rank."""
        runner, mode = self.runner, self.mode
        runner.set_optimizer_mode(training=False)
        runner.call_hook(f"before_{mode}")
        runner.call_hook(f"before_{mode}_epoch")
        runner.model.eval()
        autocast = nullcontext() if self._dtype is None else torch.autocast(get_device(), dtype=self._dtype)
        kept = random_state_kept() if self.keeps_random_state else nullcontext()
        with kept, autocast, runner.agreement.evaluation():
            if runner.iter == 0:  # else the training has done so
                part_ranks(runner.args.randomness, runner.seed, runner.data_shard.rank)
            self._predict()
        self.metrics = self.evaluator.evaluate(self._size)
        self.at_iter = runner.iter
        runner.last_evaluation = self
        runner.call_hook(f"after_{mode}_epoch", metrics=self.metrics)
        runner.call_hook(f"after_{mode}")
        return self.metrics

    def _predict(self) -> None:
        runner, mode = self.runner, self.mode
        step = step_of(runner.model, f"{mode}_step", predict_step)
        for batch_idx, batch in enumerate(self._batches()):
            runner.agreement.act_if_asked(may_save=False)
            data_batch = batch.data
            if batch.is_own:
                runner.call_hook(f"before_{mode}_iter", batch_idx=batch_idx, data_batch=data_batch)
            moved = runner.prefetch(data_batch)
            begin_compiled_step()
            if not batch.is_own:
                step(moved)  # the other ranks need this rank's forward pass
                continue
            outputs = kept_outputs(step(moved))
            if runner.data_shard.is_first:
                self.evaluator.count_samples(batch.samples)
                self.evaluator.process(data_samples=outputs, data_batch=data_batch)
            runner.call_hook(f"after_{mode}_iter", batch_idx=batch_idx, data_batch=data_batch, outputs=outputs)
        check_alike(self.dataloader)

    def _batches(self) -> Iterator[Batch]:
        """Yield this rank's batches, and stand-ins if the model's forward pass needs all ranks; see `EvenBatches`."""
        model = self.runner.model
        if self.runner.world_size > 1 and isinstance(model, ModelWrapper) and model.forward_is_collective:
            return EvenBatches(self.dataloader).iterate()
        return _own_batches(CountedBatches(self.dataloader))


@LOOPS.register_module()
class ValLoop(EvalLoop):
    """One pass through the validation data."""

    mode = "val"


@LOOPS.register_module()
class TestLoop(EvalLoop):
    """One pass through the test data."""

    __test__ = False  # pytest would take it for a test because of its name
    mode = "test"


def _own_batches(batches: CountedBatches) -> Iterator[Batch]:
    """Yield this rank's batches; if reading fails, end the workers first, which the error would keep alive."""
    try:
        for batch in batches:
            size = batch_size_of(batch) if batches.samples is None else batches.samples
            yield Batch(batch, size, size, True)
    except Exception:
        batches.shut_down()
        raise


def _half(dtype: str | torch.dtype | None) -> torch.dtype:
    known = {"float16": torch.float16, "fp16": torch.float16, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
    found = torch.get_autocast_dtype(get_device()) if dtype is None else known.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise ConfigError(f"`dtype` must be 'float16' or 'bfloat16', but is {dtype!r}")
    return found
