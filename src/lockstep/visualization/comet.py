"""Scalars, images, texts and the config in Comet."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.config.source_form import plain_data
from lockstep.registry import VISUALIZERS
from lockstep.visualization.files import as_picture, png_bytes
from lockstep.visualization.library import LibraryVisualizer


@VISUALIZERS.register_module(name=["CometVisualizer", "CometVisBackend"])
class CometVisualizer(LibraryVisualizer):
    """Logs to a Comet experiment.

    Comet's own logging of metrics, parameters, models and terminal output, which changes functions of torch and of the
    terminal, is off unless `experiment_config` turns it on.

    Args:
        init_kwargs: arguments of `comet_ml.start`, for example `dict(workspace="me", online=False)`; its
            `experiment_config` may be a dict. By default the project has the name of the work_dir, and the experiment
            that of the run's folder.
        save_dir: the folder of the archive that an experiment with `online=False` leaves, by default `comet/` in the
            run's folder. `comet upload` sends it.
    """

    package, extra = "comet_ml", "comet"

    def open(self, run_dir: Path) -> None:
        """Start an experiment."""
        import comet_ml

        arguments = {"project_name": run_dir.resolve().parent.name, **self._init_kwargs}
        given = arguments.pop("experiment_config", None)
        if given is None or isinstance(given, Mapping):
            defaults = {
                "name": run_dir.name,
                "offline_directory": str(self._save_dir or run_dir / "comet"),
                "parse_args": False,
                "log_graph": False,
                "auto_metric_logging": False,
                "auto_param_logging": False,
                "auto_output_logging": False,
            }
            given = comet_ml.ExperimentConfig(**{**defaults, **(given or {})})
        self._opened = comet_ml.start(**arguments, experiment_config=given)

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Log values as metrics."""
        values = {name: float(value) for name, value in scalar_dict.items()}
        self.opened.log_metrics(values, step=step)

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Log an image."""
        file = BytesIO(png_bytes(as_picture(image)))
        self.opened.log_image(file, name=name, step=step)

    def add_text(self, name: str, text: str, step: int = 0) -> None:
        """Log a text, with its name as metadata."""
        self.opened.log_text(text, step=step, metadata={"name": name})

    def add_config(self, config: Config) -> None:
        """Log each value of the config as a parameter."""
        self.opened.log_parameters(plain_data(config), nested_support=True)

    def _end(self, experiment: Any, *, failed: bool) -> None:
        experiment.log_other("status", "failed" if failed else "finished")
        experiment.end()
