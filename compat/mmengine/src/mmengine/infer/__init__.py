"""Inference from a config and weights."""

from __future__ import annotations

from mmengine.infer.infer import BaseInferencer

__all__ = ["BaseInferencer"]
