"""Whether torch traces."""

from __future__ import annotations

import torch

__all__ = ["is_jit_tracing"]


def is_jit_tracing() -> bool:
    """Return whether `torch.jit.trace` runs the present code."""
    return bool(torch.jit.is_tracing())  # type: ignore[no-untyped-call]
