"""What the API reference changes in the docstrings that it shows: an extension of griffe for `mkdocs.yml`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe


class Reference(griffe.Extension):
    """Turns a doctest into a code block, and gives `Runner` the signature that it has at run time."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Change the objects of a package that has been read."""
        for obj in _objects(pkg):
            if obj.docstring is not None:
                obj.docstring.value = _as_markdown(obj.docstring.value)
        arguments = pkg["runner.arguments.RunnerArguments"].members
        runner = pkg["runner.runner.Runner"]
        runner["__init__"].parameters = griffe.Parameters(
            griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword),
            *(
                griffe.Parameter(
                    name,
                    annotation=_without_metadata(member.annotation),
                    kind=griffe.ParameterKind.positional_or_keyword,
                    default=member.value,
                )
                for name, member in arguments.items()
                if member.is_attribute and "instance-attribute" in member.labels
            ),
        )


def _objects(parent: griffe.Object) -> Iterator[griffe.Object]:
    yield parent
    for member in parent.members.values():
        if not member.is_alias:
            yield from _objects(member)


def _as_markdown(text: str) -> str:
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


def _without_metadata(annotation: Any) -> Any:
    if isinstance(annotation, griffe.ExprSubscript) and str(annotation.left) == "Annotated":
        return annotation.slice.elements[0]
    return annotation
