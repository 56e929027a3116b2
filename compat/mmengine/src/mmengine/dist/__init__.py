"""Communication between ranks: lockstep's, under the same names."""

from __future__ import annotations

from mmengine.dist import dist as _collectives
from mmengine.dist import utils as _group
from mmengine.dist.dist import *  # noqa: F403 - its __all__
from mmengine.dist.utils import *  # noqa: F403

__all__: list[str] = []
__all__ += _collectives.__all__
__all__ += _group.__all__
