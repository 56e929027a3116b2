"""The session: what a training loop of the user's own needs on any number of ranks."""

from __future__ import annotations

from lockstep.session.session import Session

__all__ = ["Session"]
