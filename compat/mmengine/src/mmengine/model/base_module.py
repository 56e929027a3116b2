"""`BaseModule` with an `init_cfg`, and torch's containers as such modules."""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from torch import nn

import lockstep.model
from mmengine.logging import MMLogger, print_log
from mmengine.model.weight_init import PretrainedInit, fingerprint, initialize, update_init_info

InitCfg: TypeAlias = Mapping[str, Any] | list[Any] | None


class BaseModule(lockstep.model.BaseModule):
    """A module whose weights are initialised as its `init_cfg` says.

    `init_weights` does that once: first the `init_cfg`, then the `init_weights` of the modules that are attributes of
    this one, and then what `init_cfg` loads from a checkpoint. A subclass that initialises more overrides it and calls
    ``super().init_weights()``. The Runner calls it before training.

    Args:
        init_cfg: a dict or a list of dicts, as `mmengine.model.initialize` takes them.

    Attributes:
        init_cfg: a copy of the argument.
        is_init: whether the weights have been initialised. Set it to True to keep the present ones.

    Example:
        >>> class Net(BaseModule):
        ...     def __init__(self, init_cfg=None):
        ...         super().__init__(init_cfg)
        ...         self.linear = nn.Linear(2, 1)
        >>> net = Net(init_cfg=dict(type="Constant", layer="Linear", val=3, bias=1))
        >>> net.init_weights()
        >>> net.linear.weight.tolist(), net.linear.bias.tolist()
        ([[3.0, 3.0]], [1.0])
    """

    def __init__(self, init_cfg: InitCfg = None) -> None:
        super().__init__()
        self._is_init = False
        self.init_cfg = copy.deepcopy(init_cfg)

    @property
    def is_init(self) -> bool:
        """Whether the weights have been initialised."""
        return self._is_init

    @is_init.setter
    def is_init(self, value: bool) -> None:
        self._is_init = value

    def init_weights(self) -> None:
        """Initialise the weights; a second call only warns."""
        is_outermost = not hasattr(self, "_params_init_info")
        if is_outermost:
            _begin_notes(self)
        try:
            self._init_once()
            if is_outermost:
                _log_notes(self)
        finally:
            if is_outermost:
                for module in self.modules():
                    vars(module).pop("_params_init_info", None)

    def _init_once(self) -> None:
        if self._is_init:
            print_log(
                f"init_weights of {type(self).__name__} was called before; this call changes nothing",
                logger="current",
                level=logging.WARNING,
            )
            return
        print_log(f"initialise {type(self).__name__} by {self.init_cfg}", logger="current", level=logging.DEBUG)
        # What is loaded replaces what is drawn, also within the children.
        steps = [step for step in self._init_steps() if not _loads(step)]
        loading = [step for step in self._init_steps() if _loads(step)]
        if steps:
            initialize(self, steps)
        for part in self.children():
            child: Any = _unwrapped(part)
            if hasattr(child, "init_weights") and not getattr(child, "is_init", False):
                child.init_weights()
                if hasattr(child, "_params_init_info"):
                    update_init_info(child, init_info=f"initialised by `init_weights` of {type(child).__name__}")
        if loading:
            initialize(self, loading)
        self._is_init = True

    def _init_steps(self) -> list[Any]:
        if not self.init_cfg:
            return []
        return list(self.init_cfg) if isinstance(self.init_cfg, list | tuple) else [self.init_cfg]

    def __repr__(self) -> str:
        text = super().__repr__()
        return f"{text}\ninit_cfg={self.init_cfg}" if self.init_cfg else text


class Sequential(BaseModule, nn.Sequential):
    """`torch.nn.Sequential` with an `init_cfg`."""

    def __init__(self, *args: Any, init_cfg: InitCfg = None) -> None:
        BaseModule.__init__(self, init_cfg)
        nn.Sequential.__init__(self, *args)


class ModuleList(BaseModule, nn.ModuleList):
    """`torch.nn.ModuleList` with an `init_cfg`."""

    def __init__(self, modules: Iterable[nn.Module] | None = None, init_cfg: InitCfg = None) -> None:
        BaseModule.__init__(self, init_cfg)
        nn.ModuleList.__init__(self, modules)


class ModuleDict(BaseModule, nn.ModuleDict):
    """`torch.nn.ModuleDict` with an `init_cfg`."""

    def __init__(self, modules: Mapping[str, nn.Module] | None = None, init_cfg: InitCfg = None) -> None:
        BaseModule.__init__(self, init_cfg)
        nn.ModuleDict.__init__(self, modules)


def _loads(step: Any) -> bool:
    return isinstance(step, Mapping) and step.get("type") in ("Pretrained", PretrainedInit)


def _unwrapped(module: nn.Module) -> nn.Module:
    if lockstep.model.is_model_wrapper(module) and not hasattr(module, "init_weights"):
        return lockstep.model.unwrap_model(module)
    return module


def _begin_notes(root: nn.Module) -> None:
    """Give all modules one dict of what has initialised each parameter, for `update_init_info`."""
    notes: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    for parameter in root.parameters():
        notes[parameter] = {
            "init_info": f"as before `init_weights` of {type(root).__name__}",
            "fingerprint": fingerprint(parameter),
        }
    for module in root.modules():
        object.__setattr__(module, "_params_init_info", notes)


def _log_notes(root: nn.Module) -> None:
    """Log for every parameter what initialised it: into the log file if there is one, else for level DEBUG."""
    notes: Mapping[Any, Mapping[str, Any]] = root._params_init_info  # type: ignore[assignment]
    lines = [
        f"{name} {tuple(parameter.shape)}: {notes[parameter]['init_info']}"
        for name, parameter in root.named_parameters()
        if parameter in notes
    ]
    text = f"initial weights of {type(root).__name__}:\n" + "\n".join(lines)
    logger: Any = MMLogger.get_current_instance()
    files = [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
    record = logging.LogRecord(logger.name, logging.INFO, __file__, 0, text, None, None)
    for handler in files:
        handler.handle(record)
    if not files:
        print_log(text, logger="current", level=logging.DEBUG)
