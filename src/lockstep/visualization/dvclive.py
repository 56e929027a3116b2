"""Scalars, images and the config in files of DVCLive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.config.source_form import plain_data
from lockstep.registry import VISUALIZERS
from lockstep.visualization.files import as_picture
from lockstep.visualization.library import LibraryVisualizer, with_suffix


@VISUALIZERS.register_module(name=["DVCLiveVisualizer", "DVCLiveVisBackend"])
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

    def __init__(
        self,
        save_dir: str | Path | None = None,
        artifact_suffix: str | Sequence[str] = (),
        init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(init_kwargs, save_dir)
        self._artifact_suffix = artifact_suffix
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
        for file in with_suffix(self._run_dir, self._artifact_suffix):
            live.log_artifact(str(file))
        live.end()
