"""Writing a checkpoint of lockstep as MMEngine's: one file, from which MMEngine itself resumes."""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint import read_infos, read_meta, read_tensors
from lockstep.checkpoint.loading import read_part
from lockstep.errors import ConfigError, listed
from lockstep.location import Location, locate
from lockstep.weights import find_checkpoint
from mmengine.runner.checkpoint import save_checkpoint
from mmengine.runner.saved import KEY, file_meta, regrouped, saved_hub

__all__ = ["export_checkpoint", "read_as_file"]

_logger = logging.getLogger(__name__)


def export_checkpoint(checkpoint: str | Location, filename: str | Path, histories: bool = False) -> None:
    """Write a checkpoint of lockstep as a file from which MMEngine, or another `Runner` of this package, resumes.

    It has the weights, averaged ones as `EMAHook` keeps them, the optimizer's state, the schedules, the epoch and the
    iteration. Random numbers, and where in an epoch the run was, have no place in it: the epoch begins anew. The states
    of several optimizers and of their schedules are left out, with a warning.

    Args:
        checkpoint: a checkpoint, the folder of a run, or a work_dir, of which the last checkpoint is taken.
        filename: a path or URL, as in ``epoch_3.pth``.
        histories: also write the histories of the message hub, as MMEngine does. They are objects of a class, so with
            torch 2.6 or later MMEngine reads the file only with ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1``.

    **Cost**: memory for all that the checkpoint holds.

    Raises:
        ConfigError: there is no checkpoint.
    """
    folder = find_checkpoint(locate(checkpoint))
    if folder is None:
        raise ConfigError(f"`checkpoint` must be a checkpoint, the folder of a run or a work_dir, but is {checkpoint}")
    content = read_as_file(folder)
    if not histories:
        content["message_hub"]["log_scalars"] = OrderedDict()
    save_checkpoint(content, filename)


def read_as_file(folder: Location) -> dict[str, Any]:
    """Return what a checkpoint of lockstep holds, in the form of MMEngine's file; see `export_checkpoint`."""
    meta = read_meta(folder)
    own = meta.get(KEY, {})
    state = OrderedDict(_tensors(folder, "model"))
    content: dict[str, Any] = {
        "meta": file_meta(folder),
        "state_dict": state,
        "message_hub": saved_hub(own),
    }
    if parts := [name for name in own.get("parts", ()) if name not in content["meta"]]:  # that hooks have added
        content |= {part: read_part(folder, part) for part in parts}
    if meta.get("ema", {}).get("steps"):
        trained = {**state, **_tensors(folder, "ema")}
        content["ema_state_dict"] = OrderedDict(
            {"steps": torch.tensor(meta["ema"]["steps"]), **{f"module.{name}": trained[name] for name in state}}
        )
    if several := _optimizers(meta.get("optim_wrapper", {})):
        _logger.warning(
            "%s as MMEngine's file has no state of the optimizers %s and of their schedules: that has each apart, a "
            "checkpoint of lockstep does not. A training that resumes from the file begins with new ones",
            folder,
            listed(several),
        )
    else:
        groups = None
        if meta.get("has_optimizer", True):
            saved = read_part(folder, "optimizer")
            alone = own.get("own_groups", [*state] if len(saved["param_groups"]) > 1 else [])
            content["optimizer"], groups = _by_number(saved, alone)
        content["param_schedulers"] = [_schedule(regrouped(one, groups)) for one in meta["param_schedulers"]]
    return content


def _optimizers(extra_states: Mapping[str, Any]) -> list[str]:
    """Return the names of several optimizers: each has an extra state of its own."""
    is_one = not extra_states.keys().isdisjoint(("loss_scaler", "windows"))
    are_several = not is_one and all(isinstance(one, Mapping) for one in extra_states.values())
    return list(extra_states) if are_several else []


def _tensors(folder: Location, part: str) -> dict[str, torch.Tensor]:
    return dict(read_tensors(folder, part, read_infos(folder, part)))


def _by_number(saved: Mapping[str, Any], alone: Sequence[str]) -> tuple[dict[str, Any], list[int]]:
    """Return the state of an optimizer as torch has it, which counts the parameters.

    Args:
        saved: the state.
        alone: the parameters that are to have a group each, as in MMEngine with a `paramwise_cfg`; none for the groups
            that are in `saved`.

    Returns:
        The state, and for each of its groups which one of `saved` it comes from.
    """
    groups = saved["param_groups"]
    place = {name: index for index, group in enumerate(groups) for name in group["params"]}
    names = [name for name in alone or place if name in place]
    number = {name: index for index, name in enumerate(names)}
    source = [place[name] for name in names] if alone else list(range(len(groups)))
    members = [[name] for name in names] if alone else [group["params"] for group in groups]
    packed = [
        {**groups[index], "params": [number[name] for name in own]} for index, own in zip(source, members, strict=True)
    ]
    state = {number[name]: entry for name, entry in saved["state"].items() if name in number}
    return {"state": state, "param_groups": packed}, source


def _schedule(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schedule's state with what is no JSON value."""
    found = dict(state)
    if "milestones" in state:
        found["milestones"] = Counter(state["milestones"])
    if "num_bad_epochs" in state and state["best"] is None:
        found["best"] = -math.inf if state["rule"] == "greater" else math.inf
    return found
