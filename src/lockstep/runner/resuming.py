"""Resuming from a checkpoint: what is read from it, and where it is restored."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoint import find_last_checkpoint, load_state, read_meta
from lockstep.dataset.random_state import set_random_state
from lockstep.dist import run_on_main
from lockstep.errors import ConfigError, counted
from lockstep.optim.paramwise import param_sites
from lockstep.runner.run import TrainRun
from lockstep.runner.seeds import seed_all
from lockstep.runner.weights import Weights

_logger = logging.getLogger(__name__)


def find_resumption(load_from: Weights | None, work_dir: Path) -> Path | None:
    """Return the checkpoint to resume from: `load_from` if given, else the last one in the work_dir.

    **Collective**: every rank; rank 0 looks.
    """
    return run_on_main(lambda: find_last_checkpoint(work_dir) if load_from is None else load_from.path)


def randomness_of(randomness: Mapping[str, Any] | None, resume_from: Path | None) -> Mapping[str, Any] | None:
    """Return the given randomness; if it has no seed, with the seed of the run that is resumed."""
    if resume_from is None or (randomness or {}).get("seed") is not None:
        return randomness
    return {**(randomness or {}), "seed": read_meta(resume_from)["seed"]}


def resume_run(run: TrainRun, directory: Path) -> None:
    """Restore a built run to the state saved in a checkpoint.

    **Collective**: every rank.
    """
    strategy, loop = run.strategy, run.train_loop
    meta = read_meta(directory)
    wanted: dict[str, Any] = {"model": strategy.model_state(), "meta": meta}
    if meta.get("has_optimizer", True):
        wanted["optimizer"] = strategy.optim_state()
    else:
        _logger.warning("%s was saved without the optimizer's state, which begins anew", directory)
    run.call_hook("before_load_checkpoint", checkpoint=wanted)
    del wanted["meta"]
    # Ranks that now compute on the same samples must not continue with different random states.
    has_own = (meta.get("rank_states"), meta.get("data_shares")) == (run.world_size, run.data_shard.size)
    if has_own:
        wanted["ranks"] = {str(run.rank): ()}
    template = strategy.optim_template() if "optimizer" in wanted else {}
    state = load_state(directory, wanted, template)
    _check_schedulers(run, meta, directory)
    for scheduler, saved in zip(run.param_schedulers, meta["param_schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    strategy.load_state(state["model"], state.get("optimizer"))
    if "optimizer" in state:
        _tell_of_new_parameters(run, wanted["optimizer"]["param_groups"], state["optimizer"], directory)
    run.optim_wrapper.load_extra_state(meta.get("optim_wrapper", {}))
    loop.epoch, loop.iter, into = meta["epoch"], meta["iter"], meta["batches_into_epoch"]
    was_validated = (meta.get("validated_iter") or 0) >= loop.iter - into
    if loop.max_epochs is not None:
        shares = meta.get("data_shares", meta["world_size"])
        if into and shares != run.data_shard.size:
            _logger.warning(
                "%s was saved %d batches into epoch %d on %s; on %d they hold other samples: "
                "the epoch begins anew",
                directory, into, meta["epoch"] + 1, counted(shares, "rank"), run.data_shard.size,
            )  # fmt: skip
            into = 0
        loop.iter = loop.epoch * (loop.epoch_length or 0) + into
    if run.val_loop is not None and was_validated:
        run.val_loop.at_iter = loop.iter - into
    if has_own:
        own = state.pop("ranks")[str(run.rank)][0]
        loop.passes.restore(own["data"], partial(set_random_state, own["random"]))
    else:
        _restart_random_state(run, saved_by=meta["world_size"])
    run.saved_iter = loop.iter
    run.call_hook("after_load_checkpoint", checkpoint={**state, "meta": meta})
    _logger.info("resumed from %s: epoch %d, iter %d", directory, loop.epoch, loop.iter)


def _tell_of_new_parameters(
    run: TrainRun, groups: list[Mapping[str, Any]], saved: Mapping[str, Any], directory: Path
) -> None:
    """Log which parameters in `groups` have no optimizer state in the checkpoint, and so begin with a new one."""
    known = saved["state"] or {name for group in saved["param_groups"] for name in group["params"]}
    frozen = {site.name for site in param_sites(run.model) if not site.parameter.requires_grad}
    new = [name for group in groups for name in group["params"] if name not in known and name not in frozen]
    if new:
        from lockstep.strategy.optim_state import listed  # imports DTensor

        _logger.info("%s has no state of the optimizer for %s, whose state begins anew", directory, listed(new))


def _check_schedulers(run: TrainRun, meta: dict[str, Any], directory: Path) -> None:
    saved, present = len(meta["param_schedulers"]), len(run.param_schedulers)
    if saved != present:
        raise ConfigError(
            f"`param_scheduler` must have {saved} schedulers to resume from {directory}, but has {present}"
        )


def _restart_random_state(run: TrainRun, saved_by: int) -> None:
    """Seed the generators anew, because the checkpoint was saved by a different set of ranks."""
    options = run.args.randomness or {}
    seed_all(run.seed + run.iter + (run.data_shard.rank if options.get("diff_rank_seed") else 0))
    _logger.info(
        "the checkpoint was saved by %s, so that on %d random numbers, such as those of dropout, begin anew",
        counted(saved_by, "rank"), run.world_size,
    )  # fmt: skip
