"""Scalars, images, texts and the config in experiment trackers: a class for each, which imports its library late."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from html import escape
from importlib import import_module
from io import BytesIO, StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lockstep.config import Config
from lockstep.config.dictionary import leaves
from lockstep.config.source_form import plain_data
from lockstep.logging.sinks import placed
from lockstep.registry import VISUALIZERS
from lockstep.visualization.files import as_picture, png_bytes
from lockstep.visualization.library import LibraryVisualizer, with_suffix

_STEP = "global_step"
_MOST_OF_MLFLOW = 250  # characters of a name in MLflow (3.17)


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
        metrics = [Metric(_name_in_mlflow(name), float(value), now_ms, step) for name, value in scalar_dict.items()]
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
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        client = self.opened
        client.log_text(self._run_id, config.pretty_text, "config.py")
        values = {_name_in_mlflow(key): str(value)[:MAX_PARAM_VAL_LENGTH] for key, value in leaves(plain_data(config))}
        client.log_batch(self._run_id, params=[Param(key, value) for key, value in values.items()])

    def _end(self, client: Any, *, failed: bool) -> None:
        client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def _name_in_mlflow(name: str) -> str:
    """Return a name with `_` for what MLflow does not allow in it, for which it would refuse all values of a call.

    Of a long one it is the end. A name is also a path, whose parts must not be empty, `.`, or begin with `..`.
    """
    parts = re.sub(r"[^\w\-. :/]", "_", name).split("/")
    path = "/".join(re.sub(r"^(\.?|\.\..*)$", "_", part) for part in parts)
    return path if len(path) <= _MOST_OF_MLFLOW else path[-_MOST_OF_MLFLOW:].lstrip("./")


@VISUALIZERS.register_module(name=["WandbVisualizer", "WandbVisBackend"])
class WandbVisualizer(LibraryVisualizer):
    """Logs to a run of Weights & Biases.

    The steps are values named `global_step`, over which all others are plotted: W&B's own steps must never decrease,
    and it would ignore a record that is written after a hook has logged a later step.

    Args:
        init_kwargs: arguments of `wandb.init`, for example `dict(project="digits", mode="offline")`. By default the
            project has the name of the work_dir, and the run that of its folder.
        save_dir: where wandb keeps its files, by default the run's folder.
    """

    package = "wandb"

    def open(self, run_dir: Path) -> None:
        """Start a run of Weights & Biases."""
        self._init(run_dir, dir=str(self._save_dir or run_dir))
        self._opened.define_metric("*", step_metric=_STEP)

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Log values."""
        self._log(self.opened, scalar_dict, step)

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Log an image."""
        self._log(self.opened, {name: import_module(self.package).Image(as_picture(image).numpy())}, step)

    def add_text(self, name: str, text: str, step: int = 0) -> None:
        """Log a text."""
        self._log(self.opened, {name: self._as_text(text)}, step)

    def add_config(self, config: Config) -> None:
        """Log the values of the config, in place of others that a resumed run of W&B, or its own `config`, has."""
        self.opened.config.update(plain_data(config), allow_val_change=True)

    def _log(self, run: Any, values: Mapping[str, Any], step: int) -> None:
        run.log(placed({_STEP: step}, values))

    def _as_text(self, text: str) -> Any:
        return import_module(self.package).Html(f"<pre>{escape(text)}</pre>")

    def _end(self, run: Any, *, failed: bool) -> None:
        run.finish(exit_code=int(failed))

    def _init(self, run_dir: Path, **defaults: Any) -> None:
        names = {"project": run_dir.resolve().parent.name, "name": run_dir.name}
        self._opened = import_module(self.package).init(**{**names, **defaults, **self._init_kwargs})


@VISUALIZERS.register_module()
class TrackioVisualizer(WandbVisualizer):
    """Logs to a run of Trackio, which needs no account: `trackio show --project NAME` shows it.

    Args:
        init_kwargs: arguments of `trackio.init`, for example `dict(space_id="me/digits")`. By default the project has
            the name of the work_dir, and the run that of its folder. Where Trackio keeps its files is said by the
            environment variable `TRACKIO_DIR`.
    """

    package = "trackio"

    def __init__(self, init_kwargs: Mapping[str, Any] | None = None) -> None:
        super().__init__(init_kwargs)

    def open(self, run_dir: Path) -> None:
        """Start a run of Trackio."""
        self._init(run_dir)

    def add_config(self, config: Config) -> None:
        """Log the values of the config."""
        self.opened.config.update(plain_data(config))

    def _log(self, run: Any, values: Mapping[str, Any], step: int) -> None:
        run.log(dict(values), step=step)

    def _as_text(self, text: str) -> Any:
        return import_module(self.package).Markdown(text)

    def _end(self, run: Any, *, failed: bool) -> None:
        if failed:
            run.alert("the training failed")
        run.finish()


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
        self.opened.log_metrics({name: float(value) for name, value in scalar_dict.items()}, step=step)

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Log an image."""
        self.opened.log_image(BytesIO(png_bytes(as_picture(image))), name=name, step=step)

    def add_text(self, name: str, text: str, step: int = 0) -> None:
        """Log a text, with its name as metadata."""
        self.opened.log_text(text, step=step, metadata={"name": name})

    def add_config(self, config: Config) -> None:
        """Log each value of the config as a parameter."""
        self.opened.log_parameters(plain_data(config), nested_support=True)

    def _end(self, experiment: Any, *, failed: bool) -> None:
        experiment.log_other("status", "failed" if failed else "finished")
        experiment.end()


