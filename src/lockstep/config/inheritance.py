"""`_base_` and `read_base()`: how one config file builds upon others."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

from lockstep.config.config_file import BASE, BaseFile, ConfigFile
from lockstep.config.dictionary import ConfigDict, closest, merged
from lockstep.config.files import read_file
from lockstep.config.placeholders import filled


def load(path: Path, children: tuple[ConfigFile, ...] = ()) -> tuple[ConfigDict, str]:
    """Return what the file at `path` and its bases say together, and their texts, bases first.

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
        united = _united(parts, file)
        own = filled(file.values(deepcopy(united)), path, united)
        values = merged(united, ConfigDict(own), file.error)
    return values, "\n".join(texts)


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


def _united(parts: list[tuple[BaseFile, ConfigDict]], file: ConfigFile) -> ConfigDict:
    """Return the keys of all bases, which must not share any."""
    united = ConfigDict()
    origin: dict[str, Path] = {}
    for base, part in parts:
        for key in part:
            if key in origin:
                raise file.error(BASE, f"gives `{key}` twice: in {origin[key]} and in {base.path}; keep one")
            origin[key] = base.path
        united.update(part)
    return united
