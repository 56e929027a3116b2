"""`BaseInferencer`: a model, its weights and its pipeline, called on files or arrays."""

from __future__ import annotations

import copy
import re
import warnings
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import nn

from lockstep.errors import nearest
from mmengine.config import Config, ConfigDict
from mmengine.dataset import pseudo_collate
from mmengine.device import get_device
from mmengine.fileio import get_file_backend, isdir, join_path, list_dir_or_file, load
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import FUNCTIONS, MODELS, VISUALIZERS, DefaultScope
from mmengine.visualization import Visualizer

InputType: TypeAlias = str | np.ndarray[Any, Any] | torch.Tensor
InputsType: TypeAlias = InputType | Sequence[InputType]
ImgType: TypeAlias = np.ndarray[Any, Any] | Sequence[np.ndarray[Any, Any]]
ConfigType: TypeAlias = Config | ConfigDict
ModelType: TypeAlias = dict[str, Any] | Config | ConfigDict | str

_SETS = ("preprocess_kwargs", "forward_kwargs", "visualize_kwargs", "postprocess_kwargs")


class InferencerMeta(ABCMeta):
    """Checks that no argument of an inferencer goes to two of its steps.

    Raises:
        TypeError: one of the four attributes is not a set.
        AssertionError: two of them share a name.
    """

    def __init__(cls, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        seen: dict[str, str] = {}
        for step in _SETS:
            names = getattr(cls, step)
            if not isinstance(names, set):
                raise TypeError(f"`{step}` of {cls.__name__} must be a set of names, but is {names!r}")
            for name in names:
                if name in seen:
                    raise AssertionError(
                        f"`{name}` of {cls.__name__} must be in one set, but is in {seen[name]} and {step}"
                    )
                seen[name] = step


class BaseInferencer(metaclass=InferencerMeta):
    """A model with its weights, which predicts on files, arrays or tensors; base class.

    A call takes four steps: `preprocess`, `forward`, `visualize` and `postprocess`. A subclass defines `visualize`,
    `postprocess` and `_init_pipeline`, and names the further arguments of each step in the four sets.

    Args:
        model: the config of a run that has a `model`: a path, or the config itself; or the name of a model in the
            metafiles of `scope`. If None, the config is read from `weights`.
        weights: path or URL of a checkpoint; by default that of the model in the metafiles.
        device: where the model computes; by default the best device there is.
        scope: the package in whose registries names are looked up, such as ``"mmpretrain"``; by default the default
            scope.
        show_progress: whether a bar is shown during a call.

    Raises:
        ValueError: there is neither `model` nor `weights`, or no model of that name.
        TypeError: `model` has another type.
    """

    preprocess_kwargs: ClassVar[set[str]] = set()
    forward_kwargs: ClassVar[set[str]] = set()
    visualize_kwargs: ClassVar[set[str]] = set()
    postprocess_kwargs: ClassVar[set[str]] = set()

    def __init__(
        self,
        model: ModelType | None = None,
        weights: str | None = None,
        device: str | None = None,
        scope: str | None = None,
        show_progress: bool = True,
    ) -> None:
        if scope is None:
            default = DefaultScope.get_current_instance()
            scope = None if default is None else default.scope_name
        self.scope = scope
        cfg, weights = self._config_and_weights(model, weights)
        device = get_device() if device is None else device
        self.model = self._init_model(cfg, weights, device)
        self.cfg = getattr(self.model, "cfg", cfg)  # one that `_init_model` makes may have none
        self.pipeline = self._init_pipeline(self.cfg)
        self.collate_fn = self._init_collate(self.cfg)
        self.visualizer = self._init_visualizer(self.cfg)
        self.show_progress = show_progress

    def __call__(
        self, inputs: InputsType, return_datasamples: bool = False, batch_size: int = 1, **kwargs: Any
    ) -> dict[str, Any]:
        """Return what `postprocess` makes of the predictions.

        Args:
            inputs: a file, an array or a tensor; a list of those; or a folder, for all files in it.
            return_datasamples: for `postprocess`.
            batch_size: number of inputs in a batch.
            kwargs: arguments of the steps.

        Raises:
            ValueError: no step takes an argument of that name.
        """
        for_preprocess, for_forward, for_visualize, for_postprocess = self._dispatch_kwargs(**kwargs)
        given = self._inputs_to_list(inputs)
        batches = self.preprocess(given, batch_size=batch_size, **for_preprocess)
        predictions: list[Any] = []
        for batch in self._tracked(batches, -(-len(given) // batch_size)):
            predictions.extend(self.forward(batch, **for_forward))
        visualization = self.visualize(given, predictions, **for_visualize)
        return self.postprocess(predictions, visualization, return_datasamples, **for_postprocess)

    def preprocess(self, inputs: Any, batch_size: int = 1, **kwargs: Any) -> Iterator[Any]:
        """Yield the batches that the pipeline and the collate function make of the inputs."""
        yield from map(self.collate_fn, self._get_chunk_data(map(self.pipeline, inputs), batch_size))

    @torch.no_grad()
    def forward(self, inputs: Any, **kwargs: Any) -> Any:
        """Return the predictions for a batch."""
        return self.model.test_step(inputs)

    @abstractmethod
    def visualize(self, inputs: list[Any], preds: Any, show: bool = False, **kwargs: Any) -> Any:
        """Return pictures of the predictions, or None."""

    @abstractmethod
    def postprocess(
        self, preds: Any, visualization: Any, return_datasample: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the result of a call: usually a dict with `predictions` and `visualization`."""

    @abstractmethod
    def _init_pipeline(self, cfg: Any) -> Callable[[Any], Any]:
        """Return the function that makes a sample of an input."""

    def _init_model(self, cfg: Any, weights: str | None, device: str = "cpu") -> Any:
        """Return the model with its weights, on the device, for evaluation, and with its config as `cfg`."""
        checkpoint = None
        if weights is not None:
            checkpoint = import_module("mmengine.runner.checkpoint")._load_checkpoint(weights, map_location="cpu")
        if not cfg:
            cfg = _config_in(checkpoint, weights)
        own = copy.deepcopy(cfg["model"])
        own.pop("pretrained", None)
        with DefaultScope.overwrite_default_scope(self.scope):
            model: Any = MODELS.build(own)
        model = revert_sync_batchnorm(model)  # which computes on one device
        model.cfg = cfg
        self._load_weights_to_model(model, checkpoint, cfg)
        model.to(device)
        model.eval()
        return model

    def _load_weights_to_model(self, model: nn.Module, checkpoint: Any, cfg: Any) -> None:
        """Load the weights of a checkpoint; without one, warn that the weights are random."""
        if checkpoint is None:
            warnings.warn(
                f"no weights are given: the predictions of {type(model).__name__} come from random ones", stacklevel=4
            )
            return
        import_module("mmengine.runner.checkpoint")._load_checkpoint_to_model(model, checkpoint)

    def _init_collate(self, cfg: Any) -> Callable[[list[Any]], Any]:
        """Return the collate function of the config's `test_dataloader`, by default `pseudo_collate`."""
        named = (cfg.get("test_dataloader") or {}).get("collate_fn")
        if named is None:
            return pseudo_collate
        arguments = dict(named) if isinstance(named, Mapping) else {"type": named}
        kind = arguments.pop("type")
        with DefaultScope.overwrite_default_scope(self.scope), FUNCTIONS.switch_scope_and_registry(None) as registry:
            found: Any = registry[kind] if isinstance(kind, str) else kind
        return lambda samples: found(samples, **arguments)

    def _init_visualizer(self, cfg: Any) -> Visualizer | None:
        """Return the visualizer of the config, under a name of its own; None if there is none."""
        if not cfg.get("visualizer"):
            return None
        own = copy.deepcopy(cfg["visualizer"])
        own["name"] = f"inferencer-{datetime.now().timestamp()}"
        with DefaultScope.overwrite_default_scope(self.scope):
            return VISUALIZERS.build(own)  # type: ignore[no-any-return]

    def _inputs_to_list(self, inputs: Any) -> list[Any]:
        if isinstance(inputs, str) and hasattr(get_file_backend(inputs), "isdir") and isdir(inputs):
            return [join_path(inputs, name) for name in sorted(list_dir_or_file(inputs, list_dir=False))]
        return list(inputs) if isinstance(inputs, list | tuple) else [inputs]

    def _get_chunk_data(self, inputs: Iterable[Any], chunk_size: int) -> Iterator[list[Any]]:
        """Yield lists of `chunk_size` inputs; the last one may be shorter."""
        chunk: list[Any] = []
        for item in inputs:
            chunk.append(item)
            if len(chunk) == chunk_size:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    def _dispatch_kwargs(self, **kwargs: Any) -> tuple[dict[str, Any], ...]:
        """Return the arguments of each step."""
        known = set().union(*(getattr(self, step) for step in _SETS))
        if unknown := sorted(set(kwargs) - known):
            raise ValueError(
                f"no step of {type(self).__name__} takes `{'`, `'.join(unknown)}`. Known: {', '.join(sorted(known))}"
            )
        return tuple({name: kwargs[name] for name in kwargs if name in getattr(self, step)} for step in _SETS)

    def _tracked(self, batches: Iterable[Any], total: int) -> Iterable[Any]:
        if not self.show_progress:
            return batches
        from rich.progress import track

        return track(batches, description="Inference", total=total)

    def _config_and_weights(self, model: Any, weights: str | None) -> tuple[Any, str | None]:
        if isinstance(model, str):
            if Path(model).is_file():
                return Config.fromfile(model), weights
            cfg, known = self._load_model_from_metafile(model)
            return cfg, known if weights is None else weights
        if isinstance(model, Config | ConfigDict):
            return copy.deepcopy(model), weights
        if isinstance(model, Mapping):
            return copy.deepcopy(ConfigDict(model)), weights
        if model is not None:
            raise TypeError(f"`model` must be a path, a name, a config or None, but is of {type(model).__name__}")
        if weights is None:
            raise ValueError("`weights` must be given if `model` is None, because the config is read from them")
        return ConfigDict(), weights

    def _load_model_from_metafile(self, model: str) -> tuple[Config, str | None]:
        """Return the config and the weights of the model that the metafiles of the scope list by this name."""
        folder = self._get_repo_or_mim_dir(self.scope)
        names: list[str] = []
        for entry in self._get_models_from_metafile(folder):
            known = _names_of(entry)
            names += known
            if model.casefold() in [name.casefold() for name in known]:
                return Config.fromfile(Path(folder) / entry["Config"]), entry.get("Weights")
        near = nearest(model, names)
        raise ValueError(
            f"there is no model `{model}` in the metafiles of `{self.scope}`, nor a file of that name"
            + (f": did you mean `{near}`?" if near else "")
        )

    @staticmethod
    def _get_repo_or_mim_dir(scope: str | None) -> str:
        """Return the folder that holds the configs and metafiles of a package.

        Raises:
            ValueError: there is no such package, or it has no metafiles.
        """
        if scope is None:
            raise ValueError("`scope` must be given to find a model by its name")
        try:
            package = Path(str(import_module(scope).__file__)).parent
        except ImportError as error:
            raise ValueError(f"`scope` must be an installed package, but is {scope!r}") from error
        for folder in (package / ".mim", package.parent):
            if (folder / "model-index.yml").is_file():
                return str(folder)
        raise ValueError(f"the package `{scope}` must have a file model-index.yml, but has none")

    @staticmethod
    def _get_models_from_metafile(dir: str) -> Iterator[dict[str, Any]]:  # noqa: A002 - MMEngine's name
        """Yield the entries of all models in the metafiles that `model-index.yml` in a folder names."""
        for path in load(str(Path(dir) / "model-index.yml"))["Import"]:
            content = load(str(Path(dir) / path))
            models = content.get("Models") if isinstance(content, Mapping) else content
            yield from models or ()

    @staticmethod
    def list_models(scope: str | None = None, patterns: str = r".*") -> list[str]:
        """Return the names of the models in the metafiles of a package.

        Args:
            scope: the package; by default the default scope.
            patterns: a regular expression that names must match from their beginning.
        """
        if scope is None:
            default = DefaultScope.get_current_instance()
            if default is None:
                raise AssertionError("`scope` must be given, because there is no default scope")
            scope = default.scope_name
        folder = BaseInferencer._get_repo_or_mim_dir(scope)
        names = [name for entry in BaseInferencer._get_models_from_metafile(folder) for name in _names_of(entry)]
        return [name for name in names if re.match(patterns, name) is not None]


def _names_of(entry: Mapping[str, Any]) -> list[str]:
    alias = entry.get("Alias") or []
    return [entry["Name"], *([alias] if isinstance(alias, str) else alias)]


def _config_in(checkpoint: Any, weights: str | None) -> Any:
    """Return the config that a checkpoint holds.

    Raises:
        ValueError: it holds none.
    """
    text = None
    if isinstance(checkpoint, Mapping):
        hub = checkpoint.get("message_hub")
        info = (hub or {}).get("runtime_info", {}) if isinstance(hub, Mapping) else {}
        text = (checkpoint.get("meta") or {}).get("cfg") or info.get("cfg")
    if not isinstance(text, str):
        raise ValueError(f"`weights` must hold the config of its run if `model` is None, but `{weights}` does not")
    return Config.fromstring(text, ".py")
