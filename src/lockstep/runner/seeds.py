"""Seeding: the same random numbers in every run with the same seed."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lockstep.dataset.random_state import random_state, seed_generators, set_random_state
from lockstep.dist import get_rank, sync_random_seed
from lockstep.errors import ConfigError
from lockstep.runner.arguments import checked_keys


def set_randomness(randomness: Mapping[str, Any] | None) -> int:
    """Seed every random generator of this process, and return the seed.

    Args:
        randomness: `seed`, the same on every rank, by default drawn by rank 0; `deterministic`, whether only
            deterministic algorithms may be used; `diff_rank_seed`, whether ranks draw different random numbers. By
            default they draw the same while model and data are built, and different ones from the first iteration on
            (see `part_ranks`). True adds the rank to the seed now; False lets all ranks draw the same throughout, as
            MMEngine does by default: the n-th samples of all ranks get the same dropout mask and the same noise. In all
            cases, the order of samples depends on `seed` alone, the random numbers of a data loader's workers depend on
            seed, rank and epoch, and ranks that compute on the same samples together (tensor parallelism) draw the same
            numbers.

    **Collective**: every rank, if no seed is given.
    """
    options = checked_keys("randomness", randomness)
    given = options.get("seed")
    try:
        seed = sync_random_seed() if given is None else operator.index(given)
        seed.to_bytes(8, "little", signed=seed < 0)  # what generators take
    except (TypeError, OverflowError):
        raise ConfigError(f"`randomness['seed']` must be a whole number of 64 bits or None, but is {given!r}") from None
    seed_all(seed + get_rank() if options.get("diff_rank_seed") else seed)
    if options.get("deterministic"):
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
    return seed


def part_ranks(randomness: Mapping[str, Any] | None, seed: int, shard: int) -> None:
    """Let ranks that compute on different samples draw different random numbers from now on, unless told otherwise.

    Ranks with the first shard go on with the numbers of one process.

    Args:
        randomness: as for `set_randomness`.
        seed: the seed, the same on every rank.
        shard: the number of this rank's shard of the data.
    """
    if are_parted(randomness, shard):
        seed_all(seed + shard)


def are_parted(randomness: Mapping[str, Any] | None, shard: int) -> bool:
    """Return whether a rank draws numbers of its own from the first iteration on; see `part_ranks`."""
    return shard > 0 and (randomness or {}).get("diff_rank_seed") is None


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators, also of accelerators."""
    seed_generators(seed)
    torch.manual_seed(seed)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the state of the random generators on exit."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)
