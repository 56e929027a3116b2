"""Small functions around torch that MMEngine offers to everybody."""

from __future__ import annotations

from mmengine.utils.dl_utils.collect_env import collect_env
from mmengine.utils.dl_utils.hub import load_url
from mmengine.utils.dl_utils.misc import has_batch_norm, is_norm, mmcv_full_available, torch_meshgrid
from mmengine.utils.dl_utils.parrots_wrapper import TORCH_VERSION
from mmengine.utils.dl_utils.setup_env import set_multi_processing
from mmengine.utils.dl_utils.time_counter import TimeCounter
from mmengine.utils.dl_utils.trace import is_jit_tracing
from mmengine.utils.dl_utils.visualize import tensor2imgs

__all__ = [
    "TORCH_VERSION",
    "TimeCounter",
    "collect_env",
    "has_batch_norm",
    "is_jit_tracing",
    "is_norm",
    "load_url",
    "mmcv_full_available",
    "set_multi_processing",
    "tensor2imgs",
    "torch_meshgrid",
]
