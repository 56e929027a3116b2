"""Batches that several ranks or workers get alike, from a loader that nothing splits between them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np
from torch import Tensor

from lockstep.dist import all_gather_object, get_rank, get_world_size
from lockstep.errors import ConfigError, listed
from lockstep.transport.moving import bytes_of, is_dense_on_host
from lockstep.tree import tree_leaves

_logger = logging.getLogger(__name__)


def refuse_repeats(loader: Any, checksum: int | None) -> None:
    """Raise a `ConfigError` on every rank if ranks have got the same batch from a loader that lockstep does not split.

    For batches in a list, which may be those of a trial, it is a warning.

    **Collective**: every rank. **Cost**: one all_gather of some bytes.
    """
    sums = all_gather_object(checksum)
    for one in [one for one in sums if one is not None and sums.count(one) > 1][:1]:
        who = listed([str(rank) for rank, other in enumerate(sums) if other == one])
        _refuse(loader, f"ranks {who} have got the same first batch")


def refuse_repeats_by_workers(loader: Any, checksums: Sequence[int | None]) -> None:
    """Raise a `ConfigError` if the first two batches, each of another worker, are the same."""
    if getattr(loader, "num_workers", 0) > 1 and None is not checksums[0] == checksums[1]:
        _refuse(loader, "two workers have made the same batch")


def _refuse(loader: Any, what: str) -> None:
    dataset = getattr(loader, "dataset", None)
    error = (
        f"{what} from {type(getattr(dataset, 'dataset', dataset) or loader).__name__} (rank {get_rank()} of "
        f"{get_world_size()}), so it seems to yield each sample several times: nothing splits it. The config "
        "dict(dataset=..., batch_size=...) splits an iterable dataset: without `split`, or with `split='ranks'` if it "
        "splits itself over its workers. If that is meant, give the loader, or its dataset, an attribute `rank`"
    )
    if not isinstance(loader, list | tuple):
        raise ConfigError(error)
    _logger.warning(error)


def checksum_of(batch: Any) -> int | None:
    """Return a checksum of all values of a batch; None if they do not tell it from others, or are not on the host."""
    checksum, items, varies = 0, set[bytes](), False
    for leaf in tree_leaves(batch):
        data: bytes | memoryview
        if isinstance(leaf, Tensor):
            if not is_dense_on_host(leaf):
                return None
            data, size = bytes_of(leaf.detach().resolve_conj().resolve_neg().contiguous()), leaf.element_size()
        elif isinstance(leaf, np.ndarray | np.generic):
            data, size = (repr(leaf.tolist()).encode(), 1) if leaf.dtype.hasobject else (leaf.tobytes(), leaf.itemsize)
        elif isinstance(leaf, str | bytes | int | float):
            data = repr(leaf).encode()
            size = len(data)
        elif leaf is None:
            continue
        else:
            return None
        checksum = crc32(data, checksum)
        items.add(bytes(data[:size]))
        varies = varies or data[size:] != data[:-size]
    return checksum if varies or len(items) > 1 else None
