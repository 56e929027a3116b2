"""Inference from a config and weights."""

from __future__ import annotations

__all__: list[str] = []
