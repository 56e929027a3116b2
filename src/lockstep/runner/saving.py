"""A run on disk, and back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lockstep.checkpoint import (
    find_last_checkpoint,
    load_state,
    point_to_checkpoint,
    read_meta,
    save_state,
)
from lockstep.dist import broadcast_object, main_process_first
from lockstep.errors import ConfigError
from lockstep.optim.paramwise import param_sites
from lockstep.runner.rank_state import rank_state, restart_random_state, restore_rank_state
from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep.runner.runner import Runner

_FORMAT = 1
_logger = logging.getLogger(__name__)


def find_resumption(load_from: Path | None, work_dir: Path) -> Path | None:
    """Return the checkpoint to resume from: the one that is named, else the work_dir's last.

    **Collective**: every rank; rank 0 looks.
    """
    found = load_from if load_from is not None else find_last_checkpoint(work_dir)
    chosen: Path | None = broadcast_object(found)
    return chosen


def randomness_of(randomness: Mapping[str, Any] | None, resume_from: Path | None) -> Mapping[str, Any] | None:
    """Return the randomness that was given; without a seed, that of the run that is resumed."""
    if resume_from is None or (randomness or {}).get("seed") is not None:
        return randomness
    return {**(randomness or {}), "seed": read_meta(resume_from)["seed"]}


class Progress(NamedTuple):
    """How far a training is.

    Attributes:
        epoch: complete epochs.
        iteration: complete iterations.
    """

    epoch: int
    iteration: int


def place_of(runner: Runner, by_epoch: bool, known: Mapping[str, Any]) -> Progress:
    """Return how far a run is, at the end of an epoch or, without `by_epoch`, of an iteration.

    What is `known` of its `epoch` and `iter` counts; None is not known.
    """
    epoch, iteration = runner.epoch, runner.iter
    if not by_epoch:
        iteration += 1
    elif iteration == (epoch + 1) * (runner.train_loop.epoch_length or -1):
        epoch += 1  # which the loop counts when its hooks have been called
    given = known.get("epoch"), known.get("iter")
    return Progress(epoch if given[0] is None else given[0], iteration if given[1] is None else given[1])


def save_run(
    runner: Runner,
    directory: Path,
    place: Progress,
    *,
    is_last: bool,
    with_optimizer: bool = True,
    notes: Mapping[str, Any] | None = None,
) -> Path:
    """Save everything that resuming needs; the work_dir points to it if it `is_last`.

    Args:
        runner: whose state it is.
        directory: the checkpoint's path.
        place: how far the training is.
        is_last: whether it is the one to resume from.
        with_optimizer: save the optimizer's state, too.
        notes: further facts, in JSON values.

    **Collective**: every rank.
    """
    epoch, iteration = place
    meta: dict[str, Any] = {
        **(notes or {}),
        "format": _FORMAT,
        "lockstep": __version__,
        "torch": torch.__version__,
        "epoch": epoch,
        "iter": iteration,
        "batches_into_epoch": _batches_into_epoch(runner, epoch, iteration),
        "world_size": runner.world_size,
        "data_shares": runner.share.size,
        "rank_states": runner.world_size,
        "seed": runner.seed,
        "validated_iter": None if runner.val_loop is None else runner.val_loop.at_iter,
        "has_optimizer": with_optimizer,
        "optim_wrapper": runner.optim_wrapper.extra_state(),
        "param_schedulers": [scheduler.state_dict() for scheduler in runner.param_schedulers],
    }
    checkpoint: dict[str, Any] = {"model": runner.strategy.model_state(), "meta": meta}
    if with_optimizer:
        checkpoint["optimizer"] = runner.strategy.optim_state()
    runner.call_hook("before_save_checkpoint", checkpoint=checkpoint)
    meta = checkpoint.pop("meta")
    # A tuple, so that it stays one item whatever is in it.
    checkpoint["ranks"] = {str(runner.rank): (rank_state(runner),)}
    save_state(directory, checkpoint, meta)
    if is_last:
        with main_process_first():  # whoever returns from here finds it
            if runner.rank == 0:
                point_to_checkpoint(runner.work_dir, directory)
    _logger.debug("saved %s", directory)
    return directory


def resume_run(runner: Runner, directory: Path) -> None:
    """Bring a run that is built to where another one was saved.

    **Collective**: every rank.
    """
    strategy, loop = runner.strategy, runner.train_loop
    meta = read_meta(directory)
    wanted: dict[str, Any] = {"model": strategy.model_state(), "meta": meta}
    if meta.get("has_optimizer", True):
        wanted["optimizer"] = strategy.optim_state()
    else:
        _logger.warning("%s was saved without the optimizer's state, which begins anew", directory)
    runner.call_hook("before_load_checkpoint", checkpoint=wanted)
    del wanted["meta"]
    # Ranks that compute together now must not go on with what each of them had for itself.
    has_own = (meta.get("rank_states"), meta.get("data_shares")) == (runner.world_size, runner.share.size)
    if has_own:
        wanted["ranks"] = {str(runner.rank): ()}
    layout = strategy.optim_template() if "optimizer" in wanted else {}
    state = load_state(directory, wanted, layout)
    _check_schedulers(runner, meta, directory)
    for scheduler, saved in zip(runner.param_schedulers, meta["param_schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    strategy.load_state(state["model"], state.get("optimizer"))
    if "optimizer" in state:
        _tell_of_new_parameters(runner, wanted["optimizer"]["param_groups"], state["optimizer"], directory)
    runner.optim_wrapper.load_extra_state(meta.get("optim_wrapper", {}))
    loop.epoch, loop.iter, into = meta["epoch"], meta["iter"], meta["batches_into_epoch"]
    was_validated = (meta.get("validated_iter") or 0) >= loop.iter - into
    if loop.max_epochs is not None:
        shares = meta.get("data_shares", meta["world_size"])
        if into and shares != runner.share.size:
            _logger.warning(
                "%s was saved %d batches into epoch %d on %d ranks, which are others on %d: "
                "the epoch begins anew",
                directory, into, meta["epoch"] + 1, shares, runner.share.size,
            )  # fmt: skip
            into = 0
        loop.iter = loop.epoch * (loop.epoch_length or 0) + into
    if runner.val_loop is not None and was_validated:
        runner.val_loop.at_iter = loop.iter - into
    if has_own:
        restore_rank_state(runner, state.pop("ranks")[str(runner.rank)][0])
    else:
        restart_random_state(runner, saved_by=meta["world_size"])
    runner.call_hook("after_load_checkpoint", checkpoint={**state, "meta": meta})
    _logger.info("resumed from %s: epoch %d, iter %d", directory, loop.epoch, loop.iter)


def _batches_into_epoch(runner: Runner, epoch: int, iteration: int) -> int:
    if runner.max_epochs is None:
        return 0
    return iteration - epoch * (runner.train_loop.epoch_length or 0)


def _tell_of_new_parameters(
    runner: Runner, groups: list[Mapping[str, Any]], saved: Mapping[str, Any], directory: Path
) -> None:
    """Say which parameters of the optimizer's `groups` begin without a state, while others go on with theirs."""
    known = saved["state"] or {name for group in saved["param_groups"] for name in group["params"]}
    frozen = {site.name for site in param_sites(runner.model) if not site.parameter.requires_grad}
    new = [name for group in groups for name in group["params"] if name not in known and name not in frozen]
    if new:
        from lockstep.strategy.optim_state import listed  # imports DTensor

        _logger.info("%s has no state of the optimizer for %s, which begins without", directory, listed(new))


def _check_schedulers(runner: Runner, meta: dict[str, Any], directory: Path) -> None:
    saved, present = len(meta["param_schedulers"]), len(runner.param_schedulers)
    if saved != present:
        raise ConfigError(
            f"`param_scheduler` must have {saved} schedulers to resume from {directory}, but has {present}"
        )
