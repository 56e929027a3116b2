"""One config file: the bases it names and the values it gives."""

from __future__ import annotations
import __future__

import ast
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import yaml

from lockstep.config.dictionary import ConfigDict, closest
from lockstep.errors import ConfigError

BASE = "_base_"


class ConfigFile(ABC):
    """The text of one config file.

    Attributes:
        path: absolute.
        text: as it stands in the file.
    """

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text

    @property
    @abstractmethod
    def base(self) -> Any:
        """What the file gives for `_base_`, or None."""

    @abstractmethod
    def values(self, base: ConfigDict) -> dict[str, Any]:
        """Return the file's own values; `base` is what it may refer to as `_base_`."""

    @abstractmethod
    def line_of(self, key: str) -> int | None:
        """Return the line that gives a top-level key its value."""

    def bases(self) -> list[Path]:
        """Return the paths of the files that this one builds upon, relative to its own folder."""
        named = self.base
        if named is None:
            return []
        if isinstance(named, str):
            named = [named]
        if not isinstance(named, list | tuple) or not all(isinstance(n, str) for n in named):
            raise self.error(BASE, f"must be a path or a list of paths, but is {named!r}")
        return [self.path.parent / Path(name).expanduser() for name in named]

    def error(self, key: str, says: str) -> ConfigError:
        """Return an error that names this file, the line and the key."""
        line = self.line_of(key.partition(".")[0])
        return ConfigError(f"{self.path}{f':{line}' if line else ''}: `{key}` {says}")


class PythonFile(ConfigFile):
    """A config in Python: assignments, with whatever code makes the values."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(path, text)
        try:
            self._tree = ast.parse(text, filename=str(path))
        except SyntaxError as error:
            raise ConfigError(f"{path}:{error.lineno}: {error.msg}") from error

    @property
    def base(self) -> Any:
        """What the file gives for `_base_`, read without running it."""
        for statement in self._tree.body:
            if BASE in _targets(statement):
                try:
                    return ast.literal_eval(statement.value)  # type: ignore[attr-defined]
                except ValueError as error:
                    raise self.error(BASE, "must be a plain string or list of strings") from error
        return None

    def values(self, base: ConfigDict) -> dict[str, Any]:
        """Run the file; imports, functions and classes are its tools, not its values."""
        # The bases are loaded by now: `_base_` stands for what they say.
        body = [statement for statement in self._tree.body if BASE not in _targets(statement)]
        code = compile(ast.Module(body, type_ignores=[]), str(self.path), "exec")
        # A real module, so that dataclasses and pickle find the classes that the file defines; a
        # dot in its name would be taken for a package.
        module = ModuleType(f"lockstep_config:{self.path}".replace(".", "_"))
        module.__file__ = str(self.path)
        setattr(module, BASE, base)
        sys.modules[module.__name__] = module
        with neighbours_importable(self.path):
            try:
                exec(code, module.__dict__)
            except Exception as error:
                line = _line_in(error, self.path)
                raise ConfigError(f"{self.path}:{line}: {type(error).__name__}: {error}") from error
        if vars(module).get(BASE) is not base:
            raise ConfigError(f"{self.path}: `{BASE}` must be assigned at the top level, plainly")
        return {
            name: value
            for name, value in vars(module).items()
            if not name.startswith("__") and name != BASE and not self._is_tool(name, value, module)
        }

    def _is_tool(self, name: str, value: object, module: ModuleType) -> bool:
        """Say whether a name is there to make values, rather than a value itself.

        Modules, and what an import, a def, a class statement or a lambda has bound, are tools. A
        class or function from elsewhere that is assigned by name is a value.
        """
        home = getattr(value, "__module__", None)
        if isinstance(value, ModuleType | __future__._Feature) or home == "typing":
            return True
        if not isinstance(value, type | FunctionType | BuiltinFunctionType):
            return False
        return home == module.__name__ or self.line_of(name) is None

    def line_of(self, key: str) -> int | None:
        """Return the line of the last assignment to `key`."""
        lines = [s.lineno for s in self._tree.body if key in _targets(s)]
        return lines[-1] if lines else None


class DataFile(ConfigFile):
    """A config in YAML or JSON."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(path, text)
        values = _parse_json(path, text) if path.suffix == ".json" else _parse_yaml(path, text)
        if values is None:
            values = {}
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise ConfigError(f"{path}: must hold one mapping with strings as keys")
        self._values: dict[str, Any] = values

    @property
    def base(self) -> Any:
        """What the file gives for `_base_`."""
        return self._values.get(BASE)

    def values(self, base: ConfigDict) -> dict[str, Any]:
        """Return what the file says; it has no way to refer to its base."""
        return {key: value for key, value in self._values.items() if key != BASE}

    def line_of(self, key: str) -> int | None:
        """Return the line of `key`, counted by the YAML parser, which reads JSON as well."""
        node = yaml.compose(self.text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            return None
        lines = [k.start_mark.line + 1 for k, _ in node.value if k.value == key]
        return lines[-1] if lines else None


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


@contextmanager
def neighbours_importable(path: Path) -> Iterator[None]:
    """Let the file at `path` import the modules beside it, as Python lets a script."""
    folder = str(path.parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _targets(statement: ast.stmt) -> list[str]:
    """Return the names that a top-level statement assigns to."""
    match statement:
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            return [name]
        case _:
            return []


def _line_in(error: Exception, path: Path) -> int | str:
    """Return the innermost line of the file at `path` that took part in an error."""
    line: int | str = "?"
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _parse_json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: {error.msg}") from error


def _parse_yaml(path: Path, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"{path}:{line}: {error.problem}") from error
