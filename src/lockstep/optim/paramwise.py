"""Learning rates and weight decays per parameter, by its place in the model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.errors import ConfigError, did_you_mean, require_known
from lockstep.model import is_model_wrapper
from lockstep.model.parts import INSIDE_WRAPPERS

Options = dict[str, Any]

_MULTIPLIERS = (
    "bias_lr_mult", "bias_decay_mult", "norm_decay_mult", "flat_decay_mult", "dwconv_decay_mult", "dcn_offset_lr_mult",
)  # fmt: skip
_CUSTOM = {"lr_mult": "lr", "decay_mult": "weight_decay"}
PARAMWISE_KEYS = ("custom_keys", *_MULTIPLIERS, "bypass_duplicate")

_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
# Classes of other libraries are recognised by their names: RMSNorm, LayerNorm2d, LlamaRMSNorm; DeformConv2d,
# ModulatedDeformConv2dPack.
_NORM = re.compile(r"Norm(\dd)?$", re.IGNORECASE)
_DEFORMABLE = re.compile(r"DeformConv")


@dataclass(frozen=True, slots=True)
class ParamSite:
    """One occurrence of one parameter.

    Attributes:
        name: its full name in the user's own module, without the prefixes of wrappers.
        parameter: the parameter, in the form in which it is trained.
        module: the module that holds it.
        parent: the class name of that module's parent; empty at the top.
    """

    name: str
    parameter: nn.Parameter
    module: nn.Module
    parent: str


def param_sites(model: nn.Module) -> list[ParamSite]:
    """Return the occurrences of all parameters, in the order of `model.parameters()`.

    A shared parameter has several occurrences. Wrappers around the model or its submodules are skipped.
    """
    return list(_sites(model, "", ""))


def _sites(module: nn.Module, prefix: str, parent: str) -> Iterator[ParamSite]:
    module = _inside(module)
    # torch's own iterators leave out a module that has two names, or have no place for its parent.
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield ParamSite(prefix + name, parameter, module, parent)
    for name, child in module._modules.items():
        if child is not None:
            yield from _sites(child, f"{prefix}{name}.", type(module).__name__)


def _inside(module: nn.Module) -> nn.Module:
    names = ("module",) if is_model_wrapper(module) else INSIDE_WRAPPERS
    inner = next((module._modules[name] for name in names if name in module._modules), None)
    return module if inner is None else _inside(inner)


class Paramwise:
    """The options that a `paramwise_cfg` gives to each parameter.

    Args:
        cfg: see `DefaultOptimWrapperConstructor`.
        base: the optimizer's own options; `lr` and `weight_decay` are multiplied.
        known: all options that the optimizer takes; None if they are not known.

    Raises:
        ConfigError: a key is not known, or a multiplier is not a number of at least 0.
    """

    def __init__(self, cfg: Mapping[str, Any], base: Mapping[str, Any], known: Collection[str] | None) -> None:
        require_known("paramwise_cfg", cfg, PARAMWISE_KEYS)
        self._mult = {key: _number(key, cfg[key]) for key in _MULTIPLIERS if cfg.get(key) is not None}
        self._base = base
        self._custom = {
            key: self._read_custom(key, options, known) for key, options in (cfg.get("custom_keys") or {}).items()
        }
        # The longest key wins; among keys of one length, the first in alphabetical order.
        self._keys = sorted(sorted(self._custom), key=len, reverse=True)

    def check_keys(self, names: list[str]) -> None:
        """Check that each custom key is part of some parameter's name.

        Raises:
            ConfigError: a key is part of no name.
        """
        for key in self._keys:
            if not any(key in name for name in names):
                children = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
                parts = {part for name in names for part in _parts(name)}
                raise ConfigError(
                    "`paramwise_cfg['custom_keys']` must have keys that are part of some parameter's name, but "
                    f"{key!r} is part of none{did_you_mean(key, parts, f'. The names begin with: {children}')}"
                )

    def options(self, site: ParamSite) -> Options:
        """Return the options of a parameter that differ from the optimizer's own."""
        key = next((key for key in self._keys if key in site.name), None)
        if key is not None:
            return self._custom[key]
        read: Options = {}
        for name, key in _keys_of(site):
            if key in self._mult:
                read.setdefault(name, self._multiplied(name, self._mult[key], key))
        return self._differing(read)

    def _read_custom(self, key: str, options: Any, known: Collection[str] | None) -> Options:
        path = f"custom_keys[{key!r}]"
        if not isinstance(options, Mapping):
            raise ConfigError(f"`{path}` must be a dict such as dict(lr_mult=0.1), but is {options!r}")
        if known is not None:
            require_known(path, options, (*_CUSTOM, *known))
        read: Options = {}
        for name, value in options.items():
            if name in _CUSTOM:
                target = _CUSTOM[name]
                read[target] = self._multiplied(target, _number(f"{path}.{name}", value), f"{path}.{name}")
            else:
                read[name] = value
        return self._differing(read)

    def _multiplied(self, name: str, factor: float, key: str) -> Any:
        if self._base.get(name) is None:
            raise ConfigError(f"`{key}` needs an optimizer with a `{name}`; give it in its config")
        return self._base[name] * factor

    def _differing(self, options: Options) -> Options:
        return {name: value for name, value in options.items() if name not in self._base or value != self._base[name]}


def _keys_of(site: ParamSite) -> Iterator[tuple[str, str]]:
    """Yield pairs of an option and a multiplier that may apply to a parameter; per option, the first given counts."""
    module, is_offset = site.module, _is_offset(site)
    is_norm = _NORM.search(type(module).__name__) is not None
    is_bias = site.name.rpartition(".")[2] == "bias" and not is_norm and not is_offset
    if is_offset:
        yield "lr", "dcn_offset_lr_mult"
    elif is_bias:
        yield "lr", "bias_lr_mult"
    if is_norm:
        yield "weight_decay", "norm_decay_mult"
    elif isinstance(module, _CONVOLUTIONS) and module.groups == module.in_channels > 1:  # depthwise
        yield "weight_decay", "dwconv_decay_mult"
    elif is_bias:
        yield "weight_decay", "bias_decay_mult"
    if site.parameter.ndim == 1 and not is_offset:
        yield "weight_decay", "flat_decay_mult"


def _is_offset(site: ParamSite) -> bool:
    """Return whether a parameter belongs to the convolution that computes the offsets of a deformable convolution."""
    holder = site.name.rpartition(".")[0].rpartition(".")[2]
    return "conv_offset" in holder and _DEFORMABLE.search(site.parent) is not None


def _parts(name: str) -> list[str]:
    """Return the parts of a name that a user may write as a key: for `a.b.c`, `a`, `b`, `c`, `a.b` and `a.b.c`."""
    parts = name.split(".")
    return [*parts, *(".".join(parts[:length]) for length in range(2, len(parts) + 1))]


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ConfigError(f"`{key}` must be a number of at least 0, but is {value!r}")
    return value
