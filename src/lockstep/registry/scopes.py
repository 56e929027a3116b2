"""The scope in which names are looked for first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_default: str | None = None


def default_scope() -> str | None:
    """Return the scope in which every registry looks for names first; None for its own."""
    return _default


def init_default_scope(scope: str | None) -> None:
    """Let every registry look for names in its relative of that scope first, from now on.

    A Runner that is given a `default_scope` does so while it runs.

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
    global _default
    _default = scope


@contextmanager
def in_default_scope(scope: str | None) -> Iterator[None]:
    """Set the default scope inside; None leaves it as it is."""
    before = _default
    init_default_scope(scope or before)
    try:
        yield
    finally:
        init_default_scope(before)
