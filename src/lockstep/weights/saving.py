"""Writing the weights of a model that is distributed over ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from lockstep.dist import is_main_process, run_on_main
from lockstep.errors import require_known
from lockstep.location import locate
from lockstep.weights.description import describe_model
from lockstep.weights.safetensors_file import TensorInfo
from lockstep.weights.selection import select, told_left_out
from lockstep.weights.writing import MAX_SHARD_SIZE, SafetensorsWriter, check_new, plan_shards, read_size

_logger = logging.getLogger(__name__)


class PretrainedOptions(TypedDict, total=False):
    """The options of `Runner.save_pretrained`, which says what they mean."""

    max_shard_size: int | str
    dtype: str | torch.dtype | None
    prefix: str | None
    ema: bool | None


@torch.no_grad()
def save_pretrained(core: nn.Module, state: Mapping[str, Any], out: str | Path, options: PretrainedOptions) -> None:
    """Write a model's state for `from_pretrained`; see `Run.save_pretrained`.

    Args:
        core: the user's own module.
        state: its state in canonical form, which may be sharded.
        out: a new or empty folder, or the URL of one.
        options: how it is written. The caller has chosen between averaged and trained weights.

    **Collective**: every rank.

    Raises:
        ConfigError: there is no such option.
    """
    require_known("save_pretrained", options, PretrainedOptions.__annotations__)
    from lockstep.model.shards import gather_full

    location = locate(out)
    run_on_main(partial(check_new, location, file=False))
    infos = {n: TensorInfo(tuple(value.shape), value.dtype) for n, value in state.items() if isinstance(value, Tensor)}
    description = describe_model(core, state)
    prefix, dtype = options.get("prefix"), options.get("dtype")
    chosen = select(infos, description, "pretrained", what=type(core).__name__, prefix=prefix, dtype=dtype)
    shards = plan_shards(chosen.infos, chosen.stem, read_size(options.get("max_shard_size", MAX_SHARD_SIZE)))
    writer = SafetensorsWriter(location, shards, chosen.infos, chosen.files) if is_main_process() else None
    for name in (name for names in shards.values() for name in names):
        whole = gather_full(state[chosen.origins[name]])
        if writer is not None:
            writer.write(whole)
    run_on_main(lambda: None if writer is None else writer.finish())  # only rank 0 has one
    if chosen.left_out:
        _logger.info("%s is without %s", location, told_left_out(chosen.left_out))
    _logger.info("wrote the weights to %s", location)
