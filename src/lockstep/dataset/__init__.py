"""Data loading: the order of the samples, and the shard of each rank."""

from __future__ import annotations

from torch.utils.data import default_collate

from lockstep.dataset.loader import build_dataloader, pseudo_collate
from lockstep.dataset.position import batch_size_of, set_epoch
from lockstep.dataset.rank_aware import is_rank_aware
from lockstep.dataset.sampler import (
    DataShard,
    DefaultSampler,
    InfiniteSampler,
    ShardedSampler,
    agree_on_shard,
    length_of,
)

__all__ = [
    "DataShard",
    "DefaultSampler",
    "InfiniteSampler",
    "ShardedSampler",
    "agree_on_shard",
    "batch_size_of",
    "build_dataloader",
    "default_collate",
    "is_rank_aware",
    "length_of",
    "pseudo_collate",
    "set_epoch",
]
