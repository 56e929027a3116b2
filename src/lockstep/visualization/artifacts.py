"""Files of a run that a tracker takes along."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def with_suffix(folder: Path, suffixes: str | Sequence[str]) -> list[Path]:
    """Return the files of a folder whose names end in one of the suffixes, sorted; those of its folders are left out.

    Args:
        folder: a folder that exists.
        suffixes: one or several, such as `(".py", ".json")`.
    """
    ends = (suffixes,) if isinstance(suffixes, str) else tuple(suffixes)
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name.endswith(ends))
