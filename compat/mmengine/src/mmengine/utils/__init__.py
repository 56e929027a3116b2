"""Small functions that MMEngine offers to everybody."""

from __future__ import annotations

from mmengine.utils.manager import ManagerMeta, ManagerMixin

__all__ = ["ManagerMeta", "ManagerMixin"]
