"""`MessageHub`: lockstep's, which MMEngine's code also finds by name."""

from __future__ import annotations

from typing import ClassVar, Self

import lockstep.logging

__all__ = ["MessageHub"]


class MessageHub(lockstep.logging.MessageHub):
    """A store in which the parts of one run share values by name; see `lockstep.logging.MessageHub`.

    As in MMEngine, the hub that was created last is the current one; while a Runner runs, its own is.
    """

    _instance_dict: ClassVar[dict[str, MessageHub]] = {}

    @classmethod
    def get_instance(cls, name: str, **kwargs: object) -> Self:  # type: ignore[override]
        """Return the hub with this name, or a new one, which is then the current one."""
        if name not in cls._instance_dict:
            cls._instance_dict[name] = cls(name)
            cls._instance_dict[name].make_current()
        found = cls._instance_dict[name]
        return found  # type: ignore[return-value]

    @classmethod
    def get_current_instance(cls) -> lockstep.logging.MessageHub:
        """Return the hub of the current run, or the one that was created last, or a new one."""
        return lockstep.logging.MessageHub.get_current_instance()

    @classmethod
    def check_instance_created(cls, name: str) -> bool:
        """Return whether there is a hub of that name."""
        return name in cls._instance_dict

    @property
    def instance_name(self) -> str:
        """The hub's name."""
        return self.name
