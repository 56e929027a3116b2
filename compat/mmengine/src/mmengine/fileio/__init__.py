"""Files on disks and behind URLs."""

from __future__ import annotations

__all__: list[str] = []
