"""Arguments that no collective can take: one sentence each, on every rank, and nobody waits for a rank that refuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import new_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lockstep.dist import (
    all_gather,
    all_gather_tree,
    all_reduce,
    all_reduce_dict,
    all_reduce_params,
    all_reduce_tree,
    all_to_all,
    broadcast,
    broadcast_object,
    broadcast_tree,
    collect_results,
    gather,
    gather_object,
    get_dist_info,
    get_rank,
    get_world_size,
    init_local_group,
    reduce,
    reduce_scatter,
    scatter,
)
from lockstep.errors import PeerError
from lockstep.testing import ranks

from .reference import assert_group_works
from .strategies import NO_GROUP, run_on

LARGE = 5000  # elements: more than fits into a header


def odd_tensors() -> dict[str, tuple[Any, str]]:
    """Return tensors that have no plain memory, and what is said of each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized and strided nested tensors are on their way out of torch
        odd = {
            "nested": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"is nested .*unbind\(\)"),
            "jagged": (
                torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
                r"is nested .*unbind\(\)",
            ),
            "quantized": (
                torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
                r"is quantized, torch.quint8 .*dequantize\(\)",
            ),
            "sparse": (torch.eye(2).to_sparse(), r"must be dense, but is torch.sparse_coo .*to_dense\(\)"),
            "csr": (torch.eye(2).to_sparse_csr(), r"must be dense, but is torch.sparse_csr .*to_dense\(\)"),
        }
    odd["meta"] = (torch.ones(3, device="meta"), r"is on the meta device .*to_empty")
    odd["text"] = ("ab", "must be a tensor, but is str")
    return odd


def calls_on(data: Any) -> dict[str, Callable[[], object]]:
    """Return calls of every collective that takes tensors, with `data` in each place."""
    size = get_world_size()
    plain = torch.ones(2)
    return {
        "all_reduce": lambda: all_reduce(data),
        "reduce": lambda: reduce(data),
        "broadcast": lambda: broadcast(data),
        "all_gather": lambda: all_gather([plain] * size, data),
        "all_gather, list": lambda: all_gather([data] * size, plain),
        "gather": lambda: gather(data),
        "scatter": lambda: scatter(data, [plain] * size),
        "scatter, list": lambda: scatter(plain, [data] * size),
        "reduce_scatter": lambda: reduce_scatter(plain, [data] * size),
        "reduce_scatter, output": lambda: reduce_scatter(data, [plain] * size),
        "all_to_all": lambda: all_to_all([plain] * size, [data] * size),
        "all_reduce_params": lambda: all_reduce_params([data]),
        "all_reduce, sync_grads": lambda: all_reduce(data, sync_grads=True),
        "all_gather, sync_grads": lambda: all_gather(data, sync_grads=True),
    }


def refuse_everywhere(odd: dict[str, tuple[Any, str]]) -> None:
    for kind, (data, words) in odd.items():
        for name, call in calls_on(data).items():
            with pytest.raises((TypeError, PeerError)) as caught:
                call()
            # Only the rank that has a list can see what is in it.
            if isinstance(caught.value, TypeError):
                assert caught.match(words if kind != "text" else "must be a tensor"), (kind, name)
            else:
                assert name == "scatter, list"
                assert get_rank() > 0
        if kind != "text":
            for call in (lambda: all_reduce_tree({"x": data}), lambda: all_reduce_dict({"x": data})):  # noqa: B023
                with pytest.raises(TypeError, match=words):
                    call()
    assert_group_works()


def refuse_odd_tensors() -> None:
    refuse_everywhere(odd_tensors())


@pytest.mark.parametrize("size", [NO_GROUP, 1, 3])
def test_tensors_without_plain_memory_are_refused_in_one_sentence(size: int) -> None:
    run_on(size, refuse_odd_tensors)


