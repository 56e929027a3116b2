"""Helpers for tests."""

from __future__ import annotations

from typing import Any

from mmengine.testing.compare import (
    assert_allclose,
    assert_attrs_equal,
    assert_dict_contains_subset,
    assert_dict_has_keys,
    assert_is_norm_layer,
    assert_keys_equal,
    assert_params_all_zeros,
    check_python_script,
)

__all__ = [
    "RunnerTestCase",
    "assert_allclose",
    "assert_attrs_equal",
    "assert_dict_contains_subset",
    "assert_dict_has_keys",
    "assert_is_norm_layer",
    "assert_keys_equal",
    "assert_params_all_zeros",
    "check_python_script",
]


def __getattr__(name: str) -> Any:
    if name == "RunnerTestCase":  # imports the Runner
        from mmengine.testing.runner_test_case import RunnerTestCase

        return RunnerTestCase
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
