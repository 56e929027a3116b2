"""Where a data loader stands: which epoch's order, and how far in it."""

from __future__ import annotations

from typing import Any

from lockstep.dataset.sampler import DefaultSampler


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the first of a loader's samplers that wants to know it which epoch begins."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    ):
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
            return


def length_of(loader: Any) -> int | None:
    """Return the number of batches in one pass, or None where it is not known before."""
    try:
        return len(loader)
    except TypeError:  # a DataLoader has a length only if its data set has one
        return None


def skip_batches(loader: Any, count: int) -> bool:
    """Leave out the first batches of the next pass without reading them, where that is possible.

    Returns:
        Whether it was; else whoever iterates has to walk past them.
    """
    sampler = getattr(loader, "sampler", None)
    batch_size = getattr(loader, "batch_size", None)
    if not isinstance(sampler, DefaultSampler) or batch_size is None:
        return False
    sampler.skip(count * batch_size)
    return True
