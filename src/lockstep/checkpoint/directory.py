"""A checkpoint as a directory: tensors through `torch.distributed.checkpoint`, metadata as JSON.

```
epoch_3/
├── .metadata          where each tensor is, by its canonical name
├── __0_0.distcp ...   tensors, as each rank wrote its shards
└── meta.json          the progress of training
```

Under `model` are the tensors of the model by their canonical names, under `optimizer` the optimizer's canonical state:
`optimizer.state.<parameter>.<key>` for the parameters that had a state, and `optimizer.param_groups.<index>.<option>`.

A checkpoint is written under a temporary name next to its final one, and renamed when it is complete. So a process
killed at any moment leaves either a complete checkpoint or none, and never damages an old one.

`torch.distributed.checkpoint` is imported only when used: the import takes half as long as that of torch, on every
rank, and a run may need it late or never.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.dist import is_distributed, run_on_main
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

META_FILE = "meta.json"
OPTIMIZER = "optimizer"
POINTER_FILE = "last_checkpoint"  # in the work_dir, holds the path of the newest checkpoint
_INDEX_FILE = ".metadata"
_DAMAGED = "The checkpoint is damaged: copy it again, or resume from another one"
_REMEDY = "Resume with the model that was saved, or load what fits of the weights, by `load_from` with resume=False"


def save_state(directory: Path, state: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Write a checkpoint; when this returns on any rank, the checkpoint is complete under its final name.

    Args:
        directory: the checkpoint's path, on a disk shared by all ranks. An existing checkpoint is replaced.
        state: nested dicts and lists whose leaves are tensors and plain values, the same keys on every rank. Each
            tensor is written once, even if several ranks hold it.
        meta: metadata as JSON values. Those of rank 0 are written.

    **Collective**: every rank.

    Raises:
        OSError: on every rank, if a rank could not write.
    """
    import torch.distributed.checkpoint as dcp

    draft = directory.with_name(f".{directory.name}.draft")
    run_on_main(partial(_make_draft, draft))
    with _failures_as(OSError, f"the checkpoint {directory} could not be written"):
        dcp.save(dict(state), checkpoint_id=draft, no_dist=not is_distributed())
    run_on_main(partial(_publish, draft, directory, meta))


