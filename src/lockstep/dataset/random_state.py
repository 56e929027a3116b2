"""The state of a process's random generators, and how ranks that compute on the same samples share one."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.device import get_device
from lockstep.dist import broadcast_object
from lockstep.dist.groups import GroupLike


def random_state(*, accelerator: bool = True) -> dict[str, Any]:
    """Return the state of every random generator of this process: Python's, numpy's, torch's, the accelerator's."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if accelerator and get_device() != "cpu":
        state["device"] = torch.get_device_module(get_device()).get_rng_state()
    if "numpy" in sys.modules:  # if not imported, it draws no random numbers
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore a state that `random_state` returned; generators that this process does not have are skipped."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "device" in state and get_device() != "cpu":
        torch.get_device_module(get_device()).set_rng_state(state["device"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


def sync_random_state(group: GroupLike) -> None:
    """Set the random state of every rank of the group to that of its first rank.

    From then on, ranks that draw equally often draw the same numbers. So dropout drops the same elements of an
    activation that all ranks hold in full; of an activation that is split between them, each rank drops from its own
    part by the same pattern. Samples that are augmented in this process are the same, too.

    **Collective**: every rank of the group. **Cost**: about 10 kB.
    """
    set_random_state(broadcast_object(random_state(), src=0, group=group))
