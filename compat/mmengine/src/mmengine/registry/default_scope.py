"""`DefaultScope`: which registries of a family come first, as instances with names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from lockstep.registry import default_scope, in_default_scope
from lockstep.registry import init_default_scope as set_default_scope
from mmengine.utils.manager import ManagerMixin


class DefaultScope(ManagerMixin):
    """A default scope by name; the one that was created last is in force, as lockstep's.

    Args:
        name: the instance's name.
        scope_name: the scope, such as `"mmdet"`.
    """

    def __init__(self, name: str, scope_name: str) -> None:
        if not isinstance(scope_name, str):
            raise TypeError(f"`scope_name` must be a str, but is {scope_name!r}")
        super().__init__(name)
        self._scope_name = scope_name
        set_default_scope(scope_name)

    @property
    def scope_name(self) -> str:
        """The scope."""
        return self._scope_name

    @classmethod
    def get_current_instance(cls) -> Self | None:  # type: ignore[override]  # None: MMEngine says so, too
        """Return the instance of the scope in force, or None if there is no default scope."""
        scope = default_scope()
        if scope is None:
            return None
        instance: Self
        for instance in reversed(cls._instance_dict.values()):
            if instance.scope_name == scope:
                return instance
        return cls.get_instance(scope, scope_name=scope)  # a Runner of lockstep has set it

    @classmethod
    @contextmanager
    def overwrite_default_scope(cls, scope_name: str | None) -> Iterator[None]:
        """Set the default scope inside the context; None keeps the current one."""
        with in_default_scope(scope_name):
            yield
