"""The source code of Python's standard library: a few megabytes of real text that every machine has."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

HELD_OUT = 20  # one file in this many is held out

# Installed packages, and tests, which not every Python distribution includes.
_NOT_ENTERED = ("site-packages", "dist-packages", "test", "tests", "__pycache__")


class StandardLibrary(Dataset[Tensor]):
    """Consecutive windows of text, as bytes [length + 1]: each byte is predicted from those before it.

    Args:
        held_out: use the files kept for validation, otherwise all others. The split depends only on the version of
            Python.
        length: number of bytes to predict in a window.
        windows: use only this many windows, spread over the text.
    """

    def __init__(self, held_out: bool = False, length: int = 128, windows: int | None = None) -> None:
        files = [file for index, file in enumerate(_files()) if (index % HELD_OUT == 0) == held_out]
        text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        every = text.unfold(0, length + 1, length)  # [windows, length + 1], a view
        self.windows = every if windows is None else every[:: max(len(every) // windows, 1)][:windows]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]


def _files() -> Iterator[Path]:
    """Yield the library's files, in an order that does not depend on the file system."""
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = sorted(set(folders).difference(_NOT_ENTERED))
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
