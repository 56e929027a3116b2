"""Data loaders as MMEngine configures them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lockstep.dist import get_rank
from lockstep.registry import default_scope
from mmengine.dataset.utils import worker_init_fn
from mmengine.registry import FUNCTIONS

__all__ = ["as_mmengine"]


def as_mmengine(cfg: Mapping[str, Any], seed: int | None, rank: int | None = None) -> dict[str, Any]:
    """Return the config of a data loader, for lockstep's `build_dataloader`, with MMEngine's defaults and seeds.

    Samples become batches by `pseudo_collate` by default. Workers are seeded by the run's seed, the rank and their
    number, alike in every epoch that starts them, and the loader draws from torch's global generator: so a run draws
    the random numbers of MMEngine.

    Args:
        cfg: the config.
        seed: the run's seed; None for workers that seed themselves.
        rank: which rank's loader it is; by default this process's.
    """
    if (scope := default_scope()) is not None:
        FUNCTIONS._fill(scope)
    found = {"generator": None, **cfg}
    found["collate_fn"] = _in_own_scope(cfg.get("collate_fn", {"type": "pseudo_collate"}))
    is_silent = found.pop("disable_subprocess_warning", False)
    if "worker_init_fn" in cfg:
        found["worker_init_fn"] = _function(cfg["worker_init_fn"])
    elif seed is not None:
        found["worker_init_fn"] = partial(
            worker_init_fn,
            num_workers=cfg.get("num_workers", 0),
            rank=get_rank() if rank is None else rank,
            seed=seed,
            disable_subprocess_warning=is_silent,
        )
    return found


def _in_own_scope(cfg: Any) -> Any:
    """Return the config of a function whose name is looked up in MMEngine's registry, once the dataset has been built.

    The package of the dataset may register it when it is imported.
    """
    if isinstance(cfg, Mapping) and isinstance(kind := cfg["type"], str) and "." not in kind:
        return {**cfg, "type": f"{FUNCTIONS.scope}.{kind}"}
    return cfg


def _function(cfg: Any) -> Callable[..., Any] | None:
    """Return the function that a config names, with the arguments that it gives."""
    if not isinstance(cfg, Mapping):
        return cfg  # type: ignore[no-any-return]
    arguments = dict(cfg)
    kind: Any = arguments.pop("type")
    if isinstance(kind, str):
        found: Any = FUNCTIONS.get(kind)
        if found is None:
            raise KeyError(f"there is no function `{kind}`. Register it in FUNCTIONS")
        kind = found
    return partial(kind, **arguments) if arguments else kind
