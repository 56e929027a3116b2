"""Errors as values: sent to another process, they lose nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from importlib.machinery import ModuleSpec

import pytest

from lockstep.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistError,
    DivergenceError,
    LaunchError,
    PeerError,
    Preempted,
    RegistryError,
    place_of,
)

ERRORS = [
    PeerError("rank 1 failed", rank=1, cause="ValueError: x"),
    CollectiveMismatchError("rank 1 calls another collective", failed_ranks=[1]),
    DivergenceError("`weight` differs", name="weight", ranks=[1], iteration=3),
    CollectiveTimeoutError("rank 1 did not come"),
    DistError("no group"),
    LaunchError("rank 1 failed", exit_code=7),
    RegistryError("no such name"),
    Preempted("SIGTERM on rank 1"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("twin_of", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_a_copy_has_the_message_the_attributes_and_the_notes(
    error: BaseException, twin_of: Callable[[BaseException], BaseException]
) -> None:
    error.add_note("seen on host n1")
    twin = twin_of(error)
    assert type(twin) is type(error)
    assert (str(twin), twin.args, vars(twin)) == (str(error), error.args, vars(error))


def test_no_line_of_lockstep_is_a_place_even_where_it_is_the_main_module() -> None:
    names = {"__name__": "__main__", "__spec__": ModuleSpec("lockstep.cli.rank", None)}
    for own, place in (({}, "mine.py:1"), (names, "")):
        try:
            exec(compile("1 / 0", "mine.py", "exec"), {"__name__": "__main__", **own})
        except ZeroDivisionError as error:
            trace = error.__traceback__
            assert trace is not None
            assert place_of(trace.tb_next) == place
