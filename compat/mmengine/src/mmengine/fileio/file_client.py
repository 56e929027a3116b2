"""`FileClient`: MMEngine's older way to a backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmengine.fileio.backends import BaseStorageBackend, HardDiskBackend, backends, register_backend
from mmengine.fileio.io import _protocol, get_file_backend

__all__ = ["FileClient", "HardDiskBackend"]


class FileClient:
    """A backend by its name or by the beginning of URLs; `get_file_backend` is the newer way.

    Args:
        backend: its name; `"disk"` is `"local"`.
        prefix: the protocol of its URLs, if `backend` is not given.
        **kwargs: arguments of the backend.

    Attributes:
        client: the backend, which has all methods.

    Example:
        >>> FileClient("disk").client.name, FileClient.infer_client(uri="https://host/x").client.name
        ('LocalBackend', 'HTTPBackend')
    """

    def __init__(self, backend: str | None = None, prefix: str | None = None, **kwargs: Any) -> None:
        if backend is None and prefix is None:
            backend = "local"
        if backend is not None:
            backend = "local" if backend == "disk" else backend
            if backend not in backends:
                raise ValueError(f"`backend` must be one of {', '.join(backends)}, but is {backend!r}")
            kwargs["backend"] = backend
        self.client: Any = get_file_backend(None if prefix is None else f"{prefix}://", backend_args=kwargs)

    @property
    def name(self) -> str:
        """The name of the backend's class."""
        return str(self.client.name)

    @property
    def allow_symlink(self) -> bool:
        """Whether links can be made."""
        return bool(self.client.allow_symlink)

    @staticmethod
    def parse_uri_prefix(uri: str | Path) -> str | None:
        """Return the protocol of a URL, or None for a path on a disk."""
        return _protocol(uri) or None

    @classmethod
    def infer_client(
        cls, file_client_args: Mapping[str, Any] | None = None, uri: str | Path | None = None
    ) -> FileClient:
        """Return the client that `file_client_args` describes, or else the one that serves `uri`."""
        if file_client_args is not None:
            return cls(**file_client_args)
        if uri is None:
            raise AssertionError("`uri` must be given where `file_client_args` is None")
        return cls(prefix=cls.parse_uri_prefix(uri))

    @classmethod
    def register_backend(
        cls,
        name: str,
        backend: type[BaseStorageBackend] | None = None,
        force: bool = False,
        prefixes: str | list[str] | tuple[str, ...] | None = None,
    ) -> Any:
        """Register a backend; see `mmengine.fileio.register_backend`."""
        return register_backend(name, backend, force, prefixes)

    def __getattr__(self, name: str) -> Any:
        if name == "client":  # not set yet, in a copy that is being made
            raise AttributeError(name)
        return getattr(self.client, name)
