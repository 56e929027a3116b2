"""Configs of several files: `_base_` and `read_base()`, the file that sets a key, and the check of untrusted files.

A YAML or JSON file may name Python files, modules and import paths, which run code, only if its reader trusts it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from lockstep.config.config_file import BASE, BaseFile, ConfigFile, DataFile, filled
from lockstep.config.dictionary import ConfigDict, leaves, mapped, merged, texts_in
from lockstep.config.python_file import PythonFile
from lockstep.errors import ConfigError, counted, nearest
from lockstep.registry import is_registered
from lockstep.registry.registry import REMEDY, SCOPE, trust

_KINDS: dict[str, type[PythonFile] | type[DataFile]] = {
    ".py": PythonFile,
    ".yaml": DataFile,
    ".yml": DataFile,
    ".json": DataFile,
}
# Keys whose values, or the items of these, are looked up in a registry: `refuse_code` names the file and line of an
# import path there. One under another key is refused where it is looked up, see `trust`.
_KEYS_OF_NAMES = (
    "type", "strategy", "constructor", "collate_fn", "comm_hook", "ema_type", "runner_type", "converters",
    "auto_wrap_policy", "fsdp_auto_wrap_policy", "metrics", "val_evaluator", "test_evaluator",
)  # fmt: skip
_IMPORTS = "custom_imports"


def read_file(path: Path) -> ConfigFile:
    """Read the config file at `path`, which must be absolute.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: it is a folder, its suffix is unknown, it cannot be read, or it has a syntax error; the message
            names the line.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: must be a config file, but is a folder")
        if (kind := _KINDS.get(path.suffix)) is None:
            raise ConfigError(f"{path}: a config must end in one of {', '.join(_KINDS)}")
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows begin a file with a byte order mark
    except (FileNotFoundError, NotADirectoryError) as error:
        near = nearest(path.name, (p.name for p in path.parent.glob("*")))
        hint = f"; did you mean `{path.with_name(near)}`?" if near else ""
        if not path.parent.is_dir():
            hint = f", nor a folder `{path.parent}`"
        raise FileNotFoundError(f"there is no config file `{path}`{hint}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: must be text in UTF-8, but is not at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    return kind(path, text)


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """A config file and its bases.

    Attributes:
        file: the file itself.
        bases: its bases, in the file's order, each with the keys that the file takes from it.
    """

    file: ConfigFile
    bases: list[tuple[BaseFile, ConfigSource]]

    @classmethod
    def read(cls, path: Path, children: tuple[ConfigFile, ...] = ()) -> ConfigSource:
        """Read the file at `path` and its bases, without running them.

        Args:
            path: the absolute path.
            children: the files that led to this base, the outermost first.

        Raises:
            FileNotFoundError: `path` does not exist.
            ConfigError: a base does not exist, bases form a circle, or a file has an error. The message names file,
                line and key.
        """
        file = read_file(path)
        return cls(file, [(base, cls._read_base(base, (*children, file))) for base in file.bases()])

    @classmethod
    def _read_base(cls, base: BaseFile, children: tuple[ConfigFile, ...]) -> ConfigSource:
        try:
            path = Path(os.path.realpath(base.path))
        except (OSError, ValueError) as error:  # as for NUL
            raise children[-1].error(base.named_by, f"names no file: {error}", base.line) from error
        chain = [child.path for child in children]
        if path in chain:
            circle = " -> ".join(map(str, [*chain[chain.index(path) :], path]))
            raise children[-1].error(base.named_by, f"leads in a circle: {circle}", base.line)
        try:
            return cls.read(path, children)
        except FileNotFoundError as error:
            raise children[-1].error(base.named_by, f"names a file that is missing: {error}", base.line) from error
        except ConfigError as error:
            error.add_note(f"read as a base of {children[-1].path}")
            raise

    def __deepcopy__(self, memo: object) -> ConfigSource:
        return self  # nothing of it changes

    def files(self) -> list[ConfigFile]:
        """Return all files, bases first."""
        return [*(file for _, source in self.bases for file in source.files()), self.file]

    def text(self) -> str:
        """Return the texts of all files, bases first."""
        return "\n".join(f"# {file.path}\n{file.text}" for file in self.files())

    def values(self) -> ConfigDict:
        """Run the files, and return the merged values.

        Raises:
            ConfigError: two bases have the same key, or a file has an error. The message names file, line and key.
        """
        file, path = self.file, self.file.path
        values_of_bases = [(base, _in_scope(base.scope, source.values())) for base, source in self.bases]
        if file.imports_bases:
            imported = [_imported_values(base, values, file) for base, values in values_of_bases]
            return ConfigDict(filled(file.values(ConfigDict(), imported), path, {}))
        base_values = _join_bases(values_of_bases, file)
        values = file.values(base_values)
        return merged(base_values, ConfigDict(filled(values, path, base_values)), file.error)

    def where(self, key: str) -> str:
        """Return file and line of a dotted key, or of its nearest parent key; "" if no file sets it."""
        return self._find(key)[1]

    def intermediate_keys(self) -> set[str]:
        """Return the keys that only serve the files themselves, such as a `batch_size` that later lines read."""
        return set().union(*(file.intermediate_keys() for file in self.files()))

    def _find(self, key: str) -> tuple[int, str]:
        """Return the line that sets most of the parts of a dotted key: their number, and file and line."""
        depth, line = self.file.locate(key)
        own = depth, f"{self.file.path}:{line}" if depth else ""
        name, dot, rest = key.partition(".")
        inherited = [
            source._find(f"{taken}{dot}{rest}")
            for base, source in self.bases
            if (taken := name if base.names is None else base.names.get(name)) is not None
        ]
        # Of several bases the last one counts, as where two are imported with `*`, and the file itself before all.
        return max([own, *reversed(inherited)], key=itemgetter(0))


def _in_scope(scope: str | None, values: Any) -> Any:
    """Return values in which each outermost dict with a `type` also names the scope in which it is built."""
    if scope is None:
        return values
    if isinstance(values, dict):
        if "type" in values:
            return ConfigDict({**values, SCOPE: values.get(SCOPE, scope)})
        return ConfigDict({key: _in_scope(scope, value) for key, value in values.items()})
    return mapped(lambda value: _in_scope(scope, value), values)


def _imported_values(base: BaseFile, values: ConfigDict, file: ConfigFile) -> dict[str, object]:
    """Return the values that `file` imports from a base, by their new names."""
    if base.names is None:
        return dict(values)
    for name in base.names.values():
        if name not in values:
            near = nearest(name, values)
            raise file.error(
                name,
                f"is not a key of {base.path}{f', did you mean `{near}`?' if near else '.'} What is no key (a "
                "function, a class, a module) is imported outside of read_base()",
                base.line,
            )
    # Copies, because one key may be imported under two names.
    return {new_name: deepcopy(values[name]) for new_name, name in base.names.items()}


def _join_bases(values_of_bases: list[tuple[BaseFile, ConfigDict]], file: ConfigFile) -> ConfigDict:
    """Return the values of all bases; two bases with the same key are an error."""
    joined = ConfigDict()
    origin: dict[str, Path] = {}
    for base, values in values_of_bases:
        for key in values:
            if key in origin:
                raise file.error(BASE, f"gives `{key}` twice: in {origin[key]} and in {base.path}; keep one")
            origin[key] = base.path
        joined.update(values)
    return joined


def refuse_code(source: ConfigSource) -> None:
    """Check that no YAML or JSON file among a config and its bases names code to run; import and run nothing.

    Nor will this process import what they name, wherever that is looked up.

    Raises:
        ConfigError: one does; the message lists each place with file, line and key.
    """
    if found := list(dict.fromkeys(_find_code(source))):
        lines = "".join(f"\n  {says}" for says in found)
        raise ConfigError(f"{source.file.path} leads to code in {counted(len(found), 'place')}:{lines}\n{REMEDY}")


def _find_code(source: ConfigSource) -> Iterator[str]:
    """Yield a sentence for each place where a YAML or JSON file names code."""
    if not isinstance(source.file, DataFile):
        for _, base in source.bases:
            yield from _find_code(base)
        return
    if programs := list(_find_python_bases(source)):
        yield from programs
        return
    # Only YAML and JSON files are left, so that `values` runs no code.
    values = source.values()
    if values.get(_IMPORTS):
        yield f"{source.where(_IMPORTS) or source.file.path}: `{_IMPORTS}` imports modules"
    for key, value in leaves(values):
        names_code = isinstance(value, str) and re.sub(r"(\.\d+)+$", "", key).rpartition(".")[2] in _KEYS_OF_NAMES
        # A name without a dot can only be a registered one.
        if names_code and "." in value and not is_registered(value):
            yield f"{source.where(key) or source.file.path}: `{key}` = {value!r} is an import path"
    trust(texts_in(values), False)  # refused, from now on, wherever one of these texts is looked up


def _find_python_bases(source: ConfigSource) -> Iterator[str]:
    """Yield where a YAML or JSON file, or one of its bases, names a Python file as its base."""
    for base, below in source.bases:
        if isinstance(below.file, DataFile):
            yield from _find_python_bases(below)
        else:
            yield str(source.file.error(BASE, f"leads to a program, {base.path}"))
