"""The state of a process's random generators, and how ranks that compute on the same samples share one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from types import ModuleType
from typing import Any

import numpy as np
import torch

from lockstep.device import get_device
from lockstep.dist import broadcast_object
from lockstep.groups import GroupLike

# Where `seed_transforms` looks.
_MOST_OBJECTS = 10_000
_MOST_ITEMS = 100
_DEPTH = 8
_NO_TRANSFORM = (str, bytes, int, float, type(None), type, ModuleType, torch.Tensor, np.ndarray, np.generic)


def random_state() -> dict[str, Any]:
    """Return the state of every random generator of this process: Python's, numpy's, torch's, the accelerator's.

    Returns:
        Nested dicts of tensors and JSON values; about 15 kB.
    """
    state = portable(generator_states())
    if get_device() != "cpu":
        state["device"] = torch.get_device_module(get_device()).get_rng_state()
    return state


def portable(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states that `generator_states` gives as nested dicts of tensors and JSON values."""
    version, words, gauss = states["python"]
    python = {"version": version, "words": torch.tensor(words, device="cpu"), "gauss": gauss}
    name, keys, position, has_gauss, gauss = states["numpy"]
    words = torch.tensor(keys.tolist(), device="cpu")
    numpy = {"name": name, "words": words, "position": position, "has_gauss": has_gauss, "gauss": gauss}
    return {"python": python, "torch": states["torch"], "numpy": numpy}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore a state that `random_state` returned, without that of an accelerator if this process has none."""
    python, numpy = state["python"], state["numpy"]
    words = np.array(numpy["words"].tolist(), dtype="uint32")
    set_generator_states(
        {
            "python": (python["version"], tuple(python["words"].tolist()), python["gauss"]),
            "torch": state["torch"],
            "numpy": (numpy["name"], words, numpy["position"], numpy["has_gauss"], numpy["gauss"]),
        }
    )
    if "device" in state and get_device() != "cpu":
        torch.get_device_module(get_device()).set_rng_state(state["device"])


def generator_states() -> dict[str, Any]:
    """Return the states of the generators of Python, torch (CPU) and numpy, as each of them gives it."""
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "numpy": np.random.get_state()}


def set_generator_states(state: Mapping[str, Any]) -> None:
    """Restore what `generator_states` returned."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])


@contextmanager
def separate_random_state(states: dict[str, Any]) -> Iterator[None]:
    """Inside, the global generators go on from `states`; at the end `states` is updated, and they are restored.

    **Cost**: some tenths of a millisecond.
    """
    outside = generator_states()
    if states:
        set_generator_states(states)
    try:
        yield
    finally:
        states.update(generator_states())
        set_generator_states(outside)


def mixed_seed(*parts: int) -> int:
    """Return a seed of 63 bits, of which each depends on all parts, such as a seed and an epoch.

    The generators of torch on the CPU and of numpy use 32 bits of a seed, the lowest (torch 2.13): a part that is only
    in the higher ones has no effect.
    """
    return int.from_bytes(blake2b(repr([*map(int, parts)]).encode(), digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, torch (CPU) and numpy."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)


def seed_transforms(dataset: Any, seed: int) -> None:
    """Seed the transforms in a dataset that draw from generators of their own, and have a method to seed these.

    Such are albumentations' (`set_random_seed(seed)`) and MONAI's (`set_random_state(seed=...)`). Workers that are
    forked have copies of these generators: all of them would draw the same numbers, and in each epoch anew
    (albumentations 2.0, MONAI 1.6 with torch's `DataLoader`).

    Args:
        dataset: looked through with what it holds: datasets, lists and dicts of up to 100 items, objects.
        seed: a seed; the same for all that are found, so that those stay alike that the user has seeded alike.
    """
    seed %= 2**32  # numpy's
    seen, found = set[int](), [(dataset, 0)]
    while found and len(seen) < _MOST_OBJECTS:
        part, depth = found.pop()
        if id(part) in seen or isinstance(part, _NO_TRANSFORM):
            continue
        seen.add(id(part))
        own = type(part)
        if _takes_seed(getattr(own, "set_random_seed", None)):
            part.set_random_seed(seed)
        elif _takes_seed(getattr(own, "set_random_state", None)):
            part.set_random_state(seed=seed)
        elif depth < _DEPTH:
            inner = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ()
            inner = [*inner] if len(inner) <= _MOST_ITEMS else []
            found += [(one, depth + 1) for one in (*inner, *getattr(part, "__dict__", {}).values())]


def _takes_seed(method: Any) -> bool:
    code = getattr(method, "__code__", None)
    return code is not None and "seed" in code.co_varnames[1 : code.co_argcount]


def sync_random_state(group: GroupLike) -> None:
    """Set the random state of every rank of the group to that of its first rank.

    From then on, ranks that draw equally often draw the same numbers. So dropout drops the same elements of an
    activation that all ranks hold in full; of an activation that is split between them, each rank drops from its own
    part by the same pattern. Samples that are augmented in this process are the same, too.

    **Collective**: every rank of the group. **Cost**: about 16 kB.
    """
    set_random_state(broadcast_object(random_state(), src=0, group=group))
