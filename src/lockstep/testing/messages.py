"""What the test process and its ranks tell each other: references to bodies, requests, and reports.

Nothing here imports torch.
"""

from __future__ import annotations

import ast
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from textwrap import indent
from types import CodeType, ModuleType
from typing import Any, Literal, TypeAlias

# `@ranks` puts a wrapper into the module; this attribute of the wrapper holds the body itself.
BODY_ATTRIBUTE = "rank_body"
# A rank that died makes its peers fail, and one that raised leaves them waiting: so causes come first.
_CAUSES_FIRST: tuple[Kind, ...] = ("died", "raised", "leaked", "hung")
# On this signal a rank writes its stack (as a Java VM does); training code hardly ever uses it.
STACK_SIGNAL = signal.SIGQUIT


@dataclass(frozen=True, slots=True)
class FunctionReference:
    """Where a module-level function is, so that another process can import it.

    Attributes:
        file: path of its module.
        module: name of its module in the test process.
        qualname: its name there.
        rewritten: whether pytest has rewritten the module's assertions, so that failures show the values.
    """

    file: str
    module: str
    qualname: str
    rewritten: bool

    @classmethod
    def of(cls, body: Callable[..., Any]) -> FunctionReference:
        """Return the reference to `body`.

        Raises:
            TypeError: it can't be found by name, so no other process could find it.
        """
        body = getattr(body, BODY_ATTRIBUTE, body)
        name = getattr(body, "__qualname__", None)
        module = sys.modules.get(getattr(body, "__module__", None) or "")
        file = getattr(module, "__file__", None)
        found = getattr(module, name or "", None)
        if module is None or file is None or name is None or found is None:
            raise TypeError(
                f"`body` must be a function at the top level of a module file, but is {body!r}. Other processes import "
                "it by its name: move it out of the function, class or lambda around it, and pass what it needs as "
                "arguments"
            )
        if getattr(found, BODY_ATTRIBUTE, found) is not body:
            raise TypeError(
                f"`body` must be what its module calls {name!r}, but that name means {found!r} now. "
                "Give the function a name of its own"
            )
        rewritten = "@pytest_ar" in vars(module)
        return cls(os.path.abspath(file), module.__name__, name, rewritten)

    def load(self) -> Callable[..., Any]:
        """Import the module from its file, unless this process has it already, and return the function."""
        module = sys.modules.get(self.module)
        if os.path.abspath(getattr(module, "__file__", None) or "") != self.file:
            module = _import_file(self.module, self.file, self.rewritten)
        found = getattr(module, self.qualname)
        body: Callable[..., Any] = getattr(found, BODY_ATTRIBUTE, found)
        return body


class _RewritingLoader(SourceFileLoader):
    """Loads a module with pytest's assertion rewriting, from the bytecode that the test process has kept, if it has."""

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        from _pytest.assertion.rewrite import rewrite_asserts

        tree = ast.parse(data, filename=path)
        rewrite_asserts(tree, data, path)
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def get_data(self, path: str) -> bytes:
        import pytest

        stem, ending = os.path.splitext(path)
        # Pytest keeps what it has rewritten beside Python's own bytecode, in the same format.
        return super().get_data(f"{stem}-pytest-{pytest.__version__}{ending}" if ending == ".pyc" else path)

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Write no bytecode: that is pytest's."""


def _import_file(name: str, file: str, rewritten: bool) -> ModuleType:
    parent = name.rpartition(".")[0]
    if parent:
        folder = Path(file).parent
        _import_package(parent, folder.parent if Path(file).stem == "__init__" else folder)
    loader = _RewritingLoader(name, file) if rewritten else None
    return _execute(spec_from_file_location(name, file, loader=loader))


def _import_package(name: str, folder: Path) -> None:
    """Make package `name` importable from `folder`, so that relative imports in its modules work.

    Names such as ``tests.dist.test_sums`` come from pytest's importlib mode. In that mode the folders need not be on
    ``sys.path``, nor contain an ``__init__.py``.
    """
    if str(folder) in getattr(sys.modules.get(name), "__path__", ()):
        return
    parent = name.rpartition(".")[0]
    if parent:
        _import_package(parent, folder.parent)
    spec = find_spec(name) if name not in sys.modules else None
    if spec is None or str(folder) not in (spec.submodule_search_locations or ()):
        init = folder / "__init__.py"
        spec = spec_from_file_location(name, init) if init.exists() else ModuleSpec(name, None)
        assert spec is not None
        spec.submodule_search_locations = [str(folder)]
    _execute(spec)


