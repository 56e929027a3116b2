"""Who writes what of a state: what each rank holds, described so that rank 0 plans kinds of tensors, not parts.

Ranks hold mostly the same names, and tensors of one shape that are sharded alike lie alike on every rank. So a rank
describes each section of the state, which is what lies under one of its keys, by a digest of its names and of which
tensors lie alike, and by the boxes in which they lie. One rank sends the section of each digest. It finds out
once for all tensors that lie alike how their boxes cut them, and which ranks hold copies, of which one writes.

A plan is kept for the next save. Each rank says by its id whether it still holds what was planned; if all do, values
travel only from the ranks that send a section, and nothing is planned.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy
import torch
from torch import Tensor

from lockstep.checkpoint.manifest import ITEM_SIZES, Place, StoredTensor
from lockstep.checkpoint.values import encode, tagged
from lockstep.errors import ConfigError, listed
from lockstep.transport.moving import as_bytes

Sizes: TypeAlias = tuple[int, ...]
_Held: TypeAlias = tuple[tuple[str, str], int]  # key and digest of a section, and the number of a box in it


class Piece(NamedTuple):
    """A part of a tensor that one rank holds.

    Attributes:
        name: the tensor's name.
        shape: the shape of the whole tensor.
        offsets: where the part begins in it, for each dim.
        part: the part.
    """

    name: str
    shape: Sizes
    offsets: Sizes
    part: Tensor

    @property
    def dtype(self) -> str:
        """Name of the dtype."""
        return name_of(self.part.dtype)


class Box(NamedTuple):
    """A part of tensors of one shape: the shape of the whole, where the part begins, and its shape."""

    whole: Sizes
    offsets: Sizes
    lengths: Sizes


class Section(NamedTuple):
    """What one rank holds under a key of the state.

    Attributes:
        digest: of all but the boxes and the plain values.
        rows: the name and dtype of each tensor, and the number of its box.
        boxes: the boxes.
        values: the encoded values.
    """

    digest: str
    rows: Sequence[tuple[str, str, int]]
    boxes: Sequence[Box]
    values: Any


class Holding:
    """What one rank has to save.

    Args:
        state: the state.
        rank: this rank.
        world_size: number of ranks.

    Attributes:
        sections: what it holds under each key.
        pieces: the parts of tensors, in the order of the sections' rows.
        digest: the digest of all but the values.

    Raises:
        ConfigError: a value can't be saved; the message names it.
    """

    def __init__(self, state: Mapping[str, Any], rank: int, world_size: int) -> None:
        self.pieces: list[Piece] = []
        self.sections: dict[str, Section] = {}
        tensors: dict[str, Tensor] = {}
        for key, item in state.items():
            before = len(tensors)
            values = encode(item, (key,), tensors)
            pieces = pieces_of(dict(itertools.islice(tensors.items(), before, None)))
            self.pieces += pieces
            self.sections[key] = section_of(pieces, values)
        boxes = [(key, section.digest, section.boxes) for key, section in self.sections.items()]
        self.digest = digest_of((rank, world_size, boxes))

    def written(self, bits: bytes) -> list[Piece]:
        """Return the pieces that this rank writes, as the bits of `decide` say."""
        chosen = numpy.unpackbits(numpy.frombuffer(bits, numpy.uint8), count=len(self.pieces))
        return list(itertools.compress(self.pieces, chosen))


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype."""
    return str(dtype).removeprefix("torch.")


@torch.no_grad()  # so that a shard costs nothing
def pieces_of(tensors: Mapping[str, Any]) -> list[Piece]:
    """Return what this rank holds of tensors, of which some may be sharded; nothing of those of other ranks' meshes."""
    for name, tensor in tensors.items():
        _require_plain(name, tensor)
    kinds = {
        name: (tensor.shape, tensor.device_mesh, tensor.placements)
        for name, tensor in tensors.items()
        if hasattr(tensor, "device_mesh")
    }
    examples = {kind: name for name, kind in kinds.items()}
    offsets = _offsets_of({name: tensors[name] for name in examples.values()})
    pieces = []
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if name not in kinds:
            pieces.append(Piece(name, shape, (0,) * len(shape), tensor.detach()))
        elif (begins := offsets.get(examples[kinds[name]])) is not None:
            pieces.append(Piece(name, shape, begins, tensor.to_local().detach()))
    return pieces


