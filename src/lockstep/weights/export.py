"""Writing weights in a form that others read: from a checkpoint without a model, or from a model over ranks."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from fnmatch import fnmatch
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

import torch
from torch import Tensor, nn

from lockstep.checkpoint import read_infos, read_meta, read_tensors
from lockstep.checkpoint.files import POINTER_FILE
from lockstep.checkpoint.search import nearest_to
from lockstep.dist import is_main_process, run_on_main
from lockstep.errors import ConfigError, counted, require_known, require_one_of
from lockstep.location import Location, locate
from lockstep.model.shards import gather_full
from lockstep.weights.description import describe_model
from lockstep.weights.safetensors_file import (
    MAX_SHARD_SIZE,
    SafetensorsWriter,
    TensorInfo,
    check_dtypes,
    check_new,
    draft_of,
    plan_shards,
    read_size,
)
from lockstep.weights.source import best_checkpoint_in, find_checkpoint

Target: TypeAlias = Literal["safetensors", "hf", "torch"]
Form: TypeAlias = Literal["safetensors", "hf", "torch", "pretrained"]
TARGETS: tuple[Target, ...] = ("safetensors", "hf", "torch")
# EMAHook saves the averaged weights as the checkpoint's model, and the trained ones in this part.
TRAINED_PART = "ema"
# The files of a HuggingFace folder that are copied beside the weights.
_COPIED_FILES = (
    "config.json", "generation_config.json", "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "spiece.model", "sentencepiece*.model", "chat_template*", "*processor_config.json",
)  # fmt: skip
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
_logger = logging.getLogger(__name__)


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
    best: bool = False,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    dtype: str | None = None,
    prefix: str | None = None,
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
            adapter, only what it adds. `"torch"`: a file that plain torch reads, by
            `model.load_state_dict(torch.load(out))`, tied weights under each of their names.
        best: of a run or a work_dir, take the best checkpoint, which CheckpointHook keeps by `save_best`.
        max_shard_size: the most bytes of a file, for folders.
        dtype: convert floating-point weights to it: `"float32"`, `"float16"`, `"bfloat16"` or `"float64"`.
        prefix: write only the weights under this name, without it.
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
    place, weights = locate(out), _CheckpointWeights(_checkpoint(checkpoint, best=best), ema)
    is_file = to == "torch" or (to == "safetensors" and place.suffix == ".safetensors")
    if not is_file and place.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        raise ConfigError(f"`out` must be a folder for {to!r}, but has the name {place.name!r}. 'torch' writes a file")
    check_new(place, file=is_file)
    most = read_size(max_shard_size)
    description: dict[str, Any] = weights.meta.get("weights") or {}
    if files_from is not None and is_file:
        raise ConfigError(f"`files_from` must be left out where `out` is one file, but is {str(files_from)!r}")
    copied = {} if files_from is None else _config_and_tokenizer(locate(files_from))
    config = copied.pop("config.json", None)
    if config is not None and not description.get("pretrained"):
        entry = {
            "prefix": f"{prefix.rstrip('.')}." if prefix else "",
            "stem": "model",
            "names": None,
            "files": {"config.json": config},
        }
        description = {**description, "pretrained": [entry]}
    chosen = select_weights(weights.infos, description, to, what=str(weights.path), prefix=prefix, dtype=dtype)
    if to == "torch":
        _write_torch(place, chosen, weights)
    else:
        shards = plan_shards(chosen.infos, chosen.stem, math.inf if is_file else most)
        writer = SafetensorsWriter(place, shards, chosen.infos, {**copied, **chosen.files}, single=is_file)
        names = chain.from_iterable(shards.values())
        with writer:
            for _, tensor in weights.read(chosen.origins[name] for name in names):
                writer.write(tensor)
                if writer.failure is not None:
                    break
            writer.finish()
    nbytes = sum(info.nbytes for info in chosen.infos.values())
    return Exported(weights.path, place, len(chosen.origins), nbytes, chosen.left_out)


class PretrainedOptions(TypedDict, total=False):
    """The options of `Runner.save_pretrained`.

    Attributes:
        max_shard_size: the most bytes of a file, 5 GB by default; more are several files with an index.
        dtype: convert floating-point weights to it.
        prefix: write only the part of the model with this name, its weights without the prefix.
        ema: beside EMAHook, False for the trained weights; by default the averaged ones, as in a checkpoint.
        overwrite: replace the weights that a folder holds, an adapter of peft too, and files of the same names, one
            by one; others stay. A process that is killed meanwhile leaves all former weights, or all new ones, or files
            without what leads to them, which nothing loads.
    """

    max_shard_size: int | str
    dtype: str | torch.dtype | None
    prefix: str | None
    ema: bool | None
    overwrite: bool


@torch.no_grad()
def save_pretrained(core: nn.Module, state: Mapping[str, Any], out: str | Path, options: PretrainedOptions) -> None:
    """Write a model's state for `from_pretrained`; see `Run.save_pretrained`.

    Args:
        core: the user's own module.
        state: its state in canonical form, which may be sharded.
        out: a new or empty folder, or with `overwrite` any, or the URL of one.
        options: how it is written. The caller has chosen between averaged and trained weights.

    **Collective**: every rank.

    Raises:
        ConfigError: there is no such option.
    """
    require_known("save_pretrained", options, PretrainedOptions.__annotations__)
    location = locate(out)
    run_on_main(partial(check_new, location, file=False, overwrite=options.get("overwrite", False)))
    infos = {n: TensorInfo(tuple(value.shape), value.dtype) for n, value in state.items() if isinstance(value, Tensor)}
    description = describe_model(core, state)
    prefix, dtype = options.get("prefix"), options.get("dtype")
    chosen = select_weights(infos, description, "pretrained", what=type(core).__name__, prefix=prefix, dtype=dtype)
    shards = plan_shards(chosen.infos, chosen.stem, read_size(options.get("max_shard_size", MAX_SHARD_SIZE)))
    writer = SafetensorsWriter(location, shards, chosen.infos, chosen.files) if is_main_process() else None
    with writer or nullcontext():
        for name in chain.from_iterable(shards.values()):
            whole = gather_full(state[chosen.origins[name]])
            if writer is not None:
                writer.write(whole)
        run_on_main(lambda: None if writer is None else writer.finish())  # only rank 0 has one
    if chosen.left_out:
        _logger.info("%s is without %s", location, describe_left_out(chosen.left_out))
    _logger.info("wrote the weights to %s", location)


def describe_left_out(left_out: Sequence[str]) -> str:
    """Return the names that are left out, by the parts of the model that they belong to.

    Example:
        >>> describe_left_out(["head.weight", "head.bias", "scale"])
        '3 weights of head, scale'
    """
    parts = dict.fromkeys(name.partition(".")[0] for name in left_out)
    return f"{counted(len(left_out), 'weight')} of {', '.join(parts)}"


class Selection(NamedTuple):
    """The weights to write.

    Attributes:
        origins: for each name in the file, the name of the stored tensor.
        infos: for each name in the file, shape and dtype of what is written.
        files: further files, by name, as JSON values.
        stem: name of the file of weights, without its ending.
        left_out: names of stored weights that are not written, and are not tied to one that is.
    """

    origins: dict[str, str]
    infos: dict[str, TensorInfo]
    files: dict[str, Any]
    stem: str
    left_out: list[str]


def select_weights(
    stored: Mapping[str, TensorInfo],
    description: Mapping[str, Any],
    form: Form,
    *,
    what: str,
    prefix: str | None = None,
    dtype: str | torch.dtype | None = None,
) -> Selection:
    """Choose the weights to write, their names, their dtypes, and the files beside them.

    Args:
        stored: shape and dtype of each weight, by name.
        description: the model's description of its weights, see `describe_model`.
        form: `"safetensors"`, all of them; `"hf"`, what `from_pretrained` loads; `"torch"`, all of them, tied ones
            under each name; `"pretrained"`, as `"hf"` if the model has a HuggingFace config, else as `"safetensors"`.
        what: the checkpoint or model that has the weights, for messages.
        prefix: write only the weights under this name, without it.
        dtype: convert floating-point weights to it.

    Raises:
        ConfigError: there are no such weights, the model has no config of HuggingFace's, two weights get one name, or
            the form lacks a dtype.
    """
    described: list[Mapping[str, Any]] = list(description.get("pretrained", ()))
    prefix = None if prefix is None else prefix.rstrip(".") + "." if prefix else ""
    chosen = _choose(described, form, prefix, what)
    names: Mapping[str, str] | None = None if chosen is None else chosen["names"]
    if prefix is None:
        prefix = "" if chosen is None else chosen["prefix"]
    inside = [name for name in stored if name.startswith(prefix)]
    if not inside:
        parts = sorted({name.partition(".")[0] for name in stored})
        raise ConfigError(
            f"`prefix` must be the name of a part of {what}, out of {', '.join(parts)}, but is '{prefix[:-1]}'"
        )
    first_names = _first_of_tied(inside, description.get("tied", ()))
    origins: dict[str, str] = {}
    for name in inside:
        # An adapter has a tensor under each of the names by which its library looks for it.
        if name not in names if names is not None else form != "torch" and first_names[name] != name:
            continue
        written = name.removeprefix(prefix) if names is None else names[name]
        if written in origins:
            raise ConfigError(f"each weight must keep a name of its own, but two of {what} would be called `{written}`")
        origins[written] = first_names[name]
    target = _dtype(dtype)
    infos = {name: _converted(stored[origin], target) for name, origin in origins.items()}
    if form != "torch":
        check_dtypes(infos)
    files = {} if chosen is None else _with_dtype(chosen["files"], infos)
    first_names = _first_of_tied([*stored], description.get("tied", ()))
    written_tensors = {first_names[origin] for origin in origins.values()}
    left_out = [name for name in stored if first_names[name] not in written_tensors]
    return Selection(origins, infos, files, "model" if chosen is None else chosen["stem"], left_out)


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
        found = {part: read_infos(path, part) for part in ("model", TRAINED_PART)}
        if ema and not found[TRAINED_PART]:
            raise ConfigError(f"{path} must have averaged weights, as EMAHook saves them, but has none")
        self._parts = dict.fromkeys(found["model"], "model")
        if ema is False:
            self._parts |= dict.fromkeys(found[TRAINED_PART], TRAINED_PART)
        self.infos = {name: TensorInfo(*found[part][name]) for name, part in self._parts.items()}
        if not self.infos:
            raise ConfigError(f"{path} must hold a model's weights, but has none")

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield weights in the order of `names`."""
        for part, some in groupby(names, key=self._parts.__getitem__):
            yield from read_tensors(self.path, part, some)


