"""A config in YAML or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lockstep.config.config_file import BASE, DUMPED, ConfigFile, Location
from lockstep.config.dictionary import ConfigDict
from lockstep.errors import ConfigError


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

    def values(self, base: ConfigDict, imported: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Return what the file says; it has no way to refer to its base."""
        return {key: value for key, value in self._values.items() if key != BASE}

    def locate(self, key: str) -> Location | None:
        """Return where the file writes a key, as the YAML parser, which reads JSON as well, counts lines."""
        try:
            node = yaml.compose(self.text, Loader=yaml.SafeLoader)
        except yaml.YAMLError:  # JSON may be indented by tabs, YAML may not
            return None
        location = None
        for depth, part in enumerate(key.split("."), start=1):
            found = _below(node, part)
            if found is None:
                break
            line, node = found
            location = Location(depth, line)
        return location

    def helpers(self) -> set[str]:
        """Return all names of a file that was dumped; in others, no name can help another."""
        return set(self._values) if self.text.startswith(DUMPED) else set()


def _below(node: yaml.Node | None, key: str) -> tuple[int, yaml.Node] | None:
    """Return the line and the value of `key` in a mapping or a sequence."""
    found = None
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == key:
                found = name.start_mark.line + 1, value
    elif isinstance(node, yaml.SequenceNode) and key.isdecimal() and int(key) < len(node.value):
        value = node.value[int(key)]
        found = value.start_mark.line + 1, value
    return found


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
