from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.topology.environ import expand_task_counts, first_host


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("localhost", "localhost"),
        ("n1,n2", "n1"),
        ("n[1-2]", "n1"),
        ("n[01-03,7]", "n01"),
        ("n[3,1]", "n3"),  # order is kept, node 0 is the first
        ("a[1-2]b[3-4]", "a1b3"),
        ("n[1-2][3-4]", "n13"),
        ("gpu-[1-2].cluster", "gpu-1.cluster"),
        ("login,n[1-2],gpu[05-06]-x,m9", "login"),
        ("[1-2]", "1"),
    ],
)
def test_first_host(text: str, host: str) -> None:
    assert first_host(text) == host


@pytest.mark.parametrize("text", ["", ",", "n[1-2", "n1-2]", "n[1-[2]]", "n[]", "n[a-b]", "n[-1]"])
def test_what_is_no_hostlist(text: str) -> None:
    with pytest.raises(ValueError, match="is not a node list"):
        first_host(text)


@given(st.text("n012[],-", max_size=12))
def test_any_text_is_a_hostlist_or_a_value_error(text: str) -> None:
    try:
        host = first_host(text)
    except ValueError:
        return
    assert host
    assert not set(host) & set("[],")


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("2,1", [2, 1]), ("2(x3)", [2, 2, 2]), ("2(x3),1", [2, 2, 2, 1]), ("8(x2),4,16(x1)", [8, 8, 4, 16])],
)
def test_task_counts(text: str, counts: list[int]) -> None:
    assert expand_task_counts(text) == counts


@pytest.mark.parametrize("text", ["", "2,", "x3", "2(x)", "2(3)", "2(x3", "-1", "2 (x3)", "two", f"2(x{10**18})"])
def test_what_is_no_task_count(text: str) -> None:
    with pytest.raises(ValueError, match="is not a task count such as"):
        expand_task_counts(text)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 20)), min_size=1))
def test_task_counts_are_run_lengths(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{nodes})" if nodes > 1 else f"{count}" for count, nodes in runs)
    assert expand_task_counts(text) == [count for count, nodes in runs for _ in range(nodes)]
