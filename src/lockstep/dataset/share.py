"""Ranks that compute on the same samples together, of which only one may count them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lockstep.dist import all_gather, get_rank, get_world_size


class DataShare(NamedTuple):
    """Which of the samples a rank sees.

    Attributes:
        rank: the number of its share.
        size: how many shares there are: the world size, or, where ranks compute together, less.
        is_first: whether this rank speaks for all that see the same samples.
    """

    rank: int
    size: int
    is_first: bool


def agree_on_share(rank: int, size: int) -> DataShare:
    """Return a rank's share, with who is the first to have it.

    **Collective**: every rank. **Cost**: 8 bytes from each rank to each, where there are fewer shares than ranks.

    **Example (2 ranks)**::

        >>> from lockstep.dist import get_rank
        >>> agree_on_share(get_rank(), 2).is_first, agree_on_share(0, 1).is_first == (get_rank() == 0)
        (True, True)
    """
    if size == get_world_size():
        return DataShare(rank, size, is_first=True)
    holders = [int(holder) for holder in all_gather(torch.tensor(rank))]
    return DataShare(rank, size, is_first=holders.index(rank) == get_rank())
