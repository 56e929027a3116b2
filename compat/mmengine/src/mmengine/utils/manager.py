"""`ManagerMixin`: classes whose instances are found by name from anywhere."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from typing import Any, ClassVar, Self

__all__ = ["ManagerMeta", "ManagerMixin"]


class ManagerMeta(type):
    """Gives each class its own table of instances.

    Raises:
        AssertionError: the class takes no `name`.
    """

    def __init__(cls, *args: Any) -> None:
        cls._instance_dict: OrderedDict[str, Any] = OrderedDict()
        if "name" not in inspect.signature(cls).parameters:
            raise AssertionError(f"{cls.__name__}.__init__ must have an argument `name`")
        super().__init__(*args)


class ManagerMixin(metaclass=ManagerMeta):
    """Base class of objects that exist once for each name.

    Args:
        name: the instance's name.

    Example:
        >>> class Counter(ManagerMixin):
        ...     def __init__(self, name="", start=0):
        ...         super().__init__(name)
        ...         self.count = start
        >>> Counter.get_instance("steps", start=3).count
        3
        >>> Counter.get_instance("steps").count, Counter.get_current_instance().instance_name
        (3, 'steps')
    """

    _instance_dict: ClassVar[OrderedDict[str, Any]]

    def __init__(self, name: str = "", **kwargs: Any) -> None:
        if not isinstance(name, str) or not name:
            raise AssertionError(f"`name` must be a str that is not empty, but is {name!r}")
        self._instance_name = name
        super().__init__(**kwargs)

    @classmethod
    def get_instance(cls, name: str, **kwargs: Any) -> Self:
        """Return the instance of that name, which is created with `kwargs` if there is none."""
        if not isinstance(name, str):
            raise AssertionError(f"`name` must be a str, but is {name!r} of {type(name).__name__}")
        if name not in cls._instance_dict:
            cls._instance_dict[name] = cls(name=name, **kwargs)
        instance: Self = cls._instance_dict[name]
        return instance

    @classmethod
    def get_current_instance(cls) -> Self:
        """Return the instance that was created last.

        Raises:
            RuntimeError: there is none.
        """
        if not cls._instance_dict:
            raise RuntimeError(f"there is no instance of {cls.__name__} yet. Call {cls.__name__}.get_instance(name)")
        instance: Self = next(reversed(cls._instance_dict.values()))
        return instance

    @classmethod
    def check_instance_created(cls, name: str) -> bool:
        """Return whether there is an instance of that name."""
        return name in cls._instance_dict

    @property
    def instance_name(self) -> str:
        """The instance's name."""
        return self._instance_name
