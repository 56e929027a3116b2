"""Which sample comes when, and on which rank."""

from __future__ import annotations

from lockstep.dataset.loader import build_dataloader, pseudo_collate
from lockstep.dataset.position import length_of, set_epoch, skip_batches
from lockstep.dataset.sampler import DefaultSampler

__all__ = ["DefaultSampler", "build_dataloader", "length_of", "pseudo_collate", "set_epoch", "skip_batches"]
