"""Saving a state: each rank writes its part into a file of its own, and rank 0 publishes them together.

A save has three steps: `Planner.plan` says which rank writes which part, `write_share` writes a rank's part, and
`publish` makes a checkpoint of what all have written.

A tensor that several ranks hold is written once, and a sharded one by each rank that holds a part (`layout.py`). A file
is one of safetensors: a header with the names, dtypes and shapes of the parts, then their bytes, without gaps and
copies, and at last the checksums of their blocks, under a name of their own.
"""

from __future__ import annotations

import errno
import json
import logging
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.checkpoint.drafts import Draft, make_draft
from lockstep.checkpoint.files import writing
from lockstep.checkpoint.layout import Holding, Piece, decide, digest_of, keys_to_send
from lockstep.checkpoint.manifest import (
    BLOCK,
    CHECKSUM,
    ITEM_SIZES,
    Manifest,
    StoredFile,
    StoredTensor,
    check_meta,
    dump_manifest,
    place_in_file,
)
from lockstep.checkpoint.search import pointing
from lockstep.checkpoint.together import Exchange, run_then_complete
from lockstep.checkpoint.values import encode, merge
from lockstep.dist import get_dist_info, is_main_process
from lockstep.errors import ConfigError
from lockstep.location import Location
from lockstep.transport.moving import bytes_of
from lockstep.version import __version__

# What safetensors calls the dtypes that all its readers know; the others are written as bytes.
SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "float16": "F16",
    "bfloat16": "BF16", "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_CHECKSUMS = "$crc32"  # their name in a file
_logger = logging.getLogger(__name__)
_BAND = 1 << 20  # bytes that are summed up and then written while they are in the processor's cache


def save_state(
    directory: Location,
    state: Mapping[str, Any],
    meta: Mapping[str, Any],
    last_of: Location | None = None,
    planner: Planner | None = None,
) -> None:
    """Write a checkpoint; when this returns on any rank, it is complete under its final name, on the disk or bucket.

    Args:
        directory: the checkpoint's path, on a disk shared by all ranks, or in a bucket. A checkpoint of this name is
            replaced, and stays complete until the new one is.
        state: nested dicts, lists and tuples whose leaves are tensors, arrays of numpy, numbers, strings, None and
            dtypes. What several ranks hold is written once.
        meta: metadata in the same form, without tensors. Those of rank 0 are written.
        last_of: the work_dir, or the folder in the bucket, whose last checkpoint it becomes; None for none.
        planner: has the plan of the last save, which holds if all ranks hold tensors of the same names and shapes.

    **Collective**: every rank. **Cost**: each rank writes its share, and copies up to 16 MiB of it at a time if it is
    not contiguous on the CPU; about 80 MiB more for a bucket. Between ranks only the plan is sent: see `Planner.plan`.

    Raises:
        ConfigError: on every rank, if a value on some rank can't be saved, or what ranks hold of a tensor does not fit
            together; the message names it.
        OSError: on every rank, if some rank could not write. Nothing is left of the checkpoint then.
    """
    write_and_publish((planner or Planner()).plan(directory, state, meta, last_of))


class Outline(NamedTuple):
    """What rank 0 knows of a checkpoint that is being written, besides what the ranks write.

    Attributes:
        directory: its path.
        draft: where it is written before.
        last_of: the folder whose last checkpoint it becomes.
        meta: the metadata, encoded.
        state: the state of all ranks, encoded.
        tensors: how each tensor is stored, by name.
    """

    directory: Location
    draft: Draft
    last_of: Location | None
    meta: Mapping[str, Any]
    state: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


class Plan(NamedTuple):
    """What one rank has to do for a save.

    Attributes:
        failure: the beginning of the message if a step fails.
        path: the file that this rank writes.
        pieces: what it writes there.
        outline: on rank 0, what it publishes; None on the others.
    """

    failure: str
    path: Location
    pieces: Sequence[Piece]
    outline: Outline | None

    def discard(self) -> None:
        """Remove what has been written, on rank 0; do nothing on others."""
        if self.outline is not None:
            self.outline.draft.discard()


class _Offer(NamedTuple):
    """What a rank says first of what it has to save.

    Attributes:
        plan_id: that of the plan that it has kept; empty if it has none, or holds something else now.
        digest: the digest of what it holds.
        digests: the digest of each section.
        values: the values of the sections that it sends by that plan.
        meta: on rank 0, the metadata, encoded.
    """

    plan_id: str
    digest: str
    digests: Mapping[str, str]
    values: Mapping[str, Any]
    meta: Any


