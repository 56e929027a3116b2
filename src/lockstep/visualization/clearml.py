"""Scalars, images, texts and the config in ClearML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.config.source_form import plain_data
from lockstep.registry import VISUALIZERS
from lockstep.visualization.files import as_picture
from lockstep.visualization.library import LibraryVisualizer, with_suffix


@VISUALIZERS.register_module(name=["ClearMLVisualizer", "ClearMLVisBackend"])
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

    def __init__(
        self,
        init_kwargs: Mapping[str, Any] | None = None,
        artifact_suffix: str | Sequence[str] = (),
        save_dir: str | Path | None = None,
        *,
        offline: bool = False,
    ) -> None:
        super().__init__(init_kwargs, save_dir)
        self._artifact_suffix = artifact_suffix
        self._offline = offline
        self._run_dir = Path()

    def open(self, run_dir: Path) -> None:
        """Start a task."""
        from clearml import Task

        # ClearML 2.1 reports from a fork of the training process, whatever threads and devices that has. The fork holds
        # the pipes of programs that a thread of ClearML starts in the meantime, and close() then waits for minutes.
        Task._report_subprocess_enabled = False
        if self._offline:
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
        logger = self.opened.get_logger()
        logger.report_image(title, series, iteration=step, image=as_picture(image).numpy())

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
        for file in with_suffix(self._run_dir, self._artifact_suffix):
            task.upload_artifact(file.name, file)
        task.close()
        if failed:
            task.mark_failed(force=True)  # close() has just marked it as completed


def _plot(name: str) -> tuple[str, str]:
    """Return the title of a plot and the name of its series."""
    title, _, series = name.partition("/")
    return title, series or title
