"""Initial weights: functions, the initializers that an `init_cfg` names, and `initialize`, which runs an `init_cfg`."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from mmengine.registry import WEIGHT_INITIALIZERS


def update_init_info(module: nn.Module, init_info: str) -> None:
    """Note for each parameter that has changed since the last call what initialised it.

    Only while `BaseModule.init_weights` runs: it then logs what it was told.

    Args:
        module: a module inside the one that is initialised.
        init_info: how its parameters were initialised.

    Raises:
        AssertionError: `init_weights` is not running, or a parameter was added to the module since it began.
    """
    notes = getattr(module, "_params_init_info", None)
    if notes is None:
        raise AssertionError(
            f"{type(module).__name__} must be inside a BaseModule whose `init_weights` is running, but is not"
        )
    for name, parameter in module.named_parameters():
        if parameter not in notes:
            raise AssertionError(
                f"`{name}` must exist when `init_weights` begins, but was added to {type(module).__name__} since. "
                "Create all parameters in `__init__`"
            )
        trace = fingerprint(parameter)
        if notes[parameter]["fingerprint"] != trace:
            notes[parameter].update(init_info=init_info, fingerprint=trace)


def fingerprint(parameter: Tensor) -> tuple[int, float]:
    """Return two numbers of which one changes with the values: how often torch saw a change, and the sum.

    Changes through `.data` are not counted by torch, and a change may keep the sum.
    """
    values = parameter.detach()
    is_summable = not values.is_meta and (values.is_floating_point() or values.is_complex())
    return parameter._version, float(values.abs().sum()) if is_summable else 0.0


def constant_init(module: nn.Module, val: float, bias: float = 0) -> None:
    """Set the weight to `val` and the bias to `bias`, as far as the module has them."""
    _fill(module, lambda weight: nn.init.constant_(weight, val), bias)


def xavier_init(module: nn.Module, gain: float = 1, bias: float = 0, distribution: str = "normal") -> None:
    """Draw the weight by Glorot's rule.

    Args:
        module: a module with a weight, a bias, both or none.
        gain: a factor of the standard deviation.
        bias: value of the bias.
        distribution: ``"normal"`` or ``"uniform"``.

    **Source**: Glorot and Bengio, Understanding the difficulty of training deep feedforward neural networks (2010).
    """
    _check_distribution(distribution)
    rule = nn.init.xavier_uniform_ if distribution == "uniform" else nn.init.xavier_normal_
    _fill(module, lambda weight: rule(weight, gain=gain), bias)


def normal_init(module: nn.Module, mean: float = 0, std: float = 1, bias: float = 0) -> None:
    """Draw the weight from a normal distribution, and set the bias."""
    _fill(module, lambda weight: nn.init.normal_(weight, mean, std), bias)


def trunc_normal_init(
    module: nn.Module, mean: float = 0, std: float = 1, a: float = -2, b: float = 2, bias: float = 0
) -> None:
    """Draw the weight from a normal distribution that is cut off below `a` and above `b`, and set the bias."""
    _fill(module, lambda weight: trunc_normal_(weight, mean, std, a, b), bias)


def uniform_init(module: nn.Module, a: float = 0, b: float = 1, bias: float = 0) -> None:
    """Draw the weight uniformly from `a` to `b`, and set the bias."""
    _fill(module, lambda weight: nn.init.uniform_(weight, a, b), bias)


def kaiming_init(
    module: nn.Module,
    a: float = 0,
    mode: str = "fan_out",
    nonlinearity: str = "relu",
    bias: float = 0,
    distribution: str = "normal",
) -> None:
    """Draw the weight by He's rule.

    Args:
        module: a module with a weight, a bias, both or none.
        a: negative slope of the nonlinearity, for ``"leaky_relu"``.
        mode: ``"fan_in"`` keeps the variance in the forward pass, ``"fan_out"`` in the backward pass.
        nonlinearity: the function that follows, by torch's name.
        bias: value of the bias.
        distribution: ``"normal"`` or ``"uniform"``.

    **Source**: He et al., Delving Deep into Rectifiers (2015).
    """
    _check_distribution(distribution)
    rule: Any = nn.init.kaiming_uniform_ if distribution == "uniform" else nn.init.kaiming_normal_
    _fill(module, lambda weight: rule(weight, a=a, mode=mode, nonlinearity=nonlinearity), bias)


def caffe2_xavier_init(module: nn.Module, bias: float = 0) -> None:
    """Draw the weight as Caffe2's XavierFill does: uniformly, with a variance of 1 / fan_in."""
    kaiming_init(module, a=1, mode="fan_in", nonlinearity="leaky_relu", bias=bias, distribution="uniform")


