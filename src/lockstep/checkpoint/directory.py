"""A checkpoint as a directory: tensors through `torch.distributed.checkpoint`, facts as JSON.

```
epoch_3/
├── .metadata          where each tensor is, by its canonical name
├── __0_0.distcp ...   tensors, as each rank wrote its share
└── meta.json          how far the training was
```

It is written under a temporary name beside its own and renamed when it is complete, so that a process killed at any
moment leaves either a whole checkpoint or none, and never spoils an old one.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lockstep.dist import is_distributed, is_main_process, main_process_first
from lockstep.errors import ConfigError

META_FILE = "meta.json"
_INDEX_FILE = ".metadata"


def save_state(directory: Path, state: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Write a checkpoint; when this returns, on any rank, it is complete under its own name.

    Args:
        directory: the checkpoint's path, on a disk that all ranks see. One that exists is replaced.
        state: nested dicts and lists whose leaves are tensors and plain values, the same keys on every rank. Each
            tensor is written once, whoever holds it.
        meta: facts in values that JSON knows. Rank 0's are written.

    **Collective**: every rank.

    Raises:
        OSError: on every rank, if a rank could not write.
    """
    draft = directory.with_name(f".{directory.name}.draft")
    with main_process_first():
        if is_main_process():
            shutil.rmtree(draft, ignore_errors=True)  # left behind by a run that was killed
            draft.mkdir(parents=True)
    with _failures_as(OSError, f"the checkpoint {directory} could not be written"):
        dcp.save(dict(state), checkpoint_id=draft, no_dist=not is_distributed())
    with main_process_first():
        if is_main_process():
            (draft / META_FILE).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
            _publish(draft, directory)


def load_state(directory: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Read a checkpoint into tensors that are there already.

    Args:
        directory: a checkpoint, written by any number of ranks.
        state: what is to be read, with the keys, shapes and devices that it is to have. Its tensors are filled in
            place.

    Returns:
        `state` with plain values replaced, too.

    **Collective**: every rank.

    Raises:
        ConfigError: the directory is not a checkpoint, or does not hold what `state` asks for.
    """
    _require_checkpoint(directory)
    wanted = dict(state)
    with _failures_as(ConfigError, f"the checkpoint {directory} does not fit"):
        dcp.load(wanted, checkpoint_id=directory, no_dist=not is_distributed())
    return wanted


def read_meta(directory: Path) -> dict[str, Any]:
    """Return the facts that were saved with a checkpoint.

    Raises:
        ConfigError: the directory is not a checkpoint.
    """
    _require_checkpoint(directory)
    meta: dict[str, Any] = json.loads((directory / META_FILE).read_text(encoding="utf-8"))
    return meta


def read_shapes(directory: Path, part: str) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of the tensors that a checkpoint has under `part`, by name; None of what is no tensor.

    Raises:
        ConfigError: the directory is not a checkpoint.
    """
    _require_checkpoint(directory)
    stored = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    prefix = f"{part}."
    return {
        name.removeprefix(prefix): tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in stored.items()
        if name.startswith(prefix)
    }


def is_checkpoint(directory: Path) -> bool:
    """Return whether there is a complete checkpoint of that name."""
    return all((directory / name).is_file() for name in (_INDEX_FILE, META_FILE))


def _require_checkpoint(directory: Path) -> None:
    if not is_checkpoint(directory):
        raise ConfigError(
            f"a checkpoint must be a directory with {_INDEX_FILE} and {META_FILE} in it, but "
            f"{directory} {'has not both' if directory.is_dir() else 'is not there'}"
        )


def _publish(draft: Path, directory: Path) -> None:
    if not directory.exists():
        draft.rename(directory)
        return
    former = directory.with_name(f".{directory.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    directory.rename(former)
    draft.rename(directory)
    shutil.rmtree(former)


@contextmanager
def _failures_as(kind: type[Exception], what: str) -> Iterator[None]:
    """Turn torch's CheckpointException, which is not an Exception, into a readable one."""
    try:
        with warnings.catch_warnings():
            # torch warns that it saves on one process, which is just what was asked for.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        causes = [f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items()]
        raise kind(f"{what}: {'; '.join(causes)}") from error
