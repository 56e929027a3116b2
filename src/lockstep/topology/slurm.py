"""Slurm's shorthand for host names and for tasks per node, read without `scontrol`."""

from __future__ import annotations

import re
from itertools import product

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hostlist(text: str) -> list[str]:
    """Return the host names that a Slurm node list stands for, in its order.

    A number keeps the width of the first number of its range.

    **Raises**: ValueError if the text is not a node list.

    **Example**::

        >>> expand_hostlist("n[01-03,7],login")
        ['n01', 'n02', 'n03', 'n7', 'login']
        >>> expand_hostlist("rack[1-2]n[3-4]")
        ['rack1n3', 'rack1n4', 'rack2n3', 'rack2n4']

    **Source**: "Hostlist expressions", scontrol(1), Slurm 22.05.
    """
    return [host for group in _split_outside_brackets(text) for host in _expand_group(group)]


def expand_task_counts(text: str) -> list[int]:
    """Return the number of tasks on each node, from Slurm's run-length form.

    **Raises**: ValueError if the text is not such a list.

    **Example**::

        >>> expand_task_counts("2(x3),1")
        [2, 2, 2, 1]

    **Source**: SLURM_TASKS_PER_NODE, sbatch(1), Slurm 22.05.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not a task count such as 2 or 2(x3)")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _split_outside_brackets(text: str) -> list[str]:
    # The pattern matches each bracketed part as a whole, so that commas inside brackets do not split.
    groups = re.findall(r"(?:\[[^\[\]]*\]|[^,\[\]])+", text)
    if not groups or ",".join(groups) != text:
        raise ValueError(f"{text!r} is not a node list such as n[01-03,7],login")
    return groups


def _expand_group(group: str) -> list[str]:
    # Splitting at the brackets gives text and ranges alternately: "a[1-2]b" -> "a", "1-2", "b".
    pieces = _BRACKETS.split(group)
    choices = [_expand_ranges(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return ["".join(choice) for choice in product(*choices)]


def _expand_ranges(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not a number or range such as 01-03")
        first, last = match[1], match[2] or match[1]
        if int(first) > int(last):
            raise ValueError(f"the range {part!r} runs backwards")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers
