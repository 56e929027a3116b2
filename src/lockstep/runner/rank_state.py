"""What each rank has for itself: the state of its random generators, and where it is in its data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.dataset.random_state import random_state, set_random_state
from lockstep.runner.seeds import seed_all

if TYPE_CHECKING:
    from lockstep.runner.runner import Runner

_logger = logging.getLogger(__name__)


def rank_state(runner: Runner) -> dict[str, Any]:
    """Return what this rank needs, beside what all have in common, to go on as if it had never stopped."""
    return {"random": random_state(), "data": runner.train_loop.passes.state()}


def restore_rank_state(runner: Runner, state: Mapping[str, Any]) -> None:
    """Let the training go on with what `rank_state` returned, once it has come to the place where that was.

    Whether the data go on in the middle of a pass is for the loop to say.
    """
    runner.train_loop.passes.restore(state["data"], partial(set_random_state, state["random"]))


def restart_random_state(runner: Runner, saved_by: int) -> None:
    """Seed the generators anew, where the ranks of a checkpoint were others than these."""
    options = runner.given.randomness or {}
    seed_all(runner.seed + runner.iter + (runner.share.rank if options.get("diff_rank_seed") else 0))
    _logger.info(
        "the checkpoint was saved by %d ranks, so that on %d random numbers, such as those of dropout, begin anew",
        saved_by, runner.world_size,
    )  # fmt: skip
