"""What checkpoints hold here beyond lockstep's: the message hub, and which parameters have a group of their own.

While a checkpoint is made, hooks also find its parts under MMEngine's keys.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lockstep.checkpoint import read_meta
from lockstep.checkpoint.loading import read_part
from lockstep.checkpoint.values import encode
from lockstep.config import Config
from lockstep.errors import ConfigError
from lockstep.location import Location
from lockstep.masking import mask_text
from lockstep.optim.constructor import param_sites
from lockstep.runner.run import TrainRun
from mmengine.logging import HistoryBuffer
from mmengine.version import __version__

__all__ = ["KEY", "file_meta", "parameter_names", "regrouped", "restore_hub", "saved_hub", "with_mmengines_keys"]

_logger = logging.getLogger(__name__)

KEY = "mmengine"
"""Where a checkpoint's metadata hold it."""

# Scalars that lockstep counts for itself.
_OWN = ("train/samples", "amounts/")
# Parts of a checkpoint that lockstep's hooks add, and ask for by themselves.
_OWN_PARTS = ("ema",)
# What lockstep's hooks add to the metadata.
_OWN_META = ("checkpoint_hook", "early_stopping", "ema", "logger")
# A part of its own, because it may hold arrays, which metadata can't.
_DATASET = "dataset_meta"
# What a schedule of MMEngine keeps of each parameter group.
_BY_GROUP = ("base_values", "_last_value", "min_values")


@contextmanager
def with_mmengines_keys(run: TrainRun, checkpoint: dict[str, Any]) -> Iterator[None]:
    """Give a checkpoint that is being made the keys `state_dict`, `param_schedulers` and `message_hub`, for hooks.

    What they put there instead is saved, and so are other keys that they add, there and in `meta`, which also has
    MMEngine's keys. `message_hub` has MMEngine's form.
    """
    meta, model, known = checkpoint["meta"], checkpoint["model"], {*checkpoint, *_OWN_PARTS}
    known_meta = {*meta, *_OWN_META, _DATASET}
    meta |= _mmengines_meta(run)
    hub = OrderedDict(
        log_scalars=OrderedDict(
            (key, HistoryBuffer(*history.data))
            for key, history in run.message_hub.log_scalars.items()
            if history.values and not key.startswith(_OWN)
        ),
        runtime_info=OrderedDict(_infos(run)),
        resumed_keys=OrderedDict(),
    )
    schedules = meta["param_schedulers"]
    checkpoint.update(state_dict=model, param_schedulers=schedules, message_hub=hub)
    yield
    if (given := checkpoint.pop("state_dict")) is not model:
        checkpoint["model"] = given
    if (given := checkpoint.pop("param_schedulers")) is not schedules:
        meta["param_schedulers"] = given
    hub = checkpoint.pop("message_hub")
    if _DATASET in meta:
        checkpoint[_DATASET] = meta.pop(_DATASET)
    meta[KEY] = {
        "meta": [name for name in meta if name not in known_meta],
        "log_scalars": {key: history.data[0].tolist() for key, history in hub["log_scalars"].items()},
        "log_counts": _counts(hub),
        "runtime_info": dict(hub["runtime_info"]),
        "own_groups": _own_groups(run),
        "parts": [name for name in checkpoint if name not in known],
    }


def _mmengines_meta(run: TrainRun) -> dict[str, Any]:
    """Return what the metadata of MMEngine's file hold beside the progress."""
    cfg = run.args.cfg
    metainfo = getattr(getattr(run.train_dataloader, "dataset", None), "metainfo", None)
    return {
        "cfg": cfg.masked().pretty_text if isinstance(cfg, Config) else mask_text(getattr(cfg, "pretty_text", "")),
        "experiment_name": run.run_dir.name,
        "time": time.strftime("%Y%m%d_%H%M%S"),
        "mmengine_version": __version__,
        **({_DATASET: _savable(metainfo)} if isinstance(metainfo, Mapping) else {}),
    }


