"""A run on disk, and back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.checkpoint import (
    find_last_checkpoint,
    is_checkpoint,
    load_state,
    point_to_checkpoint,
    read_meta,
    read_weights_file,
    save_state,
)
from lockstep.dist import broadcast_object, main_process_first
from lockstep.errors import ConfigError
from lockstep.runner.rank_state import rank_state, restart_random_state, restore_rank_state
from lockstep.strategy import Strategy
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


def save_run(runner: Runner, name: str, *, epoch: int, iteration: int, is_last: bool) -> Path:
    """Save everything that resuming needs; the work_dir points to it if it `is_last`.

    **Collective**: every rank.
    """
    meta: dict[str, Any] = {
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
        "optim_wrapper": runner.optim_wrapper.extra_state(),
        "param_schedulers": [scheduler.state_dict() for scheduler in runner.param_schedulers],
    }
    checkpoint: dict[str, Any] = {
        "model": runner.strategy.model_state(),
        "optimizer": runner.strategy.optim_state(),
        "meta": meta,
    }
    runner.call_hook("before_save_checkpoint", checkpoint=checkpoint)
    meta = checkpoint.pop("meta")
    # A tuple, so that it stays one item whatever is in it.
    checkpoint["ranks"] = {str(runner.rank): (rank_state(runner),)}
    directory = runner.run_dir / name
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
    wanted = {"model": strategy.model_state(), "optimizer": strategy.optim_state(), "meta": meta}
    runner.call_hook("before_load_checkpoint", checkpoint=wanted)
    del wanted["meta"]
    # Ranks that compute together now must not go on with what each of them had for itself.
    has_own = (meta.get("rank_states"), meta.get("data_shares")) == (runner.world_size, runner.share.size)
    if has_own:
        wanted["ranks"] = {str(runner.rank): ()}
    state = load_state(directory, wanted)
    _check_schedulers(runner, meta, directory)
    for scheduler, saved in zip(runner.param_schedulers, meta["param_schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    strategy.load_state(state["model"], state["optimizer"])
    runner.optim_wrapper.load_extra_state(meta.get("optim_wrapper", {}))
    loop.epoch, loop.iter = meta["epoch"], meta["iter"]
    if loop.max_epochs is not None:
        into = meta["batches_into_epoch"]
        shares = meta.get("data_shares", meta["world_size"])
        if into and shares != runner.share.size:
            _logger.warning(
                "%s was saved %d batches into epoch %d on %d ranks, which are others on %d: "
                "the epoch begins anew",
                directory, into, meta["epoch"] + 1, shares, runner.share.size,
            )  # fmt: skip
            into = 0
        loop.iter = loop.epoch * (loop.epoch_length or 0) + into
    if has_own:
        restore_rank_state(runner, state.pop("ranks")[str(runner.rank)][0])
    else:
        restart_random_state(runner, saved_by=meta["world_size"])
    runner.call_hook("after_load_checkpoint", checkpoint={**state, "meta": meta})
    _logger.info("resumed from %s: epoch %d, iter %d", directory, loop.epoch, loop.iter)


def load_weights(strategy: Strategy, path: Path) -> None:
    """Load a model's weights from a checkpoint, or from a file of weights.

    **Collective**: every rank.
    """
    if is_checkpoint(path):
        strategy.load_state(load_state(path, {"model": strategy.model_state()})["model"])
    elif path.is_file():
        strategy.load_state(read_weights_file(path))
    else:
        raise ConfigError(f"`load_from` must be a checkpoint or a file of weights, but is {path}")
    _logger.info("loaded the weights of %s", path)


def _batches_into_epoch(runner: Runner, epoch: int, iteration: int) -> int:
    if runner.max_epochs is None:
        return 0
    return iteration - epoch * (runner.train_loop.epoch_length or 0)


def _check_schedulers(runner: Runner, meta: dict[str, Any], directory: Path) -> None:
    saved, present = len(meta["param_schedulers"]), len(runner.param_schedulers)
    if saved != present:
        raise ConfigError(
            f"`param_scheduler` must have {saved} schedulers to resume from {directory}, but has {present}"
        )
