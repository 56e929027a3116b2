"""Saving a state: each rank writes its part into a file of its own, and rank 0 publishes them together.

A save has three steps, each a function of values: `plan_save` says which rank writes which part, `write_share` writes
a rank's part, and `publish` makes a checkpoint of what all have written.

The plan is that of torch.distributed.checkpoint (`DefaultSavePlanner`): a tensor that several ranks hold is written
once, and a sharded one by each rank that holds a part. A file is one of safetensors: a header with the names, dtypes
and shapes of the chunks, then their bytes, without gaps and copies.

`torch.distributed.checkpoint` is imported only when used: the import takes half as long as that of torch, on every
rank, and a run may need it late or never.
"""

from __future__ import annotations

import errno
import json
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
from lockstep.checkpoint.together import Exchange, run_then_complete
from lockstep.checkpoint.values import encode, merge
from lockstep.dist import is_main_process
from lockstep.errors import ConfigError
from lockstep.location import Location, RemotePath
from lockstep.version import __version__

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

# What safetensors calls the dtypes that all its readers know; the others are written as bytes.
SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "float16": "F16",
    "bfloat16": "BF16", "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_BAND = 1 << 20  # bytes that are summed up and then written while they are in the processor's cache


class Piece(NamedTuple):
    """A part of a tensor that one rank writes.

    Attributes:
        name: the tensor's name.
        shape: the shape of the whole tensor.
        offsets: where the part begins in it, for each dim.
        part: the part.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    part: Tensor

    @property
    def dtype(self) -> str:
        """Name of the dtype."""
        return _name_of(self.part.dtype)


class Outline(NamedTuple):
    """What rank 0 knows of a checkpoint that is being written, besides what the ranks write.

    Attributes:
        draft: where it is written.
        last_of: the folder whose last checkpoint it becomes.
        meta: the metadata, encoded.
        state: the state of all ranks, encoded.
        tensors: dtype and shape of each tensor, by name.
    """

    draft: Draft
    last_of: Location | None
    meta: Mapping[str, Any]
    state: Mapping[str, Any]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]


class Plan(NamedTuple):
    """What one rank has to do for a save.

    Attributes:
        directory: the checkpoint's path.
        path: the file that this rank writes.
        pieces: what it writes there.
        outline: on rank 0, what it publishes; None on the others.
    """

    directory: Location
    path: Location
    pieces: Sequence[Piece]
    outline: Outline | None

    @property
    def size(self) -> int:
        """Number of bytes that this rank writes, without the file's header."""
        return sum(piece.part.nbytes for piece in self.pieces)

    @property
    def failure(self) -> str:
        """The beginning of the message if a step fails."""
        return _failure(self.directory)

    def discard(self) -> None:
        """Remove what has been written, on rank 0; do nothing on others."""
        if self.outline is not None:
            self.outline.draft.discard()


class _LocalPlan(NamedTuple):
    """What a rank has to save: its plan, and its encoded values; on rank 0, the metadata."""

    plan: SavePlan
    values: Any
    meta: Any


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
    write_and_publish(plan_save(directory, state, meta, last_of))