def _offsets_of(sharded: Mapping[str, Tensor]) -> dict[str, Sizes]:
    """Return where this rank's shards begin in sharded tensors, as torch's planner of checkpoints says."""
    if not sharded:
        return {}
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(sharded), None, is_coordinator=True)
    items = planner.create_local_plan().items
    return {item.index.fqn: tuple(item.tensor_data.chunk.offsets) for item in items if item.tensor_data is not None}


def section_of(pieces: Sequence[Piece], values: Any) -> Section:
    """Describe what a rank holds under a key of the state."""
    boxes: dict[Box, int] = {}
    rows = []
    for piece in pieces:
        box = Box(piece.shape, piece.offsets, tuple(piece.part.shape))
        rows.append((piece.name, piece.dtype, boxes.setdefault(box, len(boxes))))
    return Section(digest_of((rows, _keys_of(values))), rows, list(boxes), values)


def _keys_of(node: Any) -> Any:
    """Return the keys of an encoded dict, and of those in it; what else is in it is a plain value or in the rows."""
    if isinstance(node, dict) and tagged(node)[0] is None:
        return {key: _keys_of(item) for key, item in node.items()}
    return None


def digest_of(value: Any) -> str:
    """Return a digest of values of JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def keys_to_send(digests: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Return for each rank the keys of the sections that it sends: those that no lower rank has alike."""
    seen: set[tuple[str, str]] = set()
    keys = []
    for by_key in digests:
        keys.append([key for key, digest in by_key.items() if (key, digest) not in seen])
        seen.update(by_key.items())
    return keys


def decide(
    digests: Sequence[Mapping[str, str]],
    boxes: Sequence[Mapping[str, Sequence[Box]]],
    rows: Sequence[Mapping[str, Sequence[tuple[str, str, int]]]],
) -> tuple[dict[str, StoredTensor], list[bytes]]:
    """Decide who writes what.

    Args:
        digests: for each rank, the digest of each of its sections.
        boxes: for each rank, the boxes of each of its sections.
        rows: for each rank, the rows of the sections that it sends.

    Returns:
        All tensors, by name; and for each rank, which of its pieces it writes, as bits.

    Raises:
        ConfigError: what the ranks hold of a tensor does not fit together; the message names it and a rank.
    """
    ranks_of: dict[tuple[str, str], list[int]] = {}  # by key and digest of a section: the ranks that hold it
    for rank, by_key in enumerate(digests):
        for section in by_key.items():
            ranks_of.setdefault(section, []).append(rank)
    dtypes: dict[str, str] = {}
    holders: dict[str, tuple[_Held, ...]] = {}
    tables = {section: rows[ranks[0]][section[0]] for section, ranks in ranks_of.items()}
    for section, table in tables.items():
        for name, dtype, box in table:
            if dtypes.setdefault(name, dtype) != dtype:
                other = ranks_of[holders[name][0][0]][0]
                raise ConfigError(
                    f"`{name}` must have one dtype on all ranks, but is {dtypes[name]} on rank {other} and {dtype} on "
                    f"rank {ranks_of[section][0]}"
                )
            holders[name] = (*holders.get(name, ()), (section, box))
    grids: dict[tuple[_Held, ...], _Grid] = {}
    loads = numpy.zeros(len(digests), dtype=numpy.int64)
    numbers = {name: i for i, name in enumerate(dtypes)}
    writes = numpy.zeros((len(digests), len(dtypes)), dtype=bool)
    chosen: dict[str, tuple[_Grid, Place]] = {}
    for name, held in holders.items():
        if held not in grids:
            found = [(rank, boxes[rank][section[0]][box]) for section, box in held for rank in ranks_of[section]]
            grids[held] = _Grid(name, found)
        grid = grids[held]
        ranks, place = grid.least_loaded(loads)
        loads[ranks] += grid.elements * ITEM_SIZES[dtypes[name]]
        writes[ranks, numbers[name]] = True
        chosen[name] = grid, place
    files = numpy.cumsum(writes.any(axis=1)) - 1  # ranks that write nothing have no file
    places: dict[Place, Place] = {}
    tensors = {}
    for name, (grid, place) in chosen.items():
        if place not in places:
            places[place] = Place(files[list(place)].tolist())
        tensors[name] = StoredTensor(dtypes[name], grid.shape, grid.begins, places[place])
    columns = {section: [numbers[name] for name, _, _ in table] for section, table in tables.items()}
    own = (itertools.chain(*(columns[section] for section in by_key.items())) for by_key in digests)
    return tensors, [numpy.packbits(writes[rank, [*held]]).tobytes() for rank, held in enumerate(own)]


