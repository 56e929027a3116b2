"""Data loading: the order of the samples, and the shard of each rank."""

from __future__ import annotations

from torch.utils.data import default_collate

from lockstep.dataset.compose import Compose
from lockstep.dataset.deal import Amount, Deal, amount_of, batch_size_of, deal_of
from lockstep.dataset.loader import build_dataloader, pseudo_collate
from lockstep.dataset.position import (
    begun_at,
    head_of,
    position_of,
    restore_position,
    set_epoch,
    skip_batches,
    without_batches,
)
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
    "Amount",
    "Compose",
    "DataShard",
    "Deal",
    "DefaultSampler",
    "InfiniteSampler",
    "ShardedSampler",
    "agree_on_shard",
    "amount_of",
    "batch_size_of",
    "begun_at",
    "build_dataloader",
    "deal_of",
    "default_collate",
    "head_of",
    "is_rank_aware",
    "length_of",
    "position_of",
    "pseudo_collate",
    "restore_position",
    "set_epoch",
    "skip_batches",
    "without_batches",
]
