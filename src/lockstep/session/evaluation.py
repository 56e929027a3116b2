"""`OwnEvaluation`: what a session evaluates in the user's own code, and rows that it gathers from all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lockstep.dataset import set_epoch
from lockstep.dataset.position import deals_batches
from lockstep.dist import all_gather
from lockstep.errors import ConfigError, listed
from lockstep.groups import this_rank
from lockstep.model import ModelWrapper, unwrap_model
from lockstep.model.compiling import begin_compiled_step
from lockstep.model.shards import reshard
from lockstep.runner.seeds import random_state_kept
from lockstep.runner.uneven_inputs import EvenBatches
from lockstep.session.loop import OwnLoop


class OwnEvaluation:
    """The passes of the user's code over data to evaluate on, and what it gathers there or in an iteration.

    Args:
        loop: the loop that trains.
    """

    def __init__(self, loop: OwnLoop) -> None:
        self._loop = loop
        self._has_gathered = False  # rows of the present batch
        self._samples = 0  # of all ranks' present batches
        self._has_warned = self._has_told_of_stand_ins = False

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield equally many batches on every rank; training then draws the same random numbers as without."""
        loop, run = self._loop, self._loop.runner
        if loop.is_evaluating:
            raise RuntimeError(
                "a pass over a loader of prepare_evaluation() began within another one, so that session.gather() can't "
                f"tell whose rows it gets ({this_rank()}). Go through one after the other, or through one loader of a "
                "torch.utils.data.StackDataset; end a pass by `break` before the next one begins"
            )
        set_epoch(loader, 0)
        loop.end_left_iter()
        # In the midst of an iteration or of an accumulation window, what has been computed can't be saved.
        may_stop = not loop.is_stepping and not run.optim_wrapper.has_open_window
        context = run.model.evaluation_context() if isinstance(run.model, ModelWrapper) else nullcontext()
        with run.saving.at_stop(), random_state_kept(), run.evaluated(), self._weights_to_evaluate(), context:
            loop.deals_batches = deals_batches(loader)
            for batch in EvenBatches(loader).iterate():
                if may_stop:
                    loop.stop_in_validation()
                loop.counts = batch.is_own
                self._samples = round(batch.mean_samples * run.data_shard.size)
                self._has_gathered = False
                moved = run.to_device(batch.data)
                begin_compiled_step()
                yield moved
                if batch.stands_in:
                    self._tell_of_stand_ins()

    def require_none(self) -> None:
        """Refuse a training step in a pass over evaluation data, which would be trained on."""
        if self._loop.is_evaluating and not self._loop.is_stepping:
            raise RuntimeError(
                "session.step() was called in a pass over a loader of prepare_evaluation(), and would train on data of "
                "a validation. Leave it out there, or go through the loader that prepare() has returned"
            )

    def gather(self, tensors: Sequence[Any], *, sync_grads: bool) -> Any:
        """Return each tensor's rows of all ranks, each sample once and in the order of the loader; see `Session`."""
        loop, run = self._loop, self._loop.runner
        at = f"({this_rank()})"
        for x in tensors:
            if not isinstance(x, Tensor) or x.dim() == 0:
                what = "a tensor without dimensions" if isinstance(x, Tensor) else f"a {type(x).__name__}"
                raise TypeError(
                    f"gather() takes tensors with one row per sample, but got {what} {at}. Hand them in one by one, as "
                    "in predictions, labels = session.gather(predictions, labels); for one value per rank use "
                    "lockstep.dist.all_gather or all_reduce"
                )
        if len(sizes := {len(x) for x in tensors}) > 1:
            raise ValueError(f"gather() takes tensors with one row per sample, but they have {sorted(sizes)} rows {at}")
        if sync_grads and run.data_shard.size < run.world_size:  # gradients would reach one rank of those alone
            raise ConfigError(
                "gather(sync_grads=True) must be called where each rank has samples of its own, but under "
                f"tensor_parallel ranks share them {at}. Use strategy 'ddp', or 'fsdp' without it"
            )
        sends = loop.counts and run.data_shard.is_first
        parts = [all_gather(x if sends else x[:0], sync_grads=sync_grads) for x in tensors]
        cuts = torch.is_grad_enabled() and not sync_grads and any(x.requires_grad for x in tensors)
        self._warn_of_gather(sum(map(len, parts[0])) if parts else 0, cuts=cuts)
        for rows in parts:
            if len(shapes := dict.fromkeys(str(tuple(part.shape[1:])) for part in rows)) > 1:
                raise ValueError(
                    f"gather() takes rows of one shape on all ranks, but theirs are {listed([*shapes])} {at}. Pad them "
                    "alike, or reduce each to a number before"
                )
        gathered = tuple(map(torch.cat, parts))
        if not loop.deals_batches:  # samples in turns: the first of each rank, then the second of each
            places = [torch.cat([torch.arange(len(one), device=one.device) for one in part]) for part in parts]
            gathered = tuple(rows[place.argsort(stable=True)] for rows, place in zip(gathered, places, strict=True))
        return gathered[0] if len(gathered) == 1 else gathered

    @contextmanager
    def _weights_to_evaluate(self) -> Iterator[None]:
        """Let hooks give the model what a Runner validates, such as averaged weights, for one pass."""
        loop, run = self._loop, self._loop.runner
        run.call_hook("before_val")
        run.call_hook("before_val_epoch")
        loop.is_evaluating = True
        try:
            yield
        finally:
            loop.counts, loop.is_evaluating = True, False
            loop.deals_batches = deals_batches(loop.dataloader)
            run.call_hook("after_val")
            reshard(unwrap_model(run.model))  # hooks of an iteration that goes on look for shards

    def _tell_of_stand_ins(self) -> None:
        """Say, once, that a rank got a batch twice: what the user's code sums itself contains it twice.

        A warning where nothing was gathered; else the code may still sum something else beside it.
        """
        if not self._has_told_of_stand_ins:
            self._has_told_of_stand_ins = True
            self._loop.runner.logger.log(
                logging.INFO if self._has_gathered else logging.WARNING,
                "in a validation, a rank that had run out of batches got its last one again. session.gather() leaves "
                "it out%s; a sum of your own, with or without all_reduce(), and a metric that your loop updates count "
                "it twice: compute them from what gather() returns",
                "" if self._has_gathered else ", but was not called",
            )  # fmt: skip

    def _warn_of_gather(self, rows: int, *, cuts: bool) -> None:
        """Warn, once, if rows are gathered that no loader of this session has given, or not one for each sample.

        Or if the rows of a training have a gradient, which ends there (`cuts`).
        """
        self._has_gathered = True
        is_stepping, is_evaluating = self._loop.is_stepping, self._loop.is_evaluating
        is_training = is_stepping and not is_evaluating
        if self._has_warned or (is_stepping and not (is_training and cuts)):
            return
        if is_training:
            says = (
                "with a tensor that requires grad, whose gradient ends there: a loss of what it returns trains nothing "
                "before it. Pass sync_grads=True to let gradients flow back over the ranks, or hand in .detach()"
            )
        elif not is_evaluating:
            says = (
                "outside of a pass through a loader of the session. If each rank has gone through all samples, each is "
                "gathered once for every rank: hand the loader to prepare_evaluation()"
            )
        elif rows != self._samples:
            says = (
                f"with {rows} rows of all ranks for batches of {self._samples} samples: a mean over rows "
                "weighs samples unequally. Give one row per sample; of a batch's mean loss, loss.repeat(len(labels))"
            )
        else:
            return
        self._has_warned = True
        self._loop.runner.logger.warning("gather() was called %s", says)
