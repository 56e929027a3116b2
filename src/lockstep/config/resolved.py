"""A config that has been read, in a form in which other processes can have it without reading its files again."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lockstep.config.config import Config, import_custom
from lockstep.config.dictionary import ConfigDict
from lockstep.config.inheritance import Sources
from lockstep.config.python_file import PythonFile, neighbours_importable
from lockstep.config.source_form import python_source_if_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """A config in plain strings, which `asdict` and JSON can carry to another process.

    Attributes:
        source: assignments that give the values.
        imports: what the config's files import, because a module may register something when it is imported.
        folders: where those files are; modules beside them can be imported.
        filename: the file that the config came from.
        text: the text of that file, after those of its bases.
    """

    source: str
    imports: list[str]
    folders: list[str]
    filename: str
    text: str

    @classmethod
    def of(cls, cfg: Config) -> Self | None:
        """Return the values that a config has now; None where another process has to read its files itself.

        That is where a value has no source form (a lambda, an object, a class that the file defines), or where a file
        does more than import and give values: whatever it does, it does in each process then.
        """
        source = python_source_if_whole(cfg)
        if source is None or cfg.filename is None:
            return None
        files = Sources.read(Path(cfg.filename)).files()
        imports: dict[str, None] = {}
        for file in files:
            statements = file.imports()
            if statements is None:
                return None
            imports.update(dict.fromkeys(statements))
        folders = list(dict.fromkeys(str(file.path.parent) for file in files))
        return cls(source=source, imports=list(imports), folders=folders, filename=cfg.filename, text=cfg.text)

    def config(self) -> Config:
        """Return the config; what its files have imported is imported."""
        path = Path(self.filename)
        with ExitStack() as importable:
            for folder in self.folders:
                importable.enter_context(neighbours_importable(Path(folder, path.name)))
            exec("\n".join(self.imports), {})
            values: Mapping[str, Any] = PythonFile(path, self.source).values(ConfigDict())
            cfg = Config(values, filename=path, text=self.text)
            import_custom(cfg)
        return cfg
