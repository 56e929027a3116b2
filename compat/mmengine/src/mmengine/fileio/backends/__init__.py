"""Backends: where files are read from and written to."""

from __future__ import annotations

from mmengine.fileio.backends.base import BaseStorageBackend
from mmengine.fileio.backends.lmdb_backend import LmdbBackend
from mmengine.fileio.backends.local_backend import HardDiskBackend, LocalBackend
from mmengine.fileio.backends.registry_utils import backends, prefix_to_backends, register_backend
from mmengine.fileio.backends.remote_backends import FsspecBackend, HTTPBackend

PetrelBackend = FsspecBackend

__all__ = [
    "BaseStorageBackend",
    "FsspecBackend",
    "HTTPBackend",
    "HardDiskBackend",
    "LmdbBackend",
    "LocalBackend",
    "PetrelBackend",
    "backends",
    "prefix_to_backends",
    "register_backend",
]
