"""The choice of one of ColossalAI's plugins and its options, and the checks of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.device import get_device
from lockstep.dist import get_world_size
from lockstep.errors import ConfigError, did_you_mean
from lockstep.model.norm import BATCH_NORMS
from lockstep.strategy.engine_parameters import check_kinds, refuse_lbfgs, updates_elementwise

_CLASSES: Mapping[str, str] = {
    "lowlevel_zero": "LowLevelZeroPlugin",
    "hybrid": "HybridParallelPlugin",
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "lowlevel_zero": {"stage": 1, "precision": "fp32"},
    "hybrid": {
        "tp_size": 1,
        "pp_size": 1,
        "zero_stage": 0,
        "precision": "fp32",
        "broadcast_buffers": False,
        # With True, each rank of a HuggingFace model predicts only its part of the vocabulary.
        "parallel_output": False,
    },
}
_REFUSED: Mapping[str, str] = {
    "ddp": "is PyTorch's DDP. Use strategy='ddp', which takes its options",
    "gemini": (
        "leaves out the clipping of gradients in bf16, has no fp32, and runs on no processor (ColossalAI 0.5.0). Use "
        "plugin='lowlevel_zero' with stage=2, or strategy='fsdp', which shards the parameters, too"
    ),
    "fsdp": (
        "clips gradients by the norm of each rank's own shard, and fails with AdamW (ColossalAI 0.5.0). Use "
        "strategy='fsdp', which is PyTorch's FSDP as well"
    ),
}
# ColossalAI's optimizers that update each element independently, as those of torch do that are known.
_ELEMENTWISE = frozenset({"CPUAdam", "FusedAdam", "FusedSGD", "HybridAdam"})


class PluginChoice:
    """A plugin and its options.

    Args:
        plugin: the plugin's name.
        options: arguments of the plugin's class.

    Attributes:
        kind: `"lowlevel_zero"` or `"hybrid"`.
        class_name: name of the plugin's class.
        options: the arguments, with lockstep's defaults.
        zero_stage: 0 if every rank has the whole optimizer, 1 or 2 if it is sharded.
        tp_size: number of ranks that share one replica of the model.
        dtype: the dtype that the model computes in.

    Raises:
        ConfigError: the plugin or an option is unknown, or gives wrong results.
    """

    def __init__(self, plugin: str, options: Mapping[str, Any]) -> None:
        self.kind = kind = _kind(plugin)
        if kind in _REFUSED:
            raise ConfigError(f"`plugin` must be one of {', '.join(_CLASSES)}, because {kind!r} {_REFUSED[kind]}")
        self.class_name = _CLASSES[kind]
        self.options: Mapping[str, Any] = {**_DEFAULTS[kind], **options}
        self.zero_stage: int = self.options.get("stage", self.options.get("zero_stage", 0))
        self.tp_size: int = self.options.get("tp_size", 1)
        self.dtype = torch.bfloat16 if self.options.get("precision") == "bf16" else torch.float32
        self._check_options()

    def with_run(self, max_norm: float | None) -> dict[str, Any]:
        """Return the options, completed with the values known when training begins."""
        options = {**self.options, "max_norm": max_norm or 0.0}
        if get_device() == "cpu":
            options["overlap_communication"] = False
        return options

    def check_run(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Refuse models and optimizers that the plugin does not support, before anything is changed.

        Raises:
            ConfigError: the model, the optimizer or the number of ranks does not fit.
        """
        refuse_lbfgs(optimizer, "ColossalAI")
        if (self.zero_stage or self.tp_size > 1) and not _is_elementwise(optimizer):
            raise ConfigError(
                f"`optimizer` must update each number by itself, because {self.kind!r} hands it shards, but is "
                f"{type(optimizer).__name__}, which is not known to do so. Use AdamW or SGD, strategy 'ddp' or 'fsdp', "
                "or set `is_elementwise = True` on its class if it does"
            )
        engine = f"ColossalAI's {self.kind!r}"
        check_kinds(model, half=self.dtype != torch.float32, engine=engine, half_option="precision='bf16'")
        if get_world_size() % self.tp_size:
            raise ConfigError(
                f"`tp_size` must divide the number of ranks, but is {self.tp_size}, and there are {get_world_size()}"
            )
        norms = [path for path, module in model.named_modules() if isinstance(module, BATCH_NORMS)]
        if norms and self.kind == "hybrid" and not self.zero_stage and get_device() == "cpu":
            raise ConfigError(
                f"the model must have no BatchNorm on the CPU, because {self.kind!r} turns it into SyncBatchNorm, "
                f"which runs on accelerators alone, but {norms[0]!r} is one. Use plugin='lowlevel_zero', or "
                "strategy='ddp'"
            )

    def _check_options(self) -> None:
        options = self.options
        if "max_norm" in options or "clip_grad_norm" in options:
            raise ConfigError(
                "`max_norm` must be given to the optim wrapper, but is given to the plugin. Write "
                "optim_wrapper=dict(optimizer=..., clip_grad=dict(max_norm=...))"
            )
        if self.kind != "hybrid" and "tp_size" in options:
            raise ConfigError(
                f"`tp_size` must come with plugin='hybrid', which alone splits layers, but comes with {self.kind!r}"
            )
        precision = options.get("precision", "fp32")
        if precision not in ("fp32", "bf16"):
            raise ConfigError(
                f"`precision` must be 'fp32' or 'bf16', but is {precision!r}. ColossalAI's fp16 does not run on a "
                "CPU, and its loss scale is in no checkpoint: use precision='bf16', or strategy 'ddp' with an "
                "AmpOptimWrapper"
            )
        if self.kind == "lowlevel_zero" and self.zero_stage not in (1, 2):
            raise ConfigError(
                f"`stage` must be 1 or 2, but is {self.zero_stage}. To shard the parameters, too, use strategy='fsdp'"
            )
        if self.kind == "hybrid":
            self._check_hybrid(precision)

    def _check_hybrid(self, precision: str) -> None:
        if (stages := self.options.get("pp_size", 1)) != 1:
            raise ConfigError(
                f"`pp_size` must be 1, because lockstep makes no pipelines, but is {stages}. For a model that does not "
                "fit on one device use strategy='fsdp', perhaps with `tensor_parallel`; `tp_size`; or "
                "plugin='lowlevel_zero' with stage=2"
            )
        if self.zero_stage and precision == "fp32":
            raise ConfigError(
                f"`zero_stage` must be 0 in fp32, but is {self.zero_stage}: ColossalAI's 'hybrid' shards its "
                "optimizer in bf16 alone. Use precision='bf16', or plugin='lowlevel_zero'"
            )
        if self.options.get("enable_sequence_parallelism"):
            raise ConfigError(
                "`enable_sequence_parallelism` must be False, because ranks would compute on the same samples, "
                "which the data loader splits between them. Use tp_size"
            )


