"""Seeds."""

from __future__ import annotations

import random

import numpy as np
import torch

from lockstep.dist import get_rank, sync_random_seed
from mmengine.logging import print_log

__all__ = ["set_random_seed"]


def set_random_seed(seed: int | None = None, deterministic: bool = False, diff_rank_seed: bool = False) -> int:
    """Seed Python, numpy and torch, and return the seed.

    Args:
        seed: the seed; None for one that is drawn, the same on all ranks.
        deterministic: also choose algorithms that give the same numbers each time.
        diff_rank_seed: add the rank to it.
    """
    seed = sync_random_seed() if seed is None else seed
    if diff_rank_seed:
        seed += get_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    if deterministic:
        if torch.backends.cudnn.benchmark:
            print_log("torch.backends.cudnn.benchmark is off now, for deterministic algorithms", "current")
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        torch.use_deterministic_algorithms(True)
    return seed
