"""Saving a state: each rank writes its part into a file of its own, and rank 0 publishes them together.

Which rank writes which part is planned by torch.distributed.checkpoint (`DefaultSavePlanner`): a tensor that several
ranks hold is written once, and a sharded one by each rank that holds a part. A file is one of safetensors: a header
with the names, dtypes and shapes of the chunks, then their bytes, without gaps and copies.

`torch.distributed.checkpoint` is imported only when used: the import takes half as long as that of torch, on every
rank, and a run may need it late or never.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from lockstep.checkpoint.drafts import Draft, make_draft
from lockstep.checkpoint.files import MANIFEST_FILE, writing
from lockstep.checkpoint.manifest import (
    BLOCK,
    ITEM_SIZES,
    Chunk,
    Manifest,
    StoredFile,
    StoredTensor,
    check_meta,
    checksum_of,
    dump_manifest,
)
from lockstep.checkpoint.pointer import PointerDraft
from lockstep.checkpoint.together import on_all_then_main
from lockstep.checkpoint.values import encode, merge
from lockstep.dist import is_main_process
from lockstep.errors import ConfigError
from lockstep.location import Location, RemotePath
from lockstep.version import __version__

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

# What safetensors calls the dtypes that all its readers know; the others are written as bytes.
SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "float16": "F16",
    "bfloat16": "BF16", "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_BAND = 1 << 20  # bytes that are summed up and then written while they are in the processor's cache


def save_state(
    directory: Location, state: Mapping[str, Any], meta: Mapping[str, Any], last_of: Location | None = None
) -> None:
    """Write a checkpoint; when this returns on any rank, it is complete under its final name, on the disk or bucket.

    Args:
        directory: the checkpoint's path, on a disk shared by all ranks, or in a bucket. A checkpoint of this name is
            replaced, and stays complete until the new one is.
        state: nested dicts, lists and tuples whose leaves are tensors, arrays of numpy, numbers, strings, None and
            dtypes. What several ranks hold is written once.
        meta: metadata in the same form, without tensors. Those of rank 0 are written.
        last_of: the work_dir, or the folder in the bucket, whose last checkpoint it becomes; None for none.

    **Collective**: every rank. **Cost**: each rank writes its share, and needs 1 MiB of memory for it if tensors are
    contiguous; about 80 MiB more for a bucket. Between ranks only the plan is sent.

    Raises:
        ConfigError: on every rank, if a value on some rank can't be saved; the message names it.
        OSError: on every rank, if some rank could not write. Nothing is left of the checkpoint then.
    """
    save = Save(directory, state, meta, last_of)
    try:
        share = on_all_then_main(save.failure, save.plan, save.share_out, save.clean)
        on_all_then_main(save.failure, lambda: save.write(share, save.tensor_of), save.complete, save.clean)
    except BaseException:
        save.clean()
        raise


class _Plan(NamedTuple):
    """What a rank has to save: its plan, and its encoded values; on rank 0, the metadata."""

    plan: SavePlan
    values: Any
    meta: Any


class Share(NamedTuple):
    """What a rank is to write, and where."""

    items: Sequence[WriteItem]
    path: Location

    @property
    def size(self) -> int:
        """Number of bytes, without the file's header."""
        return sum(size_of(item) for item in self.items)


class Written(NamedTuple):
    """What a rank has written: a file, and its chunks with the names of their tensors."""

    name: str
    file: StoredFile
    chunks: Sequence[tuple[str, Chunk]]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        chunks = [(tensor, one.start, one.offsets, one.shape, one.crc32) for tensor, one in self.chunks]
        return {"name": self.name, "file": dataclasses.astuple(self.file), "chunks": chunks}

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Written:
        """Return what `to_json` of another rank has returned."""
        name = said["name"]
        chunks = [
            (tensor, Chunk(name, start, tuple(offsets), tuple(shape), tuple(crc32)))
            for tensor, start, offsets, shape, crc32 in said["chunks"]
        ]
        return cls(name, StoredFile(*said["file"]), chunks)


