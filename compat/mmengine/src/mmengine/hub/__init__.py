"""Configs and models of installed packages."""

from __future__ import annotations

__all__: list[str] = []
