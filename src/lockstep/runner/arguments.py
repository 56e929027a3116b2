"""What a Runner is given: checked at once, built later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.errors import ConfigError

_MAPPING_OR_NONE = (Mapping, type(None)), "a dict or None"
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "model": ((nn.Module, Mapping), "a torch.nn.Module or a config dict"),
    "data_preprocessor": ((nn.Module, Mapping, type(None)), "a torch.nn.Module, a config dict or None"),
    "work_dir": ((str, Path), "a path"),
    "resume": ((bool,), "True or False; the checkpoint goes to `load_from`"),
    "env_cfg": _MAPPING_OR_NONE,
    "randomness": _MAPPING_OR_NONE,
    "auto_scale_lr": _MAPPING_OR_NONE,
    "default_hooks": _MAPPING_OR_NONE,
    "custom_hooks": ((list, tuple, type(None)), "a list of hooks or None"),
    "load_from": ((str, Path, type(None)), "a path or None"),
    "default_scope": ((str, type(None)), "the scope of a registry or None"),
    "compile": ((bool, Mapping), "a bool or a dict for torch.compile"),
}


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
    data_preprocessor: Any
    default_scope: str | None
    log_processor: Any
    cfg: Any

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in self.names()}
        for name, says in misfits(given):
            raise TypeError(f"`{name}` {says}")
        for name, says in mispaired(given):
            raise ConfigError(f"`{name}` {says}")

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


def misfits(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what does not fit in arguments of a Runner: the name of each, and what it must be.

    Args:
        given: those that are given, by name.
    """
    for name, (kinds, wanted) in _KINDS.items():
        if name in given and not isinstance(given[name], kinds):
            yield name, f"must be {wanted}, but is {given[name]!r} of {type(given[name]).__name__}"


def mispaired(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield which arguments are lacking beside others: the name of each, and what it must be."""
    for mode in ("val", "test"):
        loader, evaluator, cfg = (
            given.get(f"{mode}_{part}") is not None for part in ("dataloader", "evaluator", "cfg")
        )
        if not loader and (evaluator or cfg):
            yield (
                f"{mode}_dataloader",
                f"must be given with `{mode}_{'evaluator' if evaluator else 'cfg'}`, but is None",
            )
        if loader and not evaluator:
            yield (
                f"{mode}_evaluator",
                f"must be given with `{mode}_dataloader`, but is None. For example dict(type='Accuracy')",
            )
