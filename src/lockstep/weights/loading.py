"""Loading weights into a model, as far as they fit it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.checkpoint import load_state, read_shapes
from lockstep.checkpoint.layout import digest_of
from lockstep.checkpoint.together import on_all, read_once
from lockstep.dist import all_gather_object
from lockstep.errors import ConfigError, listed
from lockstep.groups import resolve
from lockstep.location import Location, locate
from lockstep.model import unwrap_model
from lockstep.model.parts import INSIDE_WRAPPERS
from lockstep.model.shards import is_dtensor, shard_like
from lockstep.strategy import Strategy
from lockstep.transport.moving import as_bytes
from lockstep.weights.description import sized_on_loading, tied_names
from lockstep.weights.source import WeightSource, find_checkpoint, open_source

REVISE_KEYS = ((r"^module\.", ""),)
_MOST_AT_ONCE = 64 * 2**20  # bytes of a tensor that travel at once, unless a row is longer
_OF_OTHER_NAMES = "Rename them, by load_checkpoint(PATH, revise_keys=[(PATTERN, REPLACEMENT)])"
_OF_ANOTHER_SIZE = (
    "The names are those of the model, but the weights are of a model of another size: build the model as it was when "
    "they were saved, or load other weights"
)
_OF_EXPERTS = (
    "The folder has each expert by itself, and the model all of them in one parameter, which transformers fills where "
    "it loads them: begin with from_pretrained in place of `load_from`"
)
_logger = logging.getLogger(__name__)


class Weights(NamedTuple):
    """Where weights come from.

    Attributes:
        path: a checkpoint, a run's folder or a work_dir; a folder of HuggingFace's; or a file of weights.
        strict: raise an error if weights are missing, unknown or of another shape; else log a warning. By default this
            is False for a model that is to be trained, else True.
        revise_keys: patterns in the names of the weights, and their replacements. The default ones apply only to names
            that the model does not have.
        given: what the user named, where `path` is a copy of it.
    """

    path: Location
    strict: bool | None = None
    revise_keys: Sequence[tuple[str, str]] = REVISE_KEYS
    given: Location | None = None

    @property
    def shown(self) -> Location:
        """What messages name."""
        return self.path if self.given is None else self.given


def load_weights(strategy: Strategy, core: nn.Module, weights: Weights, *, training: bool) -> None:
    """Load a model's weights.

    Args:
        strategy: the strategy that has prepared the model.
        core: the user's own module; shows which weights are tied, that is, one parameter under several names.
        weights: where the weights come from.
        training: whether the model is to be trained, and may keep its own weights where the loaded ones do not fit,
            such as those of a head for other classes.

    **Collective**: every rank. **Cost**: tensors that are whole on every rank are read once by all ranks together, and
    sent to each; of parameters that are sharded by rows, each rank reads its rows, and of those that are sharded
    otherwise, the whole tensor. Memory for one tensor, or for 64 MiB on the host and on the device.

    Raises:
        ConfigError: on every rank, if on any there are no weights, none of them fit, or, if strict, some do not fit.
    """
    strict = not training if weights.strict is None else weights.strict
    failed = f"the weights in {weights.shown} could not be loaded"
    load = on_all(failed, lambda: _Matched(core, strategy.model_state(), weights, strict=strict))
    strategy.load_state(load.read_on_all(failed))
    _logger.info("loaded the weights of %s", weights.shown)


def load_checkpoint(
    model: nn.Module,
    filename: str | Path,
    map_location: Any = "cpu",
    strict: bool = False,
    revise_keys: Sequence[tuple[str, str]] = REVISE_KEYS,
) -> None:
    """Load weights into a model that is not used by a Runner.

    Args:
        model: wrapped or not, but not sharded.
        filename: a checkpoint, a run's folder or a work_dir, of which the last checkpoint is taken; a folder of
            HuggingFace's; or a file of weights, safetensors or of `torch.save`. All may also be URLs that fsspec can
            open.
        map_location: from MMEngine; has no effect, because weights go to the model's device.
        strict: raise an error if weights are missing, unknown or of another shape; else log a warning.
        revise_keys: patterns in the names of the weights, and their replacements. The default ones apply only to names
            that the model does not have.

    **Collective**: every rank, if `filename` is a checkpoint.

    Raises:
        ConfigError: there are no weights, none of them fit, or, if `strict`, some do not fit.

    Example:
        >>> import torch
        >>> from tempfile import TemporaryDirectory
        >>> net = nn.Linear(2, 1)
        >>> with TemporaryDirectory() as folder:
        ...     shifted = {f"module.{name}": value + 1 for name, value in net.state_dict().items()}
        ...     torch.save({"state_dict": shifted}, f"{folder}/net.pth")
        ...     before = net.bias.item()
        ...     load_checkpoint(net, f"{folder}/net.pth")
        >>> round(net.bias.item() - before, 6)
        1.0
    """
    core = unwrap_model(model)
    load = _Matched(core, core.state_dict(), Weights(locate(filename), strict, revise_keys), strict=strict)
    core.load_state_dict(load.read())


class _Part(NamedTuple):
    """A tensor, or some of its rows, that one rank reads for all."""

    name: str
    rows: slice | None
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Matched:
    """The tensors of a model, and the weights that fill them.

    Args:
        core: the user's own module.
        own: its state.
        weights: where the weights come from.
        strict: whether all must fit.

    Raises:
        ConfigError: there are no weights, none of them fit, or, if `strict`, some do not fit.
    """

    def __init__(self, core: nn.Module, own: Mapping[str, Any], weights: Weights, *, strict: bool) -> None:
        self._ties = {name: names for names in tied_names(core) for name in names}
        self._shown = weights.shown
        self._checkpoint = find_checkpoint(weights.path)
        self._source: WeightSource | None = None
        if self._checkpoint is not None:
            stored = read_shapes(self._checkpoint, "model")
            if not stored:
                raise ConfigError(f"{self._checkpoint} must hold a model's weights, but has none")
        else:
            self._source = open_source(weights.path)
            stored = {name: info.shape for name, info in self._source.tensors.items()}
        self._origins = _renamed(stored, weights, own)
        for name in sized_on_loading(core) & self._origins.keys():
            shape = stored[self._origins[name]]
            if shape is not None and not _is_alike(own.get(name), shape):
                own = {**own, name: own[name].new_empty(shape)}
        self._own = own
        shapes = {name: stored[origin] for name, origin in self._origins.items()}
        self._fitting = _fitting(own, shapes, self._ties, weights, strict=strict)

    def read(self) -> dict[str, Any]:
        """Return the model's state with its tensors filled in place; tied weights under each of their names.

        **Collective**: every rank, if the weights are those of a checkpoint.
        """
        if self._source is not None:
            self._read_alone(self._source, self._fitting)
            return self._state({name: self._own[name] for name in self._fitting})
        assert self._checkpoint is not None
        wanted = {self._origins[name]: self._own[name] for name in self._fitting}
        loaded = load_state(self._checkpoint, {"model": wanted})["model"]
        return self._state({name: loaded[self._origins[name]] for name in self._fitting})

    def read_on_all(self, failed: str) -> dict[str, Any]:
        """Do as `read` does, on all ranks, each of which raises what one does; whole tensors are read once.

        **Collective**: every rank.
        """
        comm, source = resolve(), self._source
        if source is None or comm.is_alone:
            return self.read()
        whole = [name for name in self._fitting if not is_dtensor(self._own[name])]
        parts = self._parts(source, whole)
        if len(set(all_gather_object(digest_of([str(part) for part in parts])))) > 1:
            return on_all(failed, self.read)

        def read() -> dict[str, Any]:
            read_once(
                [prod(part.shape) * part.dtype.itemsize for part in parts],
                lambda number, into: self._read_part(source, parts[number], into),
                lambda number, sent: self._place(parts[number], sent),
            )
            self._read_alone(source, [name for name in self._fitting if name not in whole])
            return self._state({name: self._own[name] for name in self._fitting})

        return on_all(failed, read)

    def _state(self, read: dict[str, Any]) -> dict[str, Any]:
        """Return the model's state with what was read. A weight that is tied to a loaded one has its values, too."""
        twins = ((name, next((twin for twin in self._ties.get(name, ()) if twin in read), None)) for name in self._own)
        return {**self._own, **{name: read[twin] for name, twin in twins if twin is not None}, **read}

    @torch.no_grad()
    def _read_alone(self, source: WeightSource, names: Iterable[str]) -> None:
        """Fill tensors in place, one after the other."""
        for name in names:
            target = self._own[name]
            rows = _own_rows(target)
            value = self._rows(source, name, rows)
            if rows is not None:
                target.to_local().copy_(value)
            else:
                target.copy_(shard_like(value, target))

    def _rows(self, source: WeightSource, name: str, rows: slice | None) -> Tensor:
        try:
            return source.read(self._origins[name], rows)
        except OSError as error:
            raise ConfigError(f"{self._shown} cannot be read: {error}") from error

    def _parts(self, source: WeightSource, names: Iterable[str]) -> list[_Part]:
        """Cut tensors by rows into what travels at once."""
        parts = []
        for name in names:
            shape, dtype = source.tensors[self._origins[name]]
            if not shape:
                parts.append(_Part(name, None, shape, dtype))
                continue
            step = max(_MOST_AT_ONCE // max(prod(shape[1:]) * dtype.itemsize, 1), 1)
            for first in range(0, shape[0], step):
                count = min(step, shape[0] - first)
                parts.append(_Part(name, slice(first, first + count), (count, *shape[1:]), dtype))
        return parts

    def _read_part(self, source: WeightSource, part: _Part, into: Tensor) -> None:
        into.copy_(as_bytes(self._rows(source, part.name, part.rows).contiguous()))

    @torch.no_grad()
    def _place(self, part: _Part, sent: Tensor) -> None:
        target = self._own[part.name]
        (target if part.rows is None else target[part.rows]).copy_(sent.view(part.dtype).view(part.shape))


def _own_rows(tensor: Any) -> slice | None:
    """Return the rows of a DTensor that this rank holds; None if it holds something else."""
    if not is_dtensor(tensor):
        return None
    from torch.distributed.tensor import Shard  # by those alone who have a DTensor

    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    sharding = tensor.placements[axes[0]] if len(axes) == 1 else None
    if type(sharding) is not Shard or sharding.dim != 0:
        return None
    mesh = tensor.device_mesh
    rows = -(-len(tensor) // mesh.size(axes[0]))  # in chunks, as `torch.chunk`
    begin = min(len(tensor), mesh.get_local_rank(axes[0]) * rows)
    return slice(begin, begin + len(tensor.to_local()))


def _renamed(stored: Mapping[str, Any], weights: Weights, own: Mapping[str, Any]) -> dict[str, str]:
    """Return the names under which weights are loaded, each with its name where it is stored."""
    origins = {}
    plain = {_without_compiled(name): name for name in own}
    for stored_name in stored:
        name = stored_name
        if weights.revise_keys is not REVISE_KEYS or name not in own:
            for pattern, replacement in weights.revise_keys:
                name = re.sub(pattern, replacement, name)
        origins[name if name in own else plain.get(_without_compiled(name), name)] = stored_name
    if any(name in own for name in origins):
        return origins
    if prefix := _missing_prefix(own, origins):
        _logger.info("the names in %s lack the prefix `%s` of the model's: it is added", weights.shown, prefix)
        return {prefix + name: origin for name, origin in origins.items()}
    if prefix := _missing_prefix(origins, own):
        _logger.info(
            "the names in %s have the prefix `%s`, which the model's lack: it is left out", weights.shown, prefix
        )
        return {name.removeprefix(prefix): origin for name, origin in origins.items()}
    return origins


def _without_compiled(name: str) -> str:
    """Return a name without the parts that `torch.compile` of a module, also of an inner one, puts into it."""
    return name.replace(f"{INSIDE_WRAPPERS[0]}.", "")


def _missing_prefix(long: Mapping[str, Any], short: Mapping[str, Any]) -> str | None:
    """Return the prefix that turns most of the short names into long ones; None if two do so equally well, or none.

    Example:
        >>> _missing_prefix({"bert.a.weight": 0, "bert.b.weight": 0, "head.weight": 0}, {"a.weight": 0, "b.weight": 0})
        'bert.'
    """
    counts: dict[str, int] = {}
    for name in long:
        parts = name.split(".")
        for index in range(1, len(parts)):
            if ".".join(parts[index:]) in short:
                prefix = ".".join(parts[:index]) + "."
                counts[prefix] = counts.get(prefix, 0) + 1
    best = max(counts.values(), default=0)
    prefixes = [prefix for prefix, count in counts.items() if count == best]
    return prefixes[0] if len(prefixes) == 1 and 2 * best > min(len(short), len(long)) else None


def _fitting(
    own: Mapping[str, Any], shapes: Mapping[str, Any], ties: Mapping[str, list[str]], weights: Weights, *, strict: bool
) -> list[str]:
    """Return the names of the weights that can be loaded, and report the others."""
    differ = [name for name in own if name in shapes and not _is_alike(own[name], shapes[name])]
    fitting = [name for name in own if name in shapes and name not in differ]
    there = {*shapes, *(twin for name in fitting for twin in ties.get(name, ()))}
    faults = {
        "missing": [name for name in own if name not in there],
        "of another shape": [f"{name} {_shown(shapes[name])}, not {tuple(own[name].shape)}" for name in differ],
        "unknown to the model": [name for name in shapes if name not in own],
    }
    summary = "; ".join(f"{what}: {listed(names, most=8)}" for what, names in faults.items() if names)
    experts_apart = any(re.search(r"\.experts\.\D", name) for name in faults["missing"]) and any(
        re.search(r"\.experts\.\d", name) for name in faults["unknown to the model"]
    )
    if summary and (strict or not fitting or experts_apart):
        hint = _OF_EXPERTS if experts_apart else _OF_ANOTHER_SIZE if differ else _OF_OTHER_NAMES
        raise ConfigError(
            f"the weights in {weights.shown} do not fit the model ({summary})"
            + (f". {hint}" if experts_apart or not fitting else "")
        )
    if summary:
        _logger.warning(
            "some of the weights in %s do not fit the model (%s). The other %d are loaded",
            weights.shown, summary, len(fitting),
        )  # fmt: skip
    return fitting


def _shown(shape: Any) -> str:
    return "no tensor" if shape is None else str(tuple(shape))


def _is_alike(own: Any, shape: Any) -> bool:
    return not isinstance(own, Tensor) or (shape is not None and tuple(own.shape) == tuple(shape))
