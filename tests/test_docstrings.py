"""The examples in docstrings run: those for two ranks on two ranks, the others here."""

from __future__ import annotations

import ast
import doctest
import inspect
from collections.abc import Iterator
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep import dist
from lockstep.testing import ranks, run_ranks
from lockstep.testing.messages import RankFailure

PACKAGE = Path(lockstep.__file__).parent
ON_RANKS = "**Example (2 ranks)**"

# What every rank of a group has to call. destroy_dist is one as well, but would take the group away from the pool.
COLLECTIVES = (
    "all_gather",
    "all_gather_object",
    "all_gather_tree",
    "all_reduce",
    "all_reduce_dict",
    "all_reduce_params",
    "all_reduce_tree",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_object_list",
    "broadcast_tree",
    "check_collectives",
    "collect_results",
    "collect_results_cpu",
    "collect_results_gpu",
    "gather",
    "gather_object",
    "init_dist",
    "init_local_group",
    "local_main_process_first",
    "main_process_first",
    "run_on_main",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object_list",
    "sync_random_seed",
)


def documented() -> Iterator[tuple[str, str, str]]:
    """Yield module, name and docstring of everything in the package that shows an example; nothing is imported."""
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        yield from ((module, name, text) for name, text in _docstrings(ast.parse(file.read_text())) if ">>> " in text)


def _docstrings(node: ast.AST, path: str = "") -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{path}{child.name}"
            if text := ast.get_docstring(child):
                yield name, text
            yield from _docstrings(child, f"{name}.")


EXAMPLES = list(documented())


def run_example(module: str, name: str) -> None:
    """Run the example of one function or class as if it stood in its module."""
    home = import_module(module)
    text = inspect.getdoc(attrgetter(name)(home))
    assert text is not None
    example = doctest.DocTestParser().get_doctest(text, {"torch": torch, **vars(home)}, name, home.__file__, None)
    complaints: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(example, out=complaints.append)
    assert not complaints, "".join(complaints).replace("*" * 70, "").strip()


def named(examples: list[tuple[str, str, str]]) -> pytest.MarkDecorator:
    """Make a test of each example, with its full name."""
    ids = [f"{module.removeprefix('lockstep.')}.{name}" for module, name, _ in examples]
    return pytest.mark.parametrize(("module", "name"), [example[:2] for example in examples], ids=ids)


@named([example for example in EXAMPLES if ON_RANKS in example[2]])
@ranks(2)
def test_example_on_two_ranks(module: str, name: str) -> None:
    run_example(module, name)


@named([example for example in EXAMPLES if ON_RANKS not in example[2]])
def test_example_in_one_process(module: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_example(module, name)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_says_who_must_call_it_and_shows_it_on_two_ranks(name: str) -> None:
    text = inspect.getdoc(getattr(dist, name))
    assert text is not None
    assert "**Collective**" in text
    assert ON_RANKS in text
    assert doctest.DocTestParser().get_examples(text)


def test_whatever_in_dist_calls_itself_a_collective_is_among_them() -> None:
    # A class, such as an error, says nothing of the kind.
    telling = {name for name in dist.__all__ if "**Collective**" in (inspect.getdoc(getattr(dist, name)) or "")}
    assert telling == {*COLLECTIVES, "destroy_dist"}


def test_a_wrong_example_fails_and_shows_what_each_rank_got() -> None:
    with pytest.raises(RankFailure, match=r"Expected:\s+0\s+Got:\s+1") as caught:
        run_ranks(2, run_example, __name__, "shows_nonsense")
    assert [report.rank for report in caught.value.reports] == [1]


def shows_nonsense() -> None:
    """Show the rank, as if there were one only.

    >>> from lockstep.dist import get_rank
    >>> get_rank()
    0
    """
