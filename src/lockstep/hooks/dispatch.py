"""Calling hooks at points, at the price of those that have something to do there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lockstep.errors import ConfigError
from lockstep.hooks.hook import PRIORITIES, Hook
from lockstep.hooks.host import RunnerLike

POINTS = tuple(name for name in vars(Hook) if name.startswith(("before_", "after_")))


class HookList:
    """The hooks of a run in their order.

    Args:
        hooks: in order of registration; they are sorted by priority.
    """

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self.hooks = sorted(hooks, key=_rank_of)
        self._calls: dict[str, list[Callable[..., None]]] = {
            point: [
                getattr(hook, point) for hook in self.hooks if getattr(type(hook), point) is not getattr(Hook, point)
            ]
            for point in POINTS
        }

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
