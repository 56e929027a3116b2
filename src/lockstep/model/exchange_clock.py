"""How long a rank computes in a backward pass of DDP, and how long it waits for the gradients of the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any

from torch import Tensor
from torch.autograd import Variable


class ExchangeClock:
    """Adds up times of backward passes on the CPU, where the host itself waits for gradients.

    Attributes:
        waited: seconds after the rank's own backward passes, until the gradients of all ranks are averaged.
        hooked: seconds in the code of a communication hook, before it returns. That is part of the backward pass.

    **Cost**: some 5 us for each backward pass.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        self.hooked = 0.0
        self._computed: float | None = None

    def begin(self, loss: Tensor) -> None:
        """Prepare for the backward pass of a loss."""
        self._computed = None
        if loss.requires_grad:
            loss.register_hook(self._queue)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Add what has passed since the rank had computed all its gradients."""
        if self._computed is not None:
            self.waited += perf_counter() - self._computed

    def timed(self, comm_hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return a communication hook that is timed."""

        @wraps(comm_hook)
        def hook(state: Any, bucket: Any) -> Any:
            before = perf_counter()
            try:
                return comm_hook(state, bucket)
            finally:
                self.hooked += perf_counter() - before

        return hook

    def _queue(self, _: Tensor) -> None:
        # Autograd calls what is queued at the end of the pass in that order: this before DDP's own wait.
        Variable._execution_engine.queue_callback(self._note)

    def _note(self) -> None:
        self._computed = perf_counter()
