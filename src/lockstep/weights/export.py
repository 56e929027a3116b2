"""Writing the weights of a checkpoint in a form that others read, in one process without a model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lockstep.checkpoint import read_infos, read_meta, read_tensors
from lockstep.errors import ConfigError, require_one_of
from lockstep.location import Location, locate
from lockstep.weights.safetensors_file import TensorInfo
from lockstep.weights.selection import Selection, select
from lockstep.weights.source import find_checkpoint
from lockstep.weights.writing import MAX_SHARD_SIZE, SafetensorsWriter, check_new, draft_of, plan_shards, read_size

Target: TypeAlias = Literal["safetensors", "hf", "torch"]
TARGETS: tuple[Target, ...] = ("safetensors", "hf", "torch")
_TRAINED = "ema"  # where EMAHook keeps the trained weights, while the average is the checkpoint's model
_BESIDE = (
    "config.json", "generation_config.json", "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "spiece.model", "sentencepiece*.model", "chat_template*", "*processor_config.json",
)  # fmt: skip


class Exported(NamedTuple):
    """What has been written.

    Attributes:
        checkpoint: the checkpoint whose weights they are.
        out: where they have been written.
        tensors: number of tensors.
        nbytes: their size in bytes.
        left_out: names of weights that have not been written.
    """

    checkpoint: Location
    out: Location
    tensors: int
    nbytes: int
    left_out: list[str]


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    to: Target = "safetensors",
    *,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    dtype: str | None = None,
    prefix: str | None = None,
    revise_keys: Sequence[tuple[str, str]] = (),
    ema: bool | None = None,
    files_from: str | Path | None = None,
) -> Exported:
    """Write the weights of a checkpoint in a form that others read.

    Args:
        checkpoint: a checkpoint, the folder of a run, or a work_dir, of which the last checkpoint is taken.
        out: a new or empty folder; a new file for `"torch"`, or, if its name ends in .safetensors, for that format.
            Also the URL of one that fsspec can open.
        to: `"safetensors"`: all weights, tied ones once, and `config.json` if the model is one of transformers. `"hf"`:
            what `from_pretrained` of transformers or peft loads; of a model within another, only that; of an
            adapter, only what it adds. `"torch"`: a file `{"state_dict": ...}`, tied weights under each of their
            names.
        max_shard_size: the most bytes of a file, for folders.
        dtype: convert floating-point weights to it: `"float32"`, `"float16"` or `"bfloat16"`.
        prefix: write only the weights under this name, without it.
        revise_keys: patterns in names, and their replacements.
        ema: of a run with EMAHook, True for the averaged weights and False for the trained ones; by default those of
            the checkpoint's model, which are the averaged ones if there are some.
        files_from: a folder of HuggingFace's, whose config, if the checkpoint has none, and tokenizer are copied.

    **Cost**: safetensors and hf: memory for one tensor, or 64 MiB. torch: memory for all weights once.

    Raises:
        ConfigError: there is no such checkpoint, it has not what is asked for, or `out` cannot be written.

    Example::

        export_checkpoint("work_dirs/bert", "my_bert", "hf")
        model = BertForSequenceClassification.from_pretrained("my_bert")
    """
    require_one_of("to", to, TARGETS)
    place, weights = locate(out), _CheckpointWeights(_checkpoint(checkpoint), ema)
    is_file = to == "torch" or (to == "safetensors" and place.suffix == ".safetensors")
    check_new(place, file=is_file)
    most = read_size(max_shard_size)
    description: dict[str, Any] = weights.meta.get("weights") or {}
    beside = {} if files_from is None or is_file else _files_beside(locate(files_from))
    config = beside.pop("config.json", None)
    if config is not None and not description.get("pretrained"):
        own = {"prefix": f"{prefix.rstrip('.')}." if prefix else "", "stem": "model", "names": None}
        description = {**description, "pretrained": [{**own, "files": {"config.json": config}}]}
    chosen = select(
        weights.infos, description, to, what=str(weights.path), prefix=prefix, revise_keys=revise_keys, dtype=dtype
    )
    if to == "torch":
        _write_torch(place, chosen, weights)
    else:
        shards = plan_shards(chosen.infos, chosen.stem, math.inf if is_file else most)
        writer = SafetensorsWriter(place, shards, chosen.infos, {**beside, **chosen.files}, single=is_file)
        _write_safetensors(writer, chosen, weights)
    nbytes = sum(info.nbytes for info in chosen.infos.values())
    return Exported(weights.path, place, len(chosen.origins), nbytes, chosen.left_out)


class _CheckpointWeights:
    """The weights of a checkpoint: averaged or trained ones.

    Attributes:
        path: the checkpoint.
        meta: its metadata.
        infos: shape and dtype of each weight, by name.
    """

    def __init__(self, path: Location, ema: bool | None) -> None:
        self.path = path
        self.meta = read_meta(path)
        found = {part: read_infos(path, part) for part in ("model", _TRAINED)}
        if ema and not found[_TRAINED]:
            raise ConfigError(f"{path} must have averaged weights, as EMAHook saves them, but has none")
        self._parts = dict.fromkeys(found["model"], "model")
        if ema is False:
            self._parts |= dict.fromkeys(found[_TRAINED], _TRAINED)
        self.infos = {name: TensorInfo(*found[part][name]) for name, part in self._parts.items()}
        if not self.infos:
            raise ConfigError(f"{path} must hold a model's weights, but has none")

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield weights in the order of `names`."""
        for part, some in groupby(names, key=self._parts.__getitem__):
            yield from read_tensors(self.path, part, some)


