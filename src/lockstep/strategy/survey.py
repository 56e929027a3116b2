"""Which strategies and variants work in this environment, determined by building them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lockstep.engines import INSTALL
from lockstep.errors import ConfigError
from lockstep.registry import STRATEGIES


@dataclass(frozen=True, slots=True)
class Standing:
    """Which variants of one strategy work in this environment.

    Attributes:
        name: the name in a config or for `--strategy`.
        package: the package that implements it.
        version: the version of that package; None if it is not installed.
        works: variants that can be built.
        refused: variants that raise an error, with the reason and the alternative.
    """

    name: str
    package: str
    version: str | None
    works: tuple[str, ...]
    refused: Mapping[str, str]


_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "single": {"one process": {}},
    "ddp": {"replicas": {}},
    "fsdp": {
        "full shards": {},
        "hybrid": {"device_mesh": (2, 2)},
        "tensor parallel": {"tensor_parallel": 2},
        "bf16": {"mixed_precision": "bf16"},
        "offload": {"cpu_offload": True},
    },
    "deepspeed": {
        **{f"stage {stage}": {"stage": stage} for stage in range(4)},
        "offload": {"stage": 2, "offload": True},
        "bf16": {"stage": 1, "bf16": True},
        "bf16 at stage 0": {"stage": 0, "bf16": True},
        "fp16": {"stage": 1, "fp16": True},
    },
    "colossalai": {
        "ZeRO 1": {"plugin": "lowlevel_zero", "stage": 1},
        "ZeRO 2": {"plugin": "lowlevel_zero", "stage": 2},
        "bf16": {"plugin": "lowlevel_zero", "precision": "bf16"},
        "fp16": {"plugin": "lowlevel_zero", "precision": "fp16"},
        "hybrid": {"plugin": "hybrid"},
        "gemini": {"plugin": "gemini"},
        "ddp": {"plugin": "ddp"},
        "fsdp": {"plugin": "fsdp"},
    },
}


def survey_strategies() -> list[Standing]:
    """Return what works for each strategy. Installed engines are imported, which takes seconds."""
    return [_ask(name) for name in _VARIANTS]


def _ask(name: str) -> Standing:
    package = name if name in INSTALL else "torch"
    try:
        installed = version(package)
    except PackageNotFoundError:
        return Standing(name, package, None, (), {"": f"not installed: {INSTALL[package]}"})
    refused = {}
    for variant, options in _VARIANTS[name].items():
        try:
            STRATEGIES.build({"type": name, **options})
        except ConfigError as error:
            refused[variant] = str(error.__cause__ or error)
    works = tuple(variant for variant in _VARIANTS[name] if variant not in refused)
    return Standing(name, package, installed, works, refused)
