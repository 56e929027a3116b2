from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.topology.environ import expand_hostlist, expand_task_counts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("localhost", ["localhost"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-2]", ["n1", "n2"]),
        ("n[01-03,7]", ["n01", "n02", "n03", "n7"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1-03]", ["n1", "n2", "n3"]),  # the first number gives the width
        ("n[7]", ["n7"]),
        ("n[3,1]", ["n3", "n1"]),  # order is kept, node 0 is the first
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("n[1-2][3-4]", ["n13", "n14", "n23", "n24"]),
        ("gpu-[1-2].cluster", ["gpu-1.cluster", "gpu-2.cluster"]),
        ("login,n[1-2],gpu[05-06]-x,m9", ["login", "n1", "n2", "gpu05-x", "gpu06-x", "m9"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_hostlist(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not a node list"),
        (",", "is not a node list"),
        ("n1,", "is not a node list"),
        ("n1,,n2", "is not a node list"),
        ("n[1-2", "is not a node list"),
        ("n1-2]", "is not a node list"),
        ("n[1-[2]]", "is not a node list"),
        ("n[]", "'' is not a number or range"),
        ("n[1,,2]", "'' is not a number or range"),
        ("n[a-b]", "'a-b' is not a number or range"),
        ("n[1-2-3]", "'1-2-3' is not a number or range"),
        ("n[-1]", "'-1' is not a number or range"),
        ("n[3-1]", "the range '3-1' runs backwards"),
    ],
)
def test_what_is_no_hostlist(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        expand_hostlist(text)


# A range is a first number, its width, and how many more follow.
ranges = st.tuples(st.integers(0, 999), st.integers(1, 4), st.integers(0, 9))
names = st.text("abcxyz-.", min_size=1, max_size=4)
brackets = st.lists(ranges, min_size=1, max_size=3)
groups = st.lists(st.tuples(names, st.none() | brackets), min_size=1, max_size=3)


@given(st.lists(groups, min_size=1, max_size=4))
def test_hostlist_is_what_its_parts_stand_for(
    parts: list[list[tuple[str, list[tuple[int, int, int]] | None]]],
) -> None:
    text = ",".join("".join(name + _written(bracket) for name, bracket in group) for group in parts)
    hosts = [
        "".join(choice)
        for group in parts
        for choice in product(*(pieces for name, bracket in group for pieces in ([name], _meant(bracket))))
    ]
    assert expand_hostlist(text) == hosts


@given(st.lists(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), min_size=1))
def test_plain_names_come_back(hosts: list[str]) -> None:
    assert expand_hostlist(",".join(hosts)) == hosts


@given(st.text("n012[],-", max_size=12))
def test_any_text_is_a_hostlist_or_a_value_error(text: str) -> None:
    try:
        hosts = expand_hostlist(text)
    except ValueError:
        return
    assert hosts
    assert all(host and not set(host) & set("[],") for host in hosts)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("2,1", [2, 1]), ("2(x3)", [2, 2, 2]), ("2(x3),1", [2, 2, 2, 1]), ("8(x2),4,16(x1)", [8, 8, 4, 16])],
)
def test_task_counts(text: str, counts: list[int]) -> None:
    assert expand_task_counts(text) == counts


@pytest.mark.parametrize("text", ["", "2,", "x3", "2(x)", "2(3)", "2(x3", "-1", "2 (x3)", "two"])
def test_what_is_no_task_count(text: str) -> None:
    with pytest.raises(ValueError, match="is not a task count such as"):
        expand_task_counts(text)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 20)), min_size=1))
def test_task_counts_are_run_lengths(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{nodes})" if nodes > 1 else f"{count}" for count, nodes in runs)
    assert expand_task_counts(text) == [count for count, nodes in runs for _ in range(nodes)]


def _written(bracket: list[tuple[int, int, int]] | None) -> str:
    if bracket is None:
        return ""
    return (
        f"[{','.join(f'{first:0{width}d}' + (f'-{first + more}' if more else '') for first, width, more in bracket)}]"
    )


def _meant(bracket: list[tuple[int, int, int]] | None) -> list[str]:
    if bracket is None:
        return [""]
    return [f"{number:0{width}d}" for first, width, more in bracket for number in range(first, first + more + 1)]
