"""Configs: lockstep's, with what MMEngine's callers also use."""

from __future__ import annotations

import re
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import unified_diff
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import lockstep.config
from lockstep.config import ConfigDict, read_base
from lockstep.errors import ConfigError

__all__ = ["Config", "ConfigDict", "DictAction", "read_base"]

_QUOTED = re.compile(r"""^([^=]+)=\s*(["'])((?:(?!\2).)*)\2\s*$""")
_SUFFIXES = (".py", ".json", ".yaml", ".yml")


class DictAction(lockstep.config.DictAction):
    """An argparse action that collects ``key=value`` in a dict; see `lockstep.config.DictAction`.

    A value that is in quotes as a whole is read without them, as in MMEngine.
    """

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: Any = None) -> None:
        """Add the values of one occurrence of the option to those of earlier ones."""
        given = [values] if isinstance(values, str) else values or ()
        super().__call__(parser, namespace, [_QUOTED.sub(r"\1=\3", one) for one in given], option_string)

    @staticmethod
    def _parse_iterable(val: str) -> Any:
        """Return the value that a text on a command line stands for.

        Example:
            >>> DictAction._parse_iterable("1,2,a"), DictAction._parse_iterable("[(1,2),3]")
            ([1, 2, 'a'], [(1, 2), 3])
        """
        return lockstep.config.parse_options([f"value={val}"])["value"]


class ConfigKeyError(ConfigError, KeyError):
    """A `ConfigError` that MMEngine raises as a KeyError."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class ConfigImportError(ConfigError, ImportError):
    """A `ConfigError` that MMEngine raises as an ImportError."""


class ConfigSyntaxError(ConfigError, SyntaxError):
    """A `ConfigError` that MMEngine raises as a SyntaxError."""

    def __init__(self, says: str) -> None:
        super().__init__(says)
        self.msg = says  # which `str` and tracebacks show


class ConfigFileError(ConfigError, OSError):
    """A `ConfigError` that MMEngine raises as an OSError."""


@contextmanager
def _as_mmengine_raises() -> Iterator[None]:
    """Give a ConfigError also the type that MMEngine's would have."""
    try:
        yield
    except ConfigError as error:
        if type(error) is not ConfigError:
            raise
        kind: type[ConfigError] = ConfigKeyError
        if isinstance(error.__cause__, ImportError):
            kind = ConfigImportError
        elif isinstance(error.__cause__, SyntaxError):
            kind = ConfigSyntaxError
        raise kind(*error.args) from error.__cause__


class Config(lockstep.config.Config):
    """The description of a run, read from a file; see `lockstep.config.Config`.

    Each `ConfigError` is also a KeyError, ImportError, SyntaxError or OSError, as MMEngine's code expects.
    """

    __slots__ = ()

    def __init__(self, cfg_dict: Mapping[str, Any] | None = None, *args: Any, **kwargs: Any) -> None:
        with _as_mmengine_raises():
            super().__init__(cfg_dict, *args, **kwargs)

    @classmethod
    def fromfile(cls, filename: str | PathLike[str], *args: Any, **kwargs: Any) -> Self:
        """Read a config from a file; see `lockstep.config.Config.fromfile`.

        A file with ``_deprecation_ = dict(expected="new.py", reference="...")`` warns that another one is meant.
        """
        if Path(filename).suffix not in _SUFFIXES:
            raise ConfigFileError(f"{filename}: a config must end in one of {', '.join(_SUFFIXES)}")
        with _as_mmengine_raises():
            cfg = super().fromfile(filename, *args, **kwargs)
        if isinstance(old := cfg.pop("_deprecation_", None), Mapping):
            says = f"{filename} is deprecated" + (f": use {old['expected']}" if "expected" in old else "")
            more = f". See {old['reference']}" if "reference" in old else ""
            warnings.warn(says + more, DeprecationWarning, stacklevel=2)
        return cfg

    @classmethod
    def fromstring(cls, cfg_str: str, file_format: str, *, trusted: bool = False) -> Self:
        """Read a config from the text of a file, by the rules of `fromfile`.

        Args:
            cfg_str: the text.
            file_format: the suffix of such a file, such as `".py"`.
            trusted: see `fromfile`.

        Example:
            >>> Config.fromstring("lr = 0.1", ".py").lr
            0.1
        """
        with TemporaryDirectory() as folder:
            file = Path(folder) / f"config{file_format}"
            file.write_text(cfg_str, encoding="utf-8")
            cfg = cls.fromfile(file, trusted=trusted)
        return cls(cfg, text=cfg_str)  # without the name of the file, which no longer exists

    def merge_from_dict(self, options: Mapping[str, Any], allow_list_keys: bool = True) -> None:
        """Set values by dotted keys; see `lockstep.config.Config.merge_from_dict`."""
        with _as_mmengine_raises():
            super().merge_from_dict(options, allow_list_keys)

    @staticmethod
    def diff(cfg1: str | lockstep.config.Config, cfg2: str | lockstep.config.Config) -> str:
        """Return the lines in which two configs, or the files of two, differ, as `diff -u` shows them."""
        first, second = (
            (Config.fromfile(one) if isinstance(one, str) else one).pretty_text.splitlines(keepends=True)
            for one in (cfg1, cfg2)
        )
        return "".join(unified_diff(first, second))

    @property
    def _cfg_dict(self) -> ConfigDict:
        return self

    @staticmethod
    def auto_argparser(description: str | None = None) -> tuple[ArgumentParser, Config]:
        """Return a parser with an option for each key of the config that the command line names, and the config."""
        first = ArgumentParser(description=description)
        first.add_argument("config", help="config file path")
        cfg = Config.fromfile(first.parse_known_args()[0].config)
        parser = ArgumentParser(description=description)
        parser.add_argument("config", help="config file path")
        _add_options(parser, cfg)
        return parser, cfg


def _add_options(parser: ArgumentParser, cfg: Any, prefix: str = "") -> None:
    for key, value in cfg.items():
        if isinstance(value, bool):
            parser.add_argument(f"--{prefix}{key}", action="store_true")
        elif isinstance(value, str | int | float):
            parser.add_argument(f"--{prefix}{key}", type=type(value))
        elif isinstance(value, dict):
            _add_options(parser, value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple) and value:
            parser.add_argument(f"--{prefix}{key}", type=type(value[0]), nargs="+")