def _checkpoint(path: str | Path, *, best: bool) -> Location:
    location = locate(path)
    try:
        found = best_checkpoint_in([location]) if best else find_checkpoint(location)
    except OSError as error:
        raise ConfigError(f"`CKPT` must be a checkpoint, but {error}") from error
    if found is None:
        what = "is a file" if location.exists() else "does not exist"
        if location.is_dir():
            what = f"holds no {'best' if best else 'complete'} checkpoint"
        near = None if best and location.is_dir() else nearest_to(location)
        there = "Those of a run lie under work_dirs/NAME/TIME, as epoch_1" if near is None else f"There is {near}"
        if near is not None and location.is_dir():
            what, there = f"has no {POINTER_FILE} that leads to one", f"The newest one in it is {near}"
        raise ConfigError(
            f"`CKPT` must be a checkpoint, the folder of a run, or a work_dir, but {location} {what}. {there}"
        )
    return found


def _config_and_tokenizer(folder: Location) -> dict[str, Any]:
    """Return the config, as JSON values, and the files of a tokenizer in a folder of HuggingFace's."""
    try:
        wanted = [one for one in folder.iterdir() if any(fnmatch(one.name, form) for form in _COPIED_FILES)]
        found = {one.name: one.read_bytes() for one in sorted(wanted) if one.is_file()}
        if "config.json" in found:
            return {**found, "config.json": json.loads(found["config.json"])}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"`files_from` must be a folder of HuggingFace's, but {folder} cannot be read: {error}"
        ) from error
    if not found:
        raise ConfigError(f"`files_from` must be a folder with a config or a tokenizer, but {folder} has neither")
    return found


