"""Parameters under an engine: which are trained, what stands for their gradients, and their master weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.dist import get_world_size
from lockstep.errors import ConfigError, listed
from lockstep.groups import this_rank
from lockstep.model.parts import refuse_sparse_gradients
from lockstep.model.shards import digests
from lockstep.model.written import refuse_max_norm
from lockstep.tree import tree_leaves

_ELEMENTWISE = (
    torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.SGD,
    torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop,
)  # fmt: skip


class FrozenParamsGuard:
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
        """Check that no parameter has been frozen or unfrozen since.

        **Cost**: one attribute of each parameter is read, without touching the device.

        Raises:
            ConfigError: `requires_grad` of a parameter has changed.
        """
        if changed := [name for name, own, before in self._before if own.requires_grad != before]:
            raise ConfigError(
                f"`requires_grad` of parameters must stay as it was when training began under {self._engine}, which "
                f"has laid out what it trains, but has changed: {listed(changed)} ({this_rank()}). Begin with all "
                "parameters that are ever trained, at lr=0 by paramwise_cfg, or use strategy 'fsdp'"
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
    usual = {"type": "norm", "norm_type": 2}
    rest = {key: value for key, value in clip_grad.items() if key not in ("max_norm", "foreach")}
    if wrong := {key: value for key, value in rest.items() if (value != usual[key] if key in usual else value)}:
        raise ConfigError(
            f"`clip_grad` must be dict(max_norm=...) under {engine}, which clips to the 2-norm alone, but has "
            f"{listed([f'{key}={value!r}' for key, value in wrong.items()])}. Use strategy 'fsdp' or 'ddp'"
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
        ConfigError: a trainable parameter has an unsupported dtype, or its gradient is sparse; or on several ranks, an
            embedding writes its weight in the forward pass.
    """
    if get_world_size() > 1:
        refuse_max_norm(model, f"under {engine}, where each rank has its own batch, so that weights would differ")
    halves = (torch.bfloat16, torch.float16)
    for name, parameter in model.named_parameters():
        dtype = parameter.dtype
        if parameter.requires_grad and dtype != torch.float32 and not (half and dtype in halves):
            instead = f"float32 with {half_option}" if dtype in halves else "float32"
            raise ConfigError(
                f"`{name}` must be float32 under {engine}, which trains all parameters in one float32 buffer, but is "
                f"{dtype}. Use {'torch.view_as_real(...)' if dtype.is_complex else instead}, or strategy 'ddp'"
            )
    refuse_sparse_gradients(model, engine)


_REMEDY = (
    "Clip by `clip_grad` of the optim wrapper; leave a parameter out of some updates by a group of its own at lr=0 and "
    "weight_decay=0 (paramwise_cfg); or use strategy 'ddp' or 'fsdp'"
)


class GradientPlaceholders:
    """Placeholders in `parameter.grad` between a backward pass and the update.

    The engine keeps gradients in its own buffers, so `parameter.grad` would be None. With a placeholder there, code
    that reads, changes or replaces the gradient gets an error instead of having no effect.

    Args:
        engine: name of the engine.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._held: list[tuple[str, nn.Parameter, _StandIn]] = []

    def hold(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Give those of the parameters that have no gradient a stand-in."""
        for name, parameter in named:
            if parameter.grad is None:
                parameter.grad = stand_in = _StandIn(name, parameter, self._engine)
                self._held.append((name, parameter, stand_in))

    def release(self) -> None:
        """Take the stand-ins away.

        Raises:
            ConfigError: one is not there any more.
        """
        changed = [name for name, parameter, stand_in in self._held if parameter.grad is not stand_in]
        self.drop()
        if changed:
            raise ConfigError(
                f"`grad` of parameters must be left alone between a backward pass and the update under {self._engine}, "
                f"which holds gradients in pieces and would use them all the same, but was set: {listed(changed)} "
                f"({this_rank()}). {_REMEDY}"
            )

    def drop(self) -> None:
        """Take the stand-ins away, whatever has been done to them."""
        for _, parameter, _ in self._held:
            parameter.grad = None
        self._held = []


