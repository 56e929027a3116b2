"""What all parts of a model begin with, and that all ranks have the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.dist import get_rank, get_world_size
from lockstep.errors import CollectiveMismatchError
from lockstep.model import (
    MMDistributedDataParallel,
    MMFullyShardedDataParallel,
    MMSeparateDistributedDataParallel,
)
from lockstep.model.parts import broadcast_from_first
from lockstep.testing import ranks

DDP_KINDS = [MMDistributedDataParallel, MMSeparateDistributedDataParallel]
KINDS = [*DDP_KINDS, MMFullyShardedDataParallel]


class Net(nn.Module):
    """A body, which is the same on all ranks, and a head.

    Args:
        classes: outputs of the head.
    """

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, classes)


def frozen(net: Net) -> Net:
    net.head.requires_grad_(False)
    return net


def in_another_order() -> Net:
    net = Net()
    net.body, net.head = net._modules.pop("body"), net._modules.pop("head")  # type: ignore[assignment]
    net.head, net.body = net._modules.pop("head"), net._modules.pop("body")  # type: ignore[assignment]
    return net


def with_one_more() -> Net:
    net = Net()
    net.more = nn.Linear(2, 2)
    return net


DIFFERING: dict[str, tuple[Callable[[], Net], str]] = {
    "shape": (lambda: Net(5), r"`head.weight` \[4, 8\] float32 on %s and `head.weight` \[5, 8\] float32 on rank 1\."),
    "dtype": (lambda: Net().double(), r"`body.weight` \[8, 8\] float32 on %s and `body.weight` \[8, 8\] float64 on"),
    "frozen": (
        lambda: frozen(Net()),
        r"`head.weight` .* on %s and `head.weight` \[4, 8\] float32 \(frozen\) on rank 1",
    ),
    "order": (in_another_order, r"`body.weight` .* on %s and `head.weight` .* on rank 1"),
    "one more": (with_one_more, r"nothing further on %s and `more.weight` \[2, 2\] float32 on rank 1"),
}


@pytest.mark.parametrize("wrap", KINDS)
@pytest.mark.parametrize("how", DIFFERING)
@ranks(2, 3)
def test_a_model_with_other_parameters_on_a_rank_is_refused_on_all(wrap: type[Any], how: str) -> None:
    make, message = DIFFERING[how]
    net = make() if get_rank() == 1 else Net()
    others = "rank 0" if get_world_size() == 2 else "ranks 0, 2"
    with pytest.raises(CollectiveMismatchError, match=message % others) as caught:
        wrap(net)
    assert caught.value.failed_ranks == (1,)


@pytest.mark.parametrize("wrap", DDP_KINDS)
@ranks(2)
def test_buffers_that_ddp_sends_are_compared_too(wrap: type[Any]) -> None:
    net = Net()
    net.head.register_buffer("seen", torch.zeros(2 + get_rank()))
    with pytest.raises(CollectiveMismatchError, match=r"`head.seen` \[2\] float32 on rank 0 and `head.seen` \[3\]"):
        wrap(net)


@ranks(2)
def test_what_a_wrapper_leaves_alone_may_differ() -> None:
    net = Net(4 + get_rank())
    left_out = [f"head.{name}" for name, _ in net.head.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, left_out)  # type: ignore[no-untyped-call]
    MMDistributedDataParallel(net)
    net = Net(4 + get_rank())
    MMFullyShardedDataParallel(net, ignored_modules=[net.head])


@ranks(4)
def test_ranks_of_a_mesh_of_two_axes_are_all_compared() -> None:
    with pytest.raises(CollectiveMismatchError, match=r"on ranks 0, 1, 3 and .* on rank 2\.") as caught:
        MMFullyShardedDataParallel(Net(5 if get_rank() == 2 else 4), device_mesh=(2, 2))
    assert caught.value.failed_ranks == (2,)


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
