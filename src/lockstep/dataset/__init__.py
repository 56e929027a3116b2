"""Data loading: the order of the samples, and the shard of each rank."""

from __future__ import annotations

from torch.utils.data import default_collate

from lockstep.dataset.compose import Compose
from lockstep.dataset.loader import build_dataloader, pseudo_collate
from lockstep.dataset.position import (
    Amount,
    GlobalOrder,
    Position,
    amount_of,
    batch_size_of,
    batches_from,
    begun_at,
    global_order_of,
    head_of,
    loader_state,
    restore_loader_state,
    set_epoch,
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
    "DefaultSampler",
    "GlobalOrder",
    "InfiniteSampler",
    "Position",
    "ShardedSampler",
    "agree_on_shard",
    "amount_of",
    "batch_size_of",
    "batches_from",
    "begun_at",
    "build_dataloader",
    "default_collate",
    "global_order_of",
    "head_of",
    "is_rank_aware",
    "length_of",
    "loader_state",
    "pseudo_collate",
    "restore_loader_state",
    "set_epoch",
]
