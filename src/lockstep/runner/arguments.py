"""What a Runner is given: checked at once, built later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of a Runner, as they were given."""

    model: Any
    work_dir: Any
    train_dataloader: Any
    val_dataloader: Any
    test_dataloader: Any
    train_cfg: Any
    val_cfg: Any
    test_cfg: Any
    optim_wrapper: Any
    param_scheduler: Any
    val_evaluator: Any
    test_evaluator: Any
    default_hooks: Any
    custom_hooks: Any
    strategy: Any
    launcher: str | None
    env_cfg: Any
    load_from: Any
    resume: bool
    randomness: Any
    compile: bool | Mapping[str, Any]
    auto_scale_lr: Any
    log_level: int | str
    visualizer: Any
    experiment_name: str | None
    cfg: Any

    def __post_init__(self) -> None:
        self._check_kinds()
        for mode in ("val", "test"):
            self._check_evaluation(mode)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all arguments."""
        return tuple(field.name for field in fields(cls))

    @property
    def misspelt(self) -> dict[str, str]:
        """Keys of the config that mean nothing, with the argument that was probably meant.

        A config may hold variables of its own, so that only what comes very close is suspect.
        """
        known = self.names()
        strange = [key for key in self.cfg if key not in known] if isinstance(self.cfg, Mapping) else []
        meant = {key: get_close_matches(str(key), known, n=1, cutoff=0.85) for key in strange}
        return {key: close[0] for key, close in meant.items() if close}

    def _check_kinds(self) -> None:
        _check("model", self.model, (nn.Module, Mapping), "a torch.nn.Module or a config dict")
        _check("work_dir", self.work_dir, (str, Path), "a path")
        _check("resume", self.resume, (bool,), "True or False; the checkpoint goes to `load_from`")
        for name in ("env_cfg", "randomness", "auto_scale_lr", "default_hooks"):
            _check(name, getattr(self, name), (Mapping, type(None)), "a dict or None")
        _check("custom_hooks", self.custom_hooks, (Sequence, type(None)), "a list of hooks or None")
        _check("load_from", self.load_from, (str, Path, type(None)), "a path or None")
        _check("compile", self.compile, (bool, Mapping), "a bool or a dict for torch.compile")

    def _check_evaluation(self, mode: str) -> None:
        loader = getattr(self, f"{mode}_dataloader")
        evaluator = getattr(self, f"{mode}_evaluator")
        cfg = getattr(self, f"{mode}_cfg")
        if loader is None and (evaluator is not None or cfg is not None):
            given = f"{mode}_evaluator" if evaluator is not None else f"{mode}_cfg"
            raise ConfigError(f"`{mode}_dataloader` must be given with `{given}`, but is None")
        if loader is not None and evaluator is None:
            raise ConfigError(
                f"`{mode}_evaluator` must be given with `{mode}_dataloader`, but is None. For "
                "example dict(type='Accuracy')"
            )


def _check(name: str, value: object, kinds: tuple[type, ...], wanted: str) -> None:
    if not isinstance(value, kinds):
        raise TypeError(f"`{name}` must be {wanted}, but is {value!r} of {type(value).__name__}")
