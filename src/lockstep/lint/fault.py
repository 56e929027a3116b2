"""One thing that is wrong with a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LONGEST_VALUE = 60


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a config.

    Attributes:
        key: dotted; numbers index lists.
        says: what is wrong with its value, as the rest of a sentence.
    """

    key: str
    says: str

    def sentence(self, cfg: Mapping[str, Any]) -> str:
        """Return the fault as a sentence, with the value that the key has in `cfg` where that is short."""
        value: Any = cfg
        for part in self.key.split("."):
            try:
                value = value[int(part)] if isinstance(value, list | tuple) else value[part]
            except (KeyError, IndexError, ValueError, TypeError):
                return f"`{self.key}` {self.says}"
        shown = repr(value)
        if isinstance(value, Mapping | list | tuple) or len(shown) > _LONGEST_VALUE or shown in self.says:
            return f"`{self.key}` {self.says}"
        return f"`{self.key}` = {shown} {self.says}"
