"""The results of an evaluation: on rank 0, in the order of the data set, each exactly once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.dist import (
    PeerError,
    collect_results,
    collect_results_cpu,
    collect_results_gpu,
    get_rank,
    get_world_size,
)
from lockstep.testing import ranks, run_ranks

from .reference import assert_group_works


def on_rank_0(expected: Any) -> Any:
    """Return what `collect_results` returns on this rank, if it returns `expected` on rank 0."""
    return expected if get_rank() == 0 else None


def collect(parts: list[list[Any]], size: int, indices: list[Any] | None) -> list[Any] | None:
    """Collect this rank's part."""
    rank = get_rank()
    return collect_results(parts[rank], size, indices=indices and indices[rank])


def run_on(size: int, *arguments: Any) -> list[Any]:
    """Run `collect` on ranks, or, for size 0, without a group in this process."""
    return run_ranks(size, collect, *arguments) if size else [collect(*arguments)]


# --- in whatever way the results are spread


@given(st.data())
@settings(max_examples=30)
def test_without_indices_parts_are_interleaved_and_cut(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 4), label="ranks, 0 for no group")
    counts = data.draw(st.lists(st.integers(0, 5), min_size=max(size, 1), max_size=max(size, 1)))
    parts = [[None if place == 2 else (rank, place) for place in range(n)] for rank, n in enumerate(counts)]
    dealt = [part[place] for place in range(5) for part in parts if place < len(part)]
    num_samples = data.draw(st.integers(0, len(dealt)))
    collected = run_on(size, parts, num_samples, None)
    assert collected == [dealt[:num_samples]] + [None] * (len(parts) - 1)


