"""Calling hooks at points, at the price of those that have something to do there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from typing import Any

from lockstep.errors import ConfigError
from lockstep.hooks.hook import PRIORITIES, Hook
from lockstep.hooks.host import RunnerLike

POINTS = tuple(name for name in vars(Hook) if name.startswith(("before_", "after_")))
# The method for all modes that a point calls where a hook does not override it.
_SHARED = {
    f"{when}_{mode}_{what}": f"_{when}_{what}"
    for when in ("before", "after")
    for mode in ("train", "val", "test")
    for what in ("epoch", "iter")
}
_logger = logging.getLogger(__name__)


class HookList:
    """The hooks of a run in their order.

    Args:
        hooks: in order of registration; they are sorted by priority.
    """

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self.hooks = sorted(hooks, key=_rank_of)
        for hook in self.hooks:
            _warn_of_misspelt_points(hook)
        self._calls: dict[str, list[Callable[..., None]]] = {
            point: [getattr(hook, point) for hook in self.hooks if _acts_at(hook, point)] for point in POINTS
        }

    def __iter__(self) -> Iterator[Hook]:
        return iter(self.hooks)

    def __len__(self) -> int:
        return len(self.hooks)

    def call(self, point: str, runner: RunnerLike, **kwargs: Any) -> None:
        """Call every hook that has something to do at `point`.

        An error in a hook goes through, with a note that names the hook, the point and the rank.
        """
        for method in self._calls[point]:
            try:
                method(runner, **kwargs)
            except Exception as error:
                owner = type(getattr(method, "__self__", method)).__name__
                error.add_note(f"in {owner}.{point} (rank {runner.rank} of {runner.world_size})")
                raise

    def close(self) -> None:
        """Let every hook let go of what it holds."""
        for hook in self.hooks:
            hook.close()


def _acts_at(hook: Hook, point: str) -> bool:
    return _overrides(hook, point) or (point in _SHARED and _overrides(hook, _SHARED[point]))


def _overrides(hook: Hook, name: str) -> bool:
    return getattr(type(hook), name) is not getattr(Hook, name)


def _warn_of_misspelt_points(hook: Hook) -> None:
    for name in dir(type(hook)):
        if name.startswith(("before_", "after_")) and name not in POINTS:
            for meant in get_close_matches(name, POINTS, n=1, cutoff=0.8):
                _logger.warning("`%s` of %s is no point of a run, and is never called: did you mean `%s`?",
                                name, type(hook).__name__, meant)  # fmt: skip


def _rank_of(hook: Hook) -> int:
    priority = hook.priority
    if isinstance(priority, str):
        if priority.upper() not in PRIORITIES:
            raise ConfigError(
                f"`priority` of {type(hook).__name__} must be a number or one of "
                f"{', '.join(PRIORITIES)}, but is {priority!r}"
            )
        return PRIORITIES[priority.upper()]
    return priority