def bias_init_with_prob(prior_prob: float) -> float:
    """Return the bias with which a sigmoid gives `prior_prob` at the beginning.

    Example:
        >>> round(bias_init_with_prob(0.01), 4)
        -4.5951
    """
    return float(-math.log((1 - prior_prob) / prior_prob))


def trunc_normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> Tensor:
    """Fill a tensor from a normal distribution that is cut off below `a` and above `b`, and return it.

    A number is drawn uniformly between the shares of the distribution below `a` and below `b`, and mapped to the value
    below which that share lies. `torch.nn.init.trunc_normal_` (2.13) draws other numbers from the same seed.

    **Source**: inverse transform sampling; Devroye, Non-Uniform Random Variate Generation (1986), II.2.
    """
    if mean < a - 2 * std or mean > b + 2 * std:
        warnings.warn(
            f"`mean` {mean} lies more than two standard deviations outside {a} to {b}: the values may be distributed "
            "otherwise",
            stacklevel=2,
        )
    below, above = (_normal_share((bound - mean) / std) for bound in (a, b))
    with torch.no_grad():
        tensor.uniform_(2 * below - 1, 2 * above - 1)
        return tensor.erfinv_().mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)


def _normal_share(value: float) -> float:
    """Return the share of the standard normal distribution below `value`."""
    return (1 + math.erf(value / math.sqrt(2))) / 2


class BaseInit:
    """An initializer: calling it on a module initialises the layers of some classes within.

    A subclass says in `draw` how one layer is initialised.

    Args:
        bias: value of biases.
        bias_prob: instead of `bias`, what a sigmoid of the bias gives (see `bias_init_with_prob`).
        layer: name of the class of the layers, or of one of its direct bases; or several. By default none.

    Attributes:
        wholemodule: whether all layers are initialised, of whatever class.

    Raises:
        TypeError: an argument has a wrong type.
    """

    _shown: tuple[str, ...] = ()

    def __init__(
        self, *, bias: float = 0, bias_prob: float | None = None, layer: str | list[str] | None = None
    ) -> None:
        if not isinstance(bias, int | float):
            raise TypeError(f"`bias` must be a number, but is {bias!r} of {type(bias).__name__}")
        if bias_prob is not None and not isinstance(bias_prob, float):
            raise TypeError(f"`bias_prob` must be a float, but is {bias_prob!r} of {type(bias_prob).__name__}")
        if layer is not None and not isinstance(layer, str | list):
            raise TypeError(f"`layer` must be a str or a list of str, but is {layer!r} of {type(layer).__name__}")
        self.wholemodule = False
        self.bias = bias if bias_prob is None else bias_init_with_prob(bias_prob)
        self.layer = [layer] if isinstance(layer, str) else list(layer or [])

    def draw(self, module: nn.Module) -> None:
        """Initialise one layer."""
        raise NotImplementedError(f"{type(self).__name__} must define `draw` or `__call__`")

    def __call__(self, module: nn.Module) -> None:
        """Initialise the layers within `module`, the inner ones first."""

        def visit(layer: nn.Module) -> None:
            names = {type(layer).__name__, *(base.__name__ for base in type(layer).__bases__)}
            if self.wholemodule or names.intersection(self.layer):
                self.draw(layer)

        module.apply(visit)
        _tell(module, self._get_init_info())

    def _get_init_info(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)}" for name in (*self._shown, "bias"))
        return f"{type(self).__name__}: {values}"


