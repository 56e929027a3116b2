"""The options and schedules of a run that resumes: those of the config as it is now, or of the checkpoint.

`resume_options` of the Runner says which.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.errors import CheckpointError, ConfigError, counted, listed
from lockstep.location import Location
from lockstep.optim import FormulaScheduler, OptimWrapperDict, ParamScheduler, ReduceOnPlateauLR, TorchScheduler
from lockstep.optim.build_schedulers import step_quietly, steps_in
from lockstep.runner.options import IMPLEMENTATION_KEYS
from lockstep.runner.run import TrainRun
from lockstep.strategy.optim_state import complete_states

_logger = logging.getLogger(__name__)
# Also the rate before schedules, and `train_mode`, which a schedule-free optimizer changes with each evaluation.
_NOT_FROM_CONFIG = IMPLEMENTATION_KEYS | {"initial_lr", "train_mode"}
_MOST_PARTS = 4  # of the state of torch's schedule: what is named of one that has changed
_MOST_STEPS = 10**8  # that a schedule is computed for when a run resumes
# Entries of a torch schedule's state that change while it runs; all others come from the config.
_PROGRESS = frozenset({"last_epoch", "_step_count", "_last_lr", "base_lrs"})
_COUNTS = (1, 10, 100, 1000, 10_000, 100_000)


def record_first_options(run: TrainRun) -> None:
    """Keep the options of the parameter groups as the config gives them, before a schedule changes them."""
    run.first_options = [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in run.optim_wrapper.param_groups
    ]


def record_config(run: TrainRun) -> None:
    """Keep what the config says of options and schedules as JSON values, which are saved and compared when resuming."""
    run.begun_with = {
        "options": [dict(_plain_options(first)) for first in run.first_options],
        "schedules": list(_descriptions(run)),
        "scheduled": sorted({key for scheduler in run.param_schedulers for key in _scheduled(scheduler)}),
    }


class ResumedOptions:
    """Decides the options and schedules of a run that resumes.

    Args:
        run: the run, built as its config says.
        meta: the metadata of the checkpoint.
        own: the run's parameter groups, with the names of their parameters; None if the checkpoint has no optimizer.
        saved: the parameter groups of the checkpoint.
        origin: the checkpoint, for messages.

    A schedule is restored in one of two ways. Usually its state is loaded. But where the config's values are to hold
    and have changed (`replays`), the schedule is stepped again from its beginning, up to the iteration of the
    checkpoint.
    """

    def __init__(
        self,
        run: TrainRun,
        meta: Mapping[str, Any],
        own: Sequence[Mapping[str, Any]] | None,
        saved: Sequence[Mapping[str, Any]],
        origin: Location,
    ) -> None:
        self.run, self.meta, self.origin = run, meta, origin
        self.states: Sequence[Mapping[str, Any]] = meta["param_schedulers"]
        self.begun_with: Mapping[str, Any] | None = meta.get("begun_with")
        # For each group: the options that the config has changed, with the value when the run began and the one now.
        self.changed: list[dict[str, tuple[Any, Any]]] = [{} for _ in run.first_options]
        self.has_new_schedules = False
        if self.begun_with is not None:
            options = self.begun_with["options"]
            saved_indices = _indices_of_saved_groups(own, saved, len(run.first_options), len(options))
            for index, saved_index in enumerate(saved_indices):
                if saved_index is not None and saved_index < len(options):
                    self.changed[index] = dict(_changes(options[saved_index], run.begun_with["options"][index]))
            self.has_new_schedules = self.begun_with["schedules"] != run.begun_with["schedules"]
        elif len(self.states) != len(run.param_schedulers):
            self.has_new_schedules = True
        self.takes_config = run.args.resume_options == "config"
        # Reductions that followed metrics can't be computed again, because the metrics are not saved.
        self.follows_metric = any(map(_follows_metric, run.param_schedulers)) and any(map(_has_followed, self.states))
        scheduled = set(run.begun_with["scheduled"])
        if self.has_new_schedules and self.states:  # also what schedules had set that there are no longer
            scheduled |= set((self.begun_with or {}).get("scheduled", ["lr"]))
        is_stale = self.has_new_schedules or any(scheduled & changed.keys() for changed in self.changed)
        self.has_other_groups = any(map(_other_groups, run.param_schedulers, self.states))
        self.can_replay = not self.follows_metric and (self.takes_config or not any(self.changed))
        # Without a saved state, the optimizer has the values with which the schedules begin.
        self.replays = (
            own is None or (self.takes_config and (is_stale or self.has_other_groups))
        ) and not self.follows_metric
        self.scheduled = scheduled

    def load_schedules(self) -> None:
        """Restore the states of the schedules.

        Raises:
            ConfigError: the checkpoint has another number of schedules, or one that counts in another unit, and
                `resume_options` is "checkpoint"; or a state to be loaded has values for another number of parameter
                groups.
        """
        run, states = self.run, self.states
        saved, present = len(states), len(run.param_schedulers)
        if saved != present and not self.takes_config:
            raise ConfigError(
                f"`param_scheduler` must have {saved} schedulers to resume from {self.origin}, but has {present}. Give "
                "resume_options='config' for the schedules that the config has now"
            )
        schedulers: list[Any] = list(run.param_schedulers)  # a Session has the user's own
        for index, scheduler in enumerate(schedulers):
            state = states[index] if saved == present else None
            if state is not None and isinstance(scheduler, ReduceLROnPlateau) and not _has_followed(state):
                continue  # it begins in place of another schedule
            if isinstance(scheduler, ParamScheduler):
                done = self.meta["epoch"] if scheduler.by_epoch else self.meta["iter"]
                initial, key = scheduler.state_dict(), scheduler.count_key
                has_other_unit = saved == present and self._counted_otherwise(index, scheduler)
                if has_other_unit and not self.takes_config and "by_epoch" not in initial:
                    raise ConfigError(
                        f"{scheduler.title} must count {'batches' if scheduler.by_epoch else 'epochs'} to resume from "
                        f"{self.origin}, as it did when that was saved. Give resume_options='config' for the schedule "
                        "that the config has now"
                    )
                if state is None or (self.takes_config and (has_other_unit or initial.keys() - state.keys())):
                    # The state is missing, or of another schedule: only its count is of use, if it has the same unit.
                    state = {**initial, key: done if has_other_unit else (state or {}).get(key, done)}
            if state is not None and not (self.replays and _can_replay(scheduler)):
                if groups := _other_groups(scheduler, state):
                    title = getattr(scheduler, "title", type(scheduler).__name__)
                    raise ConfigError(
                        f"the optimizer of {title} must have {counted(groups, 'parameter group')} to resume from "
                        f"{self.origin}, but has {len(scheduler.optimizer.param_groups)}. Resume with the groups that "
                        "were saved, or with resume_options='config' and no schedule that follows a metric"
                    )
                if self.takes_config and self.has_new_schedules and isinstance(scheduler, ParamScheduler):
                    scheduler.load_progress(state)
                else:
                    scheduler.load_state_dict(state)
            elif state is None and not (self.replays and index < saved):
                _logger.info(
                    "%s, which your own code steps, was not saved and begins with its first step",
                    type(scheduler).__name__,
                )
            elif isinstance(scheduler, ParamScheduler) and state is not None:
                key = scheduler.count_key
                scheduler.load_state_dict({**scheduler.state_dict(), key: state[key]})

    def _counted_otherwise(self, index: int, scheduler: ParamScheduler) -> bool:
        """Return whether the saved schedule counted epochs, and this one counts batches, or the other way round."""
        units = self.meta.get("schedules_by_epoch", [])  # one of MMEngine does not say it
        return index < len(units) and units[index] not in (None, scheduler.by_epoch)

    def apply(self) -> None:
        """Set the options, once the optimizer's state is loaded, and say in one line which ones hold."""
        run = self.run
        if self.takes_config:
            for index, group in enumerate(run.optim_wrapper.param_groups):
                for key, (former, now) in self.changed[index].items():
                    first = run.first_options[index][key]
                    if self.follows_metric and key in self.scheduled:
                        self._rescale(index, group, key, now, former)
                    else:
                        set_option(group, key, first)
            if any(self.changed):
                for optimizer in run.optim_wrapper.optimizers:
                    complete_states(optimizer)
        if self.replays:
            self._replay()
        _logger.info("%s", self._summary())
        if not self.takes_config and self.begun_with is not None:
            run.begun_with = dict(self.begun_with)

    def _rescale(self, index: int, group: dict[str, Any], key: str, now: Any, former: Any) -> None:
        """Scale an option that a schedule has reduced by a metric as the config has scaled it: by `now / former`."""
        if not isinstance(now, int | float) or not former:
            set_option(group, key, self.run.first_options[index][key])
            return
        set_option(group, key, float(group[key]) * now / former)
        for scheduler in self.run.param_schedulers:
            if isinstance(scheduler, FormulaScheduler) and scheduler.param_name == key:
                scheduler.rescale(group, now / former)

    def _replay(self) -> None:
        """Step the schedules from their beginning, with the values that the config has now, up to where the run is."""
        run = self.run
        for group, first in zip(run.optim_wrapper.param_groups, run.first_options, strict=True):
            for key in self.scheduled:
                if key in first:
                    set_option(group, key, first[key])
                initial = f"initial_{key}"
                group.pop(initial, None)
                if initial in first:
                    group[initial] = first[initial]
        schedules = [one for one in run.param_schedulers if isinstance(one, ParamScheduler)]
        counts = {id(one): one.state_dict()[one.count_key] for one in schedules}
        for one in schedules:
            one.restart()
        self._require_short(counts.values())
        length = run.train_loop.epoch_length or 0
        by_batch, by_epoch = ([one for one in schedules if one.by_epoch is kind] for kind in (False, True))
        for done in range(1, max((counts[id(one)] for one in by_batch), default=0) + 1):
            _step(one for one in by_batch if done <= counts[id(one)])
            if length and done % length == 0:
                _step(one for one in by_epoch if done // length <= counts[id(one)])
        for one in by_epoch:
            for _ in range(counts[id(one)] - one.state_dict()[one.count_key]):
                one.step()
        schedulers: list[Any] = list(run.param_schedulers)  # a Session has the user's own
        for index, scheduler in enumerate(schedulers):
            if not isinstance(scheduler, ParamScheduler) and _can_replay(scheduler):
                done = steps_in(self.states[index]) or 0 if index < len(self.states) else 0
                self._require_short([done])
                for _ in range(done - (steps_in(scheduler.state_dict()) or 0)):
                    step_quietly(scheduler)

    def _require_short(self, counts: Iterable[int]) -> None:
        """Refuse a count that only a damaged checkpoint can hold: the loop that replays it would not end."""
        if (most := max(counts, default=0)) > _MOST_STEPS:
            raise CheckpointError(f"{self.origin} says that a schedule has counted to {most}")

    def _summary(self) -> str:
        if self.begun_with is None:
            return f"the optimizer's options go on as they were saved: {self.origin} does not say what its config had"
        changes = sorted({f"{key} {old} -> {new}" for group in self.changed for key, (old, new) in group.items()})
        pairs = zip_longest(self.begun_with["schedules"], self.run.begun_with["schedules"], fillvalue="none")
        changes += [f"the schedule {_changed_part(former, now)}" for former, now in pairs if former != now]
        if self.has_other_groups and self.takes_config:
            changes.append("the number of parameter groups")
        if not changes:
            return "the optimizer's options and schedules go on as they were saved: the config has the same"
        holds = "which hold from here on; resume_options='checkpoint' keeps what was saved"
        if not self.takes_config:
            holds = "but what was saved holds, as resume_options='checkpoint' says"
        return f"the config has changed {listed(changes)}, {holds}"


def _indices_of_saved_groups(
    own: Sequence[Mapping[str, Any]] | None, saved: Sequence[Mapping[str, Any]], count: int, saved_count: int
) -> Iterator[int | None]:
    """Yield for each parameter group the index of the saved one that has its parameters; None for a new one."""
    if own is None or len(own) != count or len(saved) != saved_count:
        yield from (range(count) if count == saved_count else [None] * count)
        return
    owner = {name: index for index, group in enumerate(saved) for name in group["params"]}
    for index, group in enumerate(own):
        same = index if index < saved_count and not saved[index]["params"] and not group["params"] else None
        yield next((owner[name] for name in group["params"] if name in owner), same)


def _plain_options(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        if key in _NOT_FROM_CONFIG:
            continue
        if key == "lr":
            value = options.get("initial_lr", value)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, list | tuple):
            value = [float(one) if isinstance(one, Tensor) else one for one in value]
        if all(
            isinstance(one, bool | int | float | str | None) for one in (value if isinstance(value, list) else [value])
        ):
            yield key, value


def _changes(former: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key, value in now.items():
        if key in former and repr(former[key]) != repr(value) and former[key] != value:  # NaN is the same NaN
            yield key, (former[key], value)


def _descriptions(run: TrainRun) -> Iterator[str]:
    """Yield what the config says of each schedule: the same in a run whose batches have another size."""
    epochs = run.train_loop.max_epochs
    schedulers: list[Any] = list(run.param_schedulers)
    for config, scheduler in zip(schedule_configs(run), schedulers, strict=True):
        if isinstance(scheduler, ParamScheduler):
            described: Any = scheduler
            if isinstance(config, Mapping) and not scheduler.by_epoch and epochs is not None:
                settings = dict(config)
                kind = settings.pop("type", type(scheduler))
                name = getattr(kind, "__name__", str(kind).rpartition(".")[2])
                described = f"{name}({', '.join(f'{key}={_constants(value)}' for key, value in settings.items())})"
                described += "" if settings.get("end") is not None else f" in {epochs} epochs"
        elif isinstance(scheduler, LRScheduler):
            # Functions, which the states of torch's LambdaLR and MultiplicativeLR leave out, also within others.
            within = [scheduler, *vars(scheduler).get("_schedulers", ())]
            functions = {f"lr_lambdas {index}": getattr(one, "lr_lambdas", []) for index, one in enumerate(within)}
            state = {**scheduler.state_dict(), **{key: value for key, value in functions.items() if value}}
            described = f"{type(scheduler).__name__} {_constants(state)}"
        else:
            described = type(scheduler).__name__
        wrapper = run.optim_wrapper
        parts = wrapper.items() if isinstance(wrapper, OptimWrapperDict) else ()
        owner = next((f" of `{name}`" for name, part in parts if part.optimizer is scheduler.optimizer), "")
        yield re.sub(r" at 0x[0-9a-f]+", "", str(described)) + owner


def schedule_configs(run: TrainRun) -> list[Any]:
    """Return what `param_scheduler` says of each schedule of the run; None where it does not say it."""
    given, wrapper = run.args.param_scheduler, run.optim_wrapper
    of_each = [given]
    if isinstance(wrapper, OptimWrapperDict):
        by_name = isinstance(given, Mapping) and "type" not in given
        of_each = [given.get(name) if by_name else given for name in wrapper.optim_wrappers]
    configs = [one for each in of_each for one in (each if isinstance(each, list | tuple) else [each])]
    configs = [one for one in configs if one is not None]
    return configs if len(configs) == len(run.param_schedulers) else [None] * len(run.param_schedulers)


def _changed_part(former: str, now: str) -> str:
    """Return in words how two descriptions of a schedule differ: only where, if they are states of one class."""
    parts = [(one, other) for one, other in zip(former.split(", "), now.split(", "), strict=False) if one != other]
    state = re.match(r"\w+ {", former)
    if not state or state[0] not in now or former.count(", ") != now.count(", ") or len(parts) > _MOST_PARTS:
        return f"{former} -> {now}"
    changes = (" -> ".join(each.rpartition("{")[2].strip("[]{}()") for each in part) for part in parts)
    return f"{former.partition(' ')[0]}, {listed(changes)}"


def _constants(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _constants(item) for key, item in sorted(value.items(), key=str) if key not in _PROGRESS}
    if callable(value) and not isinstance(value, type):
        return _values_of(value)
    return [_constants(item) for item in value] if isinstance(value, list | tuple) else value


def _values_of(function: Callable[[int], Any]) -> Any:
    """Return a function's values at some counts, which tell it from one with other constants; itself if it has none."""
    try:
        return [float(function(count)) for count in _COUNTS]
    except Exception:  # the user's own, which may take no count, or not any
        return function


def _scheduled(scheduler: Any) -> Iterable[str]:
    """Return the options that a schedule sets, under any of their names."""
    if isinstance(scheduler, TorchScheduler | LRScheduler):
        return "lr", "momentum", "betas"
    if isinstance(scheduler, ParamScheduler):
        return ("momentum", "betas") if scheduler.param_name == "momentum" else (scheduler.param_name,)
    return ()


def _can_replay(scheduler: Any) -> bool:
    return isinstance(scheduler, ParamScheduler | LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)


def _follows_metric(scheduler: Any) -> bool:
    return isinstance(scheduler, ReduceOnPlateauLR | ReduceLROnPlateau)


def _has_followed(state: Mapping[str, Any]) -> bool:
    """Return whether a state is one of a schedule that follows a metric: lockstep's own or torch's."""
    return bool({"bad", "num_bad_epochs"} & state.keys())


def _other_groups(scheduler: Any, state: Mapping[str, Any]) -> int:
    """Return for how many parameter groups a schedule's state has values; 0 if for as many as there are, or none."""
    if not _can_replay(scheduler):
        return 0
    values = state.get("base") or state.get("schedule", state).get("_last_lr")
    groups = len(values) if isinstance(values, list) else 0
    return groups if groups != len(scheduler.optimizer.param_groups) else 0


def _step(schedulers: Iterable[ParamScheduler]) -> None:
    for scheduler in schedulers:
        scheduler.step()


def set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option of a parameter group; one that is a tensor stays the same tensor."""
    if isinstance(own := group.get(key), Tensor):  # a compiled or captured step reads this tensor
        own.copy_(value) if isinstance(value, Tensor) else own.fill_(value)
    else:
        group[key] = value.clone() if isinstance(value, Tensor) else value
