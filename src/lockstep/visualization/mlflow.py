"""Scalars, images, texts and the config in MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lockstep.config import Config
from lockstep.config.dictionary import leaves
from lockstep.config.source_form import plain_data
from lockstep.registry import VISUALIZERS
from lockstep.visualization.files import as_picture, png_bytes
from lockstep.visualization.library import LibraryVisualizer

_PARAMS_PER_CALL = 100  # MLflow's own limit
_LONGEST_PARAM = 500


@VISUALIZERS.register_module(name=["MLflowVisualizer", "MLflowVisBackend"])
@dataclass(eq=False, repr=False)
class MLflowVisualizer(LibraryVisualizer):
    """Logs to an MLflow experiment through its own client: MLflow's active run is not affected.

    Args:
        tracking_uri: MLflow's store or server, by default the file `mlflow.db` in `save_dir`; show it with `mlflow ui
            --backend-store-uri sqlite:///.../mlflow.db`.
        exp_name: the experiment, by default the name of the work_dir. It is created if it does not exist.
        run_name: the name of the MLflow run, by default that of the run's folder.
        tags: tags of the run.
        save_dir: the folder of `mlflow.db` and `mlartifacts/`; by default the work_dir, shared by all its runs.
    """

    package = "mlflow"

    tracking_uri: str | None = None
    exp_name: str | None = None
    run_name: str | None = None
    tags: Mapping[str, str] | None = None
    save_dir: str | Path | None = None

    def __post_init__(self) -> None:
        super().__init__()
        self._run_id = ""

    def open(self, run_dir: Path) -> None:
        """Start an MLflow run."""
        from mlflow import MlflowClient

        work_dir = run_dir.resolve().parent
        folder = work_dir if self.save_dir is None else Path(self.save_dir).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        client = MlflowClient(tracking_uri=self.tracking_uri or f"sqlite:///{folder / 'mlflow.db'}")
        name = self.exp_name or work_dir.name
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            # A server knows where its artifacts go; those of a file are stored next to it.
            artifacts = (folder / "mlartifacts").as_uri() if self.tracking_uri is None else None
            experiment_id = client.create_experiment(name, artifact_location=artifacts)
        else:
            experiment_id = experiment.experiment_id
        run = client.create_run(experiment_id, run_name=self.run_name or run_dir.name, tags=dict(self.tags or {}))
        self._opened, self._run_id = client, run.info.run_id

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Log values as metrics."""
        from mlflow.entities import Metric

        now_ms = time.time_ns() // 1_000_000
        metrics = [Metric(name, float(value), now_ms, step) for name, value in scalar_dict.items()]
        self.opened.log_batch(self._run_id, metrics=metrics)

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Log an image as an artifact, `images/NAME_STEP.png`."""
        client = self.opened
        directory, _, stem = f"images/{name}".rpartition("/")
        with TemporaryDirectory() as folder:
            file = Path(folder, f"{stem}_{step}.png")
            file.write_bytes(png_bytes(as_picture(image)))
            client.log_artifact(self._run_id, str(file), directory)

    def add_text(self, name: str, text: str, step: int = 0) -> None:
        """Log a text as an artifact, `texts/NAME_STEP.txt`."""
        self.opened.log_text(self._run_id, text, f"texts/{name}_{step}.txt")

    def add_config(self, config: Config) -> None:
        """Log the config as an artifact, and each value of it as a parameter."""
        from mlflow.entities import Param

        client = self.opened
        client.log_text(self._run_id, config.pretty_text, "config.py")
        params = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in leaves(plain_data(config))]
        for begin in range(0, len(params), _PARAMS_PER_CALL):
            client.log_batch(self._run_id, params=params[begin : begin + _PARAMS_PER_CALL])

    def _end(self, client: Any, *, failed: bool) -> None:
        client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")
