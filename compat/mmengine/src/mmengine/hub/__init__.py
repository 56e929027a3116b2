"""Configs that come with installed packages, and their models."""

from __future__ import annotations

from mmengine.hub.hub import get_config, get_model

__all__ = ["get_config", "get_model"]
