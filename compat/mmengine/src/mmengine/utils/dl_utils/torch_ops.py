"""`torch_meshgrid`, under the path where MMEngine has it."""

from __future__ import annotations

from mmengine.utils.dl_utils.misc import torch_meshgrid

__all__ = ["torch_meshgrid"]
