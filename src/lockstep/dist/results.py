"""Collecting the results of an evaluation on rank 0, in the order of the dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from lockstep.dist.consistency import check_call
from lockstep.dist.pickling import gather_pickled
from lockstep.dist.validate import NOT_GIVEN, either, is_int
from lockstep.groups import Comm, resolve
from lockstep.transport.control import exchange, report_failure

_Part: TypeAlias = tuple[list[Any], list[int] | None]

T = TypeVar("T")

_ABSENT: Final = object()


def collect_results(
    results: Sequence[T],
    size: int,
    device: str = "cpu",
    tmpdir: str | Path | None = None,
    indices: Sequence[int] | None = None,
) -> list[T] | None:
    """Return all ranks' results in the order of the dataset on rank 0, None elsewhere.

    Args:
        results: this rank's part; any objects, None included. Parts may be uneven or empty.
        size: number of samples in the dataset, the same on every rank.
        device: accepted for compatibility; it has no effect, because the group determines the device.
        tmpdir: accepted for compatibility, like `device`; the hosts need no shared disk.
        indices: for each result, the index of its sample in the dataset.

    Without `indices` the parts are assumed to be interleaved as samplers assign them (rank 0's first, rank 1's first,
    ...), and results beyond `size` are dropped as padding. With `indices`, results are ordered by index; if padding
    gives one sample several results, the first one in rank order is kept.

    **Collective**: every rank of the default group.

    **Raises**: on one rank, with PeerError on the others, which has the same words: ValueError on rank 0 if there are
    fewer results than `size`, or if indices are missing or out of range, naming them; TypeError if a result can't be
    pickled, `results` or `indices` are no list or the like, or an index is no integer; ValueError if the numbers of
    results and indices differ, DistError if rank 0 can't load what it received.

    **Cost**: the pickled bytes of all parts but rank 0's, sent to rank 0 alone; large tensors and arrays from their own
    memory. Rank 0 gets its own results back without a copy.

    **Example (2 ranks)**::

        >>> from lockstep.dist import collect_results, get_rank
        >>> part = ["a", "c"] if get_rank() == 0 else ["b", "d (padding)"]
        >>> collect_results(part, size=3) == (["a", "b", "c"] if get_rank() == 0 else None)
        True
    """
    comm = resolve()
    if not is_int(size) or size < 0:
        raise ValueError(f"`size` must be the number of samples, an int >= 0, but is {size!r}")
    size = int(size)
    check_call("collect_results", comm, size, compares=False)
    with report_failure(comm):
        part = _own_part(results, indices, comm)
    parts = gather_pickled(part, 0, comm, copy_own=False)
    with report_failure(comm):
        ordered = None if parts is None else _in_order(list(parts), size)
    exchange(comm)
    return ordered


def collect_results_cpu(
    results: Sequence[T] = NOT_GIVEN,
    size: int = NOT_GIVEN,
    tmpdir: str | Path | None = None,
    *,
    result_part: Sequence[T] = NOT_GIVEN,
) -> list[T] | None:
    """Return all ranks' results on rank 0: `collect_results` under an older name.

    **Collective**: every rank of the default group.

    **Example (2 ranks)**::

        >>> from lockstep.dist import collect_results_cpu, get_rank
        >>> collect_results_cpu([get_rank()], size=2) == ([0, 1] if get_rank() == 0 else None)
        True
    """
    return collect_results(either("results", results, "result_part", result_part), size, "cpu", tmpdir)


def collect_results_gpu(
    results: Sequence[T] = NOT_GIVEN, size: int = NOT_GIVEN, *, result_part: Sequence[T] = NOT_GIVEN
) -> list[T] | None:
    """Return all ranks' results on rank 0: `collect_results` under an older name.

    **Collective**: every rank of the default group.

    **Example (2 ranks)**::

        >>> from lockstep.dist import collect_results_gpu, get_rank
        >>> collect_results_gpu([get_rank()], size=2) == ([0, 1] if get_rank() == 0 else None)
        True
    """
    return collect_results(either("results", results, "result_part", result_part), size, "gpu")


def _own_part(results: Sequence[Any], indices: Sequence[int] | None, comm: Comm) -> _Part:
    for name, values in (("results", results), ("indices", () if indices is None else indices)):
        if not hasattr(values, "__len__") or isinstance(values, str | bytes | Mapping | Set):
            raise TypeError(f"`{name}` must be a list, but is {type(values).__name__} ({comm.this_rank})")
    if indices is None:
        return list(results), None
    if len(indices) != len(results):
        raise ValueError(
            f"`indices` must name one sample for each of the {len(results)} results, but has {len(indices)} entries "
            f"({comm.this_rank})"
        )
    numbers = [index.item() if hasattr(index, "item") else index for index in indices]  # of tensors and numpy
    for number in numbers:
        if not is_int(number):
            raise TypeError(f"`indices` must hold integers, but have {number!r} ({comm.this_rank})")
    return list(results), numbers


def _in_order(parts: list[_Part], size: int) -> list[Any]:
    without = [str(rank) for rank, (_, indices) in enumerate(parts) if indices is None]
    if not without:
        return _by_index(parts, size)
    if len(without) < len(parts):
        raise ValueError(
            f"`indices` must be given on every rank or on none, but are missing on rank {', '.join(without)}"
        )
    return _interleaved([part for part, _ in parts], size)


def _interleaved(parts: list[list[Any]], size: int) -> list[Any]:
    interleaved = chain.from_iterable(zip_longest(*parts, fillvalue=_ABSENT))
    ordered = list(islice((result for result in interleaved if result is not _ABSENT), size))
    if len(ordered) < size:
        counts = ", ".join(f"rank {rank}: {len(part)}" for rank, part in enumerate(parts))
        raise ValueError(f"`size` must not exceed the results of all ranks, {len(ordered)}, but is {size} ({counts})")
    return ordered


def _by_index(parts: list[_Part], size: int) -> list[Any]:
    ordered: list[Any] = [_ABSENT] * size
    for rank, (part, indices) in enumerate(parts):
        for result, index in zip(part, indices or [], strict=True):
            if not 0 <= index < size:
                raise ValueError(
                    f"`indices` must be below `size`, {size}, and not negative, but rank {rank} has {index}"
                )
            if ordered[index] is _ABSENT:
                ordered[index] = result
    missing = [index for index, result in enumerate(ordered) if result is _ABSENT]
    if missing:
        shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise ValueError(f"every sample must have a result, but {len(missing)} of {size} have none: {shown}")
    return ordered
