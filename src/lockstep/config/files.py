"""Which kind of config a file is."""

from __future__ import annotations

from pathlib import Path

from lockstep.config.config_file import ConfigFile
from lockstep.config.data_file import DataFile
from lockstep.config.dictionary import closest
from lockstep.config.python_file import PythonFile
from lockstep.errors import ConfigError

_KINDS: dict[str, type[PythonFile] | type[DataFile]] = {
    ".py": PythonFile,
    ".yaml": DataFile,
    ".yml": DataFile,
    ".json": DataFile,
}


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
