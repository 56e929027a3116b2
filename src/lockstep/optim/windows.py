"""Windows of accumulation: which backward pass ends in an update, and what each of them weighs in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Windows:
    """Counts backward passes, of which each `size` make up a window that ends in an update.

    Everything is counted in backward passes, of which an iteration may make several, or none. The last window, of the
    training or of an epoch that windows end with, may be shorter: each iteration is expected to make as many of them as
    the latest one that made any, and until then one. If the last iteration makes more, each of those ends in an update.

    An update follows the mean over all samples of its window, on all ranks. Wrappers average gradients over ranks,
    which gives every batch the same weight. So a loss is multiplied by its batch's number of samples, divided by a
    reference: the mean over ranks of the first batch of the window. It is also divided by `size`. At the window's end
    `correction` says by what the gradients must be multiplied, so that they are divided by its true length and number
    of samples; if the window is full and all batches have the same size, that is exactly 1.

    Args:
        size: backward passes in a window, until `set_size` is called.

    Attributes:
        size: backward passes in the present window.
        next_size: in those that begin after it.
        count: backward passes so far.
        updates: complete windows so far.
        own: number of samples in the present batch of this rank.
        mean: its mean over the ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = self.next_size = size
        self.own = self.mean = 1.0
        self._loaded: Mapping[str, Any] = {}
        self.restart(0, None)

    def restart(self, done: int, total: int | None) -> int:
        """Begin a training after `done` of `total` iterations, or go on where `load` says.

        Until iterations are announced by `begin_iteration`, each is taken to make one backward pass.

        Returns:
            The number of backward passes of an open window whose gradients are lost.
        """
        begun = {"size": self.size, "backward_passes": done, "open": done % self.size, "updates": done // self.size}
        state = {**begun, **self._loaded}
        self._loaded = {}
        self.count: int = state["backward_passes"]
        self.updates: int = state["updates"]
        self._per_iteration: int | None = state.get("per_iteration")
        self._iterations = total
        self._before: int | None = None  # backward passes before the present iteration, if it was announced
        self._end = None if total is None else self.count + total - done
        lost: int = state["open"]
        # The window goes on with what is left of it, unless windows have another size now.
        self._left = self.size - lost if lost and state["size"] == self.size else 0
        self._made = 0
        self._reference, self._samples, self._of_batch = 1.0, 0.0, 0.0
        return lost

    def begin_iteration(self, index: int, end: int | None = None) -> None:
        """Announce that the iteration after `index` others begins; windows end with iteration `end`, if it is given."""
        self._per_iteration = self._of_an_iteration()
        self._before = self.count
        if self.is_complete:  # also a window that was cut short where an epoch ended
            self._left = 0
        ends = [one for one in (self._iterations, end) if one is not None]
        if ends:
            left = min(ends) - index
            is_known = self._per_iteration or left == 1
            self._end = self.count + left * (self._per_iteration or 1) if is_known else None

    @property
    def is_complete(self) -> bool:
        """Whether the last backward pass ended a window."""
        return self._left == 0 or (self._end is not None and self.count >= self._end)

    @property
    def next_completes(self) -> bool:
        """Whether the next backward pass will end a window."""
        left = self.next_size if self.is_complete else self._left
        return left == 1 or (self._end is not None and self.count + 1 >= self._end)

    @property
    def made(self) -> int:
        """Backward passes of the open window so far; 0 if there is none."""
        return 0 if self.is_complete else self._made

    def set_size(self, size: int) -> None:
        """Set the size of windows that begin after the present one, which ends with its update."""
        self.next_size = size
        if not self.made and not self._samples:
            self.size = size

    def weigh(self) -> float:
        """Return the factor for the loss of the present batch, which is divided by `size`."""
        if self.is_complete or self._made == 0:
            self.size, self._reference, self._samples = self.next_size, self.mean or 1.0, 0.0
        self._of_batch = self.mean
        return self.own / self._reference

    def add(self) -> None:
        """Count a backward pass, and the samples of its batch, if that has been weighed."""
        if self.is_complete:
            self.size = self._left = self.next_size
            self._made = 0
        self._samples += self._of_batch
        self._of_batch = 0.0
        self.count += 1
        self._made += 1
        self._left -= 1
        if self.is_complete:
            self.updates += 1

    def correction(self) -> float:
        """Return the factor for the gradients of a complete window, and forget its samples."""
        samples, self._samples = self._samples, 0.0
        size, self.size = self.size, self.next_size
        return self._reference * size / samples if samples else 1.0

    def state(self) -> dict[str, Any]:
        """Return what resuming needs, in JSON values."""
        if self._loaded:
            return dict(self._loaded)
        return {
            "size": self.size,
            "backward_passes": self.count,
            "per_iteration": self._of_an_iteration(),
            "open": 0 if self.is_complete else self.size - self._left,  # also those before this training began
            "updates": self.updates,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Set where the next `restart` goes on."""
        self._loaded = dict(state)

    def _of_an_iteration(self) -> int | None:
        made = 0 if self._before is None else self.count - self._before
        return made or self._per_iteration
