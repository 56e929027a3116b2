"""`lockstep config`, and how every command reads its config."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from inspect import signature
from pathlib import Path

from lockstep.cli.options import CfgOptions, ConfigPath, TrustConfig
from lockstep.config import Config, parse_options
from lockstep.config.config import import_custom
from lockstep.errors import ConfigError, did_you_mean


def read_config(path: Path, *, trusted: bool = False) -> Config:
    """Return the config at `path`; a YAML or JSON file may lead to code only if it is `trusted`.

    From then on, modules in its folder and in the current folder can be imported, as from a script there.
    """
    for folder in (os.getcwd(), os.path.dirname(os.path.realpath(path))):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        return Config.fromfile(path, trusted=trusted)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from None


def apply_options(cfg: Config, options: Sequence[str]) -> None:
    """Apply ``--cfg-options``, strings ``key=value``, to a config.

    The user has typed them: unlike a YAML file, they may name import paths and `custom_imports`, which are imported.

    Raises:
        ConfigError: a top-level key is neither in the config nor an argument of Runner, so nothing would read it.
    """
    changes = parse_options(options)
    by_key = {dotted.partition(".")[0]: dotted for dotted in changes}
    for key, dotted in by_key.items():
        if key in cfg:
            continue
        from lockstep.runner import Runner  # imports torch
        from lockstep.runner.arguments import CONFIG_KEYS

        if key not in (known := {*signature(Runner).parameters, *CONFIG_KEYS}):
            hint = did_you_mean(key, {*cfg, *known})
            raise ConfigError(f"the config has no key `{key}` for the option `{dotted}`{hint}")
    cfg.merge_from_dict(changes)
    if "custom_imports" in by_key:
        import_custom(cfg)


def print_config(config: ConfigPath, cfg_options: CfgOptions = None, trust_config: TrustConfig = False) -> None:
    """Print a config, merged with its bases and options, as Python. Passwords, tokens and keys in it are '***'."""
    cfg = read_config(config, trusted=trust_config)
    cfg.merge_from_dict(parse_options(cfg_options or []))
    print(cfg.masked().pretty_text, end="")


def check(config: ConfigPath, cfg_options: CfgOptions = None, trust_config: TrustConfig = False) -> None:
    """List everything that is wrong with a config, without building anything from it.

    It finds unknown keys, types and arguments, missing ones, impossible values, and contradictions.
    """
    cfg = read_config(config, trusted=trust_config)
    apply_options(cfg, cfg_options or [])
    from lockstep.lint import check_config  # imports torch

    check_config(cfg)
    print(f"{config}: no faults")