@ranks(2)
def test_a_dtensor_is_refused_in_a_sentence_that_names_the_whole_and_the_part() -> None:
    mesh = init_device_mesh("cpu", (2,))
    data = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    refuse_everywhere(
        {"dtensor": (data, r"is a DTensor, of which every rank holds a part .*full_tensor\(\).*to_local\(\)")}
    )
    whole, part = data.full_tensor(), data.to_local()
    all_reduce(part)
    assert part.tolist() == [2.0, 4.0]
    assert torch.equal(torch.cat(all_gather(data.to_local())), torch.tensor([2.0, 4.0] * 2))
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0]


class Marked(Tensor):
    """A subclass that holds values as any tensor does."""


def refuse_expanded() -> None:
    rank, size = get_dist_info()
    for base in (torch.ones(1), torch.ones(1, 3)):
        data = base.expand(LARGE, *base.shape[1:])
        plain = data.contiguous()
        for name, call in {
            "data": lambda: all_reduce(data),  # noqa: B023
            "data ": lambda: reduce(data, size - 1),  # noqa: B023
            "data  ": lambda: broadcast(data),  # noqa: B023
            "tensor": lambda: scatter(data, [plain] * size if rank == 0 else None),  # noqa: B023
            "output": lambda: reduce_scatter(data, [plain] * size),  # noqa: B023
            r"tensor_list\[0\]": lambda: all_gather([data] * size, plain),  # noqa: B023
            r"output_tensor_list\[0\]": lambda: all_to_all([data] * size, [plain] * size),  # noqa: B023
            r"params\[0\]": lambda: all_reduce_params([data]),  # noqa: B023
        }.items():
            with pytest.raises(
                (ValueError, PeerError), match=rf"`{name.strip()}` must have memory for each .*contiguous"
            ):
                call()
        with pytest.raises(ValueError if rank == 0 else PeerError, match=r"`gather_list\[0\]` must have memory"):
            gather(plain, [data] * size if rank == 0 else None)
        assert_group_works()
        # What is only read may be expanded.
        assert torch.equal(all_gather(data)[-1], plain)
        output = torch.empty_like(plain)
        reduce_scatter(output, [data] * size)
        assert torch.equal(output, plain * size)
        assert torch.equal(all_reduce(data, sync_grads=True), plain * size)
    one = torch.ones(1).expand(1, 1)
    all_reduce(one)
    assert one.item() == size
    marked = torch.ones(2).as_subclass(Marked)
    all_reduce(marked)
    assert marked.tolist() == [size] * 2


@pytest.mark.parametrize("size", [NO_GROUP, 1, 3])
def test_expanded_tensors_are_refused_where_a_result_is_written(size: int) -> None:
    run_on(size, refuse_expanded)


def refuse_on_one_rank(group: Any, wrong: int) -> None:
    rank, size = get_dist_info(group)
    is_wrong = rank == wrong

    def refused(name: str) -> Any:
        if is_wrong:
            return pytest.raises(TypeError, match=f"`{name}` must be a tensor, .*but (is|they are) .*str")
        return pytest.raises(PeerError, match=f"rank {wrong} of {size} could not take part: TypeError: `{name}`")

    for numel in (2, LARGE):
        data = torch.ones(numel)
        bad: Any = "no tensor" if is_wrong else data
        room = [torch.empty(numel) for _ in range(size)]
        for call in (
            lambda: all_gather(bad, group),  # noqa: B023
            lambda: all_gather(room, bad, group),  # noqa: B023
            lambda: all_gather([bad] * size, data, group),  # noqa: B023
            lambda: all_gather(bad, group, sync_grads=True),  # noqa: B023
        ):
            with pytest.raises(TypeError if is_wrong else PeerError, match="TypeError" if not is_wrong else None):
                call()
        for dst in range(size):
            with refused("data"):
                gather(bad, dst, group)
            with refused("data"):
                gather(bad, room if rank == dst else None, dst, group)
            parts = [data] * size if rank == dst else None
            with refused("tensor"):
                scatter(bad, parts, dst, group)
        assert_group_works(group)


@ranks(3)
def test_what_one_rank_alone_hands_in_wrong_keeps_nobody_waiting() -> None:
    for wrong in range(3):
        refuse_on_one_rank(None, wrong)
    group = new_group([1, 2])
    if get_rank() > 0:
        refuse_on_one_rank(group, 0)
        refuse_on_one_rank(group, 1)