class Save:
    """One save, as one rank sees it: its steps, none of which is a collective.

    Attributes:
        directory: the checkpoint's path.
        failure: begins the message if a step fails.
    """

    def __init__(
        self, directory: Location, state: Mapping[str, Any], meta: Mapping[str, Any], last_of: Location | None
    ) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        self.directory = directory
        self.failure = f"the checkpoint {directory} could not be written"
        self._state, self._meta, self._last_of = state, meta, last_of
        self._planner = DefaultSavePlanner(flatten_state_dict=False)
        # Known to rank 0 alone:
        self._draft: Draft | None = None
        self._pointer: PointerDraft | None = None
        self._values: Any = {}
        self._forms: dict[str, tuple[str, tuple[int, ...]]] = {}  # dtypes and shapes

    def plan(self) -> _Plan:
        """On every rank: say what there is to write."""
        tensors: dict[str, Tensor] = {}
        values = encode(self._state, (), tensors)
        for name, tensor in tensors.items():
            _require_plain(name, tensor)
        self._planner.set_up_planner(tensors, None, is_main_process())
        return _Plan(self._planner.create_local_plan(), values, encode(self._meta) if is_main_process() else None)

    def share_out(self, plans: list[_Plan]) -> list[Share]:
        """On rank 0: decide who writes what, and make the draft."""
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        shared, index = self._planner.create_global_plan([one.plan for one in plans])
        for name, entry in index.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), "only tensors are planned"
            self._forms[name] = _name_of(entry.properties.dtype), tuple(entry.size)
        for one in plans:
            self._values = merge(self._values, one.values)
        self._meta = plans[0].meta
        try:
            check_meta(self._meta)
        except ValueError as error:
            raise ConfigError(f"metadata must have the form that readers expect, but {error}") from error
        self._draft = make_draft(self.directory)
        place, ending = self._draft.folder, self._draft.ending
        shares = [Share(plan.items, place / f"rank_{rank}{ending}") for rank, plan in enumerate(shared)]
        if not isinstance(place, RemotePath):
            needed, free = sum(share.size for share in shares), shutil.disk_usage(place).free
            if needed > free:
                raise _no_space(needed, free, place)
        return shares

    def tensor_of(self, item: WriteItem) -> Tensor:
        """On every rank: return what is to be written of the state."""
        return cast("Tensor", self._planner.resolve_data(item))

    def release(self) -> None:
        """On every rank: forget the state, of which there is a copy."""
        del self._state, self._planner

    def write(self, share: Share, tensor_of: Callable[[WriteItem], Tensor]) -> Written | None:
        """On every rank: write its share."""
        if not share.items:
            return None
        with _space_for(share.size, share.path):
            return _write(share, tensor_of)

    def complete(self, written: list[Written | None]) -> list[None]:
        """On rank 0: write the manifest, publish the draft, and point to it."""
        assert self._draft is not None, "rank 0 has made it"
        parts = [part for part in written if part is not None]
        chunks: dict[str, list[Chunk]] = {}
        for part in parts:
            for name, chunk in part.chunks:
                chunks.setdefault(name, []).append(chunk)
        manifest = Manifest(
            written={
                "time": time.time(),
                "block": BLOCK,
                "lockstep": __version__,
                "torch": torch.__version__,
                "ranks": len(written),
            },
            meta=self._meta,
            state=self._values,
            files={part.name: part.file for part in parts},
            tensors={
                name: StoredTensor(dtype, shape, tuple(chunks[name])) for name, (dtype, shape) in self._forms.items()
            },
        )
        sizes = {name: file.size for name, file in manifest.files.items()}
        content = dump_manifest(manifest)
        # All that needs space comes before the checkpoint gets its name.
        with _space_for(len(content), self._draft.folder / MANIFEST_FILE):
            if self._last_of is not None:
                self._pointer = PointerDraft(self._last_of, self.directory)
            self._draft.publish(content, sizes)
        if self._pointer is not None:
            self._pointer.publish()
        return [None] * len(written)

    def clean(self) -> None:
        """Remove the drafts of a save that has failed."""
        if self._draft is not None:
            self._draft.discard()
        if self._pointer is not None:
            self._pointer.discard()


def header_bytes(tensors: Mapping[str, Any]) -> bytes:
    """Return the beginning of a file of safetensors, from the entry of each tensor."""
    words = json.dumps({"__metadata__": {"format": "pt"}, **tensors}, separators=(",", ":")).encode()
    words += b" " * (-len(words) % 8)  # so that tensors are aligned
    return len(words).to_bytes(8, "little") + words


