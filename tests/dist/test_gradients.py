"""Gradients that flow back over the ranks: against one process that computes every rank's part itself."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn
from torch.distributed import new_group
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lockstep.dist import (
    ReduceOp,
    all_gather,
    all_reduce,
    all_to_all,
    check_collectives,
    get_dist_info,
    get_rank,
    get_world_size,
    reduce_scatter,
)
from lockstep.errors import CollectiveMismatchError, PeerError
from lockstep.groups import GroupLike
from lockstep.testing import ranks

from .reference import assert_group_works
from .strategies import NO_GROUP, run_on

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def drawn(seed: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def loss_of(rank: int, received: Sequence[Tensor]) -> Tensor:
    """Return a loss that differs from rank to rank, and is not linear in what the rank received."""
    return sum(((x * (rank + 1 + place)) ** 2).abs().sum() for place, x in enumerate(received))  # type: ignore[return-value]


# Each collective with sync_grads on this rank, and what every rank would receive, computed from the inputs of all.


def gathers(own: list[Tensor], group: GroupLike) -> list[Tensor]:
    return all_gather(own[0], group, sync_grads=True)


def gathered(inputs: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[x[0] for x in inputs]] * len(inputs)


def sums(own: list[Tensor], group: GroupLike) -> list[Tensor]:
    return [all_reduce(own[1], group=group, sync_grads=True)]


def summed(inputs: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[sum(x[1] for x in inputs)]] * len(inputs)  # type: ignore[list-item]


def averages(own: list[Tensor], group: GroupLike) -> list[Tensor]:
    return [all_reduce(own[1], ReduceOp.AVG, group, sync_grads=True)]


def averaged(inputs: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[sum(x[1] for x in inputs) / len(inputs)]] * len(inputs)


def scatters(own: list[Tensor], group: GroupLike) -> list[Tensor]:
    rank, size = get_dist_info(group)
    entries = [own[1][r : 2 * r + 1] for r in range(size)]  # of r + 1 rows
    outputs = [torch.empty_like(entries[rank], requires_grad=False) for _ in range(2)]
    assert reduce_scatter(outputs[0], entries, "sum", group, sync_grads=True) is outputs[0]
    even = [own[1] * (r + 1) for r in range(size)]
    mean = reduce_scatter(torch.empty_like(own[1], requires_grad=False), even, "mean", group, sync_grads=True)
    return [outputs[0], mean]


def scattered(inputs: list[list[Tensor]]) -> list[list[Tensor]]:
    total: Tensor = sum(x[1] for x in inputs)  # type: ignore[assignment]
    return [[total[r : 2 * r + 1], total * (r + 1) / len(inputs)] for r in range(len(inputs))]


def exchanges(own: list[Tensor], group: GroupLike) -> list[Tensor]:
    rank, size = get_dist_info(group)
    outputs = [torch.empty((r + rank + 1, 3), dtype=own[1].dtype) for r in range(size)]
    return all_to_all(outputs, [own[1][: r + rank + 1] for r in range(size)], group, sync_grads=True)


def exchanged(inputs: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[inputs[a][1][: a + b + 1] for a in range(len(inputs))] for b in range(len(inputs))]


CASES: dict[str, tuple[Callable[..., list[Tensor]], Callable[..., list[list[Tensor]]]]] = {
    "all_gather": (gathers, gathered),
    "all_reduce, sum": (sums, summed),
    "all_reduce, mean": (averages, averaged),
    "reduce_scatter": (scatters, scattered),
    "all_to_all": (exchanges, exchanged),
}


def check_against_one_process(group: GroupLike = None) -> None:
    """Compare gradients, and gradients of gradients, with those of the sum of all ranks' losses in one process."""
    rank, size = get_dist_info(group)
    for number, (name, (collective, reference)) in enumerate(CASES.items()):
        for dtype in FLOATS:
            # The first differs in shape from rank to rank; the second is large enough for all slices.
            shapes = [[(2 + r, 3), (2 * size, 3)] for r in range(size)]
            leaves = [
                [drawn(10 * number + r, shape, dtype).requires_grad_() for shape in shapes[r]] for r in range(size)
            ]
            inputs = [[x * 1 for x in of_rank] for of_rank in leaves]
            losses = [loss_of(r, received) for r, received in enumerate(reference(inputs))]
            flat = [x for of_rank in inputs for x in of_rank]
            gradients = torch.autograd.grad(sum(losses), flat, create_graph=True, allow_unused=True)  # type: ignore[arg-type]
            second = torch.autograd.grad(
                sum((g.abs() ** 2).sum() for g in gradients if g is not None), flat, allow_unused=True
            )

            own = [x.detach().clone().requires_grad_() for x in leaves[rank]]
            received = collective(own, group)
            assert all(x.requires_grad for x in received)
            for x, wanted in zip(received, reference(inputs)[rank], strict=True):
                assert_close(x, wanted, name)
            mine = torch.autograd.grad(loss_of(rank, received), own, create_graph=True, allow_unused=True)
            for x, wanted in zip(mine, gradients[2 * rank : 2 * rank + 2], strict=True):
                assert_close(x, wanted, name)
            mine = torch.autograd.grad(sum((g.abs() ** 2).sum() for g in mine if g is not None), own, allow_unused=True)
            if dtype.itemsize > 2:  # squares of squares leave float16
                for x, wanted in zip(mine, second[2 * rank : 2 * rank + 2], strict=True):
                    assert_close(x, wanted, name)


