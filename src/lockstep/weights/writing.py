"""Writing weights as safetensors, tensor by tensor, in one file or several with an index."""

from __future__ import annotations

import glob
import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from lockstep.checkpoint.owner import DRAFT, is_alive, name_of_draft
from lockstep.errors import ConfigError, listed
from lockstep.location import Location
from lockstep.weights.safetensors_file import TensorInfo, write_header, write_tensor

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([A-Za-z]*)")
MAX_SHARD_SIZE = "5GB"


def read_size(size: int | str, argument: str = "max_shard_size") -> int:
    """Return a size in bytes; `argument` is what a message calls it.

    Example:
        >>> read_size("5GB"), read_size("1.5 MiB"), read_size(100)
        (5000000000, 1572864, 100)

    Raises:
        ConfigError: it is not a positive size.
    """
    match = _SIZE.fullmatch(str(size).strip())
    unit = None if match is None else _UNITS.get(match[2].upper())
    count = 0 if match is None or unit is None else int(float(match[1]) * unit)
    if count < 1:
        raise ConfigError(f"`{argument}` must be a size as 5GB, 500MB or 2GiB, but is {size!r}")
    return count


def plan_shards(infos: Mapping[str, TensorInfo], stem: str, max_bytes: float) -> dict[str, list[str]]:
    """Return the names of the files, and the tensors that each one holds, in the order in which they are written.

    A tensor larger than `max_bytes` gets a file of its own. Within a file the wider dtypes come first, so that each
    tensor is aligned.
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name, info in infos.items():
        if groups[-1] and size + info.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += info.nbytes
    of = f"of-{len(groups):05}"
    files = [
        f"{stem}-{n:05}-{of}.safetensors" if len(groups) > 1 else f"{stem}.safetensors"
        for n in range(1, len(groups) + 1)
    ]
    return {
        file: sorted(names, key=lambda n: -infos[n].dtype.itemsize) for file, names in zip(files, groups, strict=True)
    }


def check_new(out: Location, *, file: bool) -> None:
    """Raise an error if there is something already where a file or a folder is to be written.

    Raises:
        ConfigError: OUT is there, and is not an empty folder; or it cannot be reached.
    """
    what = "a new file" if file else "a new or empty folder"
    try:
        if not out.exists():
            return
        names = None if out.is_file() else sorted(one.name for one in out.iterdir())
    except OSError as error:
        raise ConfigError(f"`OUT` must be {what}, but {out} cannot be reached: {error}") from error
    if names == [] and not file:
        return
    found = "is a file" if names is None else f"is a folder that holds {listed(names, most=3) or 'nothing'}"
    raise ConfigError(f"`OUT` must be {what}, but {out} {found}. Give another one, or remove it")


@dataclass(eq=False, repr=False)
class SafetensorsWriter:
    """Writes tensors one by one into one or several files, and then what belongs beside them.

    On a disk all is written into a hidden folder beside OUT, which gets its name at the end. Behind a URL the files
    appear one by one, the JSON files last. A failure is kept until `finish`, so that a rank that writes can go on
    taking part in collectives.

    Args:
        out: the folder; or, with `single`, the file.
        shards: files and the tensors in each, as `plan_shards` returns them.
        infos: shape and dtype of what is written, by name.
        files: JSON values of further files, by name.
        single: write one file instead of a folder.

    Attributes:
        failure: why writing has failed; None if it has not.
    """

    out: Location
    shards: Mapping[str, list[str]]
    infos: Mapping[str, TensorInfo]
    files: Mapping[str, Any]
    single: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        out = self.out.absolute() if isinstance(self.out, Path) else self.out
        self._draft = draft_of(out) if isinstance(out, Path) else None
        self._waiting = [(file, name) for file, names in self.shards.items() for name in names]
        self._open: IO[bytes] | None = None
        self._written: list[Location] = []
        self.failure: OSError | None = None

    def write(self, tensor: Tensor) -> None:
        """Write the next tensor, in the order of the shards."""
        file, name = self._waiting.pop(0)
        if self.failure is not None:
            return
        try:
            info = self.infos[name]
            write_tensor(self._opened(file), tensor.detach().to(info.dtype))
            if not self._waiting or self._waiting[0][0] != file:
                self._close()
        except OSError as error:
            self.failure = error

    def finish(self) -> None:
        """Write what belongs beside the weights, and give all its final name.

        Raises:
            ConfigError: writing has failed, now or before; what was written is removed.
        """
        if self.failure is None:
            try:
                self._write_files()
                self._publish()
                return
            except OSError as error:
                self.failure = error
        self.discard()
        raise ConfigError(f"{self.out} cannot be written: {self.failure}") from self.failure

    def discard(self) -> None:
        """Remove what has been written."""
        with suppress(OSError):  # what could not be written to the end is removed
            self._close()
        if self._draft is not None:
            shutil.rmtree(self._draft, ignore_errors=True)
            return
        for file in self._written:
            with suppress(OSError):  # of several that were written, those that can be removed are
                file.unlink()

    def _opened(self, file: str) -> IO[bytes]:
        """Return the open file, which is a new one for the first tensor in it."""
        if self._open is None:
            self._open = self._create(file)
            write_header(self._open, {name: self.infos[name] for name in self.shards[file]})
        return self._open

    def _create(self, file: str) -> IO[bytes]:
        place: Location = self.out if self.single else self.out / _plain(file)
        if self._draft is not None:
            place = self._draft / _plain(file)
            if not self._written:
                self._draft.mkdir(parents=True)
        self._written.append(place)
        return place.open("wb")

    def _close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def _write_files(self) -> None:
        if self.single:
            return
        files = dict(self.files)
        if len(self.shards) > 1:
            stem = next(iter(self.shards)).partition("-")[0]
            places = {name: file for file, names in self.shards.items() for name in names}
            size = sum(info.nbytes for info in self.infos.values())
            index = {"metadata": {"total_size": size}, "weight_map": places}
            files = {f"{stem}.safetensors.index.json": index, **files}
        for name, content in files.items():
            with self._create(name) as file:
                file.write(_as_bytes(content))

    def _publish(self) -> None:
        if self._draft is None or not isinstance(self.out, Path):
            return
        if self.single:
            (written,) = self._draft.iterdir()
            written.replace(self.out)
            self._draft.rmdir()
            return
        if self.out.exists():
            self.out.rmdir()  # it was empty
        self._draft.rename(self.out)


def draft_of(out: Path) -> Path:
    """Return where this process writes what will be `out`, and remove what processes that were killed have left."""
    draft = out.with_name(name_of_draft(out.name))
    for left in out.parent.glob(f".{glob.escape(out.name)}.draft.*"):
        owner = DRAFT.fullmatch(left.name)
        if left == draft or (owner is not None and is_alive(owner) is False):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
    return draft


def _plain(name: str) -> str:
    """Return the name of a file that will lie directly in the folder, whoever has said it."""
    if name in ("", "..") or Path(name).name != name or "\\" in name:
        raise ConfigError(f"a file that is written must have a plain name, but {name!r} may lead out of the folder")
    return name


def _as_bytes(content: Any) -> bytes:
    if isinstance(content, bytes):
        return content
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
