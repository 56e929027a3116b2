"""Loading a state: the ranks read the parts that they need, and compare them with their checksums.

Of sharded tensors, a rank reads what overlaps with what it holds, so that any number of ranks, under any strategy, can
read what any other has written. Whole tensors, which all ranks need, are read once: each rank reads some buckets of
their bytes, and sends them to the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.checkpoint.layout import digest_of, pieces_of
from lockstep.checkpoint.manifest import ITEM_SIZES, Manifest, StoredTensor, read_manifest
from lockstep.checkpoint.together import on_all, read_once
from lockstep.checkpoint.values import decode, leaves, tagged
from lockstep.checkpoint.verifying import OpenFile, read_block, require_checkpoint
from lockstep.dist import all_gather_object
from lockstep.errors import CheckpointError, ConfigError
from lockstep.groups import resolve
from lockstep.location import Location
from lockstep.transport.moving import as_bytes, bytes_of, is_plain_memory

OPTIMIZER = "optimizer"
AS_SAVED = ()
"""A value that only requests what was saved."""

_MISSING = object()
_BUCKET = 64 * 2**20  # bytes that travel at once; a longer block does so alone
_MOST_NAMED = 8
_REMEDY = "Resume with the model that was saved, or load what fits of the weights, by `load_from` with resume=False"


def load_state(
    checkpoint: Location | Stored,
    state: Mapping[str, Any],
    optim_layout: Mapping[str, Any] | None = None,
    resizable: Collection[str] = (),
) -> dict[str, Any]:
    """Read a checkpoint into existing tensors, and the optimizer's state into new ones.

    The optimizer's state in a checkpoint depends on which parameters had been updated. So any value under `optimizer`
    only requests the state, which is returned as it was saved, in CPU memory. So does a value that is neither a tensor
    nor a dict nor a list.

    Args:
        checkpoint: a checkpoint, written by any number of ranks; or one that is open, whose manifest is not read again.
        state: the state to read, with the required keys, shapes and devices. Its tensors are filled in place.
        optim_layout: tensors by parameter name; entries of the optimizer's state with the shape of their parameter are
            sharded like them. By default, those under `model` in `state`. All other entries are whole.
        resizable: names of tensors, as `model.NAME`, that are returned as they were saved, in CPU memory, where they
            had another shape.

    Returns:
        `state`, with plain values also replaced, and with the optimizer's state. What a module returns from
        `get_extra_state` is returned as it was saved, whatever it holds now.

    **Collective**: every rank. **Cost**: tensors that are whole on every rank are read once by all ranks together, and
    sent to each; of others, each rank reads its part. Beyond the tensors, memory for 64 MiB on the host, as much on the
    device, and, of a tensor in another dtype or order than in the file, for the part that a file has of it.

    Raises:
        ConfigError: on every rank, if the directory is not a checkpoint, is damaged, or does not hold what `state` on
            some rank asks for.
    """
    layout = state.get("model", {}) if optim_layout is None else optim_layout
    directory = checkpoint.directory if isinstance(checkpoint, Stored) else checkpoint
    failed = f"the checkpoint {directory} could not be read"
    with ExitStack() as stack:

        def plan() -> _Load:
            stored = checkpoint
            if not isinstance(stored, Stored):
                stored = stack.enter_context(closing(open_checkpoint(stored)))
            return _Load(stored, layout, resizable, state)

        load = on_all(failed, plan)
        comm, own = resolve(), {(section, digest_of(names)) for section, names in load.whole.items()}
        alike = own.intersection(*all_gather_object(own)) if comm.size > 1 and not comm.is_alone else ()
        return on_all(failed, partial(load.run, [section for section, _ in alike]))


def read_meta(directory: Location) -> dict[str, Any]:
    """Return the metadata saved with a checkpoint.

    Raises:
        ConfigError: the directory is not a checkpoint, or is damaged.
    """
    return open_checkpoint(directory).meta


def read_shapes(directory: Location, part: str) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of the tensors that a checkpoint has under `part`, by name; None for other values.

    Raises:
        ConfigError: the directory is not a checkpoint, or is damaged.
    """
    manifest = open_checkpoint(directory).manifest
    nodes = ((".".join(path), tagged(node)) for path, node in leaves(manifest.state.get(part, {})))
    return {key: manifest.tensors[name].shape if tag == "$tensor" else None for key, (tag, name) in nodes}


