"""Resuming from the checkpoint that `resume_from` has found: what is read from it, and where it is restored."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint import load_state
from lockstep.checkpoint.loading import AS_SAVED, OPTIMIZER, Stored
from lockstep.checkpoint.together import on_all
from lockstep.dataset.position import Position
from lockstep.dataset.random_state import random_state, set_random_state
from lockstep.dist import run_on_main
from lockstep.errors import CheckpointError, LockstepError, counted, listed
from lockstep.launch.worker import RESUME_SINCE
from lockstep.location import Location
from lockstep.model import unwrap_model
from lockstep.optim import ParamScheduler, TorchScheduler
from lockstep.optim.scheduler import FormulaScheduler
from lockstep.runner.resume_from import checkpoint_folders, is_of_this_job, newest
from lockstep.runner.resumed_options import ResumedOptions, schedule_configs
from lockstep.runner.run import TrainRun
from lockstep.runner.seeds import are_parted, seed_all
from lockstep.weights import sized_on_loading
from lockstep.weights.export import TRAINED_PART

_MOST_STEPS = 2**60
_MOST_UNASKED = 2**28  # bytes
_logger = logging.getLogger(__name__)


def resume_run(run: TrainRun) -> None:
    """Restore a built run to the state saved in the checkpoint that it resumes from, if there is one, and forget that.

    If it turns out to be unusable only now, and was not named by the user, the newest other one is taken instead.

    **Collective**: every rank.
    """
    if run.stored is None:
        places = dict.fromkeys([str(run.work_dir), str(run.checkpoint_dir.parent)])
        begun = f" of a training that began at {run.args.beginning}" if run.args.beginning else ""
        _logger.info("no checkpoint to resume from%s in %s: training begins anew", begun, " or ".join(places))
    passed: dict[Location, str] = {}
    _log_passed(run.skipped)
    while (stored := run.stored) is not None:
        resizable = {f"model.{name}" for name in sized_on_loading(unwrap_model(run.model))}
        try:
            load = partial(load_state, stored, resizable=resizable)
            restore_run(run, stored.meta, load, stored.directory, added=_added_by_hooks(stored))
            stored.forget()
            return
        except CheckpointError as error:
            passed[stored.directory] = str(error)
            other, faults = None, list[str]()
            beginning, since = run.args.beginning, float(os.environ.get(RESUME_SINCE, 0.0))
            folders = checkpoint_folders(run.args, run.hooks)
            if since and run_on_main(partial(is_of_this_job, stored.directory, since)):
                other, faults = newest(folders, since=since, without=passed)
            if other is None and run.args.resume and beginning in (None, stored.meta.get("load_from")):
                other, faults = newest(folders, beginning=beginning, without=passed)  # else the user has named it
            if other is None:
                _log_passed(faults)
                raise
            _log_passed([str(error), *faults])
            stored.forget()
            run.stored = other


def _added_by_hooks(stored: Stored) -> dict[str, dict[str, int]]:
    """Return what hooks have added to a checkpoint, by name: the bytes of each tensor in it."""
    parts = sorted(stored.manifest.state.keys() - {"model", OPTIMIZER, "ranks"})
    sizes: dict[str, dict[str, int]] = {part: {} for part in parts}
    for name, tensor in stored.manifest.tensors.items():
        part, _, own_name = name.partition(".")
        if part in sizes:
            sizes[part][own_name] = tensor.size
    return sizes


def _log_passed(faults: Sequence[str]) -> None:
    for fault in faults:
        _logger.warning("not resumed from: %s", fault)


def restore_run(
    run: TrainRun,
    meta: dict[str, Any],
    load: Callable[[dict[str, Any], Any], dict[str, Any]],
    origin: Location,
    added: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> None:
    """Restore a built run to a state, whatever it is read from.

    Args:
        run: the run.
        meta: the metadata, as `Saving` writes them. Without `world_size`, random numbers go on from the seed.
        load: returns the tensors that are wanted, read from there; as `load_state`, without its first argument.
        origin: where the state is from, for messages.
        added: what hooks have added to it, and the bytes of its tensors. If no hook says where these belong, they are
            loaded whole, unless they are too large for every rank to hold.

    **Collective**: every rank.
    """
    strategy, loop = run.strategy, run.train_loop
    # Ranks that now compute on the same samples must not continue with different random states.
    has_own = (meta.get("rank_states"), meta.get("data_shares")) == (run.world_size, run.data_shard.size)
    wanted, state = _read_state(run, meta, load, origin, added, has_own=has_own)
    ranks = {int(rank): item for rank, item in state.pop("ranks", {}).items()}
    own = ranks[run.rank] if has_own else None
    if own is not None:
        on_all(f"{origin} could not be restored", partial(_require_random_state, own["random"], origin))
    own_groups = wanted["optimizer"]["param_groups"] if "optimizer" in state else None
    saved_groups = state["optimizer"]["param_groups"] if "optimizer" in state else []
    with _restored(origin, "schedules, or options of the optimizer,"):
        options = ResumedOptions(run, meta, own_groups, saved_groups, origin)
        options.load_schedules()
    strategy.load_state(state["model"], state.get("optimizer"))
    _tell_of_states_left_out(origin, own_groups or (), state.get("optimizer", {}).get("state", ()))
    with _restored(origin, "a scale of losses"):
        run.optim_wrapper.load_extra_state(meta.get("optim_wrapper", {}))
    position = meta["position"]
    data, random = (None, None) if own is None else (own["data"], own["random"])
    if meta["iter"] == 0 and are_parted(run.args.randomness, run.data_shard.rank):
        random = None  # this rank's own numbers begin with the first iteration
    with _restored(origin, "a position in the data"):
        begin = loop.even_batches.read_position(position, data, [one["data"] for one in ranks.values()], random)
        loop.resume(meta["iter"], position["epoch"], begin)
        will_stop = any(one.get("stops") for one in ranks.values())
        loop.resume_within(position, will_stop=will_stop)
        loop.frozen_before = set(meta["frozen"]) if "frozen" in meta else None
        loop.has_validated = meta.get("validated_iter") == meta["iter"]
        _compare_data(run, position, begin, origin, options, meta.get("seed", run.seed))
    with _restored(origin, "options of the optimizer"):
        options.apply()
    done = position["batches"] if loop.max_epochs is not None else 0  # batches of the epoch
    if run.val_loop is not None and (meta.get("validated_iter") or 0) >= meta["iter"] - done:
        run.val_loop.at_iter = loop.epoch_begin if loop.max_epochs is not None else loop.iter
    if own is None and "world_size" in meta:
        _restart_random_state(run, saved_by=meta["world_size"])
    run.saving.saved_iter, run.saving.saved_epoch = loop.iter, loop.epoch
    run.call_hook("after_load_checkpoint", checkpoint={**state, "meta": meta})
    seen, total = position["samples"], position["total"]
    where = f", {seen}{f' of {total}' if total else ''} {position['unit']} into the epoch" if seen else ""
    loader = run.train_dataloader
    if seen and getattr(loader, "num_workers", 0) and not hasattr(loader, "state_dict"):
        where += "; what its workers draw, as for augmentations, begins anew"
    _logger.info("resumed from %s: epoch %d, iter %d%s", origin, loop.epoch, loop.iter, where)
    if will_stop:
        end = "here" if loop.max_epochs is None else "with this epoch"
        _logger.info("the training ends %s, as was asked for before the checkpoint was saved", end)


def _read_state(
    run: TrainRun,
    meta: dict[str, Any],
    load: Callable[[dict[str, Any], Any], dict[str, Any]],
    origin: Location,
    added: Mapping[str, Mapping[str, int]],
    *,
    has_own: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the run holds now, and the same as it was saved; see `restore_run`.

    Args:
        run: the run.
        meta: the metadata.
        load: returns the tensors that are wanted.
        origin: where the state is from, for messages.
        added: what hooks have added; see `restore_run`.
        has_own: whether this rank goes on with the random state, and in the data, of the rank of its number.

    **Collective**: every rank.
    """
    strategy = run.strategy
    wanted: dict[str, Any] = {"model": strategy.model_state(), "meta": meta}
    if meta.get("has_optimizer", True):
        wanted["optimizer"] = strategy.optim_state()
    else:
        _logger.warning("%s was saved without the optimizer's state, which begins anew", origin)
    run.call_hook("before_load_checkpoint", checkpoint=wanted)
    del wanted["meta"]
    averaged = TRAINED_PART in meta and TRAINED_PART in added and TRAINED_PART not in wanted
    for name, sizes in added.items():
        if name in wanted:
            continue  # a hook has said where it belongs
        size = sum(sizes.values())
        if name == TRAINED_PART and averaged:
            wanted[name] = {one: torch.empty_like(wanted["model"][one]) for one in sizes if one in wanted["model"]}
        elif size <= _MOST_UNASKED:
            wanted[name] = AS_SAVED
        else:
            _logger.info("`%s` (%d MiB) is not loaded: no hook asks for it in before_load_checkpoint", name, size >> 20)
    holder = meta["position"]["held_by"]
    if needed := {run.rank if has_own else holder, holder} - {None}:
        wanted["ranks"] = dict.fromkeys(map(str, needed), AS_SAVED)
    state = load(wanted, strategy.optim_template() if "optimizer" in wanted else {})
    for name, value in state["model"].items():
        if isinstance(wanted["model"].get(name), Tensor) and not isinstance(value, Tensor):
            raise CheckpointError(f"{origin} must have a tensor for {name!r}, but has a {type(value).__name__}")
    for name, entry in state.get("optimizer", {}).get("state", {}).items():
        if isinstance(step := entry.get("step"), Tensor) and step.numel() == 1 and not 0 <= float(step) < _MOST_STEPS:
            raise CheckpointError(f"{origin} says that the optimizer has updated {name!r} {float(step):g} times")
    if averaged:
        state["model"] |= state.pop(TRAINED_PART)
        _logger.info("the run has no EMAHook any more: it goes on with the trained weights, not with their average")
    return wanted, state


