"""Formats of files: JSON, YAML and pickle."""

from __future__ import annotations

import json
import pickle
from abc import ABCMeta, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import yaml

_Handler = TypeVar("_Handler", bound="type[BaseFileHandler]")

__all__ = ["BaseFileHandler", "JsonHandler", "PickleHandler", "YamlHandler", "file_handlers", "register_handler"]


class BaseFileHandler(metaclass=ABCMeta):
    """Base class of formats.

    Attributes:
        str_like: whether the format is text; otherwise it is bytes.
    """

    str_like = True

    @abstractmethod
    def load_from_fileobj(self, file: IO[Any], **kwargs: Any) -> Any:
        """Return what an open file holds."""

    @abstractmethod
    def dump_to_fileobj(self, obj: Any, file: IO[Any], **kwargs: Any) -> None:
        """Write an object to an open file."""

    @abstractmethod
    def dump_to_str(self, obj: Any, **kwargs: Any) -> Any:
        """Return an object as text, or as bytes."""

    def load_from_path(self, filepath: str | Path, mode: str = "r", **kwargs: Any) -> Any:
        """Return what a file holds."""
        with open(filepath, mode) as file:
            return self.load_from_fileobj(file, **kwargs)

    def dump_to_path(self, obj: Any, filepath: str | Path, mode: str = "w", **kwargs: Any) -> None:
        """Write an object to a file."""
        with open(filepath, mode) as file:
            self.dump_to_fileobj(obj, file, **kwargs)


class JsonHandler(BaseFileHandler):
    """JSON; sets, ranges, arrays and numbers of numpy are written as lists and numbers."""

    def load_from_fileobj(self, file: IO[Any], **kwargs: Any) -> Any:
        """Return what an open file holds."""
        return json.load(file, **kwargs)

    def dump_to_fileobj(self, obj: Any, file: IO[Any], **kwargs: Any) -> None:
        """Write an object to an open file."""
        json.dump(obj, file, **{"default": _plain, **kwargs})

    def dump_to_str(self, obj: Any, **kwargs: Any) -> str:
        """Return an object as text."""
        return json.dumps(obj, **{"default": _plain, **kwargs})


class YamlHandler(BaseFileHandler):
    """YAML, also with Python's tuples; no file of YAML can make other objects."""

    def load_from_fileobj(self, file: IO[Any], **kwargs: Any) -> Any:
        """Return what an open file holds."""
        return yaml.load(file, **{"Loader": yaml.FullLoader, **kwargs})

    def dump_to_fileobj(self, obj: Any, file: IO[Any], **kwargs: Any) -> None:
        """Write an object to an open file."""
        yaml.dump(obj, file, **{"Dumper": yaml.Dumper, **kwargs})

    def dump_to_str(self, obj: Any, **kwargs: Any) -> str:
        """Return an object as text."""
        return str(yaml.dump(obj, **{"Dumper": yaml.Dumper, **kwargs}))


class PickleHandler(BaseFileHandler):
    """Pickle: who loads such a file runs what it says, so load only files that you trust."""

    str_like = False

    def load_from_fileobj(self, file: IO[Any], **kwargs: Any) -> Any:
        """Return what an open file holds."""
        return pickle.load(file, **kwargs)

    def dump_to_fileobj(self, obj: Any, file: IO[Any], **kwargs: Any) -> None:
        """Write an object to an open file."""
        pickle.dump(obj, file, **{"protocol": 2, **kwargs})

    def dump_to_str(self, obj: Any, **kwargs: Any) -> bytes:
        """Return an object as bytes."""
        return pickle.dumps(obj, **{"protocol": 2, **kwargs})

    def load_from_path(self, filepath: str | Path, mode: str = "rb", **kwargs: Any) -> Any:
        """Return what a file holds."""
        return super().load_from_path(filepath, mode="rb", **kwargs)

    def dump_to_path(self, obj: Any, filepath: str | Path, mode: str = "wb", **kwargs: Any) -> None:
        """Write an object to a file."""
        super().dump_to_path(obj, filepath, mode="wb", **kwargs)


def _plain(obj: Any) -> Any:
    if isinstance(obj, set | range):
        return list(obj)
    if isinstance(obj, np.ndarray):
        return obj.tolist()
    if isinstance(obj, np.generic):
        return obj.item()
    raise TypeError(f"JSON has no form for {type(obj)}")


_yaml, _pickle = YamlHandler(), PickleHandler()
file_handlers: dict[str, BaseFileHandler] = {
    "json": JsonHandler(),
    "yaml": _yaml,
    "yml": _yaml,
    "pickle": _pickle,
    "pkl": _pickle,
}


def register_handler(file_formats: str | list[str], **kwargs: Any) -> Callable[[_Handler], _Handler]:
    """Return a decorator that registers a format for files with these endings, without the dot.

    Args:
        file_formats: one ending or several.
        **kwargs: arguments for the class.
    """
    formats = [file_formats] if isinstance(file_formats, str) else file_formats
    if not all(isinstance(one, str) for one in formats):
        raise TypeError(f"`file_formats` must be a str or a list of str, but is {file_formats!r}")

    def register(cls: _Handler) -> _Handler:
        if not issubclass(cls, BaseFileHandler):
            raise TypeError(f"a format must be a subclass of BaseFileHandler, but is {cls!r}")
        file_handlers.update(dict.fromkeys(formats, cls(**kwargs)))
        return cls

    return register