def load_state(
    directory: Path, state: Mapping[str, Any], optim_layout: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read a checkpoint into existing tensors, and the optimizer's state into new ones.

    The optimizer's state in a checkpoint depends on which parameters had been updated. So any value under `optimizer`
    only requests the state, which is returned as it was saved, in CPU memory.

    Args:
        directory: a checkpoint, written by any number of ranks.
        state: the state to read, with the required keys, shapes and devices. Its tensors are filled in place.
        optim_layout: tensors by parameter name; entries of the optimizer's state with the shape of their parameter are
            sharded like them. By default, those under `model` in `state`. All other entries are whole.

    Returns:
        `state`, with plain values also replaced, and with the optimizer's state.

    **Collective**: every rank.

    Raises:
        ConfigError: the directory is not a checkpoint, is damaged, or does not hold what `state` asks for.
    """
    import torch.distributed.checkpoint as dcp

    index = _read_index(directory)
    _check_files(directory, index)
    wanted = dict(state)
    if OPTIMIZER in wanted:
        wanted[OPTIMIZER] = _empty_optim_state(index, wanted.get("model", {}) if optim_layout is None else optim_layout)
    with _failures_as(ConfigError, f"the checkpoint {directory} does not fit", _REMEDY):
        dcp.load(wanted, checkpoint_id=directory, no_dist=not is_distributed())
    return wanted


def read_meta(directory: Path) -> dict[str, Any]:
    """Return the metadata saved with a checkpoint.

    Raises:
        ConfigError: the directory is not a checkpoint.
    """
    _require_checkpoint(directory)
    path = directory / META_FILE
    try:
        meta: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} must hold JSON, but cannot be read: {error}. {_DAMAGED}") from error
    return meta


def read_shapes(directory: Path, part: str) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of the tensors that a checkpoint has under `part`, by name; None for other values.

    Raises:
        ConfigError: the directory is not a checkpoint.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    stored = _read_index(directory).state_dict_metadata
    prefix = f"{part}."
    return {
        name.removeprefix(prefix): tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in stored.items()
        if name.startswith(prefix)
    }


def is_checkpoint(directory: Path) -> bool:
    """Return whether the directory is a complete checkpoint."""
    return all((directory / name).is_file() for name in (_INDEX_FILE, META_FILE))


def point_to_checkpoint(work_dir: Path, directory: Path) -> None:
    """Make `directory` the last checkpoint of `work_dir`. Rank 0 calls this after saving.

    The path is stored relative to the work_dir, which may therefore be moved.
    """
    draft = work_dir / f".{POINTER_FILE}.draft"
    draft.write_text(os.path.relpath(directory, work_dir) + "\n", encoding="utf-8")
    draft.replace(work_dir / POINTER_FILE)


def find_last_checkpoint(work_dir: Path) -> Path | None:
    """Return the last checkpoint of `work_dir`, or None if there is none or it is not complete."""
    pointer = work_dir / POINTER_FILE
    if not pointer.is_file():
        return None
    directory = work_dir / pointer.read_text(encoding="utf-8").strip()
    return directory if is_checkpoint(directory) else None


def _require_checkpoint(directory: Path) -> None:
    if not is_checkpoint(directory):
        raise ConfigError(
            f"a checkpoint must be a directory with {_INDEX_FILE} and {META_FILE} in it, but "
            f"{directory} {'lacks one of them' if directory.is_dir() else 'does not exist'}"
        )


def _read_index(directory: Path) -> Metadata:
    import torch.distributed.checkpoint as dcp

    _require_checkpoint(directory)
    try:
        return dcp.FileSystemReader(directory).read_metadata()
    except Exception as error:  # unpickling can raise anything
        raise ConfigError(f"{directory / _INDEX_FILE} cannot be read: {error!r}. {_DAMAGED}") from error


def _check_files(directory: Path, index: Metadata) -> None:
    """Raise an error for a checkpoint with missing or truncated files, and name them, which torch would not do."""
    sizes: dict[str, int] = {}
    for stored in (index.storage_data or {}).values():
        end = stored.offset + stored.length
        sizes[stored.relative_path] = max(end, sizes.get(stored.relative_path, 0))
    for name, size in sorted(sizes.items()):
        path = directory / name
        present = path.stat().st_size if path.is_file() else None
        if present is None or present < size:
            found = "is not there" if present is None else f"has {present}"
            raise ConfigError(f"{path} must have {size} bytes, but {found}. {_DAMAGED}")


def _empty_optim_state(index: Metadata, layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with the entries of a checkpoint, to be filled."""
    from torch.distributed.checkpoint._traverse import set_element
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    state: dict[str, Any] = {"state": {}, "param_groups": []}
    for key, path in index.planner_data.items():
        if path[0] != OPTIMIZER:
            continue
        stored = index.state_dict_metadata[key]
        value = None
        if isinstance(stored, TensorStorageMetadata):
            like = layout.get(path[2]) if path[1] == "state" else None
            if not isinstance(like, Tensor) or like.shape != stored.size:
                like = torch.empty(stored.size, device="meta")
            value = torch.empty_like(
                like, dtype=stored.properties.dtype, device="cpu", memory_format=torch.contiguous_format
            )
        set_element(state, path[1:], value)
    return state


def _make_draft(draft: Path) -> None:
    shutil.rmtree(draft, ignore_errors=True)  # left behind by a run that was killed
    draft.mkdir(parents=True)


def _publish(draft: Path, directory: Path, meta: Mapping[str, Any]) -> None:
    (draft / META_FILE).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    if not directory.exists():
        draft.rename(directory)
        return
    former = directory.with_name(f".{directory.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    directory.rename(former)
    draft.rename(directory)
    shutil.rmtree(former)


@contextmanager
def _failures_as(kind: type[Exception], what: str, remedy: str = "") -> Iterator[None]:
    """Turn torch's CheckpointException, which is not an Exception, into a readable one."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            # torch warns that it saves in one process, which is intended here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        causes = [f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items()]
        raise kind(f"{what}: {'; '.join(causes)}{remedy and '. '}{remedy}") from error