def read_infos(directory: Location, part: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of the tensors that a checkpoint has under `part`, by name; other values are left out.

    Raises:
        ConfigError: the directory is not a checkpoint, or is damaged.
    """
    stored = open_checkpoint(directory)
    tensors = {name: stored.manifest.tensors[one] for name, one in _tensors_of(stored, part).items()}
    return {name: (one.shape, getattr(torch, one.dtype)) for name, one in tensors.items()}


def read_tensors(directory: Location, part: str, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that a checkpoint has under `part`, whole and in CPU memory, in the order of `names`.

    No collective: each process reads what it asks for.

    **Cost**: memory for one of them, and for a block of 16 MiB.

    Raises:
        ConfigError: the directory is not a checkpoint, or is damaged.
        KeyError: it has no tensor of that name.
    """
    with closing(open_checkpoint(directory)) as stored:
        tensors = _tensors_of(stored, part)
        for name in names:
            yield name, read_whole(stored, tensors[name])


def read_part(directory: Location, part: str) -> Any:
    """Return what a checkpoint has under `part`, as it was saved, in CPU memory. No collective: this process reads all.

    Raises:
        ConfigError: the directory is not a checkpoint, is damaged, or has no such part.
    """
    with closing(open_checkpoint(directory)) as stored:
        return _Load(stored, {}, (), {part: AS_SAVED}).run()[part]


def read_whole(stored: Stored, name: str) -> Tensor:
    """Return a tensor of a checkpoint, whole and in CPU memory."""
    whole = _empty(stored.manifest.tensors[name])
    for read in _reads_of(stored, name, (0,) * whole.dim(), whole):
        stored.read(read)
    return whole


def _empty(tensor: StoredTensor) -> Tensor:
    """Return memory for a tensor, which somebody else's checkpoint may say to be of any size."""
    try:
        return torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="cpu")
    except RuntimeError as error:
        raise CheckpointError(f"a tensor of {tensor.size:,} bytes must fit into memory, but does not") from error


def open_checkpoint(directory: Location) -> Stored:
    """Return a checkpoint, of which the manifest has been read and checked.

    Raises:
        ConfigError: the directory is not a checkpoint, or is damaged.
    """
    require_checkpoint(directory)
    return Stored(directory, read_manifest(directory))


class _Read(NamedTuple):
    """A tensor to be filled from the part of another one that a file holds.

    Attributes:
        file: the number of the file.
        name: name of the tensor.
        shape: shape of the part in the file.
        offsets: where that begins in the part which is to be read.
        target: the tensor to be filled.
    """

    file: int
    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    target: Tensor


def _reads_of(stored: Stored, name: str, offsets: tuple[int, ...], target: Tensor) -> Iterator[_Read]:
    """Yield what fills a tensor that is the part of a stored one which begins at `offsets`."""
    tensor = stored.manifest.tensors[name]
    for number in tensor.parts_within(offsets, target.shape):
        begins, lengths = tensor.box(number)
        part, inside = target, []
        for dim, (begin, length, at) in enumerate(zip(begins, lengths, offsets, strict=True)):
            low, high = max(begin, at), min(begin + length, at + target.shape[dim])
            part = part.narrow(dim, low - at, high - low)
            inside.append(low - begin)
        yield _Read(tensor.place[number], name, lengths, tuple(inside), part)


def read_plan(stored: Stored, tensors: Mapping[str, Tensor]) -> list[_Read]:
    """Return what this rank reads to fill tensors, some of them sharded, in the order in which it lies in files."""
    reads = [read for one in pieces_of(tensors) for read in _reads_of(stored, one.name, one.offsets, one.part)]
    order = stored.manifest.order
    return sorted(reads, key=lambda read: (read.file, order[read.name]))


class _Range(NamedTuple):
    """Bytes of a file's part of a tensor: the first of them there, and where they are in a bucket."""

    read: _Read
    first: int
    begin: int
    end: int