def _savable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those items that a checkpoint can hold, and say which it can't."""
    kept = {}
    for key, value in values.items():
        try:
            encode(value, (), {})
            kept[key] = value
        except ConfigError as error:
            _logger.warning("`dataset_meta[%r]` is not saved in checkpoints: %s", key, error)
    return kept


def file_meta(folder: Location) -> dict[str, Any]:
    """Return the metadata of a checkpoint as MMEngine's file has them."""
    meta = read_meta(folder)
    own = meta.get(KEY, {})
    found = {key: meta[key] for key in ("epoch", "iter", "seed", *own.get("meta", ()))}
    if _DATASET in own.get("parts", ()):
        found[_DATASET] = read_part(folder, _DATASET)
    return {"experiment_name": folder.parent.name, "mmengine_version": __version__, **found}


def saved_hub(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message hub in the form of MMEngine's file; `own` is what the metadata have under `KEY`."""
    histories, counts = own.get("log_scalars", {}).items(), own.get("log_counts", {})
    return {
        "log_scalars": OrderedDict(
            (key, HistoryBuffer(values, counts.get(key, [1] * len(values)))) for key, values in histories
        ),
        "runtime_info": OrderedDict(own.get("runtime_info", {})),
        "resumed_keys": OrderedDict(),
    }


def _counts(hub: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the counts of those histories that have sums of several values."""
    counts = {key: list(map(int, history.data[1])) for key, history in hub["log_scalars"].items()}
    return {key: found for key, found in counts.items() if set(found) != {1}}


def _infos(run: TrainRun) -> Iterator[tuple[str, Any]]:
    """Yield the infos that were set, except what cannot be saved, and what the run itself provides."""
    provided = run.message_hub._sources
    for key, value in run.message_hub.runtime_info.items():
        if key not in provided:
            try:
                encode(value)
            except ConfigError:
                continue
            yield key, value


def _own_groups(run: TrainRun) -> list[str]:
    """Return the parameters that would have a group each in MMEngine; none if the groups are the same there."""
    given = run.args.optim_wrapper
    if not isinstance(given, Mapping) or not given.get("paramwise_cfg"):
        return []
    is_default = given.get("constructor") in (None, "DefaultOptimWrapperConstructor")
    return list(dict.fromkeys(parameter_names(run, trained_only=True))) if is_default else []


def parameter_names(run: TrainRun, trained_only: bool = False) -> Iterator[str]:
    """Yield the names of the parameters in the order of `model.parameters()`, which MMEngine's optimizers have."""
    first: dict[Any, str] = {}
    for site in param_sites(run.model):
        if site.parameter.requires_grad or not trained_only:
            yield first.setdefault(site.parameter, site.name)


def restore_hub(run: TrainRun, saved: Mapping[str, Any]) -> None:
    """Give a run's hub what `saved_hub` returned, except the infos that the run itself provides."""
    hub, infos = run.message_hub, saved["runtime_info"]
    for key, history in saved["log_scalars"].items():
        if key in hub.log_scalars:
            hub.log_scalars[key].clear()
        for value, count in zip(*history.data, strict=True):
            hub.update_scalar(key, float(value), int(count))
    for key, value in infos.items():
        if key not in hub._sources:
            hub.update_info(key, value)


def regrouped(schedule: Mapping[str, Any], groups: Sequence[int] | None) -> dict[str, Any]:
    """Return a schedule's state for other parameter groups.

    Args:
        schedule: the state.
        groups: for each of the other groups, which of the schedule's it belongs to; None if that is not known. Then its
            values by group are left out, and those of the optimizer's groups hold.
    """
    by_group = {key: schedule[key] for key in _BY_GROUP if isinstance(schedule.get(key), list)}
    others = {key: value for key, value in schedule.items() if key not in by_group}
    if groups is None:
        return others
    return others | {key: [values[index] for index in groups] for key, values in by_group.items()}
