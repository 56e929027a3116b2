"""Which backends there are, by their names and by the beginnings of URLs."""

from __future__ import annotations

from typing import Any, TypeVar

from mmengine.fileio.backends.base import BaseStorageBackend
from mmengine.fileio.backends.lmdb_backend import LmdbBackend
from mmengine.fileio.backends.local_backend import LocalBackend
from mmengine.fileio.backends.remote_backends import FsspecBackend, HTTPBackend

_Backend = TypeVar("_Backend", bound=type[BaseStorageBackend])

backends: dict[str, type[BaseStorageBackend]] = {}
prefix_to_backends: dict[str, type[BaseStorageBackend]] = {}

__all__ = ["backends", "prefix_to_backends", "register_backend"]


def register_backend(
    name: str,
    backend: type[BaseStorageBackend] | None = None,
    force: bool = False,
    prefixes: str | list[str] | tuple[str, ...] | None = None,
) -> Any:
    """Register a backend, by a call or as a decorator.

    Args:
        name: what configs call it.
        backend: the class; without it a decorator is returned.
        force: replace one that is registered.
        prefixes: the protocols of URLs that it serves.

    Raises:
        ValueError: the name or a protocol is taken.
        TypeError: `name`, `backend` or `prefixes` are of another type.
    """
    if backend is not None:
        _register(name, backend, force, prefixes)
        return None

    def register(cls: _Backend) -> _Backend:
        _register(name, cls, force, prefixes)
        return cls

    return register


def _register(name: str, backend: Any, force: bool, prefixes: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"`name` must be a str, but is {name!r}")
    if not isinstance(backend, type) or not issubclass(backend, BaseStorageBackend):
        raise TypeError(f"`backend` must be a subclass of BaseStorageBackend, but is {backend!r}")
    if not isinstance(prefixes, str | list | tuple | None):
        raise TypeError(f"`prefixes` must be a str, a list or a tuple of str, or None, but is {prefixes!r}")
    names = [prefixes] if isinstance(prefixes, str) else prefixes or []
    if name in backends and not force:
        raise ValueError(f"there is a backend `{name}` already; choose another name, or replace it with force=True")
    for prefix in names:
        if prefix in prefix_to_backends and not force:
            raise ValueError(f"`{prefix}` has a backend already; replace it with force=True")
    backends[name] = backend
    prefix_to_backends.update(dict.fromkeys(names, backend))


register_backend("local", LocalBackend, prefixes="")
register_backend("http", HTTPBackend, prefixes=["http", "https"])
register_backend("lmdb", LmdbBackend)
# MMEngine reads s3:// by a client of its own, which it calls petrel.
register_backend("petrel", FsspecBackend, prefixes=["s3", "petrel"])
register_backend("fsspec", FsspecBackend)
