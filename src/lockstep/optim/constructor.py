"""Building an `OptimWrapper` from a config, with options per parameter."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import SGD, Adam, AdamW, Optimizer

from lockstep.errors import ConfigError, building, did_you_mean, lacks_key, require_known, require_number, wrong_type
from lockstep.model import unwrap_model
from lockstep.model.wrapper import parts_in_state
from lockstep.optim.several import OptimWrapperDict, with_joined
from lockstep.optim.wrapper import OptimWrapper
from lockstep.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS, in_default_scope
from lockstep.registry.registry import SCOPE
from lockstep.registry.signatures import Arguments, BuildError

Options = dict[str, Any]

_MULTIPLIERS = (
    "bias_lr_mult", "bias_decay_mult", "norm_decay_mult", "flat_decay_mult", "dwconv_decay_mult", "dcn_offset_lr_mult",
)  # fmt: skip
CUSTOM = {"lr_mult": "lr", "decay_mult": "weight_decay"}
PARAMWISE_KEYS = ("custom_keys", *_MULTIPLIERS, "bypass_duplicate")

_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
# Classes of other libraries are recognised by their names: RMSNorm, LayerNorm2d, LlamaRMSNorm; DeformConv2d,
# ModulatedDeformConv2dPack.
_NORM = re.compile(r"Norm(\dd)?$", re.IGNORECASE)
_DEFORMABLE = re.compile(r"DeformConv")
# Torch's optimizers with a fused kernel for accelerators, each with whether that also takes DTensors (torch 2.13);
# see docs/decisions/0007-fused-optimizers.md.
_FUSED: Mapping[type, bool] = {Adam: True, AdamW: True, SGD: False}
# On the CPU a fused update rounds differently from the one of a hand-written loop.
_DEVICES = ("cuda", "mps", "xpu")
# Options by which the user may choose the implementation; `fused` excludes the others.
_CHOICES = ("fused", "foreach", "differentiable")
# What asks for half precision elsewhere, or of an AmpOptimWrapper.
_OF_HALF_PRECISION = {"amp", "autocast", "bf16", "dtype", "fp16", "loss_scale", "mixed_precision", "precision"}


@dataclass(frozen=True, slots=True)
class ParamSite:
    """One occurrence of one parameter.

    Attributes:
        name: its full name in the user's own module, without the prefixes of wrappers.
        parameter: the parameter, in the form in which it is trained.
        module: the module that holds it; of a parametrization, as by `weight_norm`, the one whose weight that computes.
        parent: the module that holds `module`; None at the top.
    """

    name: str
    parameter: nn.Parameter
    module: nn.Module
    parent: nn.Module | None


def param_sites(module: nn.Module) -> Iterator[ParamSite]:
    """Yield the occurrences of all parameters, in the order of `module.parameters()`.

    A shared parameter has several occurrences. Wrappers around the module or its submodules are skipped.
    """
    parents: dict[nn.Module, nn.Module | None] = {}
    for prefix, part, parent in parts_in_state(module):
        parents[part] = parent
        # What holds a parametrization is the dict of those of its owner.
        above = parents.get(parent) if isinstance(part, ParametrizationList) and parent is not None else None
        owner = part if above is None else above
        # Not a method of the module's own, which may have another signature.
        for name, parameter in nn.Module.named_parameters(part, recurse=False, remove_duplicate=False):
            yield ParamSite(prefix + name, parameter, owner, parents[owner])


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
        self._mult = {key: cfg[key] for key in _MULTIPLIERS if cfg.get(key) is not None}
        for key, value in self._mult.items():
            require_number(key, value, 0)
        self._base = base
        custom = cfg.get("custom_keys") or {}
        if not isinstance(custom, Mapping):
            raise ConfigError(f"`custom_keys` must be a dict such as {{'head': dict(lr_mult=10)}}, but is {custom!r}")
        self._custom = {key: self._read_custom(key, options, known) for key, options in custom.items()}
        # The longest key wins; among keys of one length, the first in alphabetical order.
        self._keys = sorted(sorted(self._custom), key=len, reverse=True)

    def check_keys(self, names: list[str]) -> None:
        """Check that each custom key is part of some parameter's name.

        Raises:
            ConfigError: a key is part of no name.
        """
        for key in self._keys:
            if not any(key in name for name in names):
                parts = {part for name in names for part in (name.rpartition(".")[0], *name.split(".")) if part}
                raise ConfigError(
                    "`paramwise_cfg['custom_keys']` must have keys that are part of some parameter's name, but "
                    f"{key!r} is part of none{did_you_mean(key, parts)}"
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
            require_known(path, options, (*CUSTOM, *known))
        read: Options = {}
        for name, value in options.items():
            if name in CUSTOM:
                target, where = CUSTOM[name], f"{path}.{name}"
                require_number(where, value, 0)
                read[target] = self._multiplied(target, value, where)
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
    """Yield pairs of an option and a multiplier that may apply to a parameter.

    Of the multipliers of one option, the first one that the config gives applies.
    """
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
    return "conv_offset" in holder and _DEFORMABLE.search(type(site.parent).__name__) is not None


def build_optim_wrapper(
    model: nn.Module, cfg: OptimWrapper | Optimizer | Sequence[Optimizer] | Mapping[str, Any]
) -> OptimWrapper:
    """Return the optim wrapper that `cfg` describes, over the parameters of `model`.

    Args:
        model: the model in the form in which it is trained: on its device, and wrapped.
        cfg: an optim wrapper, which is returned unchanged; an optimizer, which is wrapped, or a list of some, which are
            joined (`JoinedOptimizer`); a dict whose key `optimizer` is an optimizer, such a list or the config of an
            optimizer, and whose other keys are arguments of the wrapper (`type`, by default `OptimWrapper`),
            `paramwise_cfg` with options of some parameters (see `DefaultOptimWrapperConstructor`), and `constructor`,
            the name or class of another constructor; or a dict from the names of the model's child modules to any of
            these, for one wrapper per child.

    Raises:
        ConfigError: `optimizer` is missing, or no parameter of the model requires a gradient.

    Example:
        >>> wrapper = build_optim_wrapper(
        ...     nn.Linear(2, 1), dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=4)
        ... )
    """
    if isinstance(cfg, OptimWrapper):
        return cfg
    cfg = with_joined(cfg)
    if isinstance(cfg, Optimizer):
        return OptimWrapper(cfg)
    if not isinstance(cfg, Mapping):
        raise wrong_type("optim_wrapper", "an OptimWrapper, an optimizer or a config dict", cfg)
    core = unwrap_model(model)
    if cfg and cfg.keys() <= {name for name, _ in core.named_children()} - {"optimizer", "constructor"}:
        return OptimWrapperDict(**{name: build_optim_wrapper(core.get_submodule(name), cfg[name]) for name in cfg})
    arguments = dict(cfg)
    kind = arguments.pop("constructor", None) or "DefaultOptimWrapperConstructor"
    paramwise = arguments.pop("paramwise_cfg", None)
    with in_default_scope(arguments.pop(SCOPE, None)):
        construct = {"type": kind, "optim_wrapper_cfg": arguments, "paramwise_cfg": paramwise}
        with building("optim_wrapper"):
            wrapper = OPTIM_WRAPPER_CONSTRUCTORS.build(construct)(model)
    if not isinstance(wrapper, OptimWrapper):
        raise TypeError(f"the constructor {kind!r} must return an OptimWrapper, but returned {wrapper!r}")
    return wrapper


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DefaultOptimWrapperConstructor:
    """Builds an optimizer over the parameters of a model, and its wrapper.

    The optimizer also holds frozen parameters, so that they are trained as soon as they are unfrozen.

    Parameters with the same options share a group, so there are as few groups as possible; they keep the order of the
    model. A subclass may override `add_params` to form other groups.

    Keys of `paramwise_cfg`. Each one multiplies the learning rate (`lr_mult`) or weight decay (`decay_mult`) of some
    parameters:

    - `custom_keys`: by parts of names: `{"backbone": dict(lr_mult=0.1, decay_mult=0.0)}`, also with other options of
      the optimizer. The longest key that is part of a parameter's name applies, and no other key does.
    - `bias_lr_mult`: biases, which are the parameters called `bias`, except those of norms and of deformable offsets.
    - `bias_decay_mult`: biases, except those of norms, depthwise convolutions and deformable offsets.
    - `norm_decay_mult`: norms: modules whose class name ends in `Norm`, `Norm1d`, ...: `BatchNorm2d`, `LlamaRMSNorm`.
    - `dwconv_decay_mult`: depthwise convolutions.
    - `flat_decay_mult`: one-dimensional parameters to which no other given `decay_mult` applies, except those of
      deformable offsets.
    - `dcn_offset_lr_mult`: the convolution `conv_offset` in a deformable convolution.
    - `bypass_duplicate`: if a parameter is shared by modules with different options, the options of the first one
      apply; without this key that is an error.

    Names are those of the user's own module, without the prefixes of wrappers.

    Args:
        optim_wrapper_cfg: a dict with the key `optimizer` (an optimizer or the config of one), and arguments of the
            wrapper (`type`, by default `OptimWrapper`).
        paramwise_cfg: see above.

    Raises:
        ConfigError: a key is unknown or part of no name, or no parameter of the model requires a gradient.

    Example:
        >>> construct = DefaultOptimWrapperConstructor(
        ...     dict(optimizer=dict(type="AdamW", lr=0.1, weight_decay=0.05)), dict(bias_decay_mult=0.0)
        ... )
        >>> wrapper = construct(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
        >>> [(group["weight_decay"], len(group["params"])) for group in wrapper.param_groups]
        [(0.05, 2), (0.0, 2)]
    """

    def __init__(self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None) -> None:
        if not isinstance(optim_wrapper_cfg, Mapping):
            raise wrong_type("optim_wrapper_cfg", "a dict", optim_wrapper_cfg)
        if paramwise_cfg is not None and not isinstance(paramwise_cfg, Mapping):
            raise wrong_type("paramwise_cfg", "a dict or None", paramwise_cfg)
        if "optimizer" not in optim_wrapper_cfg:
            raise ConfigError(
                f"`optim_wrapper` {lacks_key(optim_wrapper_cfg, 'optimizer')}. An optimizer stands within it: "
                "optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.001))"
            )
        self.optim_wrapper_cfg = dict(optim_wrapper_cfg)
        self.optimizer_cfg = self.optim_wrapper_cfg["optimizer"]
        self.paramwise_cfg = dict(paramwise_cfg or {})
        self._known, self._base = _options(self.optimizer_cfg)
        self.base_lr = self._base.get("lr")
        self.base_wd = self._base.get("weight_decay")

    def __call__(self, model: nn.Module) -> OptimWrapper:
        """Return the optim wrapper over the parameters of `model`, which must be on its device and wrapped already."""
        optimizer = self.optimizer_cfg
        if isinstance(optimizer, Mapping):
            optimizer = self._build_optimizer(model)
        elif self.paramwise_cfg:
            raise ConfigError(
                "`paramwise_cfg` needs the config of an optimizer, as in optimizer=dict(type='SGD', lr=0.1), but "
                f"`optimizer` is built already: {type(optimizer).__name__}"
            )
        cfg = {**self.optim_wrapper_cfg, "optimizer": optimizer}
        try:
            wrapper: OptimWrapper = OPTIM_WRAPPERS.build(cfg, type="OptimWrapper")
        except BuildError as error:
            if cfg.keys() & _OF_HALF_PRECISION and "type" not in cfg:
                error.add_note(
                    "for half precision give optim_wrapper=dict(type='AmpOptimWrapper', dtype='bfloat16', ...)"
                )
            raise
        return wrapper

    def add_params(
        self, params: list[dict[str, Any]], module: nn.Module, prefix: str = "", is_dcn_module: bool | None = None
    ) -> None:
        """Add the parameter groups of a module to `params`; a subclass may form other groups.

        Args:
            params: groups for the optimizer, each with the key `params` and its own options.
            module: the user's own module.
            prefix: for compatibility with MMEngine, where this method recurses; must be empty, because one call covers
                the whole module.
            is_dcn_module: for compatibility with MMEngine; ignored.
        """
        if prefix:
            raise ConfigError(f"`prefix` must be empty, but is {prefix!r}: one call goes through the whole module")
        sites = list(param_sites(module))
        paramwise = Paramwise(self.paramwise_cfg, self._base, self._known)
        paramwise.check_keys([site.name for site in sites])
        chosen: dict[int, tuple[ParamSite, Options]] = {}
        for site in sites:
            if not (site.parameter.is_floating_point() or site.parameter.is_complex()):
                continue  # An integer tensor has no gradient, now or later.
            options = paramwise.options(site)
            first, earlier = chosen.setdefault(id(site.parameter), (site, options))
            if options != earlier and not self.paramwise_cfg.get("bypass_duplicate"):
                raise ConfigError(
                    f"`paramwise_cfg` must say the same of {first.name} and {site.name}, which are one parameter, but "
                    f"says {earlier} and {options}. With bypass_duplicate=True the first one counts"
                )
        for site, options in chosen.values():
            # A linear search: options may hold lists, which can't be dict keys, and there are few groups.
            group = next((own for own in params if {**own, "params": 0} == {**options, "params": 0}), None)
            if group is None:
                group = {"params": [], **options}
                params.append(group)
            group["params"].append(site.parameter)

    def _build_optimizer(self, model: nn.Module) -> Optimizer:
        groups: list[dict[str, Any]] = []
        self.add_params(groups, unwrap_model(model))
        params = [param for group in groups for param in group["params"]]
        if not any(param.requires_grad for param in params):
            raise ConfigError(
                f"the model must have parameters that require a gradient, but {type(model).__name__} "
                "has none. Unfreeze some, or call val() or test() instead of train()"
            )
        options = dict(self.optimizer_cfg)
        if _fits_fused(_kind_of(options), [options, *groups], params, model):
            options["fused"] = True
        optimizer: Optimizer = OPTIMIZERS.build(options, params=groups)
        return optimizer


def _kind_of(cfg: Mapping[str, Any]) -> Any:
    kind = cfg.get("type")
    with in_default_scope(cfg.get(SCOPE)):
        return OPTIMIZERS[kind] if isinstance(kind, str) else kind


def _options(cfg: Any) -> tuple[Collection[str] | None, Options]:
    """Return the names of an optimizer's options (None if it takes any), and their values: defaults and config."""
    kind = _kind_of(cfg) if isinstance(cfg, Mapping) else None
    if not callable(kind):
        return None, {}
    takes = Arguments.of(kind)
    named = {name: parameter for name, parameter in takes.named.items() if name != "params"}
    defaults = {name: option.default for name, option in named.items() if option.default is not option.empty}
    given = {name: value for name, value in cfg.items() if name not in ("type", SCOPE)}
    return None if takes.takes_others else named, {**defaults, **given}


def _fits_fused(
    kind: Any, options: Sequence[Mapping[str, Any]], params: Sequence[nn.Parameter], model: nn.Module
) -> bool:
    """Return whether the optimizer should be fused. False if its config chooses an implementation, for some group.

    Args:
        kind: the optimizer's class.
        options: its other arguments, and the options of each group.
        params: all parameters that it will update.
        model: the model that holds them.
    """
    if kind not in _FUSED or any(each.get(name) is not None for each in options for name in _CHOICES):
        return False
    meshes = {getattr(param, "device_mesh", None) for param in params}
    if meshes != {None} and not (len(meshes) == 1 and _FUSED[kind]):
        return False
    if any(getattr(module, "sparse", None) is True for module in model.modules()):  # an embedding's gradients
        return False
    return all(torch.is_floating_point(param) and param.device.type in _DEVICES for param in params)
