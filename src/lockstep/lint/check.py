"""Checking a whole config against the arguments of a Runner and the signatures of all types that it names."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from importlib.util import find_spec

from lockstep.calls import short_path
from lockstep.config import Config
from lockstep.config.dictionary import leaves
from lockstep.errors import ConfigError, counted, did_you_mean
from lockstep.lint.parts import Fault
from lockstep.lint.sections import faults_of
from lockstep.masking import is_masked
from lockstep.registry import in_default_scope
from lockstep.runner.arguments import ARGUMENTS, CONFIG_KEYS, invalid_arguments, missing_arguments

_KNOWN = {**ARGUMENTS, **CONFIG_KEYS}
_UNKNOWN_KEY_REMEDY = ". Remove it, or begin its name with an underscore if it is for somebody else"


def check_config(cfg: Config, needed: Collection[str] = ("model",)) -> None:
    """Check that a Runner can be built from a config, as far as that is possible without building anything.

    It imports the types that the config names, and reports what their signatures and annotations rule out.

    Args:
        cfg: the config.
        needed: keys that the config must have.

    Raises:
        ConfigError: something is wrong; the message lists every fault with file, line, key and value, and the name that
            was probably meant.

    Example:
        >>> check_config(Config({"optim_wrapper": {"optimizer": {"type": "SGD", "lerning_rate": 1}}}))
        Traceback (most recent call last):
        lockstep.errors.ConfigError: the config has 2 faults:
          `optim_wrapper.optimizer.lerning_rate` = 1 is not an argument of the optimizer `SGD`: did you mean `lr`?
          `model` must be given
    """
    if lines := [f"  {_where(cfg, fault.key)}{fault.sentence(cfg)}" for fault in find_faults(cfg, needed)]:
        title = f"{short_path(cfg.filename or 'the config')} has {counted(len(lines), 'fault')}:"
        raise ConfigError("\n".join([title, *lines, *_unimported_scope(cfg.get("default_scope"))]))


def find_faults(cfg: Config, needed: Collection[str] = ("model",)) -> list[Fault]:
    """Return everything that is wrong with a config, in the order of its keys; see `check_config`."""
    scope = cfg.get("default_scope")
    with in_default_scope(scope if isinstance(scope, str) else None):
        return list(dict.fromkeys(_faults(cfg, needed)))


def _faults(cfg: Config, needed: Collection[str]) -> Iterator[Fault]:
    # `model` and `work_dir` may be None here: the command line may give a work dir, and `needed` asks for a model.
    invalid = {
        key: says for key, says in invalid_arguments(cfg) if key not in ("model", "work_dir") or cfg[key] is not None
    }
    for key, value in cfg.items():
        if key in invalid:
            yield Fault(key, invalid[key])
        elif key in _KNOWN:
            yield from faults_of(key, value, _KNOWN[key], cfg)
        elif key not in cfg.intermediate_keys and not str(key).startswith("_"):
            hint = did_you_mean(key, ARGUMENTS, _UNKNOWN_KEY_REMEDY)
            yield Fault(str(key), f"is not an argument of Runner, and nothing reads it{hint}")
    for key, says in missing_arguments(cfg):
        yield Fault(key, says)
    for key, leaf in leaves(cfg):
        if is_masked(leaf):
            says = "was masked when the config was saved. Give the secret again, as an option or in a config of yours"
            yield Fault(key, says)
    for key in needed:
        if cfg.get(key) is None:
            yield Fault(key, "must be given")


def _unimported_scope(scope: object) -> Iterator[str]:
    """Say how names of the package that is the default scope are found, if it has not been imported."""
    if not isinstance(scope, str) or not scope.isidentifier() or scope == "__main__":
        return
    if f"{scope}.registry" not in sys.modules and find_spec(scope):
        yield (
            f"  `default_scope` is {scope!r}, but nothing of that package has been looked up, because it was not "
            f"imported. To look there, too, add custom_imports={scope}.registry"
        )


def _where(cfg: Config, key: str) -> str:
    location = cfg.where(key)
    return f"{short_path(location)}: " if location else ""
