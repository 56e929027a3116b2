"""Addresses of test bodies, by which another process can find the same function."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

# `@ranks` puts a wrapper into the module; this attribute of the wrapper holds the body itself.
BODY_ATTRIBUTE = "rank_body"


@dataclass(frozen=True, slots=True)
class Address:
    """The location of a module-level function.

    Attributes:
        file: path of its module.
        module: name of its module in the test process.
        qualname: its name there.
        rewritten: whether pytest has rewritten the module's assertions, so that failures show the values.
    """

    file: str
    module: str
    qualname: str
    rewritten: bool

    @classmethod
    def of(cls, body: Callable[..., Any]) -> Address:
        """Return the address of `body`.

        Raises:
            TypeError: it can't be found by name, so no other process could find it.
        """
        body = getattr(body, BODY_ATTRIBUTE, body)
        name = getattr(body, "__qualname__", None)
        module = sys.modules.get(getattr(body, "__module__", None) or "")
        file = getattr(module, "__file__", None)
        if module is None or file is None or name is None or "<" in name:
            raise TypeError(_not_importable(body))
        try:
            found = attrgetter(name)(module)
        except AttributeError:
            raise TypeError(_not_importable(body)) from None
        if getattr(found, BODY_ATTRIBUTE, found) is not body:
            raise TypeError(
                f"`body` must be what its module calls {name!r}, but that name means {found!r} now. "
                "Give the function a name of its own"
            )
        rewritten = "@pytest_ar" in vars(module)
        return cls(os.path.abspath(file), module.__name__, name, rewritten)

    def load(self) -> Callable[..., Any]:
        """Import the module from its file, unless this process has it already, and return the function."""
        module = sys.modules.get(self.module)
        if os.path.abspath(getattr(module, "__file__", None) or "") != self.file:
            module = _import_file(self.module, self.file, self.rewritten)
        found = attrgetter(self.qualname)(module)
        body: Callable[..., Any] = getattr(found, BODY_ATTRIBUTE, found)
        return body


class _RewritingLoader(SourceFileLoader):
    """Loads a module with pytest's assertion rewriting, as pytest did in the test process."""

    def get_code(self, fullname: str) -> CodeType:
        from _pytest.assertion.rewrite import rewrite_asserts

        source = self.get_data(self.path)
        tree = ast.parse(source, filename=self.path)
        rewrite_asserts(tree, source, self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)


def _import_file(name: str, file: str, rewritten: bool) -> ModuleType:
    parent = name.rpartition(".")[0]
    if parent:
        folder = Path(file).parent
        _import_package(parent, folder.parent if Path(file).stem == "__init__" else folder)
    loader = _RewritingLoader(name, file) if rewritten else None
    return _execute(spec_from_file_location(name, file, loader=loader))


def _import_package(name: str, folder: Path) -> None:
    """Make package `name` importable from `folder`, so that relative imports in its modules work.

    Names such as ``tests.dist.test_sums`` come from pytest's importlib mode. In that mode the folders need not be on
    ``sys.path``, nor contain an ``__init__.py``.
    """
    if str(folder) in getattr(sys.modules.get(name), "__path__", ()):
        return
    parent = name.rpartition(".")[0]
    if parent:
        _import_package(parent, folder.parent)
    spec = find_spec(name) if name not in sys.modules else None
    if spec is None or str(folder) not in (spec.submodule_search_locations or ()):
        init = folder / "__init__.py"
        spec = spec_from_file_location(name, init) if init.exists() else ModuleSpec(name, None)
        assert spec is not None
        spec.submodule_search_locations = [str(folder)]
    _execute(spec)


def _execute(spec: ModuleSpec | None) -> ModuleType:
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        if spec.loader is not None:
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    parent, _, leaf = spec.name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
    return module


def _not_importable(body: object) -> str:
    return (
        f"`body` must be a function at the top level of a module file, but is {body!r}. Other processes import it by "
        "its name: move it out of the function, class or lambda around it, and pass what it needs as arguments"
    )