def _tell_of_states_left_out(origin: Location, groups: Iterable[Mapping[str, Any]], saved: Iterable[str]) -> None:
    """Warn of parameters, frozen now, whose state the optimizer has no place for: they may be unfrozen later."""
    held = {name for group in groups for name in group["params"]}
    if others := [name for name in saved if name not in held]:
        _logger.warning(
            "the state of %s in %s is left out, because they are frozen and the optimizer does not have them: if they "
            "are trained again, their moments begin anew. To keep these, give the optimizer all parameters from the "
            "beginning: it passes over frozen ones",
            listed(map(repr, others)), origin,
        )  # fmt: skip


@contextmanager
def _restored(origin: Location, what: str) -> Iterator[None]:
    """Say of values that all ranks have read that they are none that a run saves, if they turn out to be so."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, LockstepError):
            raise
        raise CheckpointError(f"{origin} has {what} that cannot be restored: {error!r}") from error


def _require_random_state(saved: Mapping[str, Any], origin: Location) -> None:
    """Check that the generators take a state, which they are given only when the loader is at its place."""
    now = random_state()
    try:
        set_random_state(saved)
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{origin} has a state of random generators that none of them takes: {error}") from error
    finally:
        set_random_state(now)


def _compare_data(
    run: TrainRun,
    position: Mapping[str, Any],
    begin: Position,
    directory: Location,
    options: ResumedOptions,
    seed: Any,
) -> None:
    """Say what is otherwise in the data than if the run had never stopped, and let schedules follow it."""
    loop, order = run.train_loop, run.train_loop.even_batches.global_order
    begins_anew = position["batches"] and begin.is_beginning
    if begins_anew:
        reason = (
            f"each of {counted(position['layout'][0], 'rank')} had an order of its own, which is another one on "
            f"{run.world_size}, or with another batch size"
        )
        if not loop.even_batches.is_resumable:
            reason = "the sampler says by `resumable = False` that its order can't be drawn again"
        _logger.warning(
            "%s was saved %d batches into epoch %d. The epoch begins anew: %s",
            directory, position["batches"], position["epoch"] + 1, reason,
        )  # fmt: skip
    if begins_anew or order is None or position["samples"] is None:
        return
    if position["samples"] and None not in (position["total"], order.total) and position["total"] != order.total:
        _logger.warning(
            "the data have %d %s, but had %d when %s was saved: the rest of epoch %d is that of another order, in "
            "which some of what was seen comes again",
            order.total, order.unit, position["total"], directory, position["epoch"] + 1,
        )  # fmt: skip
    if position["samples"] and run.seed != seed:
        _logger.warning(
            "the seed is %d, but was %s when %s was saved: the rest of epoch %d is that of another order, in which "
            "some of what was seen comes again and some is left out. Without a `seed` given, the saved one holds",
            run.seed, seed, directory, position["epoch"] + 1,
        )  # fmt: skip
    is_new = position["global_batch"] not in (None, order.global_batch)
    if is_new:
        _logger.info(
            "the global batch has %d %s now, and had %d", order.global_batch, order.unit, position["global_batch"]
        )
    if loop.max_epochs is not None and loop.epoch_length and loop.epoch_end is not None:
        left = loop.epoch_end - loop.iter
        _shift_schedules(run, (loop.epoch + 1) * loop.epoch_length - left, options, warns=is_new)


def _shift_schedules(run: TrainRun, regular: int, options: ResumedOptions, *, warns: bool) -> None:
    """Let the schedules that span the run go on at the same part of it, if it has another number of iterations now.

    Args:
        run: the run, whose schedules have their saved states.
        regular: how many iterations there would be now in a run that always had its present global batch.
        options: restores the schedules. Those of torch's, whose states have lengths, are then computed from the
            beginning.
        warns: whether to warn of a schedule that does not begin at the same part of the run as before.
    """
    loop = run.train_loop
    if regular == loop.iter:
        return
    length = (loop.max_epochs or 0) * (loop.epoch_length or 0)
    pairs: list[tuple[Any, Any]] = list(zip(schedule_configs(run), run.param_schedulers, strict=True))
    own = [pair for pair in pairs if isinstance(pair[1], ParamScheduler)]  # not those a session's user steps
    shifted = []
    for config, scheduler in own:
        in_epochs = isinstance(config, Mapping) and config.get("convert_to_iter_based")
        is_of_torch = isinstance(scheduler, TorchScheduler) and options.can_replay
        spans = not scheduler.by_epoch and (in_epochs or scheduler.end == length)
        if spans and (is_of_torch or isinstance(scheduler, FormulaScheduler)):
            scheduler.load_state_dict({**scheduler.state_dict(), "count": regular})
            options.replays |= is_of_torch
            shifted.append(scheduler.title)
            if warns and scheduler.begin > 0 and not in_epochs:
                _logger.warning(
                    "%s begins after iteration %d whatever the global batch is, which is another part of the run now: "
                    "its values jump. Say in epochs where schedules begin and end, with by_epoch=True and "
                    "convert_to_iter_based=True, and they go on where they were",
                    scheduler.title, scheduler.begin,
                )  # fmt: skip
    _logger.info(
        "with this global batch, epoch %d ends after iteration %d%s. %s; a schedule that counts "
        "iterations and has an end of its own goes on with iteration %d",
        loop.epoch + 1, loop.epoch_end,
        f", and the run after {loop.max_iters}" if loop.max_iters > loop.iter else "",  # a session's is not known yet
        f"{' and '.join(shifted)} {'goes' if len(shifted) == 1 else 'go'} on at the same part of the run"
        if shifted
        else "No schedule spans the run",
        loop.iter + 1,
    )  # fmt: skip
    if len(own) < len(run.param_schedulers):
        _logger.info("schedules that your own code steps go on after the steps they have made")


def _restart_random_state(run: TrainRun, saved_by: int) -> None:
    """Seed the generators anew, because the checkpoint was saved by a different set of ranks; see also `part_ranks`."""
    options = run.args.randomness or {}
    seed_all(run.seed + run.iter + (run.data_shard.rank if options.get("diff_rank_seed") else 0))
    _logger.info(
        "the checkpoint was saved by %s, so that on %d random numbers, such as those of dropout, begin anew",
        counted(saved_by, "rank"), run.world_size,
    )  # fmt: skip