def _write_torch(place: Location, chosen: Selection, weights: _CheckpointWeights) -> None:
    wanted = {chosen.origins[name]: chosen.infos[name].dtype for name in chosen.origins}
    read = {name: tensor.to(wanted[name]) for name, tensor in weights.read(wanted)}
    content = {name: read[origin] for name, origin in chosen.origins.items()}
    draft = draft_of(place) if isinstance(place, Path) else place
    try:
        if isinstance(draft, Path):
            draft.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            torch.save(content, file)
        if isinstance(place, Path) and isinstance(draft, Path):
            draft.replace(place)
    except BaseException as error:
        with suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError | RuntimeError):  # torch.save raises a RuntimeError if the disk is full
            raise ConfigError(f"{place} cannot be written: {error}") from error
        raise


def _choose(described: Sequence[Mapping[str, Any]], form: Form, prefix: str | None, what: str) -> Any:
    """Return the description of the HuggingFace model to write, or None to write weights without a config."""
    if form == "torch":
        return None
    if form == "safetensors":  # all weights under their own names; a description with `names` is of an adapter alone
        return next((one for one in described if one["prefix"] == (prefix or "") and one["names"] is None), None)
    candidates = [one for one in described if prefix is None or one["prefix"] == prefix]
    if len(candidates) > 1:
        names = ", ".join(one["prefix"].rstrip(".") for one in candidates)
        raise ConfigError(
            f"`prefix` must say which of the models of {what} is written, out of {names}, but is not given"
        )
    if candidates or form == "pretrained":
        return candidates[0] if candidates else None
    inner = ", ".join(one["prefix"].rstrip(".") for one in described)
    raise ConfigError(
        f"{what} must have a config of HuggingFace's to be written for from_pretrained, but has none"
        + (f" under this prefix; it has under {inner}" if inner else "")
        + ". Write the weights alone, as safetensors, or give a folder with the config, by --files-from"
    )


def _first_of_tied(names: Sequence[str], tied: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return for each name the first name of its tensor; `tied` lists the names of tensors that have several."""
    first_names = {name: name for name in names}
    for tied_names in tied:
        present = [name for name in tied_names if name in first_names]
        for name in present:
            first_names[name] = present[0]
    return first_names


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name not in _DTYPES:
        raise ConfigError(f"`dtype` must be one of {', '.join(_DTYPES)}, but is {dtype!r}")
    return _DTYPES.get(name)


def _converted(info: TensorInfo, dtype: torch.dtype | None) -> TensorInfo:
    return info if dtype is None or not info.dtype.is_floating_point else info._replace(dtype=dtype)


def _with_dtype(files: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Return the files with the dtype of the weights in `config.json`, which decides how they are loaded."""
    written = deepcopy(dict(files))
    floating = next((info.dtype for info in infos.values() if info.dtype.is_floating_point), None)
    config = written.get("config.json", {})
    for key in ("dtype", "torch_dtype"):
        if key in config and floating is not None:
            config[key] = str(floating).removeprefix("torch.")
    return written
