"""The parameters that an engine trains: recorded when the model is prepared, and not to be changed afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from lockstep.errors import ConfigError, listed
from lockstep.groups import this_rank

_ELEMENTWISE = (
    torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.SGD,
    torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop,
)  # fmt: skip
_CHANGES = {"unfrozen": False, "frozen": True}  # and whether a parameter was trained before


class TrainableParams:
    """Records which parameters an engine trains and which are frozen.

    Engines copy the parameters that they train into their own buffers. They would ignore a parameter that is unfrozen
    later; one that is frozen later would still be decayed, or waited for.

    Args:
        core: the user's own module.
        engine: name of the engine.
    """

    def __init__(self, core: nn.Module, engine: str) -> None:
        self._engine = engine
        self._before = [(name, parameter, parameter.requires_grad) for name, parameter in core.named_parameters()]

    def check(self) -> None:
        """Check that no parameter has been frozen or unfrozen since; takes microseconds.

        Raises:
            ConfigError: `requires_grad` of a parameter has changed.
        """
        changed = [(name, before) for name, parameter, before in self._before if parameter.requires_grad != before]
        if not changed:
            return
        kinds = {what: [name for name, before in changed if before == was] for what, was in _CHANGES.items()}
        told = " and ".join(f"{len(names)} were {what}: {listed(names)}" for what, names in kinds.items() if names)
        raise ConfigError(
            f"`requires_grad` of parameters must stay as it was when training began under {self._engine}, which has "
            f"laid out what it trains, but {told} ({this_rank()}). Begin with all parameters that are ever "
            "trained, at lr=0 by paramwise_cfg, or use strategy 'fsdp'"
        )


def leave_out_frozen(optimizer: Optimizer) -> None:
    """Remove frozen parameters, and groups with only such, from an optimizer whose engine does not support them.

    Raises:
        ConfigError: nothing is left.
    """
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    if not optimizer.param_groups:
        raise ConfigError(
            "`optimizer` must have parameters that require a gradient, but all of its parameters are frozen. Unfreeze "
            "some, or call val() or test() instead of train()"
        )


def updates_elementwise(optimizer: Optimizer | None) -> bool:
    """Return whether an optimizer is known to update each element independently.

    Parameters that an engine has concatenated and cut then give the same result. An optimizer's class says so by an
    attribute of its own, `is_elementwise`, that is True; of torch's optimizers it is known.
    """
    return type(optimizer) in _ELEMENTWISE or vars(type(optimizer)).get("is_elementwise") is True


def refuse_lbfgs(optimizer: Optimizer | None, engine: str) -> None:
    """Refuse LBFGS, which evaluates the loss several times per step.

    Raises:
        ConfigError: the optimizer is LBFGS.
    """
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "`optimizer` must take one step per loss, but is LBFGS, which evaluates the loss several times, while "
            f"{engine} runs one backward pass per update. Use AdamW or SGD"
        )


def max_norm_of(clip_grad: Mapping[str, Any] | None, engine: str) -> float | None:
    """Return the maximum norm to which an engine clips all gradients, the only way in which engines clip.

    Args:
        clip_grad: as for `OptimWrapper`.
        engine: name of the engine and its mode, for messages.

    Raises:
        ConfigError: another kind of clipping is configured.
    """
    if clip_grad is None:
        return None
    rest = {key: value for key, value in clip_grad.items() if key not in ("type", "max_norm", "foreach")}
    if clip_grad.get("type", "norm") != "norm" or rest.pop("norm_type", 2) != 2 or any(rest.values()):
        raise ConfigError(
            f"`clip_grad` must be dict(max_norm=...) under {engine}, which clips to the 2-norm alone, but is "
            f"{dict(clip_grad)}. Use strategy 'fsdp' or 'ddp'"
        )
    max_norm = float(clip_grad["max_norm"])
    if not max_norm > 0:
        raise ConfigError(f"`clip_grad['max_norm']` must be above 0, but is {max_norm}")
    return max_norm


def check_kinds(model: nn.Module, *, half: bool, engine: str, half_option: str) -> None:
    """Refuse parameters that an engine would train in another precision, or whose gradients it cannot send.

    Args:
        model: the user's own module.
        half: whether the engine computes in half precision, and converts all parameters to it itself.
        engine: name of the engine and its mode, for messages.
        half_option: the option that selects half precision, for messages.

    Raises:
        ConfigError: a trainable parameter has an unsupported dtype, or its gradient is sparse.
    """
    halves = (torch.bfloat16, torch.float16)
    for name, parameter in model.named_parameters():
        dtype = parameter.dtype
        if parameter.requires_grad and dtype != torch.float32 and not (half and dtype in halves):
            instead = f"float32 with {half_option}" if dtype in halves else "float32"
            raise ConfigError(
                f"`{name}` must be float32 under {engine}, which trains all parameters in one float32 buffer, but is "
                f"{dtype}. Use {'torch.view_as_real(...)' if dtype.is_complex else instead}, or strategy 'ddp'"
            )
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"`{path}` must be an {type(module).__name__} with sparse=False under {engine}, which sends dense "
                "gradients, but has sparse=True. Use sparse=False, or strategy 'ddp'"
            )