def _checkpoint(path: str | Path) -> Location:
    location = locate(path)
    try:
        found = find_checkpoint(location)
    except OSError as error:
        raise ConfigError(f"`CKPT` must be a checkpoint, but {error}") from error
    if found is None:
        what = "is a file" if location.exists() else "does not exist"
        if location.is_dir():
            what = "holds no complete checkpoint"
        raise ConfigError(
            f"`CKPT` must be a checkpoint, the folder of a run, or a work_dir, but {location} {what}. Those of a run "
            "lie under work_dirs/NAME/TIME, as epoch_1"
        )
    return found


def _files_beside(folder: Location) -> dict[str, Any]:
    """Return the config, as JSON values, and the files of a tokenizer in a folder of HuggingFace's."""
    try:
        names = sorted(one.name for one in folder.iterdir())
        found = {name: (folder / name).read_bytes() for name in names if any(fnmatch(name, form) for form in _BESIDE)}
        if "config.json" in found:
            return {**found, "config.json": json.loads(found["config.json"])}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"`files_from` must be a folder of HuggingFace's, but {folder} cannot be read: {error}"
        ) from error
    if not found:
        raise ConfigError(f"`files_from` must be a folder with a config or a tokenizer, but {folder} has neither")
    return found


def _write_safetensors(writer: SafetensorsWriter, chosen: Selection, weights: _CheckpointWeights) -> None:
    names = chain.from_iterable(writer.shards.values())
    try:
        for _, tensor in weights.read(chosen.origins[name] for name in names):
            writer.write(tensor)
            if writer.failure is not None:
                break
    except BaseException:
        writer.discard()
        raise
    writer.finish()


def _write_torch(place: Location, chosen: Selection, weights: _CheckpointWeights) -> None:
    wanted = {chosen.origins[name]: chosen.infos[name].dtype for name in chosen.origins}
    read = {name: tensor.to(wanted[name]) for name, tensor in weights.read(wanted)}
    facts = {key: weights.meta[key] for key in ("epoch", "iter", "lockstep", "torch") if key in weights.meta}
    content = {"state_dict": {name: read[origin] for name, origin in chosen.origins.items()}, "meta": facts}
    draft = draft_of(place) if isinstance(place, Path) else place
    try:
        if isinstance(draft, Path):
            draft.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            torch.save(content, file)
        if isinstance(place, Path) and isinstance(draft, Path):
            draft.replace(place)
    except (OSError, RuntimeError) as error:  # torch's writer says of a full disk that it is unexpected
        with suppress(OSError):
            draft.unlink()
        raise ConfigError(f"{place} cannot be written: {error}") from error