def _write(share: Share, tensor_of: Callable[[WriteItem], Tensor]) -> Written:
    """Write a file of safetensors, and wait until the disk or the bucket has it."""
    # The largest elements first: so each chunk begins at a multiple of its element's size, as readers expect.
    items = sorted(share.items, key=lambda item: -ITEM_SIZES[_name_of(data_of(item).properties.dtype)])
    header: dict[str, Any] = {}
    end = 0
    for item in items:
        header[_name_in_file(item)] = _header_entry(item, end)
        end += size_of(item)
    head = header_bytes(header)
    chunks = []
    start = len(head)
    with writing(share.path, start + end) as file:
        file.write(head)
        for item in items:
            checksums = _Checksums()
            for band in _bands(tensor_of(item).detach()):
                checksums.update(band)
                file.write(band)
            place = data_of(item).chunk
            chunk = Chunk(share.path.name, start, tuple(place.offsets), tuple(place.sizes), checksums.of_all())
            chunks.append((item.index.fqn, chunk))
            start += size_of(item)
    return Written(share.path.name, StoredFile(start, len(head), checksum_of(head)), chunks)


class _Checksums:
    """Checksums of the blocks of a chunk, whose bytes come in bands."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._crc = self._length = 0

    def update(self, band: memoryview) -> None:
        """Take the bytes that follow."""
        while len(band):
            part = band[: BLOCK - self._length]
            self._crc = zlib.crc32(part, self._crc)
            self._length += len(part)
            band = band[len(part) :]
            if self._length == BLOCK:
                self._close()

    def of_all(self) -> tuple[str, ...]:
        """Return the checksums of all blocks, the last of which may be short."""
        if self._length:
            self._close()
        return tuple(self._done)

    def _close(self) -> None:
        self._done.append(f"{self._crc:08x}")
        self._crc = self._length = 0


def _bands(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order, without a copy if it is contiguous and in CPU memory."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        flat = tensor.resolve_conj().resolve_neg().reshape(-1)
        step = (_BAND if tensor.device.type == "cpu" else BLOCK) // tensor.element_size()
        for begin in range(0, len(flat), step):
            array: Any = flat[begin : begin + step].cpu().view(torch.uint8).numpy()
            yield memoryview(array)
    elif tensor.nbytes <= BLOCK or tensor.dim() == 1:
        yield from _bands(tensor.contiguous())
    else:
        rows = max(1, BLOCK // (tensor.nbytes // len(tensor)))
        for begin in range(0, len(tensor), rows):
            part = tensor[begin : begin + rows]
            yield from _bands(part[0] if len(part) == 1 else part)


def _require_plain(name: str, tensor: Tensor) -> None:
    dtype = _name_of(tensor.dtype)
    if dtype not in ITEM_SIZES or tensor.layout is not torch.strided:
        what = dtype if dtype not in ITEM_SIZES else f"of the layout {str(tensor.layout).removeprefix('torch.')}"
        raise ConfigError(f"`{name}` must be a dense tensor of a usual dtype to be saved, but is {what}. Convert it")


@contextmanager
def _space_for(needed: int, path: Location) -> Iterator[None]:
    """Say how many bytes are needed and free where the disk turns out to be full."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and not isinstance(path, RemotePath):
            raise _no_space(needed, shutil.disk_usage(path.parent).free, path) from error
        raise


def _no_space(needed: int, free: int, path: Location) -> OSError:
    return OSError(
        errno.ENOSPC,
        f"{needed:,} bytes are needed, and {free:,} are free on its disk. Remove checkpoints (`lockstep checkpoints "
        "WORK_DIR prune`), keep fewer (`max_keep_ckpts`), or write elsewhere (`out_dir`)",
        str(path),
    )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def size_of(item: WriteItem) -> int:
    """Return the number of bytes that an item of the plan has in a file."""
    data = data_of(item)
    return math.prod(data.chunk.sizes) * ITEM_SIZES[_name_of(data.properties.dtype)]


def data_of(item: WriteItem) -> TensorWriteData:
    """Return which part of which tensor an item of the plan is."""
    assert item.tensor_data is not None, "only tensors are planned"
    return item.tensor_data


def _name_in_file(item: WriteItem) -> str:
    """Return the tensor's name; for a part of it, also where it lies, as in `weight[0:4,2:8]`."""
    place = data_of(item).chunk
    if place.sizes == data_of(item).size:
        return item.index.fqn
    ranges = (f"{begin}:{begin + length}" for begin, length in zip(place.offsets, place.sizes, strict=True))
    return f"{item.index.fqn}[{','.join(ranges)}]"


def _header_entry(item: WriteItem, start: int) -> dict[str, Any]:
    data, size = data_of(item), size_of(item)
    dtype, shape = _name_of(data.properties.dtype), list(data.chunk.sizes)
    if dtype not in SAFETENSORS:
        return {"dtype": "U8", "shape": [*shape, ITEM_SIZES[dtype]], "data_offsets": [start, start + size]}
    return {"dtype": SAFETENSORS[dtype], "shape": shape, "data_offsets": [start, start + size]}
