"""A backend of the CPU that answers None where NCCL does, and counts its collectives."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist

COUNTS: Counter[str] = Counter()  # of this process, by the names of the methods
_SINGLE = "all_gather_single" if hasattr(torch_dist.ProcessGroup, "all_gather_single") else "_allgather_base"


class SilentGroup(torch_dist.ProcessGroup):
    """gloo, but a call with ``asyncOp=False`` is complete when it returns, and returns None."""

    def __init__(self, store: torch_dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = torch_dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _forward(name: str) -> None:
    def call(self: SilentGroup, *arguments: Any) -> Any:
        COUNTS[name] += 1
        work = getattr(self.gloo, "_allgather_base" if name == _SINGLE else name)(*arguments)
        if name == "alltoall_base" or all(getattr(argument, "asyncOp", True) for argument in arguments):
            return work  # torch ends the process where a backend in Python has none for an all_to_all (2.13)
        work.wait()
        return None

    setattr(SilentGroup, name, call)


for _name in (
    *("allgather", "allreduce", "alltoall_base", "barrier", "broadcast", "gather", "recv", "reduce", "reduce_scatter"),
    *("scatter", "send", _SINGLE),
):
    _forward(_name)
torch_dist.Backend.register_backend("silent", SilentGroup, devices=["cpu"])
