"""Print every message that the package can raise, warn of or log, to be read in one go.

    python tools/messages.py [--room ROOM]

Each is printed with its file, its line and what becomes of it. What is filled in at run time is shown in braces.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "src" / "lockstep"
_LOG_LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
_SHORTEST = 12  # characters: below that a string is a name
_FEWEST_WORDS = 4  # that make a string a part of some message, or the help of a command


class Message(NamedTuple):
    """One message.

    Attributes:
        file: where it stands, relative to the package.
        line: its first line there.
        kind: the error that it is raised as, or ``warning``, or the level that it is logged at; ``part`` where the code
            puts it together elsewhere.
        text: the words.
    """

    file: str
    line: int
    kind: str
    text: str


def messages_in(path: Path, root: Path = PACKAGE) -> Iterator[Message]:
    """Yield the messages of one module, in the order of their lines."""
    file, seen = str(path.relative_to(root)), set[ast.AST]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            seen.add(node.value)  # a docstring
        elif isinstance(node, ast.Call) and (kind := _kind_of(node.func)) is not None:
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                if text := _text_of(argument):
                    yield Message(file, argument.lineno, kind, text)
                    seen.update(ast.walk(argument))
        elif node not in seen and isinstance(node, ast.expr) and len((text := _text_of(node)).split()) >= _FEWEST_WORDS:
            yield Message(file, node.lineno, "part", text)
            seen.update(ast.walk(node))


def all_messages(root: Path = PACKAGE) -> list[Message]:
    """Return the messages of the package, by file and line."""
    return sorted(message for path in sorted(root.rglob("*.py")) for message in messages_in(path, root))


def _kind_of(called: ast.expr) -> str | None:
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    if name.endswith(("Error", "Exit", "refused", "refusal", "Warning")):
        return name
    if name in ("warn", "warn_explicit"):
        return "warning"
    if isinstance(called, ast.Attribute) and name in _LOG_LEVELS:
        return name
    return None


def _text_of(node: ast.expr) -> str:
    """Return the words of a string, an f-string or a concatenation; nothing for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    elif isinstance(node, ast.JoinedStr):
        text = "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
            for part in node.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        )
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        text = _text_of(node.left) + _text_of(node.right)
    else:
        return ""
    return text if len(text) >= _SHORTEST else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--room", default="", help="only of this folder of the package, such as dist")
    room = parser.parse_args().room
    for message in all_messages():
        if message.file.startswith(room):
            print(f"{message.file}:{message.line}  {message.kind}\n    {message.text}")


if __name__ == "__main__":
    main()
