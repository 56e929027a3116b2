"""The pytest plugin and `@ranks`: every rank test is counted, and no rank process outlives the session.

Every pytest session in an environment with lockstep loads it, so it does not import torch.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Generator
from functools import wraps
from typing import Any

import pytest

from lockstep.errors import listed, require_count
from lockstep.testing import pool
from lockstep.testing.messages import BODY_ATTRIBUTE, RankFailure
from lockstep.testing.pool import DEFAULT_TIMEOUT_SECONDS, run_body

SIZE_PARAMETER = "n_ranks"
_PROPERTY = "lockstep_ranks"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--min-rank-tests``."""
    parser.getgroup("lockstep", "tests on several ranks").addoption(
        "--min-rank-tests",
        type=int,
        default=0,
        metavar="N",
        help="fail the session if fewer than N rank tests passed",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and start counting."""
    config.addinivalue_line(
        "markers", "ranks(*sizes): runs on that many real ranks; put there by lockstep.testing.ranks"
    )
    config.pluginmanager.register(RankTests(config), "lockstep-rank-tests")


def pytest_unconfigure() -> None:
    """End all rank processes."""
    pool.close_pools()


class RankTests:
    """The outcomes of the rank tests of a session.

    Tests are counted by their reports, so that the count is also right if another process ran them (pytest-xdist).
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._outcomes: dict[str, tuple[int, str]] = {}  # by test: how many ranks it needs, and what became of it

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Store in the item, and so in its reports, how many ranks it needs."""
        size = _size_of(item)
        if size:
            item.user_properties.append((_PROPERTY, size))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember which rank tests will run."""
        # A worker of pytest-xdist collects all tests, but runs only some.
        if self._runs_tests and not hasattr(self._config, "workerinput"):
            self._outcomes = {item.nodeid: (size, "not run") for item in session.items if (size := _size_of(item))}
            if self._outcomes:
                pool.start_importing()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a rank test unless its body has passed on all of its ranks."""
        __tracebackhide__ = True
        before = pool.ranks_passed()
        result = yield
        size, done = _size_of(item), pool.ranks_passed() - before
        if size and (done == 0 or done % size):
            raise RankFailure(
                f"{item.name} must pass on {size} ranks, but its body passed on {done}. "
                "Another plugin keeps it from running"
            )
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the outcome of one phase of one test."""
        # Other plugins may store what is no pair.
        size = next((entry[1] for entry in report.user_properties if tuple(entry[:-1]) == (_PROPERTY,)), None)
        # The call phase decides; set-up and tear-down count only if they failed or were skipped.
        decides = report.when == "call" or not report.passed
        if isinstance(size, int) and decides and self._outcomes.get(report.nodeid) != (size, "failed"):
            self._outcomes[report.nodeid] = size, report.outcome

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the session if rank tests are missing."""
        good = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if self._complaints() and session.exitstatus in good:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the count, and what is wrong with it."""
        if self._outcomes:
            passed, counts = self._passed(), Counter(outcome for _, outcome in self._outcomes.values())
            parts = [f"{len(passed)} passed on {sum(passed)} ranks"]
            parts += [f"{counts[kind]} {kind}" for kind in ("failed", "skipped") if counts[kind]]
            terminalreporter.write_line(f"rank tests: {', '.join(parts)}")
        for complaint in self._complaints():
            terminalreporter.write_line(f"rank tests: {complaint}", red=True)

    @property
    def _runs_tests(self) -> bool:
        return not any(getattr(self._config.option, name, False) for name in ("collectonly", "setuponly", "setupplan"))

    def _passed(self) -> list[int]:
        """Return the numbers of ranks of the tests that have passed."""
        return [size for size, outcome in self._outcomes.values() if outcome == "passed"]

    def _complaints(self) -> list[str]:
        if not self._runs_tests:
            return []
        complaints = []
        missing = sorted(name for name, (_, outcome) in self._outcomes.items() if outcome == "not run")
        if missing:
            complaints.append(f"{len(missing)} selected, but not run: {listed(missing)}")
        passed, least = len(self._passed()), self._config.getoption("--min-rank-tests")
        if passed < least:
            complaints.append(f"only {passed} passed, but --min-rank-tests asks for {least}")
        return complaints


def _size_of(item: pytest.Item) -> int:
    """Return the number of ranks a test needs, or 0 for a function that is not a rank test, however it is marked."""
    size: int = getattr(getattr(item, "function", None), SIZE_PARAMETER, 0)
    return item.callspec.params.get(SIZE_PARAMETER, size) if size and hasattr(item, "callspec") else size


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
        require_count("sizes", size)
    if not sizes:
        raise ValueError("`sizes` must name at least one number of ranks, as in @ranks(2)")

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        if SIZE_PARAMETER in inspect.signature(body).parameters:
            raise TypeError(
                f"{body.__name__!r} must not have a parameter {SIZE_PARAMETER!r}, which is that of @ranks. Rename it, "
                "or ask lockstep.dist.get_world_size()"
            )

        @wraps(body)
        def on_ranks(*_: Any, **values: Any) -> None:
            __tracebackhide__ = True
            if hasattr(body, "hypothesis"):  # now that the test runs, so that the others of its module can run, too
                raise TypeError(
                    f"@ranks must stand below @given, but stands above it ({body.__name__!r}): every rank would draw "
                    "examples of its own. Swap the two, or call run_ranks in the test"
                )
            size = values.pop(SIZE_PARAMETER, sizes[0])
            run_body(body, (), values, size=size, timeout=timeout, fresh=fresh, warnings=warnings)

        on_ranks.__name__ = on_ranks.__name__.strip("<>")  # pytest marks no lambda
        setattr(on_ranks, BODY_ATTRIBUTE, body)
        setattr(on_ranks, SIZE_PARAMETER, sizes[0])
        marked: Callable[..., None] = pytest.mark.ranks(*sizes)(on_ranks)
        if len(sizes) == 1:
            return marked
        _add_parameter(marked, body)
        ids = [f"{size}rank{'s' * (size != 1)}" for size in sizes]
        parametrised: Callable[..., None] = pytest.mark.parametrize(SIZE_PARAMETER, sizes, ids=ids)(marked)
        return parametrised

    return decorate


def _add_parameter(wrapper: Callable[..., None], body: Callable[..., Any]) -> None:
    signature = inspect.signature(body)
    size = inspect.Parameter(SIZE_PARAMETER, inspect.Parameter.KEYWORD_ONLY)
    others = list(signature.parameters.values())
    end = len(others) - bool(others and others[-1].kind is inspect.Parameter.VAR_KEYWORD)
    parameters = [*others[:end], size, *others[end:]]
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
