"""Errors and arguments that can't be shown: the other ranks learn of them all the same, and nobody waits."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lockstep.checkpoint.together import on_all, run_then_complete
from lockstep.dist import (
    PeerError,
    all_gather,
    all_gather_object,
    broadcast_object,
    collect_results,
    gather,
    gather_object,
    get_rank,
    main_process_first,
    run_on_main,
    scatter_object_list,
)
from lockstep.errors import DistError, error_in_words, message_of, with_causes
from lockstep.testing import ranks


class MuteError(Exception):
    """Raises in everything that could show it, or send it to another process."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__

    def __reduce__(self) -> Any:
        raise MuteError


class Exits:
    """Raises what is no `Exception` where it is to be sent."""

    def __reduce__(self) -> Any:
        raise SystemExit(3)


class Unloadable:
    def __reduce__(self) -> Any:
        return refuse, ()


def refuse() -> None:
    raise MuteError


def in_block(kind: Callable[[], Any]) -> None:
    with kind():
        if get_rank() == 0:
            refuse()


class Broken(torch.Tensor):
    """Can't be copied, as where a device has no memory left."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            raise MuteError
        return super().__torch_function__(func, types, args, kwargs or {})


def broken(rank: int) -> torch.Tensor:
    """Return a tensor, which can't be sent by one rank."""
    return torch.ones(1).as_subclass(Broken) if get_rank() == rank else torch.ones(1)


# Calls in which rank 0 fails, and the type of its error.
ON_RANK_0: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "run_on_main": (lambda: run_on_main(refuse), MuteError),
    "run_on_main, result": (lambda: run_on_main(MuteError), TypeError),
    "main_process_first": (lambda: in_block(main_process_first), MuteError),
    "all_gather_object": (lambda: all_gather_object(MuteError() if get_rank() == 0 else 1), TypeError),
    "all_gather_object, exits": (
        lambda: all_gather_object(Exits() if get_rank() == 0 else 1),
        TypeError,
    ),
    "gather_object": (lambda: gather_object(MuteError() if get_rank() == 0 else 1, 1), TypeError),
    "broadcast_object": (lambda: broadcast_object(MuteError(), 0), TypeError),
    "scatter_object_list": (lambda: scatter_object_list([None], [MuteError()] * 2), TypeError),
    "collect_results": (lambda: collect_results([Unloadable()], 2), DistError),
    "all_gather": (lambda: all_gather(broken(0)), MuteError),
    "gather": (lambda: gather(broken(0), 1), MuteError),
}


@pytest.mark.parametrize("call", ON_RANK_0)
@ranks(2)
def test_the_other_rank_learns_of_it_and_the_group_can_be_used_further(call: str) -> None:
    fails, kind = ON_RANK_0[call]
    with pytest.raises(kind if get_rank() == 0 else PeerError) as caught:
        fails()
    if get_rank() == 1:
        assert "rank 0 of 2 could not take part: " in str(caught.value)
        assert kind.__name__ in str(caught.value)
        assert kind is not MuteError or "RuntimeError in __str__; raised at test_odd_errors.py:" in str(caught.value)
    assert all_gather_object(get_rank()) == [0, 1]


@ranks(2)
def test_what_cannot_be_loaded_concerns_the_receiver_alone() -> None:
    if get_rank() == 0:
        assert isinstance(broadcast_object(Unloadable(), 0), Unloadable)
    else:
        with pytest.raises(DistError, match=r"but is not: MuteError: \(its message can't be shown: "):
            broadcast_object(None, 0)
    assert all_gather_object(get_rank()) == [0, 1]


@ranks(2)
def test_a_step_of_a_checkpoint_fails_on_all_ranks() -> None:
    with pytest.raises(RuntimeError, match=r"reading: rank 1: MuteError: \(its message can't be shown"):
        on_all("reading", refuse if get_rank() == 1 else partial(int))


@ranks(2)
def test_an_error_of_the_operating_system_keeps_its_class_and_file_on_all_ranks() -> None:
    for kind, given in ((PermissionError, (errno.EACCES, "no", "/a")), (OSError, ("gone",))):
        with pytest.raises(kind, match=r"reading: rank 1: (no|gone)") as caught:
            on_all("reading", partial(raise_, kind(*given)) if get_rank() == 1 else int)
        assert caught.value.filename == ("/a" if len(given) > 1 else None)
        assert caught.value.errno == (errno.EACCES if len(given) > 1 else None)


@ranks(2)
def test_an_interrupt_of_one_rank_in_a_step_leaves_none_waiting() -> None:
    step = partial(raise_, KeyboardInterrupt()) if get_rank() == 1 else partial(int)
    for run in (on_all, partial(run_then_complete, on_main=list)):
        with pytest.raises(KeyboardInterrupt if get_rank() == 1 else DistError, match=r"^$|rank 1: KeyboardInterrupt"):
            run("reading", step)
    assert all_gather_object(get_rank()) == [0, 1]


def raise_(error: BaseException) -> None:
    raise error


def test_words_for_an_error() -> None:
    with pytest.raises(MuteError) as caught:
        refuse()
    shown = "MuteError: (its message can't be shown: RuntimeError in __str__; raised at test_odd_errors.py:"
    assert error_in_words(caught.value).startswith(shown)
    assert message_of(MuteError()) == "(its message can't be shown: RuntimeError in __str__)"
    assert message_of(KeyError(MuteError())) == "(its message can't be shown: RuntimeError in __str__)"
    assert len(message_of(ValueError("x" * 10**8))) < 10_100


def test_an_error_that_causes_itself_is_seen_once() -> None:
    error = ValueError("round")
    error.__cause__ = error
    assert list(with_causes(error)) == [error]
