"""What tells one batch from another."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lockstep.dataset.repeats import checksum_of


def test_a_checksum_is_of_all_values_that_a_batch_has():
    prompt, blank = torch.arange(80), torch.zeros(1, 28, 28)
    digit = blank.clone()
    digit[0, 20, 20] = 1
    pairs: list[tuple[Any, Any]] = [
        (torch.cat([prompt, torch.tensor([1])]), torch.cat([prompt, torch.tensor([2])])),
        (np.append(prompt, 1.0), np.append(prompt, 2.0)),
        ((digit, 7), (digit * 2, 7)),
        (["a" * 99, "b"], ["a" * 99, "c"]),
        (np.array(["a", None]), np.array(["b", None])),
        (prompt.bfloat16().expand(2, 80).t(), prompt.bfloat16().expand(2, 80).t() + 1),
    ]
    for one, other in pairs:
        assert None is not checksum_of(one) == checksum_of(one) != checksum_of(other)
    # These do not tell a batch from others, or are not all known here.
    for batch in (blank, torch.zeros(0), [5, 5, None], (prompt, prompt.to("meta"), 1), (1, 2, object())):
        assert checksum_of(batch) is None
