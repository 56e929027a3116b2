"""Datasets, samplers, and how samples become a batch."""

from __future__ import annotations

from mmengine.dataset.base_dataset import BaseDataset, Compose, force_full_init
from mmengine.dataset.dataset_wrapper import ClassBalancedDataset, ConcatDataset, RepeatDataset
from mmengine.dataset.sampler import DefaultSampler, InfiniteSampler
from mmengine.dataset.utils import COLLATE_FUNCTIONS, default_collate, pseudo_collate, worker_init_fn

__all__ = [
    "COLLATE_FUNCTIONS",
    "BaseDataset",
    "ClassBalancedDataset",
    "Compose",
    "ConcatDataset",
    "DefaultSampler",
    "InfiniteSampler",
    "RepeatDataset",
    "default_collate",
    "force_full_init",
    "pseudo_collate",
    "worker_init_fn",
]
