"""What a model costs."""

from __future__ import annotations

__all__: list[str] = []
