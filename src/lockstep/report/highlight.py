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
    starts = [0, *(place + 1 for place, character in enumerate(source) if character == "\n")]
    parts: list[str] = []
    done = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if kind := _kind(token):
                begin = starts[token.start[0] - 1] + token.start[1]
                text = escape(token.string, quote=False)
                parts += [escape(source[done:begin], quote=False), f'<span class="{kind}">{text}</span>']
                done = begin + len(token.string)
    except (tokenize.TokenError, SyntaxError):
        return escape(source, quote=False)
    return "".join([*parts, escape(source[done:], quote=False)])


def _kind(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.NAME:
        if token.string in _CONSTANTS:
            return "number"
        return "keyword" if keyword.iskeyword(token.string) else ""
    return _KINDS.get(token.type, "")
