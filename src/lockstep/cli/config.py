"""`lockstep config`, and how every command reads its config."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from lockstep.cli.options import CfgOptions, ConfigPath
from lockstep.config import Config, parse_options
from lockstep.errors import ConfigError
from lockstep.registry.nearest import did_you_mean


def read_config(path: Path) -> Config:
    """Return the config at `path`.

    Modules beside it and in the current folder can be imported from now on, as they could from a script there.
    """
    for folder in (os.getcwd(), str(path.resolve().parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        return Config.fromfile(path)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from None


def apply_options(cfg: Config, options: Sequence[str], known: Collection[str]) -> None:
    """Lay the ``--cfg-options`` over a config.

    Args:
        cfg: is changed.
        options: texts ``key=value``.
        known: top-level keys that may be added; others must be there already, since nobody would look at them.
    """
    changes = parse_options(options)
    for dotted in changes:
        key = dotted.partition(".")[0]
        if key not in cfg and key not in known:
            raise ConfigError(
                f"the config has no key `{key}` for the option `{dotted}`" + did_you_mean(key, {*cfg, *known})
            )
    cfg.merge_from_dict(changes)


def print_config(config: ConfigPath, cfg_options: CfgOptions = None) -> None:
    """Print a config with its bases and options, as Python."""
    cfg = read_config(config)
    cfg.merge_from_dict(parse_options(cfg_options or []))
    text = cfg.pretty_text
    if not sys.stdout.isatty():
        print(text, end="")
        return
    from rich.console import Console
    from rich.syntax import Syntax

    Console().print(Syntax(text, "python", background_color="default", word_wrap=True))