@VISUALIZERS.register_module(name=["AimVisualizer", "AimVisBackend"])
class AimVisualizer(LibraryVisualizer):
    """Tracks a run in an Aim repository.

    Args:
        init_kwargs: arguments of `aim.Run`, for example `dict(repo="aim://server:53800")`. By default the experiment
            has the name of the work_dir, and the output of the terminal, which a run logs itself, is not captured.
        save_dir: the folder of the repository, `.aim`; by default the work_dir, shared by all its runs. Show it with
            `aim up --repo`.
    """

    package = "aim"

    def open(self, run_dir: Path) -> None:
        """Start an Aim run with the name of the run's folder."""
        from aim import Run

        work_dir = run_dir.resolve().parent
        defaults = {
            "repo": str(work_dir if self._save_dir is None else self._save_dir),
            "experiment": work_dir.name,
            "capture_terminal_logs": False,
        }
        self._opened = Run(**{**defaults, **self._init_kwargs})
        self._opened.name = run_dir.name

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Track values."""
        run = self.opened
        for name, value in scalar_dict.items():
            run.track(float(value), name=name, step=step)

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Track an image."""
        self.opened.track(import_module("aim").Image(as_picture(image).numpy()), name=name, step=step)

    def add_text(self, name: str, text: str, step: int = 0) -> None:
        """Track a text."""
        self.opened.track(import_module("aim").Text(text), name=name, step=step)

    def add_config(self, config: Config) -> None:
        """Store the config as the run's `hparams`."""
        self.opened["hparams"] = plain_data(config)

    def _end(self, run: Any, *, failed: bool) -> None:
        run["status"] = "failed" if failed else "finished"
        run.close()


