"""The name that was probably meant; its home is `lockstep.errors`."""

from __future__ import annotations

from lockstep.errors import did_you_mean, nearest

__all__ = ["did_you_mean", "nearest"]
