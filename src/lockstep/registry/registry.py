"""`Registry`: a table of classes and functions by name, with parents, scopes and a default scope."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from inspect import getmembers, isclass, isroutine
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar, overload
from weakref import WeakSet

from lockstep.errors import RegistryError, did_you_mean, lacks_key
from lockstep.registry.signatures import construct

Entry = Callable[..., Any]
EntryT = TypeVar("EntryT", bound=Entry)
Names: TypeAlias = str | list[str] | tuple[str, ...] | None

SCOPE = "_scope_"
"""The key of a config that names the scope in which it is built."""
REMEDY = (
    "YAML and JSON files are data: they may only name what is registered. If you trust these files, say so with "
    "--trust-config, or trusted=True in Config.fromfile; or write the config in Python, which is a program anyway"
)
_default_scope: str | None = None
_base_scope: str | None = None
_registries: WeakSet[Registry] = WeakSet()
_untrusted: set[str] = set()  # texts of config files that are data: wherever such a text arrives, it imports nothing


class Registry:
    """A table of classes and functions by name, from which configs are built.

    A family is a registry with all its children. A name is looked up in the registry itself, then in its parent, and so
    on up. If a default scope is set (see `init_default_scope`), the registry of the family with that scope comes first.
    ``"scope.Name"`` addresses one registry of the family, ``"package.module.Name"`` anything that can be imported.

    Args:
        name: what the entries are, in the singular (``"model"``); used in errors.
        scope: name of this registry within its family; by default the package that creates the registry.
        parent: the registry in which a name is looked up next.
        locations: modules that register entries when they are imported. The modules of a list are imported at the first
            lookup of a name that is not registered. In a mapping, each module has the names that it registers, and is
            imported when one of these names is looked up.
        libraries: foreign modules, each with the name of a class in it, whose public subclasses count as entries.
            Registered entries come first. A module is imported at the first lookup of a name that is not registered.
        build_func: what `build` calls instead of the constructor, with the config, this registry as `registry`, and the
            default arguments; by default the parent's.

    Attributes:
        root: the registry of the family that has no parent.
        children: the registries that have this one as their parent, by scope. Read only.
        module_dict: the entries registered here so far, by name. Read only.

    Raises:
        RegistryError: the parent already has a child with that scope.

    Example:
        >>> MODELS = Registry("model", scope="zoo")
        >>> @MODELS.register_module()
        ... class Net:
        ...     def __init__(self, width): self.width = width
        >>> MODELS.build(dict(type="Net", width=3)).width
        3
    """

    def __init__(
        self,
        name: str,
        scope: str | None = None,
        parent: Registry | None = None,
        *,
        locations: Iterable[str] | Mapping[str, Iterable[str]] = (),
        libraries: Mapping[str, str] = MappingProxyType({}),
        build_func: Entry | None = None,
    ) -> None:
        if scope is None:
            scope = str(sys._getframe(1).f_globals["__name__"]).partition(".")[0]
        if not scope or "." in scope:
            raise ValueError(f"`scope` must be a name without dots, but is {scope!r}")
        self.name: Final = name
        self.scope: Final = scope
        self.parent: Final = parent
        self.root: Final[Registry] = self if parent is None else parent.root
        self._ancestry: tuple[Registry, ...] = (self,) if parent is None else (self, *parent._ancestry)
        by_module = locations if isinstance(locations, Mapping) else dict.fromkeys(locations, ())
        # A module without names may register any.
        self._locations = {module: tuple(names) for module, names in by_module.items()}
        self._libraries = libraries
        self._build_func: Entry | None = build_func or (None if parent is None else parent._build_func)
        self._entries: dict[str, Entry] = {}
        self._children: dict[str, Registry] = {}
        self.module_dict: Final[Mapping[str, Entry]] = MappingProxyType(self._entries)
        self.children: Final[Mapping[str, Registry]] = MappingProxyType(self._children)
        if parent is not None:
            if scope in parent._children:
                raise RegistryError(f"{parent!r} has a child of scope `{scope}` already; choose another `scope`")
            parent._children[scope] = self
        _registries.add(self)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __bool__(self) -> bool:
        return True  # an empty registry is still a registry

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key) is not None

    def __repr__(self) -> str:
        return f"Registry({self.name!r}, scope={self.scope!r}, entries={len(self)})"

    @overload
    def register_module(self, name: Names = None, force: bool = False, *, module: EntryT) -> EntryT: ...
    @overload
    def register_module(
        self, name: Names = None, force: bool = False, module: None = None
    ) -> Callable[[EntryT], EntryT]: ...
    def register_module(self, name: Names = None, force: bool = False, module: Entry | None = None) -> Any:
        """Register a class or function, as a decorator or by a call.

        Args:
            name: one name or several; by default the object's own name.
            force: replace the entry that is registered under that name.
            module: the class or function; without it a decorator is returned.

        Returns:
            The class or function, unchanged, or the decorator.

        Raises:
            RegistryError: the name is taken and `force` is not set.
            TypeError: `module` is neither a class nor a function.
            ValueError: the name has a dot.

        Example:
            >>> HOOKS = Registry("hook", scope="zoo")
            >>> @HOOKS.register_module(name=["Say", "Shout"])
            ... class Say: ...
            >>> @HOOKS.register_module()
            ... def make_hook(): ...
            >>> list(HOOKS)
            ['Say', 'Shout', 'make_hook']
        """
        if name is not None and not isinstance(name, str | list | tuple):
            raise TypeError(f"`name` must be a str, a list of str or None, but is {name!r}. Write @register_module()")
        if module is not None:
            return self._register(module, name, force)
        return lambda entry: self._register(entry, name, force)

    def _register(self, entry: EntryT, name: Names, force: bool) -> EntryT:
        if not (isclass(entry) or isroutine(entry)):
            raise TypeError(f"`module` must be a class or a function, but is an object of {type(entry)}")
        names = [entry.__name__] if name is None else [name] if isinstance(name, str) else name
        for key in names:
            if "." in key:
                raise ValueError(f"`name` must have no dot, which separates a scope from a name, but is {key!r}")
            present = self._entries.get(key)
            if not force and present is not None and present is not entry:
                raise RegistryError(
                    f"{self.name} `{key}` is registered in `{self.scope}` already, by "
                    f"{present.__module__}; choose another name, or replace it with force=True"
                )
        self._entries.update(dict.fromkeys(names, entry))
        return entry

    def get(self, key: str) -> Entry | None:
        """Return the class or function called `key`, or None; ``registry[key]`` raises instead.

        Args:
            key: ``"Name"``, ``"scope.Name"`` or ``"package.module.Name"``.

        Example:
            >>> from lockstep.registry import OPTIMIZERS
            >>> OPTIMIZERS.get("AdamW").__module__
            'torch.optim.adamw'
        """
        if not isinstance(key, str):
            raise TypeError(f"`key` must be a str, but is {key!r} of {type(key).__name__}")
        scope, dot, name = key.partition(".")
        if not dot:
            for preferred in (_default_scope, _base_scope):
                if preferred is not None and (found := self._find_in_scope(preferred, key)) is not None:
                    return found
            return self._find(key)
        if (found := self._find_in_scope(scope, name)) is not None:
            return found
        imported = _import_entry(key)  # may import the package that creates the scope
        found = self._find_in_scope(scope, name)
        return imported if found is None else found

    def __getitem__(self, key: str) -> Entry:
        found = self.get(key)
        if found is None:
            raise RegistryError(f"there is no {self.name} `{key}` {self.suggest(key)}")
        return found

    def suggest(self, key: str) -> str:
        """Return, in words, where a `key` that `get` did not find was looked up, and the nearest name there."""
        module, _, name = key.rpartition(".")
        looked_in = module or _default_scope
        scoped = next((other for other in self.root._family() if other.scope == looked_in != self.scope), None)
        if scoped is not None:
            return scoped.suggest(name)
        if module in sys.modules and module != self.scope:  # else it is the scope that is meant
            known = [one for one, value in vars(sys.modules[module]).items() if one[0] != "_" and callable(value)]
            return f"in the module `{module}`{did_you_mean(name, known)}"
        here = f"in the registry of scope `{self.scope}`"
        name = key.removeprefix(f"{self.scope}.")
        if module and all(other.scope != key.partition(".")[0] for other in self.root._family()):
            return f"{here}, nor is there a module `{module}`{did_you_mean(name, self._known_names(), '')}"
        return here + did_you_mean(name, self._known_names())

    def build(self, cfg: Mapping[str, Any], **default_args: Any) -> Any:
        """Build an object from a config; `cfg` is not modified.

        Args:
            cfg: a dict whose `type` is a name, a class or a function; the other keys are its arguments. With the key
                `_scope_`, names are looked up first in that scope, also those in nested configs that it builds.
            default_args: arguments (or a `type`) for keys that `cfg` does not have.

        Raises:
            TypeError: `cfg` is not a dict, or `type` is neither a name nor callable.
            RegistryError: `type` is missing or not a known name; the nearest name is suggested.
            BuildError: an argument is unknown or missing; the nearest name is suggested.

        Example:
            >>> Registry("size").build(dict(type=complex, real=1), imag=2)
            (1+2j)
        """
        if not isinstance(cfg, Mapping):
            raise TypeError(
                f"`cfg` must be a dict with the key `type` to build a {self.name}, but is "
                f"{cfg!r} of {type(cfg).__name__}; an object that exists needs no building"
            )
        if self._build_func is not None:
            return self._build_func(cfg, registry=self, **default_args)
        arguments = {**default_args, **cfg}
        if "type" not in arguments:
            raise RegistryError(f"the config of a part ({self.name}) {lacks_key(cfg, 'type')}")
        with in_default_scope(arguments.pop(SCOPE, None)):
            kind = arguments.pop("type")
            if isinstance(kind, str):
                kind = self[kind]
            elif not callable(kind):
                raise TypeError(f"`type` of a {self.name} must be a name, a class or a function, but is {kind!r}")
            return construct(kind, arguments, self.name)

    def _find(self, name: str) -> Entry | None:
        """Look up `name` here, then in the parents."""
        found = (registry._find_here(name) for registry in self._ancestry)
        return next((entry for entry in found if entry is not None), None)

    def _find_here(self, name: str) -> Entry | None:
        """Look up `name` in this registry alone: its entries, after its modules are imported, then its libraries."""
        for location, names in self._locations.items():
            if name not in self._entries and (not names or name in names):
                import_module(location)
        return self._entries[name] if name in self._entries else self._of_libraries().get(name)

    def _of_libraries(self) -> dict[str, Entry]:
        """Import the libraries, and return what counts as entries."""
        found: dict[str, Entry] = {}
        for module_name, base_name in self._libraries.items():
            module = import_module(module_name)
            base = getattr(module, base_name)
            found |= {
                name: one for name, one in getmembers(module, isclass) if issubclass(one, base) and one is not base
            }
        return found

    def _find_in_scope(self, scope: str, name: str) -> Entry | None:
        found = (registry for registry in (self, *self.root._family()) if registry.scope == scope)
        registry = next(found, None)
        return None if registry is None else registry._find(name)

    def _family(self) -> Iterator[Registry]:
        """Yield this registry and all its descendants."""
        yield self
        for child in self._children.values():
            yield from child._family()

    def _known_names(self) -> set[str]:
        """Return the names of this registry and its ancestors, and those of the rest of the family with their scope."""
        others = (other for other in self.root._family() if other not in self._ancestry)
        names = {f"{other.scope}.{name}" for other in others for name in other}
        for registry in self._ancestry:
            names.update(registry, *registry._locations.values(), registry._of_libraries())
        return names


def init_default_scope(scope: str | None) -> None:
    """Make every registry look up names first in the registry of its family with this scope; None for no such scope.

    A Runner with a `default_scope` sets it while it runs.

    Example:
        >>> from lockstep.registry import Registry
        >>> MODELS = Registry("model", scope="base")
        >>> ZOO = Registry("model", scope="zoo", parent=MODELS)
        >>> @ZOO.register_module()
        ... class Net: ...
        >>> with in_default_scope("zoo"):
        ...     MODELS.build(dict(type="Net")).__class__.__name__
        'Net'
    """
    global _default_scope
    _default_scope = scope


def init_base_scope(scope: str) -> None:
    """Make every registry look up names, after the default scope, in the registry of its family with this scope.

    It is for a distribution whose names come before lockstep's, whatever the default scope is.
    """
    global _base_scope
    _base_scope = scope


def default_scope() -> str | None:
    """Return the default scope, or None; see `init_default_scope`."""
    return _default_scope


@contextmanager
def in_default_scope(scope: str | None) -> Iterator[None]:
    """Set the default scope inside the context; None keeps the current one."""
    before = _default_scope
    init_default_scope(scope or before)
    try:
        yield
    finally:
        init_default_scope(before)


def is_registered(name: str) -> bool:
    """Return whether a name with its scope, ``"scope.Name"``, is registered in some registry.

    Nothing is imported but the modules that fill the registries of this scope: `name` is never taken as an import path.

    Example:
        >>> from lockstep.registry import OPTIMIZERS
        >>> is_registered("lockstep.AdamW"), is_registered("torch.optim.AdamW")
        (True, False)
    """
    scope, _, name = name.partition(".")
    if not name or "." in name:
        return False
    return any(registry.scope == scope and registry._find(name) is not None for registry in list(_registries))


def trust(texts: Iterable[str], trusted: bool) -> None:
    """Say of the texts of a config file whether its reader trusts them to name what is imported in this process."""
    (_untrusted.difference_update if trusted else _untrusted.update)(texts)


def require_trusted(path: str) -> None:
    """Refuse to import what only a file of data names.

    Raises:
        RegistryError: it does.
    """
    if path in _untrusted:
        raise RegistryError(f"`{path}` would be imported, but is named by a config file that is not trusted. {REMEDY}")


def _import_entry(path: str) -> Entry | None:
    """Return the class or function at an import path, or None if there is none.

    An ImportError inside a module that exists is not caught: the module is at fault, not the path.
    """
    require_trusted(path)
    parts = path.split(".")
    if not all(parts):
        return None
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        try:
            found: Any = import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
                continue
            raise
        for attribute in parts[length:]:
            found = getattr(found, attribute, None)
        return found if isclass(found) or isroutine(found) else None
    return None
