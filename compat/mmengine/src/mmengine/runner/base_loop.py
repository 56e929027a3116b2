"""The base class of users' own loops."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from typing import Any

__all__ = ["BaseLoop"]


class BaseLoop(metaclass=ABCMeta):
    """Base class of loops; a subclass implements `run`.

    Args:
        runner: whose loop it is.
        dataloader: a data loader, or the config of one.
    """

    def __init__(self, runner: Any, dataloader: Any) -> None:
        self._runner = runner
        if isinstance(dataloader, dict):
            from mmengine.runner.runner import Runner

            dataloader = Runner.build_dataloader(dataloader, seed=runner.seed)
        self.dataloader = dataloader

    @property
    def runner(self) -> Any:
        """Whose loop it is."""
        return self._runner

    @abstractmethod
    def run(self) -> Any:
        """Run the loop."""