@WEIGHT_INITIALIZERS.register_module(name="Constant")
class ConstantInit(BaseInit):
    """Set weights to `val`; see `constant_init` and, for the other arguments, `BaseInit`."""

    _shown = ("val",)

    def __init__(self, val: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.val = val

    def draw(self, module: nn.Module) -> None:
        """Initialise one layer."""
        constant_init(module, self.val, self.bias)


@WEIGHT_INITIALIZERS.register_module(name="Xavier")
class XavierInit(BaseInit):
    """Draw weights by Glorot's rule; see `xavier_init` and, for the other arguments, `BaseInit`."""

    _shown = ("gain", "distribution")

    def __init__(self, gain: float = 1, distribution: str = "normal", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gain = gain
        self.distribution = distribution

    def draw(self, module: nn.Module) -> None:
        """Initialise one layer."""
        xavier_init(module, self.gain, self.bias, self.distribution)


@WEIGHT_INITIALIZERS.register_module(name="Normal")
class NormalInit(BaseInit):
    """Draw weights from a normal distribution; for the other arguments see `BaseInit`."""

    _shown = ("mean", "std")

    def __init__(self, mean: float = 0, std: float = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mean = mean
        self.std = std

    def draw(self, module: nn.Module) -> None:
        """Initialise one layer."""
        normal_init(module, self.mean, self.std, self.bias)


@WEIGHT_INITIALIZERS.register_module(name="TruncNormal")
class TruncNormalInit(BaseInit):
    """Draw weights from a normal distribution cut off at `a` and `b`; for the other arguments see `BaseInit`."""

    _shown = ("a", "b", "mean", "std")

    def __init__(self, mean: float = 0, std: float = 1, a: float = -2, b: float = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mean = mean
        self.std = std
        self.a = a
        self.b = b

    def draw(self, module: nn.Module) -> None:
        """Initialise one layer."""
        trunc_normal_init(module, self.mean, self.std, self.a, self.b, self.bias)


@WEIGHT_INITIALIZERS.register_module(name="Uniform")
class UniformInit(BaseInit):
    """Draw weights uniformly from `a` to `b`; for the other arguments see `BaseInit`."""

    _shown = ("a", "b")

    def __init__(self, a: float = 0, b: float = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.a = a
        self.b = b

    def draw(self, module: nn.Module) -> None:
        """Initialise one layer."""
        uniform_init(module, self.a, self.b, self.bias)


@WEIGHT_INITIALIZERS.register_module(name="Kaiming")
class KaimingInit(BaseInit):
    """Draw weights by He's rule; see `kaiming_init` and, for the other arguments, `BaseInit`."""

    _shown = ("a", "mode", "nonlinearity", "distribution")

    def __init__(
        self,
        a: float = 0,
        mode: str = "fan_out",
        nonlinearity: str = "relu",
        distribution: str = "normal",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.a = a
        self.mode = mode
        self.nonlinearity = nonlinearity
        self.distribution = distribution

    def draw(self, module: nn.Module) -> None:
        """Initialise one layer."""
        kaiming_init(module, self.a, self.mode, self.nonlinearity, self.bias, self.distribution)


@WEIGHT_INITIALIZERS.register_module(name="Caffe2Xavier")
class Caffe2XavierInit(KaimingInit):
    """Draw weights as Caffe2's XavierFill does; for the arguments see `BaseInit`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(a=1, mode="fan_in", nonlinearity="leaky_relu", distribution="uniform", **kwargs)


@WEIGHT_INITIALIZERS.register_module(name="Pretrained")
class PretrainedInit:
    """Load weights from a checkpoint; names that only one side has are reported, and left as they are.

    Args:
        checkpoint: a path or URL, whatever `mmengine.runner.load_checkpoint` takes.
        prefix: load only the weights whose names begin with it, which is cut off.
        map_location: the device that the checkpoint is loaded to.
    """

    def __init__(self, checkpoint: str, prefix: str | None = None, map_location: Any = "cpu") -> None:
        self.checkpoint = checkpoint
        self.prefix = prefix
        self.map_location = map_location

    def __call__(self, module: nn.Module) -> None:
        """Load the weights of `module`."""
        from mmengine.logging import print_log

        checkpoints = import_module("mmengine.runner.checkpoint")  # imports much, and this module

        if self.prefix is None:
            print_log(f"load weights of {type(module).__name__} from {self.checkpoint}", logger="current")
            checkpoints.load_checkpoint(
                module, self.checkpoint, map_location=self.map_location, strict=False, logger="current"
            )
        else:
            print_log(
                f"load {self.prefix} in weights of {type(module).__name__} from {self.checkpoint}", logger="current"
            )
            state = checkpoints._load_checkpoint_with_prefix(
                self.prefix, self.checkpoint, map_location=self.map_location
            )
            checkpoints.load_state_dict(module, state, strict=False, logger="current")
        _tell(module, self._get_init_info())

    def _get_init_info(self) -> str:
        return f"{type(self).__name__}: load from {self.checkpoint}"


def initialize(module: nn.Module, init_cfg: Mapping[str, Any] | list[Any]) -> None:
    """Initialise a module as an `init_cfg` says.

    Args:
        module: the module.
        init_cfg: a dict, or a list of dicts that are carried out in order. Each has the `type` of an initializer and
            its arguments. Layers whose class is named by `layer` are initialised; without `layer`, none is. `override`
            is a dict, or a list of dicts, of attributes of the module that are initialised otherwise: by `name`, and by
            a `type` with its arguments or, without these, as `init_cfg` says for all others.

    Raises:
        TypeError: `init_cfg` or `override` is neither a dict nor a list of dicts.
        ValueError: an `override` has no `name`, or arguments without a `type`.
        RuntimeError: the module has no attribute of that `name`.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(2, 2))
        >>> other = dict(type="Constant", name="1", val=5)
        >>> initialize(net, dict(type="Constant", val=1, layer="Conv2d", override=other))
        >>> net[0].weight.item(), net[1].weight[0, 0].item()
        (1.0, 5.0)
    """
    for cfg in _dicts("init_cfg", init_cfg):
        arguments = copy.deepcopy(dict(cfg))
        overrides = arguments.pop("override", None)
        if overrides is None and not arguments.get("layer") and _needs_layer(arguments.get("type")):
            warnings.warn(
                f"`init_cfg` {dict(cfg)} of {type(module).__name__} has neither `layer` nor `override`: it initialises "
                "nothing. Name the layers: layer=['Conv2d', 'Linear']",
                stacklevel=2,
            )
        WEIGHT_INITIALIZERS.build(arguments)(module)
        if overrides is not None:
            arguments.pop("layer", None)
            for override in _dicts("override", overrides):
                _override(module, override, arguments)


def _override(module: nn.Module, override: Mapping[str, Any], general: dict[str, Any]) -> None:
    arguments = copy.deepcopy(dict(override))
    name = arguments.pop("name", None)
    if name is None:
        raise ValueError(f"`override` must have the key 'name', but has only {sorted(arguments)}")
    if not arguments:
        arguments = dict(general)
    elif "type" not in arguments:
        raise ValueError(f"`override` of {name!r} must have the key 'type', but has only {sorted(arguments)}")
    if not hasattr(module, name):
        raise RuntimeError(
            f"`override` must name an attribute of {type(module).__name__}, but there is no {name!r} beside {general}"
        )
    initializer = WEIGHT_INITIALIZERS.build(arguments)
    initializer.wholemodule = True
    initializer(getattr(module, name))


def _dicts(name: str, value: Any) -> list[Mapping[str, Any]]:
    items = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, Mapping) for item in items):
        raise TypeError(f"`{name}` must be a dict or a list of dicts, but is {value!r} of {type(value).__name__}")
    return list(items)


def _needs_layer(kind: Any) -> bool:
    found = WEIGHT_INITIALIZERS.get(kind) if isinstance(kind, str) else kind
    return isinstance(found, type) and issubclass(found, BaseInit) and found.__call__ is BaseInit.__call__


def _fill(module: nn.Module, draw: Callable[[Tensor], Any], bias: float) -> None:
    weight, own_bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(weight, Tensor):
        draw(weight)
    if isinstance(own_bias, Tensor):
        nn.init.constant_(own_bias, bias)


def _tell(module: nn.Module, init_info: str) -> None:
    if hasattr(module, "_params_init_info"):
        update_init_info(module, init_info)


def _check_distribution(distribution: str) -> None:
    if distribution not in ("uniform", "normal"):
        raise AssertionError(f"`distribution` must be 'uniform' or 'normal', but is {distribution!r}")


__all__ = [
    "BaseInit",
    "Caffe2XavierInit",
    "ConstantInit",
    "KaimingInit",
    "NormalInit",
    "PretrainedInit",
    "TruncNormalInit",
    "UniformInit",
    "XavierInit",
    "bias_init_with_prob",
    "caffe2_xavier_init",
    "constant_init",
    "initialize",
    "kaiming_init",
    "normal_init",
    "trunc_normal_",
    "trunc_normal_init",
    "uniform_init",
    "update_init_info",
    "xavier_init",
]
