"""Reading and writing files by path or URL, each through the backend that serves it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, TypeAlias

from mmengine.fileio.backends import FsspecBackend, LocalBackend, backends, prefix_to_backends
from mmengine.fileio.handlers import file_handlers

_Path: TypeAlias = str | Path
_Args: TypeAlias = Mapping[str, Any] | None

_instances: dict[str, Any] = {}

__all__ = [
    "copy_if_symlink_fails",
    "copyfile",
    "copyfile_from_local",
    "copyfile_to_local",
    "copytree",
    "copytree_from_local",
    "copytree_to_local",
    "dump",
    "exists",
    "generate_presigned_url",
    "get",
    "get_file_backend",
    "get_local_path",
    "get_text",
    "isdir",
    "isfile",
    "join_path",
    "list_dir_or_file",
    "load",
    "put",
    "put_text",
    "remove",
    "rmtree",
]


def get_file_backend(uri: _Path | None = None, *, backend_args: _Args = None, enable_singleton: bool = False) -> Any:
    """Return the backend that serves a path or URL.

    Args:
        uri: the path or URL; a URL may name a cluster before a colon: ``s3:cluster://...``.
        backend_args: arguments of the backend; its key `backend` names one, which then serves any `uri`.
        enable_singleton: return the same object for the same arguments.

    Raises:
        ValueError: neither `uri` nor `backend_args` says which one.

    Example:
        >>> get_file_backend("runs/log.json").name, get_file_backend("https://host/log.json").name
        ('LocalBackend', 'HTTPBackend')
    """
    arguments = dict(backend_args or {})
    if uri is None and "backend" not in arguments:
        raise ValueError('`uri` must be given where `backend_args` has no key "backend", but is None')
    prefix = _protocol(uri) if uri is not None else ""
    name = arguments.pop("backend", None)
    key = f"{name or prefix}:{sorted(arguments.items(), key=str)}"
    if enable_singleton and key in _instances:
        return _instances[key]
    kind = backends[name] if name is not None else prefix_to_backends.get(prefix, FsspecBackend)
    backend = kind(**arguments)
    if enable_singleton:
        _instances[key] = backend
    return backend


def get(filepath: _Path, backend_args: _Args = None) -> bytes:
    """Return the content of a file."""
    return _backend(filepath, backend_args).get(filepath)


def get_text(filepath: _Path, encoding: str = "utf-8", backend_args: _Args = None) -> str:
    """Return the content of a file as text."""
    return _backend(filepath, backend_args).get_text(filepath, encoding)


def put(obj: bytes, filepath: _Path, backend_args: _Args = None) -> None:
    """Write a file."""
    _backend(filepath, backend_args).put(obj, filepath)


def put_text(obj: str, filepath: _Path, backend_args: _Args = None) -> None:
    """Write a file of text."""
    _backend(filepath, backend_args).put_text(obj, filepath)


def exists(filepath: _Path, backend_args: _Args = None) -> bool:
    """Return whether there is such a file or folder."""
    return _backend(filepath, backend_args).exists(filepath)


def isdir(filepath: _Path, backend_args: _Args = None) -> bool:
    """Return whether it is a folder."""
    return _backend(filepath, backend_args).isdir(filepath)


def isfile(filepath: _Path, backend_args: _Args = None) -> bool:
    """Return whether it is a file."""
    return _backend(filepath, backend_args).isfile(filepath)


def join_path(filepath: _Path, *filepaths: _Path, backend_args: _Args = None) -> str:
    """Return the joined path or URL."""
    return _backend(filepath, backend_args).join_path(filepath, *filepaths)


@contextmanager
def get_local_path(filepath: _Path, backend_args: _Args = None) -> Iterator[_Path]:
    """Give a path on the disk inside the context: the file's own, or that of a copy, which is removed at the end."""
    with _backend(str(filepath), backend_args).get_local_path(str(filepath)) as path:
        yield path


def copyfile(src: _Path, dst: _Path, backend_args: _Args = None) -> _Path:
    """Copy a file within a storage, and return the path of the copy."""
    return _backend(src, backend_args).copyfile(src, dst)


def copytree(src: _Path, dst: _Path, backend_args: _Args = None) -> _Path:
    """Copy a folder within a storage; `dst` must not exist."""
    return _backend(src, backend_args).copytree(src, dst)


def copyfile_from_local(src: _Path, dst: _Path, backend_args: _Args = None) -> _Path:
    """Copy a file from the disk to a storage."""
    return _backend(dst, backend_args).copyfile_from_local(src, dst)


def copytree_from_local(src: _Path, dst: _Path, backend_args: _Args = None) -> _Path:
    """Copy a folder from the disk to a storage."""
    return _backend(dst, backend_args).copytree_from_local(src, dst)


def copyfile_to_local(src: _Path, dst: _Path, backend_args: _Args = None) -> _Path:
    """Copy a file from a storage to the disk."""
    return _backend(src, backend_args).copyfile_to_local(src, dst)


def copytree_to_local(src: _Path, dst: _Path, backend_args: _Args = None) -> _Path:
    """Copy a folder from a storage to the disk."""
    return _backend(src, backend_args).copytree_to_local(src, dst)


def remove(filepath: _Path, backend_args: _Args = None) -> None:
    """Remove a file."""
    _backend(filepath, backend_args).remove(filepath)


