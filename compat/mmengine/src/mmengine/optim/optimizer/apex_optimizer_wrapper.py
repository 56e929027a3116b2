"""`ApexOptimWrapper`, which lockstep does not have: the name raises an error that says what to use."""

from __future__ import annotations

from typing import Any, NoReturn

from lockstep.errors import ConfigError
from mmengine.registry import OPTIM_WRAPPERS

__all__ = ["ApexOptimWrapper"]


@OPTIM_WRAPPERS.register_module()
class ApexOptimWrapper:
    """Refused: NVIDIA has ended the mixed precision of apex, in favour of torch's own.

    Raises:
        ConfigError: always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(
            "`ApexOptimWrapper` is not there: NVIDIA has ended the mixed precision of apex in favour of torch's. Use "
            "dict(type='AmpOptimWrapper', optimizer=...), with dtype='bfloat16' or 'float16'"
        )