class Planner:
    """Decides who writes what, in one save after the other. A plan holds as long as all ranks hold the same.

    Args:
        folders: folders that are there; of these, and of those of earlier saves, one that is gone is not made again.
    """

    def __init__(self, folders: Iterable[Location] = ()) -> None:
        self._folders = set(folders)
        self._digest = ""  # what this rank held when the last plan was made, as a digest
        self._plan_id = ""  # what all ranks held then
        self._written = b""  # which of its pieces this rank writes, as bits
        self._own_keys: Sequence[str] = ()  # the sections whose values come from it
        self._tensors: Mapping[str, StoredTensor] = {}  # on rank 0

    def plan(
        self, directory: Location, state: Mapping[str, Any], meta: Mapping[str, Any], last_of: Location | None = None
    ) -> Plan:
        """Decide who writes what, and make the draft; see `save_state`.

        **Collective**: every rank. **Cost**: an exchange of some hundred bytes for each rank; where a plan is made, one
        more, of a box for each kind of tensor from every rank, and of the names from one rank.
        """
        failure = f"the checkpoint {directory} could not be written"
        holding: list[Holding] = []
        offers: list[_Offer] = []

        def offer() -> _Offer:
            holding.append(own := Holding(state, *get_dist_info()))
            plan_id = self._plan_id if own.digest == self._digest else ""
            values = {key: own.sections[key].values for key in self._own_keys} if plan_id else {}
            digests = {key: section.digest for key, section in own.sections.items()}
            return _Offer(plan_id, own.digest, digests, values, encode(meta) if is_main_process() else None)

        def answer(found: list[_Offer]) -> Sequence[tuple[Location | None, Any]]:
            offers.extend(found)
            try:
                check_meta(offers[0].meta)
            except ValueError as error:
                raise ConfigError(f"metadata must have the form that readers expect, but {error}") from error
            plan_id = digest_of([one.digest for one in offers])
            if any(one.plan_id != plan_id for one in offers):
                return [(None, keys) for keys in keys_to_send([one.digests for one in offers])]
            return self._begin(directory, last_of, offers, [one.values for one in offers])

        def describe() -> tuple[Any, Any, Any]:
            boxes = {key: section.boxes for key, section in holding[0].sections.items()}
            own = {key: holding[0].sections[key] for key in self._own_keys}
            rows, values = ({key: getattr(one, what) for key, one in own.items()} for what in ("rows", "values"))
            return boxes, rows, values

        def decide_all(found: list[tuple[Any, Any, Any]]) -> list[tuple[Location, Outline | None, str, bytes]]:
            boxes, rows, values = zip(*found, strict=True)
            self._tensors, written = decide([one.digests for one in offers], boxes, rows)
            plan_id = digest_of([one.digest for one in offers])
            begun = self._begin(directory, last_of, offers, values)
            return [(*one, plan_id, bits) for one, bits in zip(begun, written, strict=True)]

        path, rest = run_then_complete(failure, offer, answer, place=directory)
        if path is None:
            self._plan_id, self._digest, self._own_keys = "", holding[0].digest, rest
            path, rest, self._plan_id, self._written = run_then_complete(failure, describe, decide_all, place=directory)
        return Plan(failure, path, holding[0].written(self._written), rest)

    def _begin(
        self,
        directory: Location,
        last_of: Location | None,
        offers: Sequence[_Offer],
        values: Sequence[Mapping[str, Any]],
    ) -> list[tuple[Location, Outline | None]]:
        """On rank 0: make the draft. Return the file of each rank, and for rank 0 what it publishes."""
        folder = directory.parent
        if isinstance(folder, Path) and folder in self._folders and not folder.is_dir():
            says = "the folder has been moved or removed since the run began, or its disk is gone"
            raise FileNotFoundError(errno.ENOENT, says, str(folder))
        draft = make_draft(directory)
        self._folders.add(folder)
        try:
            outline = Outline(directory, draft, last_of, offers[0].meta, reduce(merge, values, {}), self._tensors)
        except BaseException:
            draft.discard()
            raise
        return [
            (draft.folder / f"rank_{rank}{draft.ending}", outline if rank == 0 else None) for rank in range(len(offers))
        ]


def write_and_publish(plan: Plan, exchange: Exchange | None = None) -> None:
    """Do what is planned on every rank, with `exchange` between the ranks; leave nothing if that fails on one."""
    try:
        run_then_complete(
            plan.failure, partial(write_share, plan), partial(publish, plan), plan.discard, exchange, plan.path
        )
    except BaseException:
        plan.discard()
        raise


