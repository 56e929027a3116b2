"""Datasets and samplers: lockstep's, under the same names."""

from __future__ import annotations

from lockstep.dataset import Compose, DefaultSampler, InfiniteSampler, default_collate, pseudo_collate

__all__ = ["Compose", "DefaultSampler", "InfiniteSampler", "default_collate", "pseudo_collate"]
