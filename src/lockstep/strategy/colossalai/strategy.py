"""`ColossalAIStrategy`: ZeRO 1 and 2, by ColossalAI's plugin."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from lockstep.device import get_device
from lockstep.dist import init_dist, is_distributed
from lockstep.errors import ConfigError
from lockstep.model.parts import broadcast_from_first
from lockstep.optim import build_optim_wrapper
from lockstep.registry import MODEL_WRAPPERS, STRATEGIES
from lockstep.strategy.base import OptimLike, Prepared
from lockstep.strategy.colossalai import engine
from lockstep.strategy.colossalai.plugin import check_run, read_options
from lockstep.strategy.colossalai.state import ColossalAIState
from lockstep.strategy.colossalai.wrappers import ColossalAIOptimWrapper
from lockstep.strategy.engine_parameters import leave_out_frozen, max_norm_of
from lockstep.strategy.engine_strategy import EngineStrategy, require_plain
from lockstep.strategy.engine_wrappers import cast_inputs_and_parts


@STRATEGIES.register_module(name=["ColossalAIStrategy", "colossalai"])
class ColossalAIStrategy(EngineStrategy):
    """Train with ColossalAI's ZeRO: each rank holds a shard of the optimizer's state, with `stage=2` of gradients, too.

    All ranks start with the parameters and buffers of rank 0. Gradients are clipped by their global norm. A model that
    is prepared without an optim wrapper is only moved to its device.

    Args:
        plugin: `"lowlevel_zero"`; or a dict with this as `type` and its options. MMEngine's default is "gemini", which
            is refused, as are ColossalAI's other plugins, with what to use instead.
        mixed_precision: must be None; give `precision="bf16"` to the plugin.
        model_wrapper: config of the wrapper, `ColossalAIModelWrapper` by default.
        **kwargs: options of the plugin: `stage`, `precision`, `cpu_offload` and so on.

    Raises:
        ConfigError: the plugin or an option is unknown, or gives wrong results in ColossalAI 0.5.0.

    **Source**: `colossalai.booster` (0.5.0).
    """

    package = "colossalai"

    def __init__(
        self,
        plugin: str | Mapping[str, Any] = "lowlevel_zero",
        mixed_precision: None = None,
        model_wrapper: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if mixed_precision is not None:
            raise ConfigError(
                f"`mixed_precision` must be None, because ColossalAI's booster can't make one (0.5.0), but is "
                f"{mixed_precision!r}. Give the plugin precision='bf16'"
            )
        self._options = read_options(plugin, kwargs)
        self._dtype = torch.bfloat16 if self._options["precision"] == "bf16" else torch.float32
        self._wrapper = dict(model_wrapper or {})

    def parallelize(self, model: nn.Module, optim_wrapper: OptimLike | None = None) -> Prepared:
        """Build the optimizer, then let the booster distribute model and optimizer over the ranks.

        **Collective**: every rank, once.

        Raises:
            ConfigError: ColossalAI is not installed, or the plugin does not support this model or optimizer.
        """
        engine.require_engine()
        require_plain(model, "ColossalAI")
        if optim_wrapper is None:
            return self.for_evaluation(model), None
        model.to(torch.device(get_device()))
        if not is_distributed():
            init_dist("none")  # ColossalAI needs a group, also of one process
        wrapper = ColossalAIOptimWrapper.of(build_optim_wrapper(model, optim_wrapper))
        check_run(model, wrapper.optimizer, self._dtype)
        leave_out_frozen(wrapper.optimizer)
        options = {**self._options, "max_norm": max_norm_of(wrapper.clip_grad, "ColossalAI's 'lowlevel_zero'") or 0.0}
        if not engine.has_streams():
            options["overlap_communication"] = False
        # Each rank updates its shard alone: the whole would be put together from different models.
        broadcast_from_first(chain(model.parameters(), model.buffers()), None)
        booster, boosted, zero = engine.boost(options, model, wrapper.optimizer)
        self._state = state = ColossalAIState(model, zero)
        wrapper.attach(zero, model, state.masters(offloads=bool(options.get("cpu_offload"))))
        wrapper.sends_as_they_come = options["stage"] == 2 or bool(options.get("overlap_communication", True))
        cast_inputs_and_parts(model, self._dtype)
        no_sync = None if options["stage"] == 2 else partial(booster.no_sync, boosted, zero)
        wrapped: nn.Module = MODEL_WRAPPERS.build(
            {"type": "ColossalAIModelWrapper", **self._wrapper},
            model=model, model_wrapper=boosted, booster=booster, no_sync=no_sync,
        )  # fmt: skip
        self._model = wrapped  # keeps its booster alive, which owns the groups that gather states
        return wrapped, wrapper