def plan_save(
    directory: Location, state: Mapping[str, Any], meta: Mapping[str, Any], last_of: Location | None = None
) -> Plan:
    """Decide who writes what, and make the draft; see `save_state`. **Collective**: every rank."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False)
    pieces: dict[MetadataIndex, Piece] = {}  # all that this rank could write
    items, path, outline = run_then_complete(
        _failure(directory),
        partial(_plan_locally, planner, state, meta, pieces),
        partial(_share_out, planner, directory, last_of),
    )
    return Plan(directory, path, [pieces[item.index] for item in items], outline)


def write_and_publish(plan: Plan, exchange: Exchange | None = None) -> None:
    """Do what is planned on every rank, with `exchange` between the ranks; leave nothing if that fails on one."""
    try:
        run_then_complete(plan.failure, partial(write_share, plan), partial(publish, plan), plan.discard, exchange)
    except BaseException:
        plan.discard()
        raise


def write_share(plan: Plan) -> dict[str, Any] | None:
    """Write a rank's file, and wait until the disk or the bucket has it. No collective.

    Returns:
        What a manifest says of it, in JSON values: `name`, `file`, and `chunks`, each after the name of its tensor;
        None if this rank has nothing to write.
    """
    if not plan.pieces:
        return None
    # The largest elements first: so each chunk begins at a multiple of its element's size, as readers expect.
    pieces = sorted(plan.pieces, key=lambda piece: -piece.part.itemsize)
    header: dict[str, Any] = {}
    end = 0
    for piece in pieces:
        header[_name_in_file(piece)] = _header_entry(piece, end)
        end += piece.part.nbytes
    head = header_bytes(header)
    chunks: list[tuple[str, dict[str, Any]]] = []
    start, name = len(head), plan.path.name
    with _space_for(plan.size, plan.path), writing(plan.path, start + end) as file:
        file.write(head)
        for piece in pieces:
            checksums = _Checksums()
            for band in _bands(piece.part):
                checksums.update(band)
                file.write(band)
            shape, crc32 = list(piece.part.shape), checksums.of_all()
            place = {"file": name, "start": start, "offsets": piece.offsets, "shape": shape, "crc32": crc32}
            chunks.append((piece.name, place))
            start += piece.part.nbytes
    return {"name": name, "file": {"size": start, "header": len(head), "crc32": checksum_of(head)}, "chunks": chunks}


def publish(plan: Plan, written: Sequence[dict[str, Any] | None]) -> list[None]:
    """On rank 0: write the manifest, give the checkpoint its name, and point to it. No collective.

    Args:
        plan: rank 0's plan.
        written: what `write_share` has returned on each rank.
    """
    assert plan.outline is not None, "rank 0 has one"
    draft, last_of, meta, state, tensors = plan.outline
    parts = [part for part in written if part is not None]
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    for part in parts:
        for name, place in part["chunks"]:
            chunks[name].append(Chunk(**place))
    manifest = Manifest(
        written={
            "time": time.time(),
            "block": BLOCK,
            "lockstep": __version__,
            "torch": torch.__version__,
            "ranks": len(written),
        },
        meta=meta,
        state=state,
        files={part["name"]: StoredFile(**part["file"]) for part in parts},
        tensors={name: StoredTensor(dtype, shape, tuple(chunks[name])) for name, (dtype, shape) in tensors.items()},
    )
    content = dump_manifest(manifest)
    with ExitStack() as stack:
        # All that needs space comes before the checkpoint gets its name.
        with _space_for(len(content), draft.folder / MANIFEST_FILE):
            pointer = None if last_of is None else PointerDraft(last_of, plan.directory)
            if pointer is not None:
                stack.callback(pointer.discard)
            draft.publish(content, {name: file.size for name, file in manifest.files.items()})
        if pointer is not None:
            pointer.publish()
        stack.pop_all()  # the draft of the pointer is the pointer now
    return [None] * len(written)


def header_bytes(tensors: Mapping[str, Any]) -> bytes:
    """Return the beginning of a file of safetensors, from the entry of each tensor."""
    words = json.dumps({"__metadata__": {"format": "pt"}, **tensors}, separators=(",", ":")).encode()
    words += b" " * (-len(words) % 8)  # so that tensors are aligned
    return len(words).to_bytes(8, "little") + words


def _failure(directory: Location) -> str:
    return f"the checkpoint {directory} could not be written"


def _plan_locally(
    planner: SavePlanner, state: Mapping[str, Any], meta: Mapping[str, Any], pieces: dict[MetadataIndex, Piece]
) -> _LocalPlan:
    """On every rank: say what there is to write, and add it to `pieces`."""
    tensors: dict[str, Tensor] = {}
    values = encode(state, (), tensors)
    for name, tensor in tensors.items():
        _require_plain(name, tensor)
    planner.set_up_planner(tensors, None, is_main_process())
    plan = planner.create_local_plan()
    pieces.update((item.index, _piece(planner, item)) for item in plan.items)
    return _LocalPlan(plan, values, encode(meta) if is_main_process() else None)


def _share_out(
    planner: SavePlanner, directory: Location, last_of: Location | None, plans: Sequence[_LocalPlan]
) -> list[tuple[Sequence[WriteItem], Location, Outline | None]]:
    """On rank 0: decide who writes what and where, and make the draft."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    shared, index = planner.create_global_plan([one.plan for one in plans])
    tensors = {}
    for name, entry in index.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), "only tensors are planned"
        tensors[name] = _name_of(entry.properties.dtype), tuple(entry.size)
    values: Any = {}
    for one in plans:
        values = merge(values, one.values)
    meta = plans[0].meta
    try:
        check_meta(meta)
    except ValueError as error:
        raise ConfigError(f"metadata must have the form that readers expect, but {error}") from error
    draft = make_draft(directory)
    try:
        if not isinstance(draft.folder, RemotePath):
            needed, free = sum(_size_of(item) for plan in shared for item in plan.items), _free(draft.folder)
            if needed > free:
                raise _no_space(needed, free, draft.folder)
    except BaseException:
        draft.discard()
        raise
    outline = Outline(draft, last_of, meta, values, tensors)
    return [
        (plan.items, draft.folder / f"rank_{rank}{draft.ending}", outline if rank == 0 else None)
        for rank, plan in enumerate(shared)
    ]


def _piece(planner: SavePlanner, item: WriteItem) -> Piece:
    data, part = item.tensor_data, planner.resolve_data(item)
    assert data is not None, "only tensors are planned"
    assert isinstance(part, Tensor), "only tensors are planned"
    return Piece(item.index.fqn, tuple(data.size), tuple(data.chunk.offsets), part.detach())


def _size_of(item: WriteItem) -> int:
    assert item.tensor_data is not None, "only tensors are planned"
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


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
            raise _no_space(needed, _free(path.parent), path) from error
        raise


def _no_space(needed: int, free: int, path: Location) -> OSError:
    return OSError(
        errno.ENOSPC,
        f"{needed:,} bytes are needed, and {free:,} are free on its disk. Remove checkpoints (`lockstep checkpoints "
        "WORK_DIR prune`), keep fewer (`max_keep_ckpts`), or write elsewhere (`out_dir`)",
        str(path),
    )


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name_in_file(piece: Piece) -> str:
    """Return the tensor's name; for a part of it, also where it lies, as in `weight[0:4,2:8]`."""
    if tuple(piece.part.shape) == piece.shape:
        return piece.name
    ranges = (f"{begin}:{begin + length}" for begin, length in zip(piece.offsets, piece.part.shape, strict=True))
    return f"{piece.name}[{','.join(ranges)}]"


def _header_entry(piece: Piece, start: int) -> dict[str, Any]:
    dtype, shape, offsets = piece.dtype, list(piece.part.shape), [start, start + piece.part.nbytes]
    if dtype not in SAFETENSORS:
        return {"dtype": "U8", "shape": [*shape, ITEM_SIZES[dtype]], "data_offsets": offsets}
    return {"dtype": SAFETENSORS[dtype], "shape": shape, "data_offsets": offsets}
