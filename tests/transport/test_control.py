"""Every collective over gloo, and over a backend without it, which returns no `Work` for a synchronous call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as torch_dist

from lockstep.dist import (
    CollectiveMismatchError,
    PeerError,
    all_gather,
    all_gather_object,
    all_reduce,
    all_reduce_dict,
    all_to_all,
    broadcast,
    broadcast_object,
    gather,
    gather_object,
    get_rank,
    get_world_size,
    main_process_first,
    reduce,
    reduce_scatter,
    run_on_main,
    scatter,
    scatter_object_list,
)
from lockstep.dist.objects import start_gather_bytes
from lockstep.groups import resolve
from lockstep.testing import ranks
from lockstep.transport import control
from lockstep.transport.control import exchange, report_failure

from ..dist import backends  # noqa: F401 - registers `silent`

KINDS = pytest.mark.parametrize("backend", ["gloo", "silent"])
SIZES = pytest.mark.parametrize("numel", [0, 1, 50_000])


@SIZES
@KINDS
@ranks(1, 3)
def test_tensors_arrive(backend: str, numel: int) -> None:
    group, rank, size = torch_dist.new_group(backend=backend), get_rank(), get_world_size()
    sizes = [numel + number for number in range(size)]  # another one on each rank
    own = torch.full((sizes[rank],), float(rank))
    expected = [torch.full((sizes[number],), float(number)) for number in range(size)]
    for got in (all_gather(own, group), gather(own, size - 1, group)):
        assert got == [] or all(map(torch.equal, got, expected))
    filled = torch.empty(sizes[rank])
    scatter(filled, expected if rank == 0 else None, 0, group)
    assert torch.equal(filled, own)
    outputs = [torch.empty(numel) for _ in range(size)]
    all_to_all(outputs, [torch.full((numel,), 10.0 * rank + number) for number in range(size)], group)
    assert all(torch.equal(x, torch.full((numel,), 10.0 * number + rank)) for number, x in enumerate(outputs))


@pytest.mark.parametrize("async_op", [False, True])
@SIZES
@KINDS
@ranks(1, 2, 3)
def test_tensors_are_reduced_and_broadcast(backend: str, numel: int, async_op: bool) -> None:
    group, rank, size = torch_dist.new_group(backend=backend), get_rank(), get_world_size()
    total, output = sum(range(1, size + 1)), torch.empty(numel)
    data = [torch.full((numel,), 1.0 + rank) for _ in range(4)]
    handles = [
        all_reduce(data[0], "sum", group, async_op),
        reduce(data[1], size - 1, "sum", group, async_op),
        reduce_scatter(output, [data[2] + other for other in range(size)], "sum", group, async_op),
        broadcast(data[3], size - 1, group, async_op),
    ]
    for handle in handles:
        assert (handle is not None) == async_op
        assert handle is None or handle.wait()
    assert torch.equal(data[0], torch.full((numel,), float(total)))
    assert rank != size - 1 or torch.equal(data[1], data[0])
    assert torch.equal(output, torch.full((numel,), float(total + rank * size)))
    assert torch.equal(data[3], torch.full((numel,), float(size)))


@KINDS
@ranks(2)
def test_bits_are_reduced_into_one_rank_alone(backend: str) -> None:
    data = torch.tensor([1 << get_rank()])
    reduce(data, 0, "bor", torch_dist.new_group(backend=backend))
    assert data.item() == (3 if get_rank() == 0 else 2)


@SIZES
@KINDS
@ranks(1, 3)
def test_objects_arrive(backend: str, numel: int) -> None:
    group, rank, size = torch_dist.new_group(backend=backend), get_rank(), get_world_size()
    texts = [str(number) * numel for number in range(size)]
    own = {"text": texts[rank], "tensor": torch.full((numel,), rank)}
    later = start_gather_bytes(texts[rank].encode(), 0, group)
    for got in (all_gather_object(own, group), gather_object(own, 0, group) or []):
        assert [one["text"] for one in got] in ([], texts)
        assert all(torch.equal(one["tensor"], torch.full((numel,), number)) for number, one in enumerate(got))
    assert later.wait() == ([text.encode() for text in texts] if rank == 0 else None)
    assert broadcast_object(own, size - 1, group)["text"] == texts[-1]
    places = [None]
    scatter_object_list(places, texts if rank == 0 else None, 0, group)
    assert places == [texts[rank]]
    assert run_on_main(lambda: texts[0], group) == texts[0]
    assert all_reduce_dict({"a": 1.0, "b": torch.ones(numel)}, "sum", group)["a"] == size


@KINDS
@ranks(2)
def test_what_one_rank_refuses_is_an_error_on_every_rank(backend: str) -> None:
    group = torch_dist.new_group(backend=backend)
    with pytest.raises(TypeError if get_rank() == 1 else PeerError):
        all_gather(torch.ones(2) if get_rank() == 0 else "no tensor", group)
    with pytest.raises(OSError if get_rank() == 0 else PeerError), main_process_first(group):
        raise OSError("no space left")
    assert all_gather_object(get_rank(), group) == [0, 1]


def refuse() -> None:
    raise OSError("no space left")


@pytest.mark.parametrize("numel", [0, 1, 2_000])
@ranks(1, 2, 3, 5, 11)
def test_bytes_go_up_and_down_a_tree(numel: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "_RING_RANKS", 1)  # eleven ranks are enough without it
        rank, size = get_rank(), get_world_size()
        alike, different = [[f"{number}" * numel for number in of] for of in ([7] * size, range(size))]
        for texts in (alike, different, alike):
            with torch.device("meta"), torch.inference_mode():  # where new tensors lie, and how they are made
                assert all_gather_object(texts[rank]) == texts
        error = OSError if rank == size - 1 else PeerError
        with pytest.raises(error, match="no space left"), report_failure(resolve(), OSError):
            refuse() if rank == size - 1 else exchange(resolve())
        if size > 1:
            with pytest.raises(CollectiveMismatchError, match=f"rank {size - 1}: broadcast"):
                broadcast_object(0) if rank == size - 1 else all_gather_object(0)
            assert all_gather_object(rank) == list(range(size))


@pytest.mark.parametrize("dst", [0, 3, 10])
@ranks(11)
def test_sizes_go_to_the_rank_alone_that_gathers(dst: int) -> None:
    rank, texts = get_rank(), [str(number) * number for number in range(11)]
    assert gather_object(texts[rank], dst) == (texts if rank == dst else None)
    many = [torch.full((2**14,), float(number)) for number in range(40)]  # their sizes need more than a slot
    gathered = gather_object(many if rank == 5 else rank, dst)
    assert gathered is None or [x for x in gathered if isinstance(x, int)] == [x for x in range(11) if x != 5]
    with pytest.raises(TypeError if rank == 2 else PeerError):
        gather_object(refuse if rank != 2 else (x for x in texts), dst)
    with pytest.raises(CollectiveMismatchError):
        gather_object(texts[rank], dst if rank != 4 else 1)
    assert all_gather_object(rank) == list(range(11))


@pytest.mark.parametrize("odd", [[], [0], [7], [0, 7], [3, 9], [0, *range(2, 11)]])
@ranks(2, 11)
def test_what_many_ranks_give_alike_is_sent_to_none_again(odd: list[int]) -> None:
    received: list[int] = []

    def counted(one: Callable[..., object]) -> Callable[..., object]:
        def run(data: torch.Tensor, *arguments: object, **options: object) -> object:
            received.append(data.nbytes)
            return one(data, *arguments, **options)

        return run

    rank, size = get_rank(), get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("recv", "broadcast"):
            patch.setattr(torch_dist, name, counted(getattr(torch_dist, name)))
        every = exchange(resolve(), bytes([rank in odd]))
    assert every == [bytes([other in odd]) for other in range(size)]
    if size == 2:
        assert not received  # one call of gloo
    else:
        behind = {0: [1, 2, 4, 3], 2: [1], 4: [1, 2], 6: [1], 8: [1, 1]}.get(rank, [])
        assert received == [256 * count for count in behind] + [1024]
