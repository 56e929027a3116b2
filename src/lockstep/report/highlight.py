"""Python source with a little colour."""

from __future__ import annotations

import io
import keyword
import tokenize
from html import escape

_KINDS = {tokenize.STRING: "string", tokenize.NUMBER: "number", tokenize.COMMENT: "comment"}
_CONSTANTS = {"None", "True", "False"}


def highlighted(source: str) -> str:
    """Return source as HTML; what is no Python is returned as it is, escaped.

    Example:
        >>> highlighted("lr = 1e-3")
        'lr = <span class="number">1e-3</span>'
    """
    lines = source.splitlines(keepends=True)
    parts: list[str] = []
    row, column = 1, 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            kind = _kind(token)
            if kind:
                parts += [
                    _between(lines, (row, column), token.start),
                    f'<span class="{kind}">{escape(token.string)}</span>',
                ]
                row, column = token.end
    except (tokenize.TokenError, IndentationError, SyntaxError):
        return escape(source, quote=False)
    return "".join([*parts, _between(lines, (row, column), (len(lines) + 1, 0))])


def _kind(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.NAME:
        if token.string in _CONSTANTS:
            return "number"
        return "keyword" if keyword.iskeyword(token.string) else ""
    return _KINDS.get(token.type, "")


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the text from one place (row from 1, column) to another, escaped."""
    if start[0] == end[0]:
        return escape(lines[start[0] - 1][start[1] : end[1]], quote=False)
    first, *rest = lines[start[0] - 1 : end[0]] or [""]
    if len(rest) == end[0] - start[0] and rest:
        rest[-1] = rest[-1][: end[1]]
    return escape("".join([first[start[1] :], *rest]), quote=False)
