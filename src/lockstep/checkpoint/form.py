"""What encoded values must look like, and that of the weights' description, whose texts become names of files.

A form is a test with words for messages, a dict of forms by key (`"*"`: for all other keys), or a list with the form
of its items. The keys of a `Whole` must all be there; those of another dict may be missing. This module does not
import torch.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from lockstep.checkpoint.values import tagged

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")


class Kind(NamedTuple):
    """A kind of value: in words, and how it is told."""

    words: str
    fits: Callable[[Any], bool]

    def or_none(self) -> Kind:
        """Return the kind that is also fitted by None."""
        return Kind(f"{self.words} or null", lambda node: node is None or self.fits(node))


class Whole(dict[str, Any]):
    """Forms by key, all of which must be there."""


Form: TypeAlias = Kind | Mapping[str, Any] | list[Any]


def require_plain_name(name: object) -> str:
    """Return the name of a file that lies directly in a folder.

    Raises:
        ValueError: it leads elsewhere, or is too long.
    """
    if not _is_plain(name):
        raise ValueError(f"{name!r} is not the name of a file in it, and may lead out of the folder")
    return str(name)


def check_form(node: Any, form: Form, path: str) -> None:
    """Check that an encoded value has a form.

    Args:
        node: the value, as `encode` returns it.
        form: the form.
        path: the keys that lead to it.

    Raises:
        ValueError: it has another one; the message names the keys that lead to what differs.
    """
    if isinstance(form, Kind):
        if not form.fits(node):
            raise ValueError(f"`{path}` must be {form.words}, but is {reprlib.repr(node)}")
    elif isinstance(form, list):
        items = tagged(node)[1] if tagged(node)[0] == "$tuple" else node
        if not isinstance(items, list):
            raise ValueError(f"`{path}` must be a list, but is {reprlib.repr(node)}")
        for i, item in enumerate(items):
            check_form(item, form[0], f"{path}.{i}")
    else:
        if not isinstance(node, dict) or tagged(node)[0] is not None:
            raise ValueError(f"`{path}` must be a dict, but is {reprlib.repr(node)}")
        if isinstance(form, Whole) and (missing := [key for key in form if key not in node]):
            raise ValueError(f"`{path}` must have {missing[0]!r}, but has {reprlib.repr(list(node))}")
        for key, item in node.items():
            if (below := form.get(key, form.get("*"))) is not None:
                check_form(item, below, f"{path}.{key}")


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and _PLAIN_NAME.fullmatch(name) is not None


def _is_number(node: Any) -> bool:
    return type(node) in (int, float) and abs(node) < 1e308 and math.isfinite(node)


def is_count(value: object) -> bool:
    """Return whether a value is a number of things, which fits into 64 bits."""
    return type(value) is int and 0 <= value < 1 << 62


TEXT = Kind("a string", lambda node: isinstance(node, str))
FLAG = Kind("true or false", lambda node: isinstance(node, bool))
COUNT = Kind("a number of things", is_count)
WHOLE_NUMBER = Kind("a whole number", lambda node: type(node) is int and abs(node) < 1 << 64)
NUMBER = Kind("a number", lambda node: _is_number(node) or tagged(node)[0] == "$float")
TENSOR = Kind("a tensor", lambda node: tagged(node)[0] == "$tensor")

DESCRIPTION: Form = {
    "tied": [[TEXT]],
    "pretrained": [
        Whole(
            prefix=TEXT,
            stem=Kind("the name of a file, without a folder", _is_plain),
            files=Kind(
                "files of JSON by their names, without folders",
                lambda node: (
                    isinstance(node, dict)
                    and all(_is_plain(name) and name.endswith(".json") for name in node)
                    and isinstance(node.get("config.json", {}), dict)
                ),
            ),
            names=Kind(
                "names by name or null",
                lambda node: node is None or (isinstance(node, dict) and all(map(TEXT.fits, node.values()))),
            ),
        )
    ],
}
"""The form of what `lockstep.weights.describe_model` returns, which a checkpoint has as `weights` in its metadata."""