class _StandIn(Tensor):
    """Takes the place of a gradient of the parameter's shape, in the memory of one element."""

    _message: str

    @staticmethod
    def __new__(cls, name: str, parameter: nn.Parameter, engine: str) -> _StandIn:
        """Return a stand-in for the gradient of a parameter."""
        element = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        made: _StandIn = element.expand(parameter.shape).as_subclass(cls)
        made._message = (
            f"`{name}.grad` must not be used between a backward pass and the update under {engine}, which holds "
            f"gradients in pieces ({this_rank()}). {_REMEDY}"
        )
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self._message}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise the placeholder's error, whatever the function."""
        for leaf in tree_leaves((args, kwargs or {})):
            if isinstance(leaf, cls):
                raise ConfigError(leaf._message)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


_BLOCK = 2**24  # elements whose masters are computed at a time


class MasterWeights:
    """The masters of this rank.

    Args:
        engine: name of the engine.
        named: the parameters, which are now where the engine keeps them.
        pairs: the masters, each with the weights that it belongs to, of the same shape.
        offloads: whether the masters are in CPU memory. Then they are written only if digests of the
            weights have changed since the last update.

    **Cost**: per update, one copy of this rank's part of the weights on its device, or one comparison of it in half
    precision, in blocks. With `offloads`, two passes over it, for digests that the host reads: such an engine waits for
    the device anyway.
    """

    def __init__(
        self,
        engine: str,
        named: Iterable[tuple[str, nn.Parameter]],
        pairs: Iterable[tuple[Tensor, Tensor]],
        *,
        offloads: bool = False,
    ) -> None:
        self._engine = engine
        self._homes = [(name, parameter, parameter.data) for name, parameter in named]
        pairs = [(master.detach().view(-1), weights.detach().view(-1)) for master, weights in pairs]
        self._pairs = [pair for pair in pairs if pair[0].data_ptr() != pair[1].data_ptr()]
        self._offloads = offloads and bool(self._pairs)
        self._digests: Tensor | None = None
        self.note_weights()

    def note_weights(self) -> None:
        """Note that the masters and the weights are equal, as after an update."""
        if self._offloads:
            self._digests = digests([weights for _, weights in self._pairs])

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Write into the masters what has been written into the model's weights.

        Raises:
            ConfigError: the `data` of a parameter was replaced by a tensor of another shape or dtype.
        """
        for name, parameter, home in self._homes:
            if parameter.data_ptr() != home.data_ptr():
                self._bring_home(name, parameter, home)
        if self._digests is not None and torch.equal(digests([weights for _, weights in self._pairs]), self._digests):
            return
        for master, weights in self._pairs:
            if master.dtype == weights.dtype:
                master.copy_(weights)
                continue
            for part, source in zip(torch.split(master, _BLOCK), torch.split(weights, _BLOCK), strict=True):
                part.copy_(newer(part, source))

    def _bring_home(self, name: str, parameter: nn.Parameter, home: Tensor) -> None:
        """Copy a parameter whose `data` was replaced into the engine's memory, which the parameter uses again."""
        if parameter.shape != home.shape or parameter.dtype != home.dtype:
            raise ConfigError(
                f"`{name}.data` must keep its shape and dtype under {self._engine}, which has laid it out in a buffer, "
                f"but was replaced by {tuple(parameter.shape)} in {parameter.dtype} where {tuple(home.shape)} in "
                f"{home.dtype} had been ({this_rank()}). Use strategy 'ddp'"
            )
        home.copy_(parameter.data)
        parameter.data = home


def newer(master: Tensor, weights: Tensor) -> Tensor:
    """Return a master, with the weights in place of those elements that are not a rounded master any more."""
    master = master.to(weights.device)
    return torch.where(master.to(weights.dtype) == weights, master, weights.to(master.dtype))