def write_share(plan: Plan) -> dict[str, Any] | None:
    """Write a rank's file, and wait until the disk or the bucket has it. No collective.

    Returns:
        What a manifest says of it, in JSON values: `name` and `file`; None if this rank has nothing to write.
    """
    if not plan.pieces:
        return None
    pieces = sorted(plan.pieces, key=lambda piece: place_in_file(piece.dtype, piece.name))
    blocks = sum(-(-piece.part.nbytes // BLOCK) for piece in pieces)
    last = sum(piece.part.nbytes for piece in pieces) + CHECKSUM * blocks
    head = header_bytes([*map(_header_entry, pieces), (_CHECKSUMS, "U8", (blocks, CHECKSUM), CHECKSUM * blocks)])
    checksums = _Checksums()
    with writing(plan.path, len(head) + last) as file:
        file.write(head)
        for piece in pieces:
            for band in _bands(piece.part):
                checksums.update(band)
                file.write(band)
            checksums.close()
        tail = bytes(checksums.done)
        file.write(tail)
    entry = StoredFile(len(head) + last, len(head), zlib.crc32(head), blocks, zlib.crc32(tail))
    return {"name": plan.path.name, "file": asdict(entry)}


def publish(plan: Plan, written: Sequence[dict[str, Any] | None]) -> list[None]:
    """On rank 0: write the manifest, give the checkpoint its name, and point to it. No collective.

    Args:
        plan: rank 0's plan.
        written: what `write_share` has returned on each rank.
    """
    assert plan.outline is not None, "rank 0 has one"
    directory, draft, last_of, meta, state, tensors = plan.outline
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
        files={part["name"]: StoredFile(**part["file"]) for part in written if part is not None},
        tensors=tensors,
    )
    content = dump_manifest(manifest)
    pointer = nullcontext() if last_of is None else pointing(last_of, directory)
    with pointer:
        draft.publish(content, {name: file.size for name, file in manifest.files.items()})
    return [None] * len(written)


def header_bytes(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """Return the beginning of a file of safetensors.

    Args:
        tensors: of each in its order, its name, what the format calls its dtype, its shape and number of bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, size in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    words = json.dumps(header, separators=(",", ":")).encode()
    words += b" " * (-len(words) % 8)  # so that tensors are aligned
    return len(words).to_bytes(8, "little") + words


class _Checksums:
    """Checksums of the blocks of parts, whose bytes come in bands.

    Attributes:
        done: those of the blocks that are complete.
    """

    def __init__(self) -> None:
        self.done = bytearray()
        self._crc = self._length = 0

    def update(self, band: memoryview) -> None:
        """Take the bytes that follow."""
        while len(band):
            part = band[: BLOCK - self._length]
            self._crc = zlib.crc32(part, self._crc)
            self._length += len(part)
            band = band[len(part) :]
            if self._length == BLOCK:
                self.close()

    def close(self) -> None:
        """End a part, the last block of which may be short."""
        if self._length:
            self.done += self._crc.to_bytes(CHECKSUM, "little")
            self._crc = self._length = 0


def _bands(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order, without a copy if it is contiguous and in CPU memory."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        flat = tensor.resolve_conj().resolve_neg().reshape(-1)
        step = (_BAND if tensor.device.type == "cpu" else BLOCK) // tensor.element_size()
        for begin in range(0, len(flat), step):
            yield bytes_of(flat[begin : begin + step].cpu())
    elif tensor.nbytes <= BLOCK or tensor.dim() == 1:
        yield from _bands(tensor.contiguous())
    else:
        rows = max(1, BLOCK // (tensor.nbytes // len(tensor)))
        for begin in range(0, len(tensor), rows):
            part = tensor[begin : begin + rows]
            yield from _bands(part[0] if len(part) == 1 else part)


def _name_in_file(piece: Piece) -> str:
    """Return the tensor's name; for a part of it, also where it lies, as in `weight[0:4,2:8]`."""
    if tuple(piece.part.shape) == piece.shape:
        return piece.name
    ranges = (f"{begin}:{begin + length}" for begin, length in zip(piece.offsets, piece.part.shape, strict=True))
    return f"{piece.name}[{','.join(ranges)}]"


def _header_entry(piece: Piece) -> tuple[str, str, Sequence[int], int]:
    name, shape = _name_in_file(piece), tuple(piece.part.shape)
    if piece.dtype not in SAFETENSORS:
        return name, "U8", (*shape, ITEM_SIZES[piece.dtype]), piece.part.nbytes
    return name, SAFETENSORS[piece.dtype], shape, piece.part.nbytes
