"""Backends of the visualizer: files, TensorBoard, and experiment trackers through lockstep's visualizers of them."""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import cv2

import lockstep.visualization
from lockstep.errors import ConfigError
from mmengine.registry import VISBACKENDS
from mmengine.visualization.utils import as_float, as_uint8_image

_Method = TypeVar("_Method", bound=Callable[..., Any])


def force_init_env(old_func: _Method) -> _Method:
    """Make a method of a backend call `_init_env` first, once."""

    @functools.wraps(old_func)
    def initialised(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "_env_initialized", False):
            self._env_initialized = True
            self._init_env()
        return old_func(self, *args, **kwargs)

    return initialised  # type: ignore[return-value]


class BaseVisBackend(ABC):
    """Where a visualizer's scalars, images and config go; base class.

    A subclass defines `_init_env`, which is called once when something is written first, `experiment`, and those of the
    methods below that it can show.

    Args:
        save_dir: the folder of the files; by default `vis_data` in the run's folder.
    """

    def __init__(self, save_dir: str | None = None) -> None:
        self._save_dir: Any = save_dir
        self._env_initialized = False

    @property
    @abstractmethod
    def experiment(self) -> Any:
        """What writes: for whatever this class has no method for."""

    @abstractmethod
    def _init_env(self) -> Any:
        """Create folders, files and connections."""

    def open(self, run_dir: Path) -> None:
        """Choose the folder, if none was given. A Runner calls this on rank 0."""
        if self._save_dir is None:
            self._save_dir = str(Path(run_dir) / "vis_data")

    def add_config(self, config: Any, **kwargs: Any) -> None:  # noqa: B027
        """Show the config of the run."""

    def add_graph(self, model: Any, data_batch: Sequence[Any], **kwargs: Any) -> None:  # noqa: B027
        """Show the graph of a model."""

    def add_image(self, name: str, image: Any, step: int = 0, **kwargs: Any) -> None:  # noqa: B027
        """Show an image [height, width, 3] of dtype uint8, red first."""

    def add_scalar(self, name: str, value: Any, step: int = 0, **kwargs: Any) -> None:  # noqa: B027
        """Show one value."""

    def add_scalars(  # noqa: B027
        self, scalar_dict: dict[str, Any], step: int = 0, file_path: str | None = None, **kwargs: Any
    ) -> None:
        """Show values that belong to one step."""

    def close(self) -> None:  # noqa: B027
        """Write what is left, and close files and connections."""


@VISBACKENDS.register_module()
class LocalVisBackend(BaseVisBackend):
    """Writes images, scalars as lines of JSON, and the config, into a folder.

    Args:
        save_dir: the folder.
        img_save_dir: the folder of the images in it.
        config_save_file: the config's file in it, a `.py`.
        scalar_save_file: the file of the scalars in it, a `.json`.
    """

    def __init__(
        self,
        save_dir: str | None = None,
        img_save_dir: str = "vis_image",
        config_save_file: str = "config.py",
        scalar_save_file: str = "scalars.json",
    ) -> None:
        super().__init__(save_dir)
        if not config_save_file.endswith(".py"):
            raise AssertionError(f"`config_save_file` must end in .py, but is {config_save_file!r}")
        if not scalar_save_file.endswith(".json"):
            raise AssertionError(f"`scalar_save_file` must end in .json, but is {scalar_save_file!r}")
        self._names = img_save_dir, config_save_file, scalar_save_file

    def _init_env(self) -> None:
        if self._save_dir is None:
            raise RuntimeError("LocalVisBackend must be given a `save_dir`, or be opened by a Runner")
        self._folder = Path(self._save_dir)
        self._folder.mkdir(parents=True, exist_ok=True)

    @property
    @force_init_env
    def experiment(self) -> LocalVisBackend:
        """This backend itself."""
        return self

    @force_init_env
    def add_config(self, config: Any, **kwargs: Any) -> None:
        """Write the config."""
        config.dump(str(self._folder / self._names[1]))

    @force_init_env
    def add_image(self, name: str, image: Any, step: int = 0, **kwargs: Any) -> None:
        """Write a PNG file; a slash in the name makes a folder."""
        path = self._folder / self._names[0] / f"{name}_{step}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = as_uint8_image(image)
        path.write_bytes(cv2.imencode(".png", picture[..., ::-1] if picture.ndim == 3 else picture)[1].tobytes())

    @force_init_env
    def add_scalar(self, name: str, value: Any, step: int = 0, **kwargs: Any) -> None:
        """Append a line with one value."""
        self._append(self._names[2], {name: value, "step": step})

    @force_init_env
    def add_scalars(
        self, scalar_dict: dict[str, Any], step: int = 0, file_path: str | None = None, **kwargs: Any
    ) -> None:
        """Append a line with values, also to a file of its own if `file_path` names one in the folder."""
        if not isinstance(scalar_dict, Mapping):
            raise AssertionError(f"`scalar_dict` must be a dict, but is {scalar_dict!r}")
        values = {**scalar_dict}
        values.setdefault("step", step)
        if file_path is not None:
            if Path(file_path).suffix != ".json" or Path(file_path).name == self._names[2]:
                raise AssertionError(
                    f"`file_path` must end in .json and be another file than {self._names[2]!r}, but is {file_path!r}"
                )
            self._append(file_path, values)
        self._append(self._names[2], values)

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        line = json.dumps({key: as_float(value) for key, value in values.items()})
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


