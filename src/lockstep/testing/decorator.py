"""`@ranks`: runs the body of a test on real ranks. Only test modules import it, so pytest is available."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

from lockstep.testing.bodies import BODY_ATTRIBUTE
from lockstep.testing.plugin import SIZE_PARAMETER
from lockstep.testing.pool import DEFAULT_TIMEOUT_SECONDS, run_body

_WARNING_ACTIONS = ("error", "default", "ignore", "always", "module", "once")


def ranks(
    *sizes: int,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    fresh: bool = False,
    warnings: str = "error",
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a module-level test function on `sizes` real ranks; with several sizes, once for each.

    The processes are shared by all tests of one size and keep their default process group. Fixtures and parameters are
    evaluated in the parent and sent to the ranks, so they must be picklable.

    Args:
        *sizes: numbers of ranks.
        timeout: seconds after which the test fails: the live stacks of the ranks are shown, and the ranks are killed.
        fresh: use new processes without an initialised group, for tests of start-up. ``RANK``, ``WORLD_SIZE``,
            ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set. Leftover variables,
            threads and open files are not checked, because the processes end with the body.
        warnings: what a warning in a rank does, as an action of Python's `warnings` filters. Use an action other than
            ``"error"`` only for bodies that use a library whose warnings the test can't avoid.

    **Raises**: ValueError, when the module is imported, if the sizes are not valid; TypeError, in the test, if the
    function can't run in another process.

    **Example**::

        @ranks(2, 4)
        def test_sum():
            data = torch.ones(1)
            all_reduce(data)
            assert data.item() == get_world_size()
    """
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"`sizes` must be positive integers, but contain {size!r}")
    if not sizes:
        raise ValueError("`sizes` must name at least one number of ranks, as in @ranks(2)")
    if warnings not in _WARNING_ACTIONS:
        raise ValueError(f"`warnings` must be one of {_WARNING_ACTIONS}, but is {warnings!r}")

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        misplaced = _what_is_wrong_with(body)

        @wraps(body)
        def on_ranks(*_: Any, **values: Any) -> None:
            __tracebackhide__ = True
            if misplaced is not None:  # when the test runs, so that the others of its module can run, too
                raise TypeError(misplaced)
            size = values.pop(SIZE_PARAMETER, sizes[0])
            run_body(body, (), values, size=size, timeout=timeout, fresh=fresh, warnings=warnings)

        on_ranks.__name__ = on_ranks.__name__.strip("<>")  # pytest marks no lambda
        setattr(on_ranks, BODY_ATTRIBUTE, body)
        marked: Callable[..., None] = pytest.mark.ranks(*sizes)(on_ranks)
        if len(sizes) == 1:
            return marked
        _add_parameter(marked, body)
        ids = [f"{size}rank{'s' * (size != 1)}" for size in sizes]
        parametrised: Callable[..., None] = pytest.mark.parametrize(SIZE_PARAMETER, sizes, ids=ids)(marked)
        return parametrised

    return decorate


def _what_is_wrong_with(body: Callable[..., Any]) -> str | None:
    """Return why a function can't run on ranks; None if it can."""
    if hasattr(body, "hypothesis"):
        return (
            f"@ranks must stand below @given, but stands above it ({body.__name__!r}): every rank would draw examples "
            "of its own. Swap the two, or call run_ranks in the test"
        )
    name = getattr(body, "__qualname__", repr(body))
    if "." in name or "<" in name:
        return (
            f"@ranks must stand above a function at the top level of a module, but stands above {name!r}. "
            "Other processes import it by its name: move it out of the class or function around it"
        )
    return None


def _add_parameter(wrapper: Callable[..., None], body: Callable[..., Any]) -> None:
    signature = inspect.signature(body)
    size = inspect.Parameter(SIZE_PARAMETER, inspect.Parameter.KEYWORD_ONLY)
    parameters = [*signature.parameters.values(), size]
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
