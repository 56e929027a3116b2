"""The base class of backends: where files are read from and written to."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod

__all__ = ["BaseStorageBackend"]


class BaseStorageBackend(metaclass=ABCMeta):
    """Base class of backends; a subclass implements `get` and `get_text`, and whatever else its storage can do."""

    # MMEngine's name: whether a link can be made in this storage.
    _allow_symlink = False

    @property
    def allow_symlink(self) -> bool:
        """Whether links can be made."""
        return self._allow_symlink

    @property
    def name(self) -> str:
        """The name of the class."""
        return type(self).__name__

    @abstractmethod
    def get(self, filepath: str) -> bytes:
        """Return the content of a file."""

    @abstractmethod
    def get_text(self, filepath: str, encoding: str = "utf-8") -> str:
        """Return the content of a file as text."""
