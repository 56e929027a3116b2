"""What all parts of a model begin with."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.dist import get_rank
from lockstep.model.parts import broadcast_from_first
from lockstep.testing import ranks


@ranks(2, 3)
def test_everybody_begins_with_the_values_of_rank_0() -> None:
    def own(rank: int) -> list[Tensor]:
        values = torch.arange(6.0).reshape(2, 3) + 10 * rank
        return [values, values.t() + 1, values[0, 0] * 2, values[:0], values.half(), values.int(), values > 12]

    tensors, expected = own(get_rank()), own(0)
    tensors[1].requires_grad_()
    broadcast_from_first(tensors, None)
    for mine, wanted in zip(tensors, expected, strict=True):
        torch.testing.assert_close(mine.detach(), wanted, rtol=0, atol=0)
