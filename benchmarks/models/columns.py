"""The strategies, as a config chooses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Engine = Literal["torch", "deepspeed", "colossalai"]
ENGINES: tuple[Engine, ...] = ("torch", "deepspeed", "colossalai")


@dataclass(frozen=True)
class Column:
    """One way to lay a model over ranks.

    Attributes:
        name: in the tables.
        nproc: number of ranks.
        strategy: what a config says under `strategy`.
        engine: whose environment it runs in.
        tensor_parallel: number of ranks that compute on the same samples together.
    """

    name: str
    nproc: int
    strategy: Mapping[str, Any]
    engine: Engine = "torch"
    tensor_parallel: int = 1

    @property
    def data_ranks(self) -> int:
        """Number of ranks that see different samples."""
        return self.nproc // self.tensor_parallel

    def strategy_for(self, plan: Mapping[str, str] | None, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the config of the strategy for a model with such a plan and options."""
        strategy = {**self.strategy, **options.get(self.name, {})}
        if self.tensor_parallel == 1:
            return strategy
        return {**strategy, "tensor_parallel": {"degree": self.tensor_parallel, "plan": plan}}


# Parameters of any size are sharded, as those of large models are.
_ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 0}

COLUMNS = (
    Column("single", 1, {"type": "single"}),
    Column("DDP-2", 2, {"type": "ddp"}),
    Column("FSDP-2", 2, {"type": "fsdp"}),
    Column("FSDP-4", 4, {"type": "fsdp"}),
    Column("HSDP-2x2", 4, {"type": "fsdp", "device_mesh": (2, 2)}),
    Column("TP-2", 2, {"type": "fsdp"}, tensor_parallel=2),
    Column("ZeRO-1", 2, {"type": "deepspeed", "stage": 1}, "deepspeed"),
    Column("ZeRO-3", 2, {"type": "deepspeed", "zero_optimization": _ZERO3}, "deepspeed"),
    Column("ColossalAI ZeRO-1", 2, {"type": "colossalai", "plugin": "lowlevel_zero", "stage": 1}, "colossalai"),
)
BY_NAME = {column.name: column for column in COLUMNS}