def _execute(spec: ModuleSpec | None) -> ModuleType:
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        if spec.loader is not None:
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    parent, _, leaf = spec.name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
    return module


Kind: TypeAlias = Literal["died", "raised", "leaked", "hung"]


@dataclass(frozen=True, slots=True)
class RankReport:
    """How one rank failed.

    Attributes:
        rank: its rank.
        kind: ``"died"``, ``"raised"``, ``"leaked"`` or ``"hung"``.
        summary: what happened, in one line.
        detail: the traceback, the live stack or further leaks.
        output: what the rank wrote to stdout and stderr.
        consequence: whether it failed only because another rank had failed.
    """

    rank: int
    kind: Kind
    summary: str
    detail: str = ""
    output: str = ""
    consequence: bool = False


class RankFailure(AssertionError):  # noqa: N818 - reads as what it is; not every failure of a test is an error
    """A test body did not pass on all of its ranks.

    Attributes:
        reports: one for each rank that failed, in the order: died, raised, leaked, hung.
    """

    def __init__(self, message: str, reports: Iterable[RankReport] = ()) -> None:
        super().__init__(message)
        self.reports = tuple(reports)

    @classmethod
    def of(cls, title: str, reports: Iterable[RankReport]) -> RankFailure:
        """Return a failure with ordered reports: the first cause in the first line, then what each rank did."""
        first, *others = sorted(reports, key=lambda one: (_CAUSES_FIRST.index(one.kind), one.consequence, one.rank))
        lines = [f"{title}: rank {first.rank} {first.kind}: {first.summary}"]
        if others:
            lines[0] += f" (and {', '.join(f'rank {report.rank} {report.kind}' for report in others)})"
        for report in (first, *others):
            lines += ["", f"--- rank {report.rank} {report.kind}: {report.summary}"]
            lines += [report.detail.rstrip()] if report.detail else []
            if report.output:
                lines += [f"--- rank {report.rank} wrote:", indent(report.output.rstrip(), "  ")]
        return cls("\n".join(lines), (first, *others))


# The module from which users import it, so that pytest prints that name.
RankFailure.__module__ = "lockstep.testing"


def describe_exit(exitcode: int | None) -> str:
    """Return text that says how a process ended, given its exit code as `multiprocessing` reports it."""
    if exitcode is None:
        return "its process is gone"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return f"killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"killed by signal {-exitcode}"


@dataclass(frozen=True, slots=True)
class Seat:
    """The rank of a process, and what it shares with the other ranks.

    Attributes:
        rank: its rank.
        size: number of ranks in the pool.
        folder: the pool's private folder: stores, captured output and stacks.
        join: whether it joins the default group before the first body.
    """

    rank: int
    size: int
    folder: Path
    join: bool

    @property
    def output(self) -> Path:
        """The file to which this rank's stdout and stderr go."""
        return self.folder / f"rank{self.rank}.output"

    @property
    def stacks(self) -> Path:
        """The file to which this rank writes its stack, on request or when it crashes."""
        return self.folder / f"rank{self.rank}.stacks"


@dataclass(frozen=True, slots=True)
class Task:
    """One body to run, with the state of the test process at the time of the call.

    Attributes:
        reference: where the body is.
        arguments: ``(args, kwargs)``, pickled.
        environment: environment variables of the test process.
        folder: its current directory.
        import_path: its ``sys.path``.
        warnings: the action of the `warnings` filter, such as ``error``.
    """

    reference: FunctionReference
    arguments: bytes
    environment: dict[str, str]
    folder: str
    import_path: list[str]
    warnings: str


@dataclass(frozen=True, slots=True)
class CleanUp:
    """All ranks have passed: release what the body used, and report what it left behind.

    Attributes:
        regroup: some rank has made its own groups: leave all groups and join the default group again.
    """

    regroup: bool


@dataclass(frozen=True, slots=True)
class Passed:
    """A rank completed a request.

    Attributes:
        value: what the body returned, pickled.
        made_groups: whether process groups other than the default group exist.
    """

    value: bytes = b""
    made_groups: bool = False


Request: TypeAlias = Task | CleanUp
Answer: TypeAlias = Passed | RankReport
