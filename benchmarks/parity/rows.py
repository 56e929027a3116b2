"""The strategies that are compared, and how far each may be off."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Engine = Literal["torch", "deepspeed", "colossalai"]

AUTOCAST = {"optim_wrapper": {"type": "AmpOptimWrapper", "dtype": "bfloat16"}}


@dataclass(frozen=True)
class Row:
    """One way to lay the model over ranks.

    Attributes:
        name: in the table.
        nproc: number of ranks.
        strategy: what a config says under `strategy`.
        engine: whose environment it runs in.
        loss_tolerance: largest difference from the loss of a single process, in nats, that is still the same.
        replicas: number of ranks that see different samples.
        bf16: what a config says besides, to compute in bfloat16.
    """

    name: str
    nproc: int
    strategy: Any
    engine: Engine = "torch"
    loss_tolerance: float = 5e-6
    replicas: int = 0
    bf16: dict[str, Any] = field(default_factory=dict)

    @property
    def data_ranks(self) -> int:
        return self.replicas or self.nproc


def _fsdp(**options: Any) -> dict[str, Any]:
    strategy = {"type": "fsdp", **options}
    return {"strategy": strategy, "bf16": {"strategy": {**strategy, "mixed_precision": "bf16"}}}


def _deepspeed(stage: int) -> Row:
    strategy = {"type": "deepspeed", "stage": stage}
    return Row(
        f"DeepSpeed {stage}",
        2,
        strategy,
        "deepspeed",
        loss_tolerance=1e-5 if stage == 3 else 5e-6,
        bf16={"strategy": {**strategy, "bf16": {"enabled": True}}},
    )


def _colossalai(name: str, **options: Any) -> Row:
    strategy = {"type": "colossalai", **options}
    bf16 = {"strategy": {**strategy, "precision": "bf16"}}
    return Row(f"ColossalAI {name}", 2, strategy, "colossalai", bf16=bf16)


ROWS = (
    Row("single", 1, "single", bf16=AUTOCAST),
    Row("DDP-2", 2, "ddp", bf16=AUTOCAST),
    Row("FSDP-2", 2, **_fsdp()),
    Row("FSDP-4", 4, **_fsdp()),
    Row("HSDP-2x2", 4, **_fsdp(device_mesh=(2, 2))),
    Row("TP-2", 2, **_fsdp(tensor_parallel=2), loss_tolerance=1e-5, replicas=1),
    Row("FSDP-2 x TP-2", 4, **_fsdp(tensor_parallel=2), loss_tolerance=1e-5, replicas=2),
    *(_deepspeed(stage) for stage in (1, 2, 3)),
    _colossalai("zero1", plugin="lowlevel_zero", stage=1),
    _colossalai("zero2", plugin="lowlevel_zero", stage=2),
)