class _Grid:
    """How the ranks have cut tensors that lie alike.

    Args:
        name: one of these tensors, for messages.
        found: ranks, and the box that each holds.

    Attributes:
        shape: the shape of the tensors.
        begins: how they are cut; see `StoredTensor`.
        elements: number of elements of each part.
    """

    def __init__(self, name: str, found: Sequence[tuple[int, Box]]) -> None:
        self.shape = found[0][1].whole
        if other := next(((rank, box) for rank, box in found if box.whole != self.shape), None):
            raise ConfigError(
                f"`{name}` must have one shape on all ranks, but has {list(self.shape)} on rank {found[0][0]} and "
                f"{list(other[1].whole)} on rank {other[0]}"
            )
        ranks_of: dict[tuple[Sizes, Sizes], list[int]] = {}
        for rank, (_, offsets, lengths) in found:
            if math.prod(lengths):
                ranks_of.setdefault((offsets, lengths), []).append(rank)
        boxes = sorted(ranks_of)
        begins = [sorted(set(along)) for along in zip(*(offsets for offsets, _ in boxes), strict=True)]
        ends = [dict(zip(along, [*along[1:], n], strict=True)) for along, n in zip(begins, self.shape, strict=False)]
        wrong = [box for box in boxes if any(at + n != end[at] for at, n, end in zip(*box, ends, strict=True))]
        if wrong or len(boxes) != (math.prod(map(len, begins)) if math.prod(self.shape) else 0):
            ranks = listed(map(str, sorted({rank for box in wrong or boxes for rank in ranks_of[box]})))
            raise ConfigError(
                f"the parts of `{name}` that the ranks hold must cover its shape {list(self.shape)} once, in rows and "
                f"columns, but those of rank {ranks or 'any'} do not"
            )
        self.begins = tuple(map(_evenly, begins, self.shape)) if boxes else tuple(map(range, self.shape))
        self.elements = numpy.array([math.prod(lengths) for _, lengths in boxes], dtype=numpy.int64)
        copies = max(map(len, ranks_of.values()), default=1)
        holders = [numpy.resize(ranks_of[box], copies) for box in boxes]
        self._holders = numpy.array(holders, dtype=numpy.int64).reshape(len(boxes), copies)
        self._places = [Place(column) for column in self._holders.T.tolist()]

    def least_loaded(self, loads: Any) -> tuple[Any, Place]:
        """Return the ranks that hold one copy of all parts, and have the least to write yet."""
        copy = int(loads[self._holders].sum(axis=0).argmin())
        return self._holders[:, copy], self._places[copy]


def _evenly(begins: Sequence[int], length: int) -> range | Sizes:
    """Return where parts begin, as a range if they are of one length."""
    even = range(0, length, begins[1] if len(begins) > 1 else length)
    return even if list(even) == begins else tuple(begins)


def _require_plain(name: str, tensor: Any) -> None:
    placements = getattr(tensor, "placements", ())
    if any(placement.is_partial() for placement in placements):
        raise ConfigError(
            f"`{name}` must be reduced over ranks to be saved, but is a DTensor whose placements are {placements}. "
            "Save its full_tensor(), or redistribute it to Replicate() or Shard(dim)"
        )
    dtype = name_of(tensor.dtype)
    if dtype not in ITEM_SIZES or tensor.layout is not torch.strided:
        what = dtype if dtype not in ITEM_SIZES else f"of the layout {str(tensor.layout).removeprefix('torch.')}"
        raise ConfigError(f"`{name}` must be a dense tensor of a usual dtype to be saved, but is {what}. Convert it")
    part = tensor.to_local() if hasattr(tensor, "device_mesh") else tensor
    if hasattr(part, "__tensor_flatten__"):  # made of other tensors, as those that torchao quantizes
        try:
            as_bytes(part)
        except (NotImplementedError, TypeError) as error:
            raise ConfigError(
                f"`{name}` must be a plain tensor to be saved, but is a {type(part).__module__}."
                f"{type(part).__qualname__}, which is made of several. Convert it; or save without the optimizer's "
                "state, if it is in that, by CheckpointHook(save_optimizer=False)"
            ) from error
