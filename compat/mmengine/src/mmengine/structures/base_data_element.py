"""`BaseDataElement`: named fields of two kinds; and what its subclasses share.

Where a value does not fit, MMEngine raises an AssertionError. The errors here are TypeErrors, ValueErrors and
IndexErrors that are AssertionErrors, too.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import chain
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lockstep.tree import tree_map

FieldType: TypeAlias = Literal["data", "metainfo"]

_STORES = ("_metainfo", "_data")  # the attributes that hold the fields; all others but `_properties` are fields
_MISSING: Any = object()


class WrongTypeError(TypeError, AssertionError):
    """A value has a wrong type."""


class WrongValueError(ValueError, AssertionError):
    """A value does not fit."""


class WrongIndexError(IndexError, AssertionError):
    """An index does not fit."""


class BaseDataElement:
    """Named fields of one sample, of two kinds: data, such as tensors, and metainfo, which describes the sample.

    Fields are attributes. `element.x = value` sets a data field; `set_metainfo` sets metainfo. A name keeps its kind
    until it is deleted. Both kinds keep the order in which they were set. Conversions (`to`, `detach`, `numpy`, ...)
    return a new element and apply only to data, at any depth of nested dicts, lists and elements.

    A subclass can restrict a field to a type: it defines a property `x` whose setter calls
    `self.set_field(value, "_x", dtype=...)`. The field is then called `x` everywhere. If it stores its value under
    another name, both are names of fields.

    An element is a node of a tree (`lockstep.tree.TreeNode`): it is gathered and collected over ranks like a dict.

    Args:
        metainfo: the metainfo fields; copied, so that later changes to the dict do not reach the element.
        **data: the data fields.

    Example:
        >>> sample = BaseDataElement(metainfo={"size": (4, 6)}, image=torch.zeros(3, 4, 6))
        >>> sample.score = torch.tensor(0.5)
        >>> sample.keys(), sample.metainfo_keys(), sample.size
        (['image', 'score'], ['size'], (4, 6))
        >>> sample.to(torch.float64).score.dtype
        torch.float64
    """

    _metainfo: dict[str, Any]
    _data: dict[str, Any]
    _properties: dict[str, None]  # names of those that have been set, but store nothing under `_` and their name

    def __init__(self, *, metainfo: Mapping[str, Any] | None = None, **data: Any) -> None:
        vars(self).update(_metainfo={}, _data={}, _properties={})
        if metainfo is not None:
            self.set_metainfo(metainfo)
        self.set_data(data)

    def set_metainfo(self, metainfo: Mapping[str, Any]) -> None:
        """Set metainfo fields to deep copies of the values of a dict.

        Raises:
            AttributeError: a name is a data field.
        """
        _require_mapping("metainfo", metainfo)
        for name, value in metainfo.items():
            self.set_field(deepcopy(value), name, field_type="metainfo")

    def set_data(self, data: Mapping[str, Any]) -> None:
        """Set data fields to the values of a dict.

        Raises:
            AttributeError: a name is a metainfo field.
        """
        _require_mapping("data", data)
        for name, value in data.items():
            self.set_field(value, name)

    def set_field(
        self, value: Any, name: str, dtype: type | tuple[type, ...] | None = None, field_type: FieldType = "data"
    ) -> None:
        """Set one field.

        Args:
            value: a value of any type.
            name: the name of the field.
            dtype: the type or types of which `value` must be an instance; None for any.
            field_type: the kind of the field.

        Raises:
            WrongTypeError: `value` is not of `dtype`.
            AttributeError: the name is a field of the other kind, or a method.
            WrongValueError: `field_type` is neither "data" nor "metainfo".
        """
        if field_type not in ("data", "metainfo"):
            raise WrongValueError(f"`field_type` must be 'data' or 'metainfo', but is {field_type!r}")
        if dtype is not None and not isinstance(value, dtype):
            raise WrongTypeError(f"`{name}` must be of {dtype}, but is {describe(value)} of {type(value)}")
        if self._has_property(name):
            object.__setattr__(self, name, value)  # the property's setter calls `set_field` for `_x`
            if f"_{name}" not in self._data and f"_{name}" not in self._metainfo:
                self._properties[name] = None
            return
        self._check_name(name, field_type)
        if field_type == "metainfo":
            self._metainfo[name] = value
        else:
            self._data[name] = self._checked(name, value)

    def update(self, instance: BaseDataElement) -> None:
        """Copy all fields of another element into this one."""
        if not isinstance(instance, BaseDataElement):
            raise WrongTypeError(
                f"`instance` must be a BaseDataElement, but is {instance!r}. For a dict call set_data()"
            )
        self.set_metainfo(instance.metainfo)
        self.set_data(dict(instance.items()))

    def new(self, *, metainfo: Mapping[str, Any] | None = None, **data: Any) -> Self:
        """Return a new element with other metainfo, other data, or both; a kind that is not given is kept."""
        element = self._with_data({} if data else self._data)
        if data:
            element._properties.clear()
        if metainfo is not None:
            element._metainfo.clear()
            element.set_metainfo(metainfo)
        element.set_data(data)
        return element

    def clone(self) -> Self:
        """Return a new element with the same data, which is shared, and a copy of the metainfo."""
        return self._with_data(self._data)

    def keys(self) -> list[str]:
        """Return the names of all data fields."""
        return [*(self._public(name) for name in self._data), *self._properties]

    def values(self) -> list[Any]:
        """Return the values of all data fields."""
        return [value for _, value in self.items()]

    def items(self) -> Iterator[tuple[str, Any]]:
        """Yield name and value of every data field."""
        return ((name, getattr(self, name)) for name in self.keys())

    def metainfo_keys(self) -> list[str]:
        """Return the names of all metainfo fields."""
        return [self._public(name) for name in self._metainfo]

    def metainfo_values(self) -> list[Any]:
        """Return the values of all metainfo fields."""
        return [value for _, value in self.metainfo_items()]

    def metainfo_items(self) -> Iterator[tuple[str, Any]]:
        """Yield name and value of every metainfo field."""
        return ((name, getattr(self, name)) for name in self.metainfo_keys())

    def all_keys(self) -> list[str]:
        """Return the names of all fields, metainfo first."""
        return self.metainfo_keys() + self.keys()

    def all_values(self) -> list[Any]:
        """Return the values of all fields, metainfo first."""
        return self.metainfo_values() + self.values()

    def all_items(self) -> Iterator[tuple[str, Any]]:
        """Yield name and value of every field, metainfo first."""
        return chain(self.metainfo_items(), self.items())

    @property
    def metainfo(self) -> dict[str, Any]:
        """The metainfo fields, as a new dict."""
        return dict(self.metainfo_items())

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a field, or `default` if there is no field of that name."""
        return getattr(self, key) if key in self else default

    def pop(self, key: str, default: Any = _MISSING) -> Any:
        """Remove a field and return its value, or `default` if there is no field of that name.

        Raises:
            KeyError: there is no such field and no `default`.
        """
        if key in self:
            value = getattr(self, key)
            delattr(self, key)
            return value
        if default is _MISSING:
            raise KeyError(self._no_field(key))
        return default

    def to(self, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Self:
        """Return a new element whose data has another device or dtype; takes the arguments of `Tensor.to`.

        `non_blocking` is for tensors; other objects that have a method `to` get the other arguments.
        """

        def moved(leaf: Any) -> Any:
            options = {**kwargs, "non_blocking": True} if non_blocking and isinstance(leaf, Tensor) else kwargs
            return leaf.to(*args, **options) if hasattr(leaf, "to") else leaf

        return self._mapped(moved)

    def cpu(self) -> Self:
        """Return a new element whose data is on the CPU."""
        return self._mapped(lambda leaf: leaf.cpu() if hasattr(leaf, "cpu") else leaf)

    def cuda(self, *args: Any, **kwargs: Any) -> Self:
        """Return a new element whose data is on a CUDA device; takes the arguments of `Tensor.cuda`."""
        return self._mapped(lambda leaf: leaf.cuda(*args, **kwargs) if hasattr(leaf, "cuda") else leaf)

    def pin_memory(self) -> Self:
        """Return a new element whose tensors are in pinned memory, as torch's loaders ask for with `pin_memory`."""
        return self._mapped(lambda leaf: leaf.pin_memory() if isinstance(leaf, Tensor) else leaf)

    def detach(self) -> Self:
        """Return a new element whose tensors are detached from the autograd graph."""
        return self._mapped(lambda leaf: leaf.detach() if hasattr(leaf, "detach") else leaf)

    def numpy(self) -> Self:
        """Return a new element with numpy arrays instead of tensors; bfloat16 becomes float32."""
        return self._mapped(lambda leaf: to_array(leaf) if isinstance(leaf, Tensor) else leaf)

    def to_tensor(self) -> Self:
        """Return a new element with tensors instead of numpy arrays, in the same memory."""
        return self._mapped(lambda leaf: torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a dict; field values that are elements become dicts, too."""
        return {
            name: value.to_dict() if isinstance(value, BaseDataElement) else value for name, value in self.all_items()
        }

    def tree_children(self) -> dict[str, Any]:
        """Return the data fields by name."""
        return dict(self._data)

    def tree_rebuild(self, children: dict[str, Any]) -> Self:
        """Return a new element with the same metainfo and with `children`, which is not checked, as its data."""
        return self._with_data(children)

    def __getattr__(self, name: str) -> Any:
        # Called only for names that are not ordinary attributes; during unpickling also before the stores exist.
        for store in _STORES:
            fields = vars(self).get(store, {})
            if name in fields:
                return fields[name]
        raise AttributeError(self._no_field(name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__dict__":  # an unpickler of another library sets all fields at once
            object.__setattr__(self, name, value)
            return
        self.set_field(value, name)

    def __delattr__(self, name: str) -> None:
        if self._has_property(name):
            object.__delattr__(self, name)
            self._properties.pop(name, None)
            return
        for fields in (self._data, self._metainfo):
            if name in fields:
                del fields[name]
                return
        raise AttributeError(self._no_field(name))

    def __getitem__(self, item: str) -> Any:
        if not isinstance(item, str):
            raise WrongTypeError(f"a field of {type(self).__name__} must be named by a str, but is by {item!r}")
        if item not in self:
            raise KeyError(self._no_field(item))
        return getattr(self, item)

    __setitem__ = __setattr__
    __delitem__ = __delattr__

    def __contains__(self, item: object) -> bool:
        return item in self._data or item in self._metainfo or item in self.all_keys()

    def __copy__(self) -> Self:
        return self.clone()

    def __repr__(self) -> str:
        lines = [type(self).__name__]
        for title, items in (("metainfo", self.metainfo_items()), ("data", self.items())):
            lines += [f"  {title} {name}: {describe(value)}".replace("\n", "\n  ") for name, value in items]
        return "\n".join(lines)

    def _checked(self, name: str, value: Any) -> Any:
        """Return the value to store as a data field; a subclass raises an error if it does not fit the other fields."""
        return value

    def _mapped(self, func: Callable[[Any], Any]) -> Self:
        mapped: Self = tree_map(func, self)
        return mapped

    @property
    def _data_fields(self) -> set[str]:
        """The names of the data fields; subclasses of MMEngine's class read it, and the next one."""
        return {*self._data, *self._properties}

    @property
    def _metainfo_fields(self) -> set[str]:
        return set(self._metainfo)

    def _with_data(self, data: dict[str, Any]) -> Self:
        """Return a new element with these data fields, unchecked, and a copy of the metainfo."""
        element = object.__new__(type(self))
        kept = {"_metainfo": deepcopy(self._metainfo), "_properties": dict(self._properties)}
        vars(element).update(kept, _data=dict(data))
        return element

    def _has_property(self, name: str) -> bool:
        return isinstance(getattr(type(self), name, None), property)

    def _public(self, name: str) -> str:
        """Return the public name of a stored field: the name of its property, if it has one."""
        return name[1:] if name.startswith("_") and self._has_property(name[1:]) else name

    def _check_name(self, name: str, field_type: FieldType) -> None:
        if name in (*_STORES, "_properties") or inspect.isroutine(getattr(type(self), name, None)):
            raise AttributeError(
                f"a field of {type(self).__name__} must not be called {name!r}, which is part of the class. "
                "Choose another name"
            )
        other, kind = (self._data, "data") if field_type == "metainfo" else (self._metainfo, "metainfo")
        if name in other:
            raise AttributeError(
                f"`{name}` must stay a {kind} field of {type(self).__name__}, but is set as {field_type}. "
                f"Delete it first, or set it with set_{kind}()"
            )

    def _no_field(self, name: str) -> str:
        known = [field for store in _STORES for field in vars(self).get(store, {})]
        return f"{type(self).__name__} has no field {name!r}; it has {', '.join(known) or 'none at all'}"


def _require_mapping(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise WrongTypeError(
            f"`{name}` must be a dict of fields by name, but is {value!r} of type {type(value).__name__}"
        )


def to_array(data: Tensor) -> Any:
    """Return a tensor as a numpy array on the CPU; bfloat16, which numpy does not support, becomes float32."""
    data = data.detach().cpu()
    return (data.float() if data.dtype == torch.bfloat16 else data).numpy()


def describe(value: Any) -> str:
    """Return a short description of a value: for tensors and arrays, the shape and dtype instead of the numbers."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"Tensor{tuple(value.shape)} {dtype} {value.device}"
    if isinstance(value, np.ndarray):
        return f"ndarray{value.shape} {value.dtype}"
    return repr(value)


def slice_at(index: Any, size: int, things: str, allowed: str = "an int or a slice") -> slice:
    """Return the slice that an int or a slice selects out of `size` items; a negative int counts from the end.

    Args:
        index: the int or slice.
        size: the number of items.
        things: what the items are, for messages.
        allowed: what the index may be, for messages.

    Raises:
        WrongIndexError: the int is out of range.
        WrongTypeError: the index is something else.
    """
    if isinstance(index, slice):
        return index
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise WrongTypeError(f"an index of {things} must be {allowed}, but is {index!r} of {type(index).__name__}")
    number = operator.index(index)
    if not -size <= number < size:
        raise WrongIndexError(f"an index of {size} {things} must be from {-size} to {size - 1}, but is {number}")
    return slice(number % size, number % size + 1)