@given(st.data())
@settings(max_examples=30)
def test_with_indices_each_sample_has_its_first_result(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 4), label="ranks, 0 for no group")
    num_samples = data.draw(st.integers(0, 8))
    padding = data.draw(st.lists(st.integers(0, num_samples - 1), max_size=3)) if num_samples else []
    order = data.draw(st.permutations(range(num_samples))) + padding
    cuts = sorted(data.draw(st.integers(0, len(order))) for _ in range(size - 1))
    indices = [order[first:last] for first, last in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    # A result knows its place, so that the first can be told from a duplicate.
    parts = [
        [None if index == 1 else (index, rank, place) for place, index in enumerate(part)]
        for rank, part in enumerate(indices)
    ]
    first: dict[int, Any] = {}
    for part, where in zip(parts, indices, strict=True):
        for result, index in zip(part, where, strict=True):
            first.setdefault(index, result)
    collected = run_on(size, parts, num_samples, indices)
    assert collected == [[first[index] for index in range(num_samples)]] + [None] * (len(parts) - 1)


# --- how it is called


@ranks(1, 2)
def test_older_names_do_the_same() -> None:
    rank, size = get_rank(), get_world_size()
    expected = on_rank_0(list(range(size)))
    assert collect_results_cpu([rank], size) == expected
    assert collect_results_cpu([rank], size, "no/such/folder") == expected
    assert collect_results_gpu([rank], size) == expected
    assert collect_results([rank], size, "cuda:0") == expected


@ranks(2)
def test_results_and_indices_may_be_tensors_arrays_and_tuples() -> None:
    indices = torch.tensor([1, 3]) if get_rank() else np.array([2, 0])
    collected = collect_results((torch.tensor([3, 7]) if get_rank() else (5, 1)), 4, indices=indices)
    assert collected == on_rank_0([1, 3, 5, 7])


def test_one_process_gets_its_own_results_back_as_they_are() -> None:
    result = torch.ones(3)
    collected = collect_results([result, None], 2)
    assert collected is not None
    assert collected[0] is result
    assert collect_results([], 0) == []


@ranks(3)
def test_large_tensors_arrive_in_memory_of_their_own_and_can_be_written() -> None:
    rank = get_rank()
    part = [{"mask": torch.full((256, 512), rank * 300 + place), "box": np.full(4, place)} for place in range(30)]
    collected = collect_results(part, 80)
    if collected is not None:
        assert len(collected) == 80
        for place, result in enumerate(collected):
            assert result["mask"].unique().tolist() == [place % 3 * 300 + place // 3]
            assert result["box"].tolist() == [place // 3] * 4
            result["mask"].fill_(-1)
            result["box"].fill(-1)
        assert len({result["mask"].data_ptr() for result in collected}) == 80
    assert part[0]["mask"][0, 0] == (-1 if rank == 0 else rank * 300)  # rank 0's own are handed back as they are


# --- errors reach every rank


@ranks(3)
def test_more_samples_than_results_is_an_error_everywhere_that_counts_them() -> None:
    part = ["result"] * get_rank()
    words = r"`size` must not exceed the results of all ranks, 3, but is 4 \(rank 0: 0, rank 1: 1, rank 2: 2\)"
    with pytest.raises(PeerError if get_rank() else ValueError, match=words):
        collect_results(part, 4)
    assert_group_works()


@pytest.mark.parametrize(
    ("indices", "size", "words"),
    [
        ([[0, 1], [3]], 6, "every sample must have a result, but 3 of 6 have none: 2, 4, 5$"),
        ([[0], [19]], 20, r"but 18 of 20 have none: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, \.\.\."),
        ([[0], [2, 1]], 2, "`indices` must be below `size`, 2, and not negative, but rank 1 has 2"),
        ([[0], [-1]], 2, "`indices` must be below `size`, 2, and not negative, but rank 1 has -1"),
        ([None, [0]], 1, "`indices` must be given on every rank or on none, but are missing on rank 0"),
        ([[0], None], 1, "`indices` must be given on every rank or on none, but are missing on rank 1"),
    ],
    ids=["missing", "many missing", "too large", "negative", "not on rank 0", "not on rank 1"],
)
@ranks(2)
def test_indices_that_do_not_fit_are_named_on_every_rank(indices: list[Any], size: int, words: str) -> None:
    mine = indices[get_rank()]
    with pytest.raises(PeerError if get_rank() else ValueError, match=words.replace("$", r"( \(seen on |$)")):
        collect_results(["result"] * len(mine or "x"), size, indices=mine)
    assert_group_works()


@pytest.mark.parametrize("size", [-1, 1.5, True, None])
@ranks(1, 2)
def test_what_is_no_size_is_refused_on_every_rank(size: Any) -> None:
    with pytest.raises(ValueError, match="`size` must be the number of samples, an int >= 0, but is"):
        collect_results([1], size)
    assert_group_works()


WRONG_PARTS: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "indices of another number": ([1, 2], [0], ValueError, "one sample for each of the 2 results, but has 1 entries"),
    "generator": (iter([1]), None, TypeError, "`results` must be a list, but is list_iterator"),
    "dict": ({5: 1}, None, TypeError, "`results` must be a list, but is dict"),
    "text": ("yes", None, TypeError, "`results` must be a list, but is str"),
    "indices by name": ([1], {0: 1}, TypeError, "`indices` must be a list, but is dict"),
    "indices of unknown number": ([1], iter([0]), TypeError, "`indices` must be a list, but is list_iterator"),
    "index that is no number": ([1], ["first"], TypeError, "`indices` must hold integers, but have 'first'"),
    "index between two": ([1], torch.tensor([0.5]), TypeError, "`indices` must hold integers, but have 0.5"),
    "mask of samples": ([1], np.array([True]), TypeError, "`indices` must hold integers, but have True"),
    "lambda": ([lambda: 0], None, TypeError, "must be picklable"),
}


@pytest.mark.parametrize("kind", WRONG_PARTS)
@ranks(3)
def test_a_part_that_one_rank_alone_can_see_is_wrong_is_an_error_on_every_rank(kind: str) -> None:
    results, indices, error, words = WRONG_PARTS[kind]
    if get_rank() == 1:
        with pytest.raises(error, match=words):
            collect_results(results, 3, indices=indices)
    else:
        with pytest.raises(PeerError, match=f"rank 1 of 3 could not take part: {error.__name__}: .*{words}") as caught:
            collect_results([1], 3, indices=None if indices is None else [0])
        assert caught.value.rank == 1
    assert_group_works()


class LoadsNowhere:
    """Arrives, but can't be put together."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@ranks(3)
def test_a_result_that_rank_0_cannot_load_is_an_error_on_every_rank() -> None:
    part = [LoadsNowhere() if get_rank() == 2 else "well"]
    with pytest.raises((ValueError, RuntimeError), match=r"invalid literal for int.*'no number'") as caught:
        collect_results(part, 3)
    assert get_rank() == 0 or (isinstance(caught.value, PeerError) and caught.value.rank == 0)
    assert_group_works()