def _is_elementwise(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    is_colossalais = kind.__module__.startswith("colossalai.") and kind.__name__ in _ELEMENTWISE
    return is_colossalais or updates_elementwise(optimizer)


def name_and_options(plugin: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a plugin that is given as a name, or as a dict with a `type`.

    Raises:
        ConfigError: `plugin` is neither.
    """
    cfg = {"type": plugin} if isinstance(plugin, str) else plugin
    if not isinstance(cfg, Mapping) or not isinstance(cfg.get("type"), str):
        raise ConfigError(
            f"`plugin` must be the name of a plugin, or a dict with its name as `type`, but is {plugin!r}"
        )
    return cfg["type"], {name: value for name, value in cfg.items() if name != "type"}


def _kind(name: str) -> str:
    """Return the kind of a plugin from MMEngine's, ColossalAI's or lockstep's name for it."""
    plain = name.lower().replace("-", "").replace("_", "").removesuffix("plugin")
    known = {
        "ddp": "ddp", "torchddp": "ddp",
        "lowlevelzero": "lowlevel_zero", "zero": "lowlevel_zero",
        "hybrid": "hybrid", "hybridparallel": "hybrid",
        "gemini": "gemini",
        "fsdp": "fsdp", "torchfsdp": "fsdp",
    }  # fmt: skip
    if plain not in known:
        raise ConfigError(
            f"`plugin` must be one of {', '.join(_CLASSES)}, but is {name!r}{did_you_mean(name, _CLASSES)}"
        )
    return known[plain]
