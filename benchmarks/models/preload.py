"""What takes long to import; processes of ranks are forked when it has been."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch._inductor.config  # which DDP and FSDP import on first use
import torch.distributed.fsdp  # noqa: F401

from benchmarks.models import (
    rank,  # noqa: F401
    rows,
)
from benchmarks.models.processes import PRELOADED
from lockstep.engines import load_engine

for _engine, _part in (("deepspeed", "deepspeed"), ("colossalai", "colossalai.booster")):
    if find_spec(_engine) is not None:
        load_engine(_part)
for _name in os.environ[PRELOADED].split("\n"):
    rows.BY_NAME[_name].make()  # whose classes are imported when they are asked for