@VISUALIZERS.register_module(name=["ClearMLVisualizer", "ClearMLVisBackend"])
@dataclass(eq=False, repr=False)
class ClearMLVisualizer(LibraryVisualizer):
    """Reports to a task of ClearML.

    ClearML's own recording of frameworks and command lines, which changes their functions, is off unless `init_kwargs`
    turn it on. It reports from a thread, not from a fork of this process.

    Args:
        init_kwargs: arguments of `clearml.Task.init`, for example `dict(tags=["small"])`. By default the project has
            the name of the work_dir, and a new task that of the run's folder.
        artifact_suffix: files of the run's folder that end so are uploaded at the end, such as `(".py", ".json")`; by
            default none.
        save_dir: from MMEngine; has no effect. Offline, ClearML writes to `~/.clearml/cache/offline`, or below the
            folder of the environment variable `CLEARML_CACHE_DIR`.
        offline: let ClearML keep everything in files from now on in this process, as its environment variable
            `CLEARML_OFFLINE_MODE=1` does. `Task.import_offline_session` sends them.

    **Cost**: closing waits for ClearML's analysis of the repository and of the packages that are imported.
    """

    package = "clearml"

    init_kwargs: Mapping[str, Any] | None = None
    artifact_suffix: str | Sequence[str] = ()
    save_dir: str | Path | None = None
    _: KW_ONLY
    offline: bool = False

    def __post_init__(self) -> None:
        super().__init__(self.init_kwargs)
        self._run_dir = Path()

    def open(self, run_dir: Path) -> None:
        """Start a task."""
        from clearml import Task

        # ClearML 2.1 reports from a fork of the training process, whatever threads and devices that has. The fork holds
        # the pipes of programs that a thread of ClearML starts in the meantime, and close() then waits for minutes.
        Task._report_subprocess_enabled = False
        if self.offline:
            Task.set_offline(True)
        self._run_dir = run_dir
        defaults = {
            "project_name": run_dir.resolve().parent.name,
            "task_name": run_dir.name,
            "reuse_last_task_id": False,
            "auto_connect_arg_parser": False,
            "auto_connect_frameworks": False,
        }
        self._opened = Task.init(**{**defaults, **self._init_kwargs})

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Report values: `train/loss` is the series `loss` in the plot `train`."""
        logger = self.opened.get_logger()
        for name, value in scalar_dict.items():
            title, series = _plot(name)
            logger.report_scalar(title, series, value=float(value), iteration=step)

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Report an image, which ClearML compresses as JPEG."""
        title, series = _plot(name)
        self.opened.get_logger().report_image(title, series, iteration=step, image=as_picture(image).numpy())

    def add_text(self, name: str, text: str, step: int = 0) -> None:
        """Report a text as a file, beside the images."""
        title, series = _plot(name)
        stream = StringIO(text)
        self.opened.get_logger().report_media(title, series, iteration=step, stream=stream, file_extension=".txt")

    def add_config(self, config: Config) -> None:
        """Store the config as the task's configuration object `config`."""
        self.opened.connect_configuration(plain_data(config), name="config")

    def _end(self, task: Any, *, failed: bool) -> None:
        if failed:
            task.add_tags(["failed"])  # also in the files that ClearML writes offline, which hold no status
        for file in with_suffix(self._run_dir, self.artifact_suffix):
            task.upload_artifact(file.name, file)
        task.close()
        if failed:
            task.mark_failed(force=True)  # close() has just marked it as completed


def _plot(name: str) -> tuple[str, str]:
    """Return the title of a plot and the name of its series."""
    title, _, series = name.partition("/")
    return title, series or title


@VISUALIZERS.register_module(name=["DVCLiveVisualizer", "DVCLiveVisBackend"])
@dataclass(eq=False, repr=False)
class DVCLiveVisualizer(LibraryVisualizer):
    """Writes the files of DVCLive: `metrics.json`, `params.yaml` and `plots/`.

    Args:
        save_dir: the folder of the files, by default `dvclive/` in the run's folder. DVCLive removes its files that it
            finds in a given folder.
        artifact_suffix: files of the run's folder that end so are added to DVC at the end, such as `(".py", ".json")`;
            by default none.
        init_kwargs: arguments of `dvclive.Live`. By default it saves no DVC experiment and writes no `dvc.yaml`, that
            is, it changes nothing but its folder; `dict(save_dvc_exp=True, dvcyaml="dvc.yaml")` are DVCLive's own
            defaults. In a Git repository without DVC, DVCLive adds a folder `.dvc`.
    """

    package = "dvclive"

    save_dir: str | Path | None = None
    artifact_suffix: str | Sequence[str] = ()
    init_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__init__(self.init_kwargs, self.save_dir)
        self._run_dir = Path()

    def open(self, run_dir: Path) -> None:
        """Create the folder; what the same run has written to its own folder is continued."""
        from dvclive import Live

        self._run_dir = run_dir
        default = run_dir / "dvclive"
        folder, resume = (default, default.exists()) if self._save_dir is None else (self._save_dir, False)
        defaults = {"dir": str(folder), "resume": resume, "save_dvc_exp": False, "dvcyaml": None}
        self._opened = Live(**{**defaults, **self._init_kwargs})

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        """Append each value to its table, `plots/metrics/NAME.tsv`, and write the last ones to `metrics.json`."""
        live = self.opened
        live.step = step
        for name, value in scalar_dict.items():
            live.log_metric(name, float(value))
        live.make_summary()

    def add_image(self, name: str, image: Any, step: int = 0) -> None:
        """Write an image, `plots/images/NAME/STEP.png`."""
        self.opened.log_image(f"{name}/{step}.png", as_picture(image).numpy())

    def add_config(self, config: Config) -> None:
        """Write the config to `params.yaml`."""
        self.opened.log_params(plain_data(config))

    def _end(self, live: Any, *, failed: bool) -> None:
        live.summary["status"] = "failed" if failed else "finished"  # in metrics.json
        for file in with_suffix(self._run_dir, self.artifact_suffix):
            live.log_artifact(str(file))
        live.end()
