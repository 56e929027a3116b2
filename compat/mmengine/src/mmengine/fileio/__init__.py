"""Files on disks and behind URLs, and the formats of files."""

from __future__ import annotations

from mmengine.fileio import io as _io
from mmengine.fileio.backends import (
    BaseStorageBackend,
    HardDiskBackend,
    HTTPBackend,
    LmdbBackend,
    LocalBackend,
    PetrelBackend,
    register_backend,
)
from mmengine.fileio.file_client import FileClient
from mmengine.fileio.handlers import BaseFileHandler, JsonHandler, PickleHandler, YamlHandler, register_handler
from mmengine.fileio.io import *  # noqa: F403 - its __all__
from mmengine.fileio.parse import dict_from_file, list_from_file

__all__ = [
    "BaseFileHandler",
    "BaseStorageBackend",
    "FileClient",
    "HTTPBackend",
    "HardDiskBackend",
    "JsonHandler",
    "LmdbBackend",
    "LocalBackend",
    "PetrelBackend",
    "PickleHandler",
    "YamlHandler",
    "dict_from_file",
    "list_from_file",
    "register_backend",
    "register_handler",
]
__all__ += _io.__all__