def _buckets_of(stored: Stored, reads: Iterable[_Read]) -> list[list[_Range]]:
    """Cut what fills whole tensors into buckets, so that no block is in two."""
    step = max(_BUCKET // stored.manifest.block, 1) * stored.manifest.block
    buckets: list[list[_Range]] = []
    for read in reads:
        size = read.target.numel() * ITEM_SIZES[stored.manifest.tensors[read.name].dtype]
        for first in range(0, size, step):
            length = min(step, size - first)
            begin = buckets[-1][-1].end if buckets else _BUCKET
            if begin + length > _BUCKET:
                buckets.append([])
                begin = 0
            buckets[-1].append(_Range(read, first, begin, begin + length))
    return buckets


class Stored:
    """An open checkpoint. Its files are opened when they are first read.

    Attributes:
        directory: the checkpoint.
        manifest: its manifest.
    """

    def __init__(self, directory: Location, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self._files: dict[int, OpenFile] = {}
        self._open = ExitStack()

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The metadata."""
        return dict(decode(self.manifest.meta))

    def read(self, read: _Read) -> None:
        """Fill a tensor from a file; at most a block is read beyond it."""
        dtype, target = self.manifest.tensors[read.name].dtype, read.target
        size, typed = ITEM_SIZES[dtype], getattr(torch, dtype)
        strides = torch.empty(read.shape, device="meta").stride()
        first = sum(offset * stride for offset, stride in zip(read.offsets, strides, strict=True)) * size
        last = first + sum((n - 1) * stride for n, stride in zip(target.shape, strides, strict=True)) * size + size
        if last - first == target.nbytes and target.is_cpu and _is_as_in_files(target, typed):
            self.read_range(read, first, bytes_of(target))
            return
        range_ = torch.empty(last - first, dtype=torch.uint8, device="cpu")
        self.read_range(read, first, bytes_of(range_))
        target.copy_(range_.view(typed).as_strided(target.shape, strides))

    def close(self) -> None:
        """Close the files. What is read later is opened again."""
        self._files.clear()
        self._open.close()

    def forget(self) -> None:
        """Close it for good, and free the memory of the manifest, which has an entry for each tensor."""
        self.close()
        self.manifest = Manifest({}, {}, {}, {}, {})

    def read_range(self, read: _Read, first: int, into: memoryview) -> None:
        """Read the bytes of a part from `first` on, by way of the blocks that they are in."""
        if read.file not in self._files:
            self._files[read.file] = OpenFile(self.directory, self.manifest, read.file)
            self._open.callback(self._files[read.file].close)
        opened, place = self._files[read.file], self.manifest.order[read.name]
        block_size, end = self.manifest.block, first + len(into)
        for number in range(first // block_size, -(-end // block_size)):
            begin = number * block_size
            block = opened.block(place, number)
            low, high = max(first, begin), min(end, begin + block.size)
            if high - low == block.size:
                read_block(opened.file, block, into[low - first : high - first])
                continue
            whole = memoryview(bytearray(block.size))
            read_block(opened.file, block, whole)
            into[low - first : high - first] = whole[low - begin : high - begin]


def _tensors_of(stored: Stored, part: str) -> dict[str, str]:
    """Return the names of the tensors under a part of the state, by their names there."""
    nodes = ((path, tagged(node)) for path, node in leaves(stored.manifest.state.get(part, {})))
    return {".".join(path): name for path, (tag, name) in nodes if tag == "$tensor"}


def _is_as_in_files(target: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the bytes of a file may be copied into a tensor's memory."""
    return target.dtype == dtype and is_plain_memory(target)


class _Load:
    """What one rank needs of a checkpoint.

    Args:
        stored: the checkpoint.
        layout: see `load_state`.
        resizable: see `load_state`.
        state: the state to read.

    Attributes:
        whole: the names of the tensors that this rank needs whole, by the key of the state under which they are.

    Raises:
        ConfigError: the checkpoint does not hold what is asked for.
    """

    def __init__(
        self, stored: Stored, layout: Mapping[str, Any], resizable: Collection[str], state: Mapping[str, Any]
    ) -> None:
        self._stored, self._layout, self._resizable, self._state = stored, layout, resizable, state
        self._wanted: dict[str, Any] = {}  # the tensors to be filled, by name
        self._differences: list[str] = []
        for key, part in state.items():
            self._ask(part, stored.manifest.state.get(key, _MISSING), (key,))
        if self._differences:
            more = len(self._differences) - _MOST_NAMED
            shown = "; ".join(self._differences[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
            raise ConfigError(f"the checkpoint {stored.directory} does not fit: {shown}. {_REMEDY}")
        self.whole: dict[str, list[str]] = {}
        for name in sorted(self._wanted):
            if not hasattr(self._wanted[name], "device_mesh"):
                self.whole.setdefault(name.partition(".")[0], []).append(name)
        self._plan = read_plan(stored, self._wanted)

    def run(self, alike: Iterable[str] = ()) -> dict[str, Any]:
        """Return the state, read.

        Args:
            alike: keys under which all ranks need the same tensors whole, which they read together. **Collective**,
                unless there are none: every rank.
        """
        shared = {name for section in alike for name in self.whole[section]}
        buckets = _buckets_of(self._stored, [read for read in self._plan if read.name in shared])
        read_once(
            [bucket[-1].end for bucket in buckets],
            lambda number, into: self._read_bucket(buckets[number], into),
            lambda number, sent: self._place(buckets[number], sent),
        )
        for read in self._plan:
            if read.name not in shared:
                self._stored.read(read)
        manifest = self._stored.manifest
        return {key: self._read(part, manifest.state.get(key), (key,)) for key, part in self._state.items()}

    def _read_bucket(self, bucket: Sequence[_Range], into: Tensor) -> None:
        """Read a bucket from the files."""
        for one in bucket:
            self._stored.read_range(one.read, one.first, bytes_of(into[one.begin : one.end]))

    def _place(self, bucket: Sequence[_Range], sent: Tensor) -> None:
        """Copy a bucket into the tensors. What is in another dtype or order there is converted when it is complete."""
        for one in bucket:
            target, last = one.read.target, one.first + one.end - one.begin
            if one.first == 0:
                dtype = getattr(torch, self._stored.manifest.tensors[one.read.name].dtype)
                self._part = target
                if not _is_as_in_files(target, dtype):
                    self._part = torch.empty(target.shape, dtype=dtype, device=target.device)
            as_bytes(self._part)[one.first : last].copy_(sent[one.begin : one.end])
            if self._part is not target and last == self._part.nbytes:
                target.copy_(self._part)

    def _ask(self, part: Any, node: Any, path: tuple[str, ...]) -> None:
        """Note the tensors that are to be filled, and what the checkpoint lacks."""
        name = ".".join(path)
        tag, held = tagged(node)
        if _is_as_saved(path) and node is not _MISSING:
            self._ask_as_saved(node, path)
        elif node is _MISSING and (len(path) > 1 or not isinstance(part, Mapping)):
            self._differences.append(f"there is no `{name}` in it")
        elif isinstance(part, Mapping):
            for key, item, below in _with_saved(part, node):
                self._ask(item, below, (*path, str(key)))
        elif _is_nested(part):
            nodes = node if isinstance(node, list) else held if tag == "$tuple" else []
            for i, item in enumerate(part):
                self._ask(item, nodes[i] if i < len(nodes) else _MISSING, (*path, str(i)))
        elif isinstance(part, Tensor) and tag == "$tensor":
            if (shape := self._stored.manifest.tensors[held].shape) != tuple(part.shape):
                if name in self._resizable:
                    self._ask_as_saved(node, path)
                    return
                self._differences.append(
                    f"`{name}` has the shape {list(shape)} in it, but is of {list(part.shape)} here"
                )
            self._wanted[held] = part
        else:
            self._ask_as_saved(node, path)

    def _ask_as_saved(self, node: Any, path: tuple[str, ...]) -> None:
        """Make tensors for all that is saved under a node."""
        tag, held = tagged(node)
        if tag in ("$tensor", "$array"):
            stored = self._stored.manifest.tensors[held]
            like = self._layout.get(path[2]) if path[0] == OPTIMIZER and path[1] == "state" else None
            if not isinstance(like, Tensor) or tuple(like.shape) != stored.shape:
                self._wanted[held] = _empty(stored)
                return
            self._wanted[held] = torch.empty_like(
                like, dtype=getattr(torch, stored.dtype), device="cpu", memory_format=torch.contiguous_format
            )
            return
        items: list[tuple[Any, Any]] = []
        if tag == "$dict":
            items = [(key, item) for key, item in held]
        elif tag == "$tuple" or isinstance(node, list):
            items = list(enumerate(held if tag else node))
        elif tag is None and isinstance(node, dict):
            items = list(node.items())
        for key, item in items:
            self._ask_as_saved(item, (*path, str(key)))

    def _read(self, part: Any, node: Any, path: tuple[str, ...]) -> Any:
        """Return a part of the state with what was read."""
        if not _is_as_saved(path):
            if isinstance(part, Mapping):
                return {key: self._read(item, below, (*path, str(key))) for key, item, below in _with_saved(part, node)}
            if _is_nested(part):
                nodes = tagged(node)[1] or node
                return [self._read(item, nodes[i], (*path, str(i))) for i, item in enumerate(part)]
        return decode(node, self._value)

    def _value(self, tag: str, held: Any) -> Any:
        return self._wanted[held] if tag == "$tensor" else self._wanted[held].numpy()


def _with_saved(part: Mapping[Any, Any], node: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the keys and values of a dict, each with what is saved under that key."""
    tag, held = tagged(node)
    saved: dict[Any, Any] = node if isinstance(node, dict) and tag is None else {}
    if tag == "$dict":
        saved = {decode(key): item for key, item in held}
    for key, value in part.items():
        yield key, value, saved.get(key, saved.get(str(key), _MISSING))


def _is_as_saved(path: tuple[str, ...]) -> bool:
    """Return whether what is held now does not tell what was saved: the optimizer's state, and a module's extra one."""
    return path == (OPTIMIZER,) or (len(path) > 1 and path[-1].rpartition(".")[2] == "_extra_state")


def _is_nested(part: Any) -> bool:
    """Return whether a list has tensors, or may have some deeper in it, which are to be filled in place."""
    return isinstance(part, list | tuple) and any(
        isinstance(item, Tensor | Mapping) or _is_nested(item) for item in part
    )
