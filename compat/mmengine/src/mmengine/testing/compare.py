"""Comparisons for tests. Those called `assert_...` return whether it is so, but for `assert_allclose`, which raises."""

from __future__ import annotations

import runpy
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_MISSING = object()


def assert_allclose(
    actual: Any,
    expected: Any,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = True,
    msg: str | Callable[[str], str] | None = None,
) -> None:
    """Raise an AssertionError if two values, or nested dicts and lists of them, are not close to each other.

    Args:
        actual: tensors, arrays or numbers.
        expected: the same.
        rtol: relative tolerance; by default one that fits the dtype. To be given together with `atol`.
        atol: absolute tolerance.
        equal_nan: whether two NaNs are equal.
        msg: what the error says in place of torch's message.
    """
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=equal_nan, msg=msg or None)


def check_python_script(cmd: str) -> None:
    """Run a script in this process, as `python` would: by its path and its arguments, divided as in a shell.

    Raises:
        Exception: whatever the script raises.
    """
    arguments = shlex.split(cmd)
    if arguments and arguments[0] == "python":
        arguments = arguments[1:]
    with patch.object(sys, "argv", arguments):
        runpy.run_path(arguments[0], run_name="__main__")


def assert_dict_contains_subset(dict_obj: Mapping[Any, Any], expected_subset: Mapping[Any, Any]) -> bool:
    """Return whether a dict has the entries of another."""
    return all(_equal(dict_obj.get(key, _MISSING), value) for key, value in expected_subset.items())


def assert_attrs_equal(obj: Any, expected_attrs: Mapping[str, Any]) -> bool:
    """Return whether an object has attributes of these values."""
    return all(_equal(getattr(obj, name, _MISSING), value) for name, value in expected_attrs.items())


def assert_dict_has_keys(obj: Mapping[str, Any], expected_keys: Iterable[str]) -> bool:
    """Return whether a dict has these keys, and perhaps others."""
    return set(expected_keys) <= set(obj)


def assert_keys_equal(result_keys: Iterable[str], target_keys: Iterable[str]) -> bool:
    """Return whether these are the same keys, in any order."""
    return set(result_keys) == set(target_keys)


def assert_is_norm_layer(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm, InstanceNorm, GroupNorm or LayerNorm."""
    return isinstance(module, _NormBase | nn.GroupNorm | nn.LayerNorm)


def assert_params_all_zeros(module: nn.Module) -> bool:
    """Return whether the weight and the bias of a module are zero everywhere, as far as it has them."""
    values = (getattr(module, name, None) for name in ("weight", "bias"))
    return not any(bool(value.detach().any()) for value in values if isinstance(value, torch.Tensor))


def _equal(one: Any, other: Any) -> bool:
    if one is _MISSING:
        return False
    equal = one == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
