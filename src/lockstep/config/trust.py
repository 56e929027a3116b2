"""What a YAML or JSON file may do only if its reader trusts it: run Python files, import modules, name import paths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.config.config_file import DataFile
from lockstep.config.dictionary import items_below
from lockstep.config.inheritance import Source
from lockstep.config.placeholders import BASE
from lockstep.errors import ConfigError, counted
from lockstep.registry import is_registered

# The keys whose values lockstep looks up in a registry.
_NAMES = ("type", "strategy", "constructor", "collate_fn", "comm_hook", "ema_type", "runner_type")
_IMPORTS = "custom_imports"
_REMEDY = (
    "YAML and JSON files are data: they may only name what is registered. If you trust {these}, say so with "
    "--trust-config, or trusted=True in Config.fromfile; or write the config in Python, which is a program anyway"
)


def refuse_code(source: Source) -> None:
    """Check that no YAML or JSON file among a config and its bases leads to code by itself; import and run nothing.

    Raises:
        ConfigError: one does; the message lists each place with file, line and key.
    """
    if found := list(dict.fromkeys(_code_in(source))):
        remedy = _REMEDY.format(these="this file" if len({place for place, _ in found}) == 1 else "these files")
        if len(found) == 1:
            raise ConfigError(f"{found[0][1]}. {remedy}")
        lines = "".join(f"\n  {says}" for _, says in found)
        raise ConfigError(f"{source.file.path} leads to code in {counted(len(found), 'place')}:{lines}\n{remedy}")


def _code_in(source: Source) -> Iterator[tuple[str, str]]:
    """Yield each place where data lead to code: its file, and a sentence."""
    if not isinstance(source.file, DataFile):
        for _, base in source.bases:
            yield from _code_in(base)
        return
    if programs := list(_programs(source)):
        yield from programs
        return
    # Only data from here on, so that the merged values can be had without running anything.
    values = source.values()
    if values.get(_IMPORTS):
        yield _place(source, _IMPORTS, "imports modules")
    for key, value in _names_in("", values):
        # A name without a dot can only be a registered one.
        if "." in value and not is_registered(value):
            yield _place(source, key, f"= {value!r} is an import path")


def _programs(source: Source) -> Iterator[tuple[str, str]]:
    """Yield where a YAML or JSON file, or one of its bases, names a Python file as its base."""
    for base, below in source.bases:
        if isinstance(below.file, DataFile):
            yield from _programs(below)
        else:
            yield str(source.file.path), str(source.file.error(BASE, f"leads to a program, {base.path}"))


def _names_in(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of each key in nested dicts and lists that names what to build."""
    for name, item in items_below(value).items():
        key = f"{prefix}{name}"
        if isinstance(item, str):
            if name in _NAMES:
                yield key, item
        else:
            yield from _names_in(f"{key}.", item)


def _place(source: Source, key: str, says: str) -> tuple[str, str]:
    where: Any = source.where(key) or str(source.file.path)
    return where.rpartition(":")[0], f"{where}: `{key}` {says}"
