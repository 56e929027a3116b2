"""`Registry` as MMEngine's code calls it: lockstep's, with MMEngine's order of arguments and rules of scope."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from lockstep import registry as core
from lockstep.registry.registry import Entry, Names, require_trusted
from lockstep.registry.signatures import construct
from mmengine.registry.default_scope import DefaultScope
from mmengine.utils.manager import ManagerMixin

_EntryT = TypeVar("_EntryT", bound=Entry)


def build_from_cfg(cfg: Any, registry: core.Registry, default_args: Mapping[str, Any] | None = None) -> Any:
    """Build an object from a config; neither the config nor the defaults are modified.

    Args:
        cfg: a dict whose `type` is a name, a class or a function, and which may name a registry in `_scope_`; the
            other keys are arguments.
        registry: where names are looked up, after the registry of the same family that `_scope_`, or else the default
            scope, names.
        default_args: arguments, or a `type`, for keys that `cfg` does not have.

    Raises:
        TypeError: `cfg`, `registry` or `default_args` are of another type, or an argument is unknown or missing.
        KeyError: `type` is missing or not a known name.
    """
    if not isinstance(cfg, Mapping):
        raise TypeError(f"`cfg` must be a dict, Config or ConfigDict, but is {cfg!r} of {type(cfg).__name__}")
    if not isinstance(registry, core.Registry):
        raise TypeError(f"`registry` must be a Registry, but is {registry!r}")
    if not isinstance(default_args, Mapping | None):
        raise TypeError(f"`default_args` must be a dict or None, but is {default_args!r}")
    arguments = {**(default_args or {}), **cfg}
    if "type" not in arguments:
        raise KeyError(f"`cfg` or `default_args` must have the key `type`, but they are {cfg} and {default_args}")
    kind, scope = arguments.pop("type"), arguments.pop("_scope_", None)
    with _switched(registry, scope) as there:
        if isinstance(kind, str):
            kind = there[kind]
        elif not callable(kind):
            raise TypeError(f"`type` must be a name, a class or a function, but is {kind!r}")
        if isinstance(kind, type) and issubclass(kind, ManagerMixin):
            return kind.get_instance(**arguments)
        return construct(kind, arguments, registry.name)


class Registry(core.Registry):
    """A table of classes and functions by name, which may be another's child; see `lockstep.registry.Registry`.

    Args:
        name: what the entries are, in the singular.
        build_func: what `build` calls, with the config, its further arguments, and this registry as `registry`; by
            default the parent's, or `build_from_cfg`.
        parent: the registry in which a name is looked up next.
        scope: name of this registry within its family; by default the package that creates the registry.
        locations: modules to import when a name is not registered yet.
    """

    def __init__(
        self,
        name: str,
        build_func: Callable[..., Any] | None = None,
        parent: core.Registry | None = None,
        scope: str | None = None,
        locations: Iterable[str] = (),
    ) -> None:
        scope = scope or str(sys._getframe(1).f_globals["__name__"]).partition(".")[0]
        super().__init__(name, scope, parent, locations=locations)
        self.module_dict: dict[str, Entry] = self._entries  # type: ignore[misc]  # which MMEngine's users change
        inherited = parent.build_func if isinstance(parent, Registry) else build_from_cfg
        self.build_func: Callable[..., Any] = build_func or inherited

    @staticmethod
    def split_scope_key(key: str) -> tuple[str | None, str]:
        """Return the scope at the beginning of a name, or None, and the rest.

        Example:
            >>> Registry.split_scope_key("mmdet.ResNet"), Registry.split_scope_key("ResNet")
            (('mmdet', 'ResNet'), (None, 'ResNet'))
        """
        scope, dot, name = key.partition(".")
        return (scope, name) if dot else (None, key)

    @staticmethod
    def infer_scope() -> str:
        """Return the package of the code that calls the caller of this method."""
        return str(sys._getframe(2).f_globals["__name__"]).partition(".")[0]

    def build(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        """Build an object from a config by this registry's `build_func`; see `build_from_cfg`."""
        return self.build_func(cfg, *args, **kwargs, registry=self)

    def get(self, key: str) -> Entry | None:
        """Return what is called `key` here or in a parent, or None; the default scope has no say.

        Args:
            key: ``"Name"``, ``"scope.Name"`` or ``"package.module.Name"``.
        """
        if not isinstance(key, str):
            raise TypeError(f"`key` must be a str, but is {key!r} of {type(key).__name__}")
        scope, dot, _ = key.partition(".")
        if not dot:
            return self._find(key)
        self._fill(scope)
        return super().get(key)

    @contextmanager
    def switch_scope_and_registry(self, scope: str | None) -> Iterator[core.Registry]:
        """Set the default scope inside the context, and give the registry of this family with that scope.

        Args:
            scope: the scope; None for the present default scope. Where the family has no such registry, this one is
                given.
        """
        with _switched(self, scope) as there:
            yield there

    def import_from_location(self) -> None:
        """Import the modules that register this registry's entries."""
        for module in self._locations:
            import_module(module)

    def _register(self, entry: _EntryT, name: Names, force: bool) -> _EntryT:
        """Register anything that can be called, also an object such as a partial function."""
        try:
            return super()._register(entry, name, force)
        except TypeError:
            if not callable(entry) or name is None:
                raise
        for key in [name] if isinstance(name, str) else name:
            if not force and self._entries.get(key, entry) is not entry:
                raise KeyError(f"{key} is registered in {self.name} at {self.scope} already")
            self._entries[key] = entry
        return entry

    def _fill(self, scope: str) -> None:
        """Import the registries of another package, if it has any and they are not there yet."""
        if any(other.scope == scope for other in self.root._family()):
            return
        try:
            if find_spec(scope) is None:
                return
            if scope not in sys.modules:  # to look for its registry is to import it
                require_trusted(scope)
            there = find_spec(f"{scope}.registry") is not None
        except (ImportError, ValueError):  # not a package, or one that cannot be imported here
            return
        if there:
            import_module(f"{scope}.registry")


@contextmanager
def _switched(registry: core.Registry, scope: str | None) -> Iterator[core.Registry]:
    with DefaultScope.overwrite_default_scope(scope):
        if scope is None and (scope := core.default_scope()) is None:
            yield registry  # whose parents lead to those of MMEngine anyway
            return
        if isinstance(registry, Registry):
            registry._fill(str(scope))
        yield next((other for other in registry.root._family() if other.scope == scope), registry)
