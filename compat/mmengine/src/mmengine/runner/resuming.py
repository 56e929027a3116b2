"""Resuming a training from a checkpoint that MMEngine has written: one file, read without running its code."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from lockstep.dist import run_on_main
from lockstep.errors import ConfigError, listed
from lockstep.hooks import CheckpointHook, EMAHook
from lockstep.location import locate
from lockstep.optim import OptimWrapper, OptimWrapperDict
from lockstep.runner.resuming import restore_run
from lockstep.runner.run import Run, TrainRun
from lockstep.weights import Weights, find_checkpoint
from mmengine.runner.checkpoint import CheckpointLoader, Unread
from mmengine.runner.exporting import read_as_file
from mmengine.runner.saved import parameter_names, regrouped, restore_hub

__all__ = ["MMEngineFile", "file_to_resume"]

_logger = logging.getLogger(__name__)

# Of a file of MMEngine; further ones are of its hooks.
_KEYS = frozenset({"meta", "state_dict", "ema_state_dict", "optimizer", "param_schedulers", "message_hub"})

# Learning rates and times that a run here records elsewhere: their old values would be shown as the present ones.
_IS_NOT_UPDATED = re.compile(r"train/(.*\.|base_)?lr|(val|test)/(data_)?time")


def file_to_resume(load_from: str | Path | None, work_dir: str | Path) -> str | None:
    """Return MMEngine's checkpoint to resume from; None if there is none, or one of lockstep.

    Args:
        load_from: where the user wants to resume from; None for the file that `last_checkpoint` in the work_dir names.
        work_dir: the work_dir.

    **Collective**: every rank; rank 0 looks.
    """
    return run_on_main(partial(_look_for_file, load_from, Path(work_dir)))


def _look_for_file(load_from: str | Path | None, work_dir: Path) -> str | None:
    if load_from is not None:
        is_ours = "://" not in str(load_from) and find_checkpoint(locate(load_from)) is not None
        return None if is_ours else str(load_from)
    try:
        named = Path((work_dir / "last_checkpoint").read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return None
    # MMEngine writes where the file was; the work_dir may have moved since.
    return next((str(one) for one in (named, work_dir / named.name) if one.is_file()), None)


@contextmanager
def shown_to_hooks(run: Run, weights: Weights) -> Iterator[Weights]:
    """Show a checkpoint to the user's hooks before its weights are loaded, and give the weights that are left.

    They are the given ones if no hook of the user's has `after_load_checkpoint`, or if there is no checkpoint but a
    folder of another library's.
    """
    own = [hook for hook in run.hooks if _is_own(hook)]
    folder = find_checkpoint(weights.path)
    if not own or (folder is None and Path(str(weights.path)).is_dir()):
        yield weights
        return
    content = CheckpointLoader.load_checkpoint(str(weights.path), "cpu") if folder is None else read_as_file(folder)
    if "state_dict" not in content:
        content = {"state_dict": content, "meta": {}}
    for hook in own:
        hook.after_load_checkpoint(run, content)
    with TemporaryDirectory() as place:
        file = Path(place, "weights.pth")
        torch.save({"state_dict": content["state_dict"]}, file)
        yield weights._replace(path=file, given=weights.path)


def _is_own(hook: Any) -> bool:
    # What averages weights restores them by itself.
    module = getattr(getattr(hook, "after_load_checkpoint", None), "__module__", "lockstep")
    return not isinstance(hook, EMAHook) and module.partition(".")[0] not in ("lockstep", "mmengine")


class MMEngineFile:
    """A checkpoint of MMEngine, in memory until it has been restored.

    Args:
        path: a path or URL, as for `CheckpointLoader.load_checkpoint`.

    Raises:
        ConfigError: it has no weights, or says not how far the training was.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        content = CheckpointLoader.load_checkpoint(path, "cpu")
        meta = content.get("meta") if isinstance(content, Mapping) else None
        if not isinstance(meta, Mapping) or not {"epoch", "iter"} <= meta.keys() or "state_dict" not in content:
            raise ConfigError(
                f"{path} must be a checkpoint of a training to resume from, with `state_dict` and the epoch and iter "
                "in `meta`. To begin a training with its weights, give it as load_from without resume"
            )
        self._content: Mapping[str, Any] = content
        self._meta: Mapping[str, Any] = meta

    @property
    def seed(self) -> int | None:
        """The seed of the run that wrote it."""
        return self._meta.get("seed")

    def restore(self, run: TrainRun) -> None:
        """Restore a built run: weights, averages, optimizer, schedules, progress, and infos of the message hub.

        As in MMEngine, the epoch that was in progress begins anew, and random numbers are those of a new run.

        **Collective**: every rank.
        """
        self._restore_hub(run)
        meta = {
            **self._meta,  # for hooks
            "epoch": self._meta["epoch"],
            "iter": self._meta["iter"],
            "seed": run.seed,
            "position": self._position(run),
            "has_optimizer": "optimizer" in self._content,
            "optim_wrapper": {},
            "param_schedulers": [],
            **self._best(run),
        }
        if "ema_state_dict" in self._content:
            meta["ema"] = {"steps": int(self._content["ema_state_dict"].get("steps", 0))}
        restore_run(run, meta, partial(self._load, run, meta), Path(self.path))

    def _position(self, run: TrainRun) -> dict[str, Any]:
        """Return the position in the data, as `EvenBatches.position` does."""
        loop, done = run.train_loop, self._meta["iter"]
        if loop.max_epochs is not None:
            position: dict[str, Any] = loop.even_batches.position(self._meta["epoch"], 0)
            return position
        order, length = loop.even_batches.global_order, loop.epoch_length
        is_endless = order is not None and order.is_endless  # it counts passes by samples
        epoch, batches = divmod(done, length) if length and not is_endless else (0, done)
        return {**loop.even_batches.position(epoch, batches), "head": []}

    def _load(self, run: TrainRun, meta: dict[str, Any], wanted: dict[str, Any], layout: Any) -> dict[str, Any]:
        """Fill the tensors of `wanted`, as `lockstep.checkpoint.load_state` does from a checkpoint of lockstep."""
        weights: Mapping[str, Any] = self._content["state_dict"]
        saved_ema: Mapping[str, Any] = self._content.get("ema_state_dict", {})
        # Beside an average, `state_dict` holds it, and `ema_state_dict` the weights that are trained.
        trained = {name.removeprefix("module."): value for name, value in saved_ema.items()}
        missing = [name for name, value in wanted["model"].items() if isinstance(value, Tensor) and name not in weights]
        unknown = [name for name in weights if name not in wanted["model"]]
        if missing or unknown:
            raise ConfigError(
                f"the weights in {self.path} do not fit the model (missing: {listed(missing or ['none'])}; unknown to "
                f"the model: {listed(unknown or ['none'])})"
            )
        found: dict[str, Any] = {}
        if "ema" in wanted:
            found["ema"] = {name: _filled(value, trained[name]) for name, value in wanted["ema"].items()}
            # What is not averaged is the trained model's: MMEngine's average keeps the first count of BatchNorm's.
            weights = {
                name: value if name in wanted["ema"] else trained.get(name, value) for name, value in weights.items()
            }
        found["model"] = {name: _filled(value, weights[name]) for name, value in wanted["model"].items()}
        schedules = self._content.get("param_schedulers")
        if "optimizer" in wanted:
            groups = wanted["optimizer"]["param_groups"]
            found["optimizer"], meta["param_schedulers"] = self._optimizers(run, groups, schedules)
        else:
            meta["param_schedulers"] = [regrouped(one, None) for one in _schedulers(schedules, run.optim_wrapper)]
        return {**{key: value for key, value in self._content.items() if key not in _KEYS}, **found}

    def _optimizers(
        self, run: TrainRun, groups: Sequence[Mapping[str, Any]], schedules: Any
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the state of all optimizers in one, and the schedules.

        Args:
            run: the run.
            groups: its parameter groups, in the order of its optimizers.
            schedules: what was saved of the schedules.
        """
        saved, wrapper = self._content["optimizer"], run.optim_wrapper
        names, trained = list(dict.fromkeys(parameter_names(run))), set(parameter_names(run, trained_only=True))
        if not isinstance(wrapper, OptimWrapperDict):
            state, source = _optimizer_by_name(saved, names, trained, groups, self.path)
            return state, [regrouped(one, source) for one in _schedulers(schedules, wrapper)]
        if saved.keys() != wrapper.optim_wrappers.keys():
            raise ConfigError(
                f"{self.path} must have a state of each optimizer of the training, which are {listed(wrapper)}, but "
                f"has {listed(saved)}. Load the weights alone, without resume"
            )
        joined: dict[str, Any] = {"state": {}, "param_groups": []}
        remaining, found = iter(groups), []
        is_shared = not isinstance(schedules, Mapping)
        for optimizer, one in wrapper.items():
            own = list(islice(remaining, len(one.param_groups)))
            updated = sorted(chain.from_iterable(group["params"] for group in own), key=names.index)
            state, source = _optimizer_by_name(saved[optimizer], updated, trained, own, f"{self.path}, {optimizer!r}")
            joined["state"] |= state["state"]
            joined["param_groups"] += state["param_groups"]
            found += (
                [] if is_shared else [regrouped(each, source) for each in _schedulers(schedules.get(optimizer), one)]
            )
        return joined, list(_schedulers(schedules, wrapper)) if is_shared else found

    def _restore_hub(self, run: TrainRun) -> None:
        """Give the run's hub the histories and infos that were saved."""
        hub = self._content.get("message_hub") or {}
        scalars = {
            key: history for key, history in hub.get("log_scalars", {}).items() if not _IS_NOT_UPDATED.fullmatch(key)
        }
        infos = {key: value for key, value in hub.get("runtime_info", {}).items() if key != "cfg"}
        restore_hub(run, {"log_scalars": scalars, "runtime_info": infos})

    def _best(self, run: TrainRun) -> dict[str, Any]:
        """Return the best value so far, as `CheckpointHook` saves it."""
        infos = (self._content.get("message_hub") or {}).get("runtime_info", {})
        hook = next((one for one in run.hooks if isinstance(one, CheckpointHook)), None)
        if hook is None or "best_score" not in infos or not isinstance(hook.save_best, str) or hook.save_best == "auto":
            return {}
        best = {"value": float(infos["best_score"]), "path": str(infos.get("best_ckpt", self.path))}
        return {"checkpoint_hook": {"best": {hook.save_best: best}, "former_runs": []}}


@torch.no_grad()
def _filled(own: Any, saved: Any) -> Any:
    """Return a tensor of the model, filled in place with a whole one; it may be sharded."""
    if not isinstance(own, Tensor):
        return saved
    if tuple(own.shape) != tuple(saved.shape):
        raise ConfigError(
            f"a weight in the checkpoint must have the shape {tuple(own.shape)} of the model's, but has "
            f"{tuple(saved.shape)}"
        )
    if hasattr(own, "placements"):
        from lockstep.model.shards import shard_like

        saved = shard_like(saved.to(own.dtype), own)
    return own.copy_(saved)


def _optimizer_by_name(
    saved: Mapping[str, Any], names: Sequence[str], trained: Set[str], groups: Sequence[Mapping[str, Any]], path: str
) -> tuple[dict[str, Any], list[int]]:
    """Return the state of MMEngine's optimizer, which counts parameters, in lockstep's form, which names them.

    MMEngine has one group for all parameters, or one for each that is trained; lockstep joins those with the same
    options, and those that are frozen are among them. A constructor of the user's own makes the same groups in both.

    Returns:
        The state, and for each group which of those that were saved it comes from.
    """
    if "state" not in saved or "param_groups" not in saved:
        raise ConfigError(
            f"the optimizer's state in {path} must be that of one optimizer, but has the keys {listed(saved)}. Give "
            "the training as many optimizers, by the same names, or load the weights alone, without resume"
        )
    if [len(group["params"]) for group in saved["param_groups"]] == [len(group["params"]) for group in groups]:
        names = list(chain.from_iterable(group["params"] for group in groups))
    order = list(chain.from_iterable(group["params"] for group in saved["param_groups"]))
    if len(order) != len(names):
        names = [name for name in names if name in trained]
    if len(order) != len(names):
        raise ConfigError(
            f"the optimizer's state in {path} must be that of the {len(names)} parameters that it updates here, but "
            f"is of {len(order)}"
        )
    by_name = dict(zip(names, order, strict=True))
    options = {index: group for group in saved["param_groups"] for index in group["params"]}
    place = {index: number for number, group in enumerate(saved["param_groups"]) for index in group["params"]}
    joined, source = [], []
    for group in groups:
        given = [{**options[by_name[name]], "params": None} for name in group["params"] if name in by_name]
        if any(one != given[0] for one in given):
            raise ConfigError(
                f"the parameters {listed(group['params'], most=4)} must have the same options in {path} as they have "
                "here, but have different ones there"
            )
        joined.append({**(given[0] if given else group), "params": list(group["params"])})
        source.append(next((place[by_name[name]] for name in group["params"] if name in by_name), 0))
    state = {name: saved["state"][index] for name, index in by_name.items() if saved["state"].get(index)}
    return {"state": state, "param_groups": joined}, source


def _schedulers(saved: Any, wrapper: OptimWrapper) -> Iterator[dict[str, Any]]:
    """Yield the states of the schedules, without what could not be read, such as functions.

    Those of several optimizers come one after the other, in the order of the run.
    """
    if isinstance(saved, Mapping) and isinstance(wrapper, OptimWrapperDict):
        saved = list(chain.from_iterable(saved.get(name, ()) for name in wrapper))
    for states in saved.values() if isinstance(saved, Mapping) else [saved or ()]:
        for state in states:
            yield {key: value for key, value in state.items() if not isinstance(value, Unread)}
