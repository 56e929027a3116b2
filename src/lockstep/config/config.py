"""`Config`: the description of a run, read from a file."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Self

import yaml

from lockstep.config.config_file import DUMP_HEADER
from lockstep.config.dictionary import ConfigDict, texts_in
from lockstep.config.inheritance import ConfigSource, refuse_code
from lockstep.config.options import set_dotted
from lockstep.config.python_file import importable
from lockstep.config.source_form import plain_data, python_source
from lockstep.errors import ConfigError, error_in_words, place_of
from lockstep.masking import mask_text, mask_value
from lockstep.registry.registry import trust

_logger = logging.getLogger(__name__)
_SLOTS = ("_filename", "_option_keys", "_source", "_text")


class Config(ConfigDict):
    """A `ConfigDict` that knows the file from which it was read.

    Args:
        cfg_dict: the values.
        filename: the file from which they were read.
        text: the text of that file, preceded by the texts of its bases.

    Raises:
        ConfigError: a key is the name of one of the attributes and methods here, as ``text`` and ``dump``.

    Example:
        >>> cfg = Config(dict(model=dict(type="ToyNet", depths=[2, 2])))
        >>> cfg.merge_from_dict({"model.depths.1": 4, "work_dir": "runs"})
        >>> print(cfg.pretty_text, end="")
        model = dict(type='ToyNet', depths=[2, 4])
        work_dir = 'runs'
    """

    __slots__ = _SLOTS

    def __init__(
        self, cfg_dict: Mapping[str, Any] | None = None, filename: str | os.PathLike[str] | None = None, text: str = ""
    ) -> None:
        if cfg_dict is not None and not isinstance(cfg_dict, Mapping):
            raise TypeError(f"`cfg_dict` must be a dict, but is {type(cfg_dict).__name__}")
        self._option_keys: frozenset[str] = frozenset()
        self._filename = None if filename is None else str(filename)
        self._source: ConfigSource | None = None  # the files as they were when they were read
        self._text = text
        super().__init__(cfg_dict or {})

    @classmethod
    def fromfile(
        cls,
        filename: str | os.PathLike[str],
        use_predefined_variables: bool = True,
        import_custom_modules: bool = True,
        use_environment_variables: bool = True,
        lazy_import: bool | None = None,
        format_python_code: bool = True,
        *,
        trusted: bool = False,
    ) -> Self:
        """Read a config from a Python, YAML or JSON file, with the files that it names in `_base_`.

        A Python file may import modules from its own folder. What it imports or defines (modules, functions, classes)
        does not become a key, but may be a value: ``dict(type=MyNet)``. It can read and change the values of its bases
        in `_base_`, as in ``lr = _base_.lr * 2`` and ``_base_.model.depth = 50``, or import its bases, see `read_base`.
        The modules that ``custom_imports=dict(imports=[...])`` names are imported. In strings, ``{{
        fileBasenameNoExtension }}``, ``{{ fileBasename }}``, ``{{ fileDirname }}`` and ``{{ fileExtname }}`` stand for
        parts of the file's path, and ``{{ _base_.model.depth }}`` for a value of its bases.

        A Python file is a program, which is run. YAML and JSON files are data: unless they are trusted, they may not
        contain import paths such as ``type: os.system``, `custom_imports`, or a Python file as a base.

        Args:
            filename: the file.
            use_predefined_variables: for compatibility with MMEngine; placeholders are always filled in.
            import_custom_modules: import the modules that `custom_imports` names.
            use_environment_variables: for compatibility with MMEngine; ignored. Placeholders of environment variables
                are filled in in Python files, and raise an error in YAML and JSON files.
            lazy_import: for compatibility with MMEngine; ignored, the contents of the file decide.
            format_python_code: for compatibility with MMEngine; ignored, output is always formatted.
            trusted: let YAML and JSON files do what Python files can.

        Raises:
            FileNotFoundError: there is no such file.
            ConfigError: the file or a base has an error, or names code to run without being trusted; the message names
                file, line and key.
        """
        given = Path(filename).expanduser()
        path = Path(os.path.realpath(given))  # also of links in a circle, of which reading tells
        if given.suffix != ".py" and path.suffix == ".py" and path.is_file() and not trusted:
            raise ConfigError(
                f"{given}: leads to a Python file, {path}, which would be run. Name that file itself, if you trust it"
            )
        source = ConfigSource.read(path)
        if not trusted:
            refuse_code(source)
        cfg = cls(source.values(), filename=path, text=source.text())
        if trusted:
            trust(texts_in(cfg), True)
        cfg._source = source
        if import_custom_modules:
            import_custom(cfg)
        return cfg

    @property
    def filename(self) -> str | None:
        """The file from which the config was read, or None."""
        return self._filename

    @property
    def text(self) -> str:
        """The text of that file, preceded by the texts of its bases."""
        return self._text

    @property
    def pretty_text(self) -> str:
        """The whole config as Python source."""
        return python_source(self)

    @property
    def intermediate_keys(self) -> set[str]:
        """The keys that only serve the config files, such as `batch_size = 8` for later lines."""
        return set() if self._source is None else self._source.intermediate_keys()

    def where(self, key: str) -> str:
        """Return where a dotted key, or its nearest parent key, was set, in words for a message.

        That is ``"path:line"``; ``"an option"`` if `merge_from_dict` has set it; or "" if it is not known.
        """
        if any(f"{key}.".startswith(f"{option}.") for option in self._option_keys):
            return "an option"
        return "" if self._source is None else self._source.where(key)

    def dump(self, file: str | os.PathLike[str] | None = None) -> str:
        """Return the config as text, and write it to `file`, whose suffix chooses the format.

        Python source gives an equal config when it is read again; only text that is a placeholder, such as
        ``{{ fileBasename }}``, is filled in then. YAML and JSON have neither classes nor tuples: they hold import paths
        and lists instead. Python and YAML files begin with a comment that lockstep wrote them. Secrets are written as
        they are; see `masked`.

        Raises:
            ConfigError: the suffix is unknown.
        """
        if file is None:
            return self.pretty_text
        suffix = Path(file).suffix
        if suffix == ".py":
            text = DUMP_HEADER + self.pretty_text
        elif suffix in (".yaml", ".yml"):
            text = DUMP_HEADER + yaml.safe_dump(plain_data(self), sort_keys=False, allow_unicode=True)
        elif suffix == ".json":
            text = json.dumps(plain_data(self), indent=2, ensure_ascii=False) + "\n"
        else:
            raise ConfigError(f"{file}: a config must end in .py, .yaml, .yml or .json")
        Path(file).write_text(text, encoding="utf-8", errors="backslashreplace")  # as JSON escapes bytes of a path
        return text

    def masked(self) -> Self:
        """Return a copy for others to see: passwords, tokens and keys in it are ``"***"``.

        Example:
            >>> Config(dict(visualizer=dict(type="WandbVisualizer", api_key="abc"))).masked().visualizer.api_key
            '***'
        """
        copied = type(self)(mask_value(self.to_dict()), self.filename, mask_text(self.text))
        copied._option_keys, copied._source = self._option_keys, self._source
        return copied

    def merge_from_dict(self, options: Mapping[str, Any], allow_list_keys: bool = True) -> None:
        """Set values by dotted keys.

        Numbers index lists: ``{"hooks.0.interval": 5}``. Missing dicts on the path of a key are created. A value that
        is a dict is merged, unless it has ``_delete_=True``.

        Args:
            options: values by dotted keys.
            allow_list_keys: for compatibility with MMEngine; ignored.

        Raises:
            ConfigError: the path of a key has a part that is neither a dict nor a list, or an index that is out of
                range; the config is then unchanged.
        """
        merged = Config(self.to_dict())
        for key, value in options.items():
            set_dotted(merged, key, value)
        for key, value in merged.items():
            self[key] = value  # assigned, not merged, so that keys that `_delete_` removes are gone
        self._option_keys = self._option_keys.union(options)

    def __setitem__(self, key: Any, value: Any) -> None:
        if key in _RESERVED:
            raise ConfigError(f"`{key}` cannot be a key: it is an attribute of Config itself. Call it otherwise")
        super().__setitem__(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SLOTS:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"Config({self.filename or ''}): {super().__repr__()}"


_RESERVED = frozenset(name for name in vars(Config) if not name.startswith("_"))


def import_custom(cfg: Config) -> None:
    """Import the modules that a config names in `custom_imports`."""
    custom = cfg.get("custom_imports") or {}
    names = custom.get("imports", []) if isinstance(custom, dict) else custom
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{cfg.filename}: `custom_imports` must be dict(imports=[...]) with names of modules, but is {custom!r}"
        )
    file = Path(cfg.filename or "")
    for name in names:
        top = name.partition(".")[0]
        # A config is no module that it means: where it has the name of one, that lies elsewhere.
        is_itself = file.stem == top and not (file.parent / top).is_dir()
        with nullcontext() if is_itself else importable(file.parent):
            try:
                import_module(name)
            except Exception as error:
                place = place_of(error.__traceback__)  # in the module; that of a SyntaxError is in its message
                why = f"{error_in_words(error)}{place and f' ({place})'}{_hidden(name)}"
                says = f"`custom_imports` names `{name}`, which cannot be imported: {why}"
                may_fail = isinstance(custom, dict) and custom.get("allow_failed_imports")
                if not (may_fail and isinstance(error, ImportError)):
                    raise ConfigError(f"{cfg.filename}: {says}") from error
                _logger.warning(says)
            else:
                if hidden := _hidden(name):
                    _logger.warning("`custom_imports` names `%s`, of which there are several%s", name, hidden)


def _hidden(name: str) -> str:
    """Say which of several modules of a name on the import path is imported; return "" if there is only one."""
    top = name.partition(".")[0]
    specs = [PathFinder.find_spec(top, [folder]) for folder in sys.path]
    found = list(dict.fromkeys(str(spec.origin) for spec in specs if spec is not None and spec.origin is not None))
    if len(found) < 2:
        return ""
    return f". `{top}` is {found[0]}, which hides {found[1]}: rename one of them"
