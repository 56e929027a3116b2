"""`MessageHub`, where MMEngine has it."""

from __future__ import annotations

from lockstep.logging import MessageHub

__all__ = ["MessageHub"]
