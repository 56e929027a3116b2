"""All that lockstep uses from the package colossalai, which is imported when first needed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.engines import load_engine
from lockstep.errors import ConfigError, DistError

# Ignores warnings that users cannot act on: about optional parts, and about names that torch has deprecated.
_QUIET = partial(warnings.catch_warnings, action="ignore")


def require_engine() -> None:
    """Import the package, and give it a stand-in for an accelerator if this machine has none.

    Raises:
        ConfigError: it is not installed or cannot be imported.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # ColossalAI imports it, but lockstep does not use it
    try:
        with _QUIET():
            accelerator = load_engine("colossalai.accelerator")
            load_engine("colossalai.booster")
    except DistError as error:
        raise ConfigError(
            f"the strategy 'colossalai' needs ColossalAI 0.5.0, but importing it failed: {error.__cause__ or error}. "
            "docs/engines.md has the recipe to install it, or use the strategy 'ddp' or 'fsdp'"
        ) from error
    logging.getLogger("colossalai").setLevel(logging.WARNING)
    # Its ZeRO calls these in backward passes and updates; torch has deprecated them (2.13). The filter stays, as no
    # context is around all of these calls.
    name = r"torch\.distributed\.(all_gather_into|reduce_scatter)_tensor"
    warnings.filterwarnings("ignore", f"`{name}` is deprecated", FutureWarning)
    if type(accelerator.get_accelerator()) is accelerator.CpuAccelerator:
        accelerator.set_accelerator(_host_accelerator())


def has_streams() -> bool:
    """Return whether this machine's accelerator has streams, which ColossalAI needs to send gradients as they come."""
    return torch.accelerator.is_available()


def boost(options: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any, Any]:
    """Return ColossalAI's booster, model and optimizer, with the options of its ZeRO plugin.

    **Collective**: every rank.
    """
    from colossalai.booster import Booster
    from colossalai.booster.plugin import LowLevelZeroPlugin

    with _QUIET():
        booster = Booster(plugin=LowLevelZeroPlugin(**options))
        boosted, engine, *_ = booster.boost(model, optimizer)
    return booster, boosted, engine


def _host_accelerator() -> Any:
    from colossalai.accelerator import CpuAccelerator

    class HostAccelerator(CpuAccelerator):  # type: ignore[misc]
        """The CPU as an accelerator, with the methods that ColossalAI's ZeRO calls on every accelerator.

        **Source**: `colossalai.accelerator.CpuAccelerator` (0.5.0), most of whose methods raise an error. Work on a CPU
        is complete when a call returns, so streams have nothing to order.
        """

        @property
        def name(self) -> str:
            return "cuda"  # LowLevelZeroOptimizer only checks for a name that it knows

        def Stream(self, *_: Any, **__: Any) -> object:  # noqa: N802 - their name
            return object()

        def current_stream(self, *_: Any) -> object:
            return object()

        def stream(self, stream_: object) -> AbstractContextManager[None]:
            return nullcontext()

        def synchronize(self, *_: Any) -> None:
            return None

    return HostAccelerator()