def rmtree(dir_path: _Path, backend_args: _Args = None) -> None:
    """Remove a folder with what it holds."""
    _backend(dir_path, backend_args).rmtree(dir_path)


def copy_if_symlink_fails(src: _Path, dst: _Path, backend_args: _Args = None) -> bool:
    """Link `dst` to `src`, or copy it where links cannot be made; return whether it is a link."""
    return _backend(src, backend_args).copy_if_symlink_fails(src, dst)


def list_dir_or_file(
    dir_path: _Path,
    list_dir: bool = True,
    list_file: bool = True,
    suffix: str | tuple[str, ...] | None = None,
    recursive: bool = False,
    backend_args: _Args = None,
) -> Iterator[str]:
    """Yield what a folder holds, relative to it; see `LocalBackend.list_dir_or_file`."""
    yield from _backend(dir_path, backend_args).list_dir_or_file(dir_path, list_dir, list_file, suffix, recursive)


def generate_presigned_url(
    url: str, client_method: str = "get_object", expires_in: int = 3600, backend_args: _Args = None
) -> str:
    """Return a URL by which others may read a file, where the backend can give one."""
    return _backend(url, backend_args).generate_presigned_url(url, client_method, expires_in)


def load(
    file: Any, file_format: str | None = None, file_client_args: _Args = None, backend_args: _Args = None, **kwargs: Any
) -> Any:
    """Return what a file of JSON, YAML or pickle holds.

    Args:
        file: a path, a URL or an open file.
        file_format: the format; by default the ending of the path.
        file_client_args: MMEngine's older name of `backend_args`.
        backend_args: as for `get_file_backend`.
        **kwargs: arguments of the format's own function, such as `json.load`.

    Raises:
        TypeError: the format is unknown.
    """
    handler = _handler(file, file_format)
    if not isinstance(file, str | Path):
        return handler.load_from_fileobj(file, **kwargs)
    backend = _backend(file, _same_args(file_client_args, backend_args))
    if handler.str_like:
        with StringIO(backend.get_text(str(file))) as text:
            return handler.load_from_fileobj(text, **kwargs)
    with BytesIO(backend.get(str(file))) as content:
        return handler.load_from_fileobj(content, **kwargs)


def dump(
    obj: Any,
    file: Any = None,
    file_format: str | None = None,
    file_client_args: _Args = None,
    backend_args: _Args = None,
    **kwargs: Any,
) -> Any:
    """Write an object as JSON, YAML or pickle.

    Args:
        obj: the object.
        file: a path, a URL or an open file; None to return the text or bytes.
        file_format: the format; by default the ending of the path.
        file_client_args: MMEngine's older name of `backend_args`.
        backend_args: as for `get_file_backend`.
        **kwargs: arguments of the format's own function, such as `json.dump`.

    Raises:
        ValueError: neither `file` nor `file_format` gives a format.
        TypeError: the format is unknown.

    Example:
        >>> dump({"a": {1, 2}}, file_format="json")
        '{"a": [1, 2]}'
    """
    if file is None and file_format is None:
        raise ValueError("`file_format` must be given where `file` is None")
    handler = _handler(file, file_format)
    if file is None:
        return handler.dump_to_str(obj, **kwargs)
    if not isinstance(file, str | Path):
        return handler.dump_to_fileobj(obj, file, **kwargs)
    backend = _backend(file, _same_args(file_client_args, backend_args))
    if handler.str_like:
        with StringIO() as text:
            handler.dump_to_fileobj(obj, text, **kwargs)
            return backend.put_text(text.getvalue(), str(file))
    with BytesIO() as content:
        handler.dump_to_fileobj(obj, content, **kwargs)
        return backend.put(content.getvalue(), str(file))


def _protocol(uri: _Path) -> str:
    protocol, separator, _ = str(uri).partition("://")
    return protocol.partition(":")[0] if separator else ""


def _backend(uri: _Path, backend_args: _Args) -> LocalBackend:
    """Return the backend that serves a path or URL; whichever it is, it has the methods of `LocalBackend`."""
    backend: LocalBackend = get_file_backend(uri, backend_args=backend_args, enable_singleton=True)
    return backend


def _handler(file: Any, file_format: str | None) -> Any:
    if file_format is None and isinstance(file, str | Path):
        file_format = str(file).rpartition(".")[2]
    if file_format not in file_handlers:
        known = ", ".join(sorted(file_handlers))
        raise TypeError(f"`file_format` must be a known format, but is {file_format!r}; there are {known}")
    if file is not None and not isinstance(file, str | Path) and not (hasattr(file, "read") or hasattr(file, "write")):
        raise TypeError(f"`file` must be a path or an open file, but is {file!r}")
    return file_handlers[file_format]


def _same_args(file_client_args: _Args, backend_args: _Args) -> _Args:
    """Return the arguments of the backend, which may be given under their older name."""
    if file_client_args is None:
        return backend_args
    if backend_args is not None:
        raise ValueError("`file_client_args` and `backend_args` mean the same; give `backend_args` only")
    warnings.warn("`file_client_args` is called `backend_args` now", DeprecationWarning, stacklevel=3)
    arguments = dict(file_client_args)
    return {**arguments, "backend": "local"} if arguments.get("backend") == "disk" else arguments
