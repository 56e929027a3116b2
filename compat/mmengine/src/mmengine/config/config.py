"""Configs: lockstep's, with what MMEngine's callers also use."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

import lockstep.config
from lockstep.config import ConfigDict, read_base

__all__ = ["Config", "ConfigDict", "DictAction", "read_base"]


class DictAction(lockstep.config.DictAction):
    """An argparse action that collects ``key=value`` in a dict; see `lockstep.config.DictAction`."""

    @staticmethod
    def _parse_iterable(val: str) -> Any:
        """Return the value that a text on a command line stands for.

        Example:
            >>> DictAction._parse_iterable("1,2,a"), DictAction._parse_iterable("[(1,2),3]")
            ([1, 2, 'a'], [(1, 2), 3])
        """
        return lockstep.config.parse_options([f"value={val}"])["value"]


class Config(lockstep.config.Config):
    """The description of a run, read from a file; see `lockstep.config.Config`."""

    __slots__ = ()

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
