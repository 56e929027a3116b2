"""Whether ranks agree on a value: a digest of it is compared, and only where they don't are the values gathered."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from lockstep.dist.objects import all_gather_object
from lockstep.groups import GroupLike

_T = TypeVar("_T")


class Sampled:
    """Says when a check is due that would cost too much each time: the first few times, and then now and then.

    Args:
        first: how many times it is due at first.
        every: the interval after these.
    """

    def __init__(self, first: int, every: int) -> None:
        self._first, self._every, self.count = first, every, 0

    def is_due(self) -> bool:
        """Count one time, and return whether the check is due at it; the same on ranks that count the same."""
        number, self.count = self.count, self.count + 1
        return number < self._first or number % self._every == 0


def from_all(value: _T, groups: Sequence[GroupLike] = (None,)) -> list[_T]:
    """Return every rank's value.

    Args:
        value: this rank's, as `all_gather_object` takes it.
        groups: one group; or the groups of a mesh's axes, from the last axis to the first, so that the values are in
            the order of the mesh.

    **Collective**: every rank of the groups. **Cost**: one exchange between the hosts for each group.
    """
    values = [value]
    for group in groups:
        values = [each for gathered in all_gather_object(values, group=group) for each in gathered]
    return values


def differing(value: _T, groups: Sequence[GroupLike] = (None,)) -> list[_T] | None:
    """Return every rank's value if they are not the same on all, as their `repr` shows; None if they are.

    **Collective** and **Cost**: as for `from_all`, of a digest; of the values, too, if they differ.
    """
    # Not Python's own hash, which is the same for -1 and -2, and of a text another one in each process.
    digests = from_all(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), groups)
    return None if len(set(digests)) == 1 else from_all(value, groups)
