"""`BaseDataElement`: lockstep's, with what subclasses of MMEngine's read, and with the types of its errors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import lockstep.structures

_Method = TypeVar("_Method", bound=Callable[..., Any])


class WrongTypeError(TypeError, AssertionError):
    """A value has a wrong type; MMEngine raises an AssertionError."""


class WrongValueError(ValueError, AssertionError):
    """A value does not fit; MMEngine raises an AssertionError."""


class WrongIndexError(IndexError, AssertionError):
    """An index does not fit; MMEngine raises an AssertionError, or an IndexError."""


_ALSO: dict[type[Exception], type[Exception]] = {
    TypeError: WrongTypeError,
    ValueError: WrongValueError,
    IndexError: WrongIndexError,
}


def also_assertion(method: _Method) -> _Method:
    """Make TypeErrors, ValueErrors and IndexErrors of a method AssertionErrors, too, as code for MMEngine expects."""

    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except (TypeError, ValueError, IndexError) as error:
            if type(error) not in _ALSO:
                raise
            raise _ALSO[type(error)](*error.args) from error.__cause__

    return checked  # type: ignore[return-value]


class BaseDataElement(lockstep.structures.BaseDataElement):
    """Named fields of one sample, of two kinds: data and metainfo; see `lockstep.structures.BaseDataElement`.

    Every new element has its own copy of the metainfo.
    """

    @property
    def _data_fields(self) -> set[str]:
        return set(self._data)

    @property
    def _metainfo_fields(self) -> set[str]:
        return set(self._metainfo)

    @also_assertion
    def set_metainfo(self, metainfo: Mapping[str, Any]) -> None:
        """Set metainfo fields to deep copies of the values of a dict."""
        super().set_metainfo(metainfo)

    @also_assertion
    def set_data(self, data: Mapping[str, Any]) -> None:
        """Set data fields to the values of a dict."""
        super().set_data(data)

    @also_assertion
    def set_field(self, *args: Any, **kwargs: Any) -> None:
        """Set one field: `value`, `name`, and perhaps `dtype` and `field_type`."""
        super().set_field(*args, **kwargs)

    @also_assertion
    def update(self, instance: lockstep.structures.BaseDataElement) -> None:
        """Copy all fields of another element into this one."""
        super().update(instance)

    def _twin(self, data: dict[str, Any]) -> Self:
        twin = super()._twin(data)
        twin._metainfo.update(copy.deepcopy(self._metainfo))
        return twin