@VISBACKENDS.register_module()
class TensorboardVisBackend(BaseVisBackend):
    """Writes event files that `tensorboard --logdir` shows.

    Args:
        save_dir: the folder.
    """

    def _init_env(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if self._save_dir is None:
            raise RuntimeError("TensorboardVisBackend must be given a `save_dir`, or be opened by a Runner")
        self._tensorboard = SummaryWriter(str(self._save_dir))

    @property
    @force_init_env
    def experiment(self) -> Any:
        """The `SummaryWriter`."""
        return self._tensorboard

    @force_init_env
    def add_config(self, config: Any, **kwargs: Any) -> None:
        """Write the config as text."""
        self._tensorboard.add_text("config", f"```\n{config.pretty_text}\n```")

    @force_init_env
    def add_image(self, name: str, image: Any, step: int = 0, **kwargs: Any) -> None:
        """Write an image."""
        self._tensorboard.add_image(name, as_uint8_image(image), step, dataformats="HWC")

    @force_init_env
    def add_scalar(self, name: str, value: Any, step: int = 0, **kwargs: Any) -> None:
        """Write a number; anything else is left out."""
        value = as_float(value)
        if isinstance(value, int | float):
            self._tensorboard.add_scalar(name, value, step)

    @force_init_env
    def add_scalars(
        self, scalar_dict: dict[str, Any], step: int = 0, file_path: str | None = None, **kwargs: Any
    ) -> None:
        """Write numbers, each under its own tag; an entry `step` is the step."""
        step = scalar_dict.get("step", step)
        for name, value in scalar_dict.items():
            if name != "step":
                self.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        if hasattr(self, "_tensorboard"):
            self._tensorboard.close()


class TrackerBackend(BaseVisBackend):
    """An experiment tracker, by lockstep's visualizer for it.

    Args:
        save_dir: the folder that the tracker is opened with.
        kwargs: arguments of lockstep's visualizer; those that only MMEngine has are left out.
    """

    tracker: type[Any]

    def __init__(self, save_dir: str | None = None, **kwargs: Any) -> None:
        super().__init__(save_dir)
        self._shows = self.tracker(**{name: value for name, value in kwargs.items() if value is not None})

    def _init_env(self) -> None:
        if self._save_dir is None:
            raise RuntimeError(f"{type(self).__name__} must be given a `save_dir`, or be opened by a Runner")
        folder = Path(self._save_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._shows.open(folder)

    @property
    @force_init_env
    def experiment(self) -> Any:
        """The tracker's run, task or client."""
        return self._shows.opened

    @force_init_env
    def add_config(self, config: Any, **kwargs: Any) -> None:
        """Show the config of the run."""
        self._shows.add_config(config)

    @force_init_env
    def add_image(self, name: str, image: Any, step: int = 0, **kwargs: Any) -> None:
        """Show an image."""
        self._shows.add_image(name, as_uint8_image(image), step)

    @force_init_env
    def add_scalar(self, name: str, value: Any, step: int = 0, **kwargs: Any) -> None:
        """Show one value."""
        self.add_scalars({name: value}, step)

    @force_init_env
    def add_scalars(
        self, scalar_dict: dict[str, Any], step: int = 0, file_path: str | None = None, **kwargs: Any
    ) -> None:
        """Show values that belong to one step."""
        step = scalar_dict.get("step", step)
        values = {name: as_float(value) for name, value in scalar_dict.items() if name != "step"}
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self._shows.add_scalars(numbers, step)

    def close(self) -> None:
        """Close the tracker, if it was opened."""
        if self._env_initialized:
            self._shows.close()


@VISBACKENDS.register_module()
class WandbVisBackend(TrackerBackend):
    """Weights & Biases, by `lockstep.visualization.WandbVisualizer`.

    Args:
        save_dir: the folder of wandb's files.
        init_kwargs: arguments of `wandb.init`.
        define_metric_cfg: by name of a metric, its `summary`; or a list of dicts of arguments of `wandb.define_metric`.
        commit: from MMEngine; has no effect.
        log_code_name: the name under which the code of the working directory is saved; by default it is not.
        watch_kwargs: arguments of `wandb.watch`, which `add_graph` calls.
    """

    tracker = lockstep.visualization.WandbVisualizer

    def __init__(
        self,
        save_dir: str | None = None,
        init_kwargs: Mapping[str, Any] | None = None,
        define_metric_cfg: Mapping[str, Any] | list[Any] | None = None,
        commit: bool | None = True,
        log_code_name: str | None = None,
        watch_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(save_dir, init_kwargs=init_kwargs)
        self._define_metric_cfg = define_metric_cfg
        self._log_code_name = log_code_name
        self._watch_kwargs = dict(watch_kwargs or {})

    def _init_env(self) -> None:
        super()._init_env()
        import wandb

        metrics = self._define_metric_cfg or []
        if isinstance(metrics, Mapping):
            metrics = [{"name": name, "summary": summary} for name, summary in metrics.items()]
        for metric in metrics:
            wandb.define_metric(**metric)

    @property
    @force_init_env
    def experiment(self) -> Any:
        """The module `wandb`, whose run has begun."""
        import wandb

        return wandb

    @force_init_env
    def add_config(self, config: Any, **kwargs: Any) -> None:
        """Show the config of the run, and save the code if asked to."""
        super().add_config(config)
        if self._log_code_name is not None:
            self.experiment.run.log_code(name=self._log_code_name)

    @force_init_env
    def add_graph(self, model: Any, data_batch: Sequence[Any], **kwargs: Any) -> None:
        """Let wandb watch the model's gradients."""
        self.experiment.watch(model, **self._watch_kwargs)


@VISBACKENDS.register_module()
class MLflowVisBackend(TrackerBackend):
    """MLflow, by `lockstep.visualization.MLflowVisualizer`, whose arguments it takes."""

    tracker = lockstep.visualization.MLflowVisualizer


@VISBACKENDS.register_module()
class ClearMLVisBackend(TrackerBackend):
    """ClearML, by `lockstep.visualization.ClearMLVisualizer`, whose arguments it takes."""

    tracker = lockstep.visualization.ClearMLVisualizer


@VISBACKENDS.register_module()
class NeptuneVisBackend(TrackerBackend):
    """Refused: Neptune's hosted service ended in March 2026.

    Raises:
        ConfigError: always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(
            "`NeptuneVisBackend` is not there: Neptune's service ended in March 2026. Use another one, such as "
            "MLflowVisBackend, or leave it out"
        )


@VISBACKENDS.register_module()
class DVCLiveVisBackend(TrackerBackend):
    """DVCLive, by `lockstep.visualization.DVCLiveVisualizer`, whose arguments it takes."""

    tracker = lockstep.visualization.DVCLiveVisualizer


@VISBACKENDS.register_module()
class AimVisBackend(TrackerBackend):
    """Aim, by `lockstep.visualization.AimVisualizer`, whose arguments it takes."""

    tracker = lockstep.visualization.AimVisualizer
