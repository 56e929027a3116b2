"""One vote for each sample, where ranks and batches hold unequal numbers of them."""

from __future__ import annotations


class SampleWeights:
    """Makes an update follow the mean over all samples of its window, on all ranks.

    Wrappers average gradients over ranks, and accumulation averages them over batches, which gives every batch one
    vote. So the loss of a batch is multiplied by its number of samples over that of an average batch; the first batches
    of the window, of all ranks, stand for the average. At the window's end the gradients are multiplied by what was
    wrong about that. Where batches are equal both factors are exactly 1.
    """

    def __init__(self) -> None:
        self._own = self._mean = self._reference = 1.0
        self._batches = 0
        self._samples = 0.0

    def announce(self, own: float, mean: float) -> None:
        """Say how many samples the next batch has: this rank's, and the mean over ranks."""
        self._own, self._mean = own, mean

    def weigh(self, *, begins_window: bool) -> float:
        """Count the present batch, and return what its loss is to be multiplied by."""
        if begins_window:
            self._batches, self._samples, self._reference = 0, 0.0, self._mean or 1.0
        self._batches += 1
        self._samples += self._mean
        return self._own / self._reference

    def correction(self) -> float:
        """Return what the gradients of a window that is complete are to be multiplied by."""
        return self._reference * self._batches / self._samples if self._samples else 1.0