@ranks(2)
def test_ranks_and_sizes_may_be_integers_of_numpy() -> None:
    rank, last = get_rank(), np.int64(1)
    parts = gather(torch.tensor([rank]), last)
    assert [x.item() for x in parts] == ([0, 1] if rank == 1 else [])
    assert gather_object(rank, last) == ([0, 1] if rank == 1 else None)
    data = torch.tensor([rank])
    broadcast(data, np.int8(1))
    reduce(data, last)
    assert rank == 0 or data.item() == 2
    output = torch.empty(1)
    scatter(output, [torch.zeros(1), torch.ones(1)] if rank == 1 else None, last)
    assert output.item() == rank
    assert broadcast_object(rank, last) == broadcast_tree(rank, last) == 1
    assert collect_results([rank], np.int64(2)) == ([0, 1] if rank == 0 else None)
    for no_rank in (np.float64(0), np.bool_(False), torch.tensor(0)):
        with pytest.raises(TypeError, match="`dst` must be an int"):
            gather(data, dst=no_rank)
    for no_size in ("1", 1.0, True):
        with pytest.raises(TypeError, match="the size of a local group must be an int, but is"):
            init_local_group(no_size)


class NoTree:
    """Can't be walked."""

    def tree_children(self) -> dict[str, Any]:
        raise RuntimeError("the children are out")

    def tree_rebuild(self, children: dict[str, Any]) -> NoTree:
        return self


@ranks(2)
def test_a_tree_that_one_rank_alone_can_not_walk_keeps_nobody_waiting() -> None:
    is_wrong = get_rank() == 1
    endless: list[Any] = []
    endless.append(endless)
    for strange, error in ((endless, RecursionError), (NoTree(), RuntimeError), ("text", TypeError)):
        with pytest.raises(error if is_wrong else PeerError):
            all_reduce_tree({"a": strange if is_wrong else 1.0})
        with pytest.raises(error if is_wrong and error is TypeError else (TypeError, PeerError)):
            all_reduce_dict({"a": strange if is_wrong else 1.0})
    with pytest.raises(TypeError if is_wrong else PeerError, match="must be a dict, but is list"):
        all_reduce_dict([1.0] if is_wrong else {"a": 1.0})
    assert all_gather_tree(endless)[0][0][0] is not None
    assert_group_works()


@ranks(1, 2)
def test_arrays_of_any_byte_order_are_reduced_and_others_named() -> None:
    data = {"a": np.arange(3, dtype=">i4"), "b": np.array(2.0, dtype=">f8"), "c": np.float16(1.5)}
    reduced = all_reduce_tree(data)
    assert reduced["a"].tolist() == [0, get_world_size(), 2 * get_world_size()]
    assert reduced["b"].item() == 2.0 * get_world_size()
    assert reduced["c"] == 1.5 * get_world_size()
    for array in (np.array(["a"]), np.array([None], dtype=object), np.datetime64("2026-11-22"), np.longdouble(1)):
        with pytest.raises(TypeError, match=r"`x\[0\]` must be .* or a number, but is an array of"):
            all_reduce_tree({"x": [array]})
    assert all_gather_tree({"x": np.array(["a"])})[0]["x"].tolist() == ["a"]
    assert_group_works()


@ranks(2)
def test_params_are_tensors_each_of_which_is_reduced_once() -> None:
    for numel in (1, 2**19):
        shared = torch.ones(numel)
        all_reduce_params([shared, torch.ones(numel), shared])
        assert shared.unique().tolist() == [2.0]
    for strange in (None, "abc", torch.nn.Linear(1, 1), 3):
        with pytest.raises(TypeError, match=r"`params` must be tensors, but is .*parameters"):
            all_reduce_params(strange)
    both = {"a": torch.ones(2)}
    both["b"] = both["a"]
    assert all_reduce_dict(both)["b"].tolist() == [2.0, 2.0]
