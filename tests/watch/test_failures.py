"""Errors that come up where a backend's are translated."""

from __future__ import annotations

import pytest
import torch

from lockstep.dist import all_reduce
from lockstep.testing import ranks
from lockstep.watch.failures import backend_errors_translated


@ranks(2)
@pytest.mark.parametrize("text", ["request timed out", "CUDA error: the launch timed out and was terminated"])
def test_a_timeout_of_something_else_than_a_backend_breaks_no_group(text: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{text}$"), backend_errors_translated():
        raise RuntimeError(text)
    all_reduce(data := torch.ones(1))
    assert data.item() == 2.0
