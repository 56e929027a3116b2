"""`StreamLoader`: batches of an iterable data set, each with the place where it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from lockstep.dataset.stream import Resumption, StreamShare

_BEGINNING = Resumption(0, {})


class StreamLoader(DataLoader[Any]):
    """A `DataLoader` over a `StreamShare`, which knows where it is, if the data set does.

    Workers are ahead of the training. So each batch comes with the position of the worker that made it, right after it;
    what is saved is the last one that was used of each worker.

    Args:
        dataset: this rank's share.
        collate_fn: makes a batch of samples, or of one sample where `batch_size` is None.
        **kwargs: further arguments of `DataLoader`.
    """

    dataset: StreamShare

    def __init__(self, dataset: StreamShare, collate_fn: Callable[[Any], Any], **kwargs: Any) -> None:
        self._batches = 0
        self._workers: dict[int, Mapping[str, Any]] = {}
        self._resumption = _BEGINNING
        super().__init__(dataset, collate_fn=_WithPosition(collate_fn, dataset), **kwargs)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        resumption, self._resumption = self._resumption, _BEGINNING
        self._batches, self._workers = resumption.batches, dict(resumption.workers)
        self.dataset.resume(resumption)
        for batch, position in super().__iter__():
            self._batches += 1
            if position is not None:
                worker, state = position
                self._workers[worker] = state
            yield batch
        self._batches, self._workers = 0, {}

    def __len__(self) -> int:
        """Return the number of batches that this rank sees in a pass, where the data set has a length.

        Raises:
            TypeError: it has none, or deals itself out.
        """
        whole = self.dataset.dataset
        if not isinstance(whole, Sized) or not self.dataset.deals_out:
            raise TypeError(f"nobody knows how many batches of {type(whole).__name__} there are")
        rank, ranks = self.dataset.share
        samples, size = len(range(rank, len(whole), ranks)), self.dataset.batch_size
        return samples // size if self.drop_last else -(-samples // size)

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank is in its pass, after the last batch that was taken."""
        return {"batches": self._batches, "workers": dict(self._workers), "layout": self._layout()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next pass where another one was saved.

        Raises:
            ValueError: other workers, ranks or batches than these have made it.
        """
        if state_dict["layout"] != self._layout():
            raise ValueError(
                f"[rank, ranks, workers, batch size] must be {state_dict['layout']}, as they were saved, but are "
                f"{self._layout()}"
            )
        self._batches, self._workers = state_dict["batches"], dict(state_dict["workers"])
        self._resumption = Resumption(self._batches, self._workers)

    def _layout(self) -> list[int]:
        return [*self.dataset.share, max(1, self.num_workers), self.dataset.batch_size]


class _WithPosition:
    """Makes a batch, where the samples are made, and adds the position that the data set is at."""

    def __init__(self, collate_fn: Callable[[Any], Any], dataset: StreamShare) -> None:
        self._collate_fn = collate_fn
        self._dataset = dataset

    def __call__(self, samples: Any) -> tuple[Any, Any]:
        info = get_worker_info()
        # In a worker it is the copy there that has made the samples.
        made_by = self._dataset if info is None else info.dataset
        assert isinstance(made_by, StreamShare)
        return self._collate_fn(samples), made_by.position() if made_by.has_position else None
