"""With which error a process ends."""

from __future__ import annotations

import sys

import pytest

from lockstep.watch.ending import raised_error


@pytest.mark.parametrize("is_prompt", [False, True])
def test_an_error_at_a_prompt_is_not_that_of_the_process(is_prompt: bool, monkeypatch: pytest.MonkeyPatch):
    error = ValueError("of an earlier cell")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    monkeypatch.delattr(sys, "ps1", raising=False)
    if is_prompt:
        monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    assert raised_error() is (None if is_prompt else error)


@pytest.mark.parametrize(("code", "is_error"), [(None, False), (0, False), (3, True), ("no data", True)])
def test_an_exit_with_success_is_no_error(code: object, is_error: bool):
    try:
        sys.exit(code)
    except SystemExit:
        assert (raised_error() is not None) == is_error
