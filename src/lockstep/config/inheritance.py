"""`_base_` and `read_base()`: how one config file builds upon others, and which of them wrote a key."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Self

from lockstep.config.config_file import BASE, BaseFile, ConfigFile, Location
from lockstep.config.data_file import DataFile
from lockstep.config.dictionary import ConfigDict, closest, merged
from lockstep.config.placeholders import filled
from lockstep.config.python_file import PythonFile
from lockstep.errors import ConfigError

_KINDS: dict[str, type[PythonFile] | type[DataFile]] = {
    ".py": PythonFile,
    ".yaml": DataFile,
    ".yml": DataFile,
    ".json": DataFile,
}


def load(path: Path, children: tuple[ConfigFile, ...] = ()) -> tuple[ConfigDict, str]:
    """Return what the file at `path` and its bases say, and their texts, bases first.

    Args:
        path: absolute.
        children: the files that led here, the youngest first.

    Raises:
        FileNotFoundError: `path` does not exist.
        ConfigError: a base does not exist, leads back to itself or contradicts another; a file has an error. Names
            file, line and key.
    """
    file = read_file(path)
    parts: list[tuple[BaseFile, ConfigDict]] = []
    texts = []
    for base in file.bases():
        part, text = _load_base(base, (*children, file))
        parts.append((base, part))
        texts.append(text)
    texts.append(f"# {path}\n{file.text}")
    if file.imports_bases:
        taken = [_taken(base, part, file) for base, part in parts]
        values = ConfigDict(filled(file.values(ConfigDict(), taken), path))
    else:
        joined = _joined(parts, file)
        own = filled(file.values(deepcopy(joined)), path, joined)
        values = merged(joined, ConfigDict(own), file.error)
    return values, "\n".join(texts)


def read_file(path: Path) -> ConfigFile:
    """Read the config file at `path`, which must be absolute.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: its suffix or its syntax is unknown; names the line.
    """
    kind = _KINDS.get(path.suffix)
    if kind is None:
        raise ConfigError(f"{path}: a config must end in one of {', '.join(_KINDS)}")
    if not path.is_file():
        near = closest(path.name, (p.name for p in path.parent.glob("*")))
        hint = f"; did you mean `{path.with_name(near)}`?" if near else ""
        raise FileNotFoundError(f"there is no config file `{path}`{hint}")
    return kind(path, path.read_text(encoding="utf-8"))


class Sources:
    """A config file and those that it builds upon, which are looked at but not run.

    Args:
        file: the youngest of them.
        bases: the sources of each of its bases, in its order.
    """

    def __init__(self, file: ConfigFile, bases: list[Self]) -> None:
        self._file = file
        self._bases = bases

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file at `path` and its bases, which `Config.fromfile` has read before.

        Raises:
            OSError: one of them is not there any more.
        """
        file = read_file(path)
        return cls(file, [cls.read(base.path.resolve()) for base in file.bases()])

    def where(self, key: str) -> str:
        """Return file and line of a dotted key, or of the nearest key above it; "" for nowhere."""
        found = self._find(key)
        return "" if found is None else f"{found[0]}:{found[1].line}"

    def helpers(self) -> set[str]:
        """Return the keys that have done their work when the files have been read."""
        return self._file.helpers().union(*(base.helpers() for base in self._bases))

    def files(self) -> list[ConfigFile]:
        """Return all of the files, bases first."""
        return [*(file for base in self._bases for file in base.files()), self._file]

    def _find(self, key: str) -> tuple[Path, Location] | None:
        location = self._file.locate(key)
        found = None if location is None else (self._file.path, location)
        name, dot, rest = key.partition(".")
        for base, sources in zip(self._file.bases(), self._bases, strict=True):
            inherited = name if base.names is None else base.names.get(name)
            below = None if inherited is None else sources._find(f"{inherited}{dot}{rest}")
            if below is not None and (found is None or below[1].depth > found[1].depth):
                found = below
        return found


def _load_base(base: BaseFile, children: tuple[ConfigFile, ...]) -> tuple[ConfigDict, str]:
    path = base.path.resolve()
    chain = [child.path for child in children]
    if path in chain:
        circle = " -> ".join(map(str, [*chain[chain.index(path) :], path]))
        raise children[-1].error(base.named_by, f"leads in a circle: {circle}", base.line)
    try:
        return load(path, children)
    except FileNotFoundError as error:
        raise children[-1].error(base.named_by, f"names a file that is missing: {error}", base.line) from error


def _taken(base: BaseFile, values: ConfigDict, file: ConfigFile) -> dict[str, object]:
    """Return the keys that `file` imports from a base, by the names that it gives them."""
    if base.names is None:
        return dict(values)
    for name in base.names.values():
        if name not in values:
            near = closest(name, values)
            raise file.error(
                name,
                f"is not a key of {base.path}{f', did you mean `{near}`?' if near else '.'} What is no key (a "
                "function, a class, a module) is imported outside of read_base()",
                base.line,
            )
    return {own: deepcopy(values[name]) for own, name in base.names.items()}  # one name may be taken twice


def _joined(parts: list[tuple[BaseFile, ConfigDict]], file: ConfigFile) -> ConfigDict:
    """Return the keys of all bases, of which no two may have the same."""
    joined = ConfigDict()
    origin: dict[str, Path] = {}
    for base, part in parts:
        for key in part:
            if key in origin:
                raise file.error(BASE, f"gives `{key}` twice: in {origin[key]} and in {base.path}; keep one")
            origin[key] = base.path
        joined.update(part)
    return joined
