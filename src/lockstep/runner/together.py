"""Going through data of which the ranks hold unequal amounts, where every forward pass needs all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import torch

from lockstep.dist import all_gather
from lockstep.errors import ConfigError

_NONE = object()


def in_step(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield this rank's batches, each with True, and go on until every rank has come to its end.

    A rank that has run out yields its last batch again, with False, so that it takes part in what the others do.

    **Collective**: every rank. **Cost**: one byte from each rank to each, per batch.

    Raises:
        ConfigError: on every rank, if some ranks have batches and others none at all.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank
        >>> from lockstep.runner.together import in_step
        >>> list(in_step("ab" if get_rank() == 0 else "c")) == (
        ...     [("a", True), ("b", True)], [("c", True), ("c", False)])[get_rank()]
        True
    """
    own = iter(batches)
    last = None
    for index in count():
        batch = next(own, _NONE)
        held = [bool(flag) for flag in all_gather(torch.tensor(batch is not _NONE))]
        if not any(held):
            return
        if index == 0 and not all(held):
            empty = [rank for rank, flag in enumerate(held) if not flag]
            raise ConfigError(
                f"the data must have a batch for every rank, but has none for the ranks {empty}, while the model's "
                "forward pass needs them all. Use fewer ranks or a smaller batch_size"
            )
        if batch is not _NONE:
            last = batch
        yield last, batch is not _NONE
