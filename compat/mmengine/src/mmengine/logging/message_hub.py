"""`MessageHub`: lockstep's, which MMEngine's code also finds by name, with a state."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import lockstep.logging
from mmengine.logging.history_buffer import HistoryBuffer

__all__ = ["MessageHub"]


class MessageHub(lockstep.logging.MessageHub):
    """A store in which the parts of one run share values by name; see `lockstep.logging.MessageHub`.

    As in MMEngine, the hub that was created last is the current one; while a Runner runs, its own is.

    Args:
        name: the hub's name.
        log_scalars: first histories, by name.
        runtime_info: first infos, by name.
        resumed_keys: whether each of them is part of `state_dict`; by default it is.
    """

    _instance_dict: ClassVar[dict[str, MessageHub]] = {}

    def __init__(
        self,
        name: str,
        log_scalars: Mapping[str, HistoryBuffer] | None = None,
        runtime_info: Mapping[str, Any] | None = None,
        resumed_keys: Mapping[str, bool] | None = None,
    ) -> None:
        super().__init__(name)
        self._scalars: Any = OrderedDict(log_scalars or {})
        self._infos.update(runtime_info or {})
        self._resumed = dict(resumed_keys or {})

    @classmethod
    def get_instance(cls, name: str, **kwargs: Any) -> Self:
        """Return the hub with this name, or a new one, which is then the current one."""
        if name not in cls._instance_dict:
            cls._instance_dict[name] = cls(name, **kwargs)
            cls._instance_dict[name].make_current()
        return cls._instance_dict[name]  # type: ignore[return-value]

    @classmethod
    def get_current_instance(cls) -> lockstep.logging.MessageHub:
        """Return the hub of the current run, or the one that was created last, or a new one."""
        if lockstep.logging.MessageHub._current is None:
            cls.get_instance("mmengine")
        return lockstep.logging.MessageHub.get_current_instance()

    @classmethod
    def check_instance_created(cls, name: str) -> bool:
        """Return whether there is a hub of that name."""
        return name in cls._instance_dict

    @property
    def instance_name(self) -> str:
        """The hub's name."""
        return self.name

    def update_scalar(self, key: str, value: Any, count: int = 1, resumed: bool = True) -> None:
        """Add a value, a number or a tensor of one element, to the history of `key`.

        Args:
            key: the name of the history.
            value: the value.
            count: how many samples it stands for.
            resumed: whether the history is part of `state_dict`; the same at each call.
        """
        self._keep(key, resumed)
        number = value.item() if hasattr(value, "item") else value
        self._scalars.setdefault(key, HistoryBuffer()).update(number, count)

    def update_scalars(self, log_dict: Mapping[str, Any], resumed: bool = True) -> None:
        """Add one value to each of several histories; a value may be a dict with `value` and `count`."""
        if not isinstance(log_dict, Mapping):
            raise AssertionError(f"`log_dict` must be a dict, but is {log_dict!r}")
        for key, value in log_dict.items():
            if isinstance(value, Mapping):
                self.update_scalar(key, value["value"], value.get("count", 1), resumed)
            else:
                self.update_scalar(key, value, resumed=resumed)

    def update_info(self, key: str, value: Any, resumed: bool = True) -> None:
        """Set the info `key`; `resumed` says whether it is part of `state_dict`."""
        self._keep(key, resumed)
        super().update_info(key, value)

    def update_info_dict(self, info_dict: Mapping[str, Any], resumed: bool = True) -> None:
        """Set several infos."""
        for key, value in info_dict.items():
            self.update_info(key, value, resumed)

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the histories and infos that a checkpoint keeps."""
        kept = [
            OrderedDict((key, value) for key, value in part.items() if self._resumed.get(key, True))
            for part in (self._scalars, self._infos)
        ]
        return OrderedDict(log_scalars=kept[0], runtime_info=kept[1], resumed_keys=OrderedDict(self._resumed))

    def load_state_dict(self, state_dict: Mapping[str, Any] | MessageHub) -> None:
        """Restore what `state_dict` returned, here or in MMEngine."""
        state = state_dict.state_dict() if isinstance(state_dict, MessageHub) else state_dict
        self._scalars = OrderedDict(copy.deepcopy(dict(state.get("log_scalars", {}))))
        self._infos.clear()
        self._infos.update(copy.deepcopy(dict(state.get("runtime_info", {}))))
        self._resumed = dict(state.get("resumed_keys", {}))

    def _keep(self, key: str, resumed: bool) -> None:
        if self._resumed.setdefault(key, resumed) != resumed:
            raise AssertionError(f"`resumed` of `{key}` was {self._resumed[key]} before, and must not be {resumed} now")
