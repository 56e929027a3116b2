"""Either transport carries every collective: the fast one can be deleted without a change of any result."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

from lockstep.dist import (
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
from lockstep.dist.objects import start_gather_object
from lockstep.groups import resolve
from lockstep.testing import ranks
from lockstep.transport import pairs
from lockstep.transport.backend import _ALL_GATHER_SINGLE, Transport
from lockstep.transport.pairs import PairwiseCpu, transport_of


class SilentTransport(Transport):
    """The transport of a group whose backend returns no `Work` for a synchronous call, as NCCL and XCCL do."""


KINDS = pytest.mark.parametrize("kind", [PairwiseCpu, Transport, SilentTransport])
SIZES = pytest.mark.parametrize("numel", [0, 1, 50_000])


class SilentGroup(torch_dist.ProcessGroup):
    """gloo, but a call with ``asyncOp=False`` is complete when it returns, and returns None."""

    def __init__(self, store: torch_dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = torch_dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _forward(name: str) -> None:
    def call(self: SilentGroup, *arguments: Any) -> Any:
        work = getattr(self.gloo, "_allgather_base" if name == _ALL_GATHER_SINGLE else name)(*arguments)
        if all(getattr(argument, "asyncOp", True) for argument in arguments):
            return work
        work.wait()
        return None

    setattr(SilentGroup, name, call)


for _name in (
    *("allgather", "allreduce", "alltoall_base", "barrier", "broadcast", "gather", "recv", "reduce", "reduce_scatter"),
    *("scatter", "send", _ALL_GATHER_SINGLE),
):
    _forward(_name)
torch_dist.Backend.register_backend("silent", SilentGroup, devices=["cpu"])


def group_with(kind: type[Transport]) -> torch_dist.ProcessGroup:
    """Return a group of all ranks that the given transport serves."""
    group = torch_dist.new_group(backend="silent" if kind is SilentTransport else None)
    pairs._transports[group] = kind(resolve(group))
    return group


@ranks(2)
def test_the_cpu_is_served_from_rank_to_rank() -> None:
    assert type(transport_of(resolve())) is PairwiseCpu
    assert transport_of(resolve()) is transport_of(resolve())


@SIZES
@KINDS
@ranks(1, 3)
def test_tensors_arrive(kind: type[Transport], numel: int) -> None:
    group, rank, size = group_with(kind), get_rank(), get_world_size()
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
def test_tensors_are_reduced_and_broadcast(kind: type[Transport], numel: int, async_op: bool) -> None:
    group, rank, size = group_with(kind), get_rank(), get_world_size()
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
def test_bits_are_reduced_into_one_rank_alone(kind: type[Transport]) -> None:
    data = torch.tensor([1 << get_rank()])
    reduce(data, 0, "bor", group_with(kind))
    assert data.item() == (3 if get_rank() == 0 else 2)


@SIZES
@KINDS
@ranks(1, 3)
def test_objects_arrive(kind: type[Transport], numel: int) -> None:
    group, rank, size = group_with(kind), get_rank(), get_world_size()
    texts = [str(number) * numel for number in range(size)]
    own = {"text": texts[rank], "tensor": torch.full((numel,), rank)}
    later = start_gather_object(own, 0, group)
    for got in (all_gather_object(own, group), gather_object(own, 0, group) or [], later.wait() or []):
        assert [one["text"] for one in got] in ([], texts)
        assert all(torch.equal(one["tensor"], torch.full((numel,), number)) for number, one in enumerate(got))
    assert broadcast_object(own, size - 1, group)["text"] == texts[-1]
    places = [None]
    scatter_object_list(places, texts if rank == 0 else None, 0, group)
    assert places == [texts[rank]]
    assert run_on_main(lambda: texts[0], group) == texts[0]
    assert all_reduce_dict({"a": 1.0, "b": torch.ones(numel)}, "sum", group)["a"] == size


@KINDS
@ranks(2)
def test_what_one_rank_refuses_is_an_error_on_every_rank(kind: type[Transport]) -> None:
    group = group_with(kind)
    with pytest.raises(TypeError if get_rank() == 1 else PeerError):
        all_gather(torch.ones(2) if get_rank() == 0 else "no tensor", group)
    with pytest.raises(OSError if get_rank() == 0 else PeerError), main_process_first(group):
        raise OSError("no space left")
    assert all_gather_object(get_rank(), group) == [0, 1]