def assert_close(actual: Tensor | None, expected: Tensor | None, name: str) -> None:
    assert (actual is None) == (expected is None), name
    if actual is not None and expected is not None:
        actual, expected = actual.detach(), expected.detach()
        tolerance = 64 * torch.finfo(actual.dtype).eps
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("size", [NO_GROUP, 1, 2, 3])
def test_gradients_are_those_of_the_sum_of_all_losses_in_one_process(size: int) -> None:
    run_on(size, check_against_one_process)


@ranks(3)
def test_gradients_flow_within_a_subgroup_without_rank_0_and_a_mesh() -> None:
    group = new_group([1, 2])
    if get_rank() > 0:
        check_against_one_process(group)
    check_against_one_process(init_device_mesh("cpu", (3,)))


class Encoder(nn.Module):
    """Two towers, as CLIP has."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1), self.scale


def contrastive_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits = scale * image @ text.T
    pairs = torch.arange(len(image))
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def check_contrastive_loss(bounds: list[int]) -> None:
    """Compare DDP over parts of a batch of 8, uneven ones too, with one process that has all of it."""
    torch.manual_seed(0)
    images, texts = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
    whole = Encoder().double()
    model = Encoder().double()
    model.load_state_dict(whole.state_dict())
    contrastive_loss(*whole(images, texts)).backward()

    own = slice(*bounds[get_rank() : get_rank() + 2])
    wrapped = DistributedDataParallel(model)
    image, text, scale = wrapped(images[own], texts[own])
    all_images, all_texts = (torch.cat(all_gather(x, sync_grads=True)) for x in (image, text))
    contrastive_loss(all_images, all_texts, scale).backward()
    for (name, mine), wanted in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, wanted.grad, rtol=1e-6, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}"
        )


@ranks(2, 4)
def test_ddp_over_gathered_features_trains_as_one_process_with_the_whole_batch() -> None:
    size = get_world_size()
    check_contrastive_loss([8 * r // size for r in range(size + 1)])
    check_contrastive_loss([*range(size), 8])  # one pair on each rank but the last


@ranks(2)
def test_every_rank_takes_part_in_the_backward_where_one_rank_alone_wants_gradients() -> None:
    weight = torch.ones(2, requires_grad=get_rank() == 1)
    parts = all_gather(weight, sync_grads=True)
    total = all_reduce(weight, sync_grads=True)
    assert all(x.requires_grad for x in (*parts, total))
    (parts[1].sum() * 3 + total.sum()).backward()
    if get_rank() == 1:
        assert weight.grad is not None
        assert weight.grad.tolist() == [8.0, 8.0]


@ranks(2)
def test_without_a_tensor_that_requires_grad_or_under_no_grad_there_is_no_graph() -> None:
    data = torch.arange(2.0) + get_rank()
    assert not all_reduce(data, sync_grads=True).requires_grad
    assert data.tolist() == [get_rank(), 1.0 + get_rank()]
    with torch.no_grad():
        total = all_reduce(data.requires_grad_(), sync_grads=True)
    assert total.tolist() == [1.0, 3.0]
    assert not total.requires_grad
    with torch.set_grad_enabled(get_rank() == 0):  # as no rank needs a graph
        labels = all_gather(torch.tensor([get_rank()]), sync_grads=True)
    assert [x.item() for x in labels] == [0, 1]


def refuse_wrong_calls(group: GroupLike = None) -> None:
    rank, size = get_dist_info(group)
    data = torch.ones(2, requires_grad=True)
    entries = [data] * size
    for op in ("max", "product", ReduceOp.MIN):
        with pytest.raises(ValueError, match=rf"`op` must be sum or mean with sync_grads, but is .* \(rank {rank}"):
            all_reduce(data, op, sync_grads=True)
        with pytest.raises(ValueError, match="`op` must be sum or mean with sync_grads"):
            reduce_scatter(torch.ones(2), entries, op, sync_grads=True)
    for call in (
        lambda: all_reduce(data, async_op=True, sync_grads=True),
        lambda: reduce_scatter(torch.ones(2), entries, async_op=True, sync_grads=True),
        lambda: all_to_all([torch.ones(2)] * size, entries, async_op=True, sync_grads=True),
    ):
        with pytest.raises(TypeError, match="`async_op` must be False with sync_grads, but is True"):
            call()
    for call in (
        lambda: reduce_scatter(data, entries, sync_grads=True),
        lambda: all_to_all(entries, entries, sync_grads=True),
    ):
        with pytest.raises(ValueError, match=r"must not require grad with sync_grads, .*\. Hand in torch.empty_like"):
            call()
    with pytest.raises(TypeError, match="`data` must be a tensor, but is list"):
        all_gather([torch.ones(2)] * size, data, sync_grads=True)
    with pytest.raises(TypeError, match=r"must have a dtype that can be reduced, but has torch.float8_e5m2"):
        all_gather(torch.zeros(2).to(torch.float8_e5m2).requires_grad_(), sync_grads=True)
    assert_group_works()


@pytest.mark.parametrize("size", [NO_GROUP, 1, 3])
def test_wrong_calls_are_refused_on_every_rank_and_the_group_works_on(size: int) -> None:
    run_on(size, refuse_wrong_calls)


@ranks(2)
def test_what_one_rank_alone_does_wrong_raises_on_all() -> None:
    is_wrong = get_rank() == 1
    data = torch.ones(2, requires_grad=True)
    for call in (
        lambda: all_reduce("no tensor" if is_wrong else data, sync_grads=True),
        lambda: all_reduce(data, "max" if is_wrong else "sum", sync_grads=True),
        lambda: all_gather(None if is_wrong else data, data if is_wrong else None, sync_grads=True),
        lambda: reduce_scatter(torch.ones(3 if is_wrong else 2), [data, data], sync_grads=True),
        lambda: all_to_all([torch.ones(2)] * (1 if is_wrong else 2), [data, data], sync_grads=True),
    ):
        with pytest.raises((TypeError, ValueError) if is_wrong else PeerError):
            call()
    with pytest.raises(CollectiveMismatchError, match=r"rank 1: all_reduce\(sync_grads, float32\[3\], sum\) at .*:\d+"):
        all_reduce(torch.ones(3 if is_wrong else 2, requires_grad=True), sync_grads=True)
    with (
        torch.set_grad_enabled(not is_wrong),
        pytest.raises(
            CollectiveMismatchError, match=r"rank 1: all_gather\(sync_grads, torch.float32, under no_grad\) at"
        ),
    ):
        all_gather(data, sync_grads=True)
    assert_group_works()


@ranks(2)
def test_calls_are_compared_in_forward_and_backward_where_that_is_asked_for() -> None:
    check_collectives("always")
    try:
        check_against_one_process()
    finally:
        check_collectives("off")


@ranks(2)
def test_tensors_that_were_filled_in_a_graph_are_freed() -> None:
    data = torch.ones(3, requires_grad=True)
    filled = [torch.empty(3) for _ in range(2)]
    all_to_all(filled, [data, data], sync_grads=True)
    alive = [weakref.ref(x) for x in filled]
    del filled
    assert [x() for x in alive] == [None, None]


@ranks(2)
def test_a_handle_asked_for_on_one_rank_is_an_error_on_all() -> None:
    data = torch.ones(3, requires_grad=True)
    if get_rank() == 0:
        with pytest.raises(TypeError, match="`async_op` must be False with sync_grads"):
            all_reduce(data, sync_grads=True, async_op=True)
    else:
        with pytest.raises(PeerError, match="rank 0 of 2 could not take part"):
            all_reduce(data, sync_grads=True)
    assert_group_works()


@ranks(2)
def test_tensors_that_are_alike_need_no_header():
    weight = torch.full((2,), float(get_rank()), requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(sys.modules[all_gather.__module__], "_exchange_headers")
        parts = all_gather(weight, sync_grads=True, uneven=False)
    assert [part.tolist() for part in parts] == [[0.0, 0.0], [1.0, 1.0]]
    (parts[0].sum() + 2 * parts[1].sum()).backward()
    assert weight.grad.tolist() == ([2.0, 2.0], [4.0, 4.0])[get_rank()]
