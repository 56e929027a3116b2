"""Each adapter against its own library: what is shown can be read back.

An adapter is tested wherever its library is installed, and elsewhere says what to install. `make test-trackers` tests
those of `TRACKERS`.
"""

from __future__ import annotations

import posixpath
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config import Config
from lockstep.errors import ConfigError
from lockstep.registry import VISUALIZERS
from lockstep.visualization import ShowsScalars
from lockstep.visualization.library import is_installed, with_suffix
from lockstep.visualization.trackers import _name_in_mlflow

LIBRARIES = {"TensorBoardVisualizer": "tensorboard", "MLflowVisualizer": "mlflow", "WandbVisualizer": "wandb"}
TRACKERS = {
    "CometVisualizer": "comet_ml",
    "AimVisualizer": "aim",
    "ClearMLVisualizer": "clearml",
    "DVCLiveVisualizer": "dvclive",
    "TrackioVisualizer": "trackio",
}
INSTALLED = [name for name, library in LIBRARIES.items() if is_installed(library)]
ARGUMENTS = {"WandbVisualizer": {"init_kwargs": {"mode": "offline", "config": {"seed": 1}}}}
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
TEXT = "<b> *forty-two*\n# \u00e9"
PICTURE = torch.arange(60, dtype=torch.uint8).reshape(4, 5, 3)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    folder = tmp_path / "digits" / "first_run"
    folder.mkdir(parents=True)
    return folder


def build(name: str) -> Any:
    visualizer = VISUALIZERS.build({"type": name, **ARGUMENTS.get(name, {})})
    assert isinstance(visualizer, ShowsScalars)
    return visualizer


def show_everything(visualizer: Any, run_dir: Path) -> None:
    visualizer.open(run_dir)
    visualizer.add_config(
        Config({"model": {"type": "Net", "depths": [2, 4]}, "seed": 0, "rates": {"head.*": 2}, "note": "n" * 9000})
    )
    visualizer.add_scalars({"train/loss": 2.0, "train/lr": 0.5}, step=10)
    visualizer.add_scalars({"train/loss": 1.0, "val/accuracy": 75.0, "val/recall@5": 0.5}, step=20)
    visualizer.add_image("digits/seven", PICTURE, step=20)
    visualizer.add_text("digits/answer", TEXT, step=20)
    visualizer.add_scalars({"train/late": 3.0}, step=15)  # as LoggerHook does, which rank 0 reads later
    visualizer.close()
    visualizer.close()


def read_tensorboard(run_dir: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(10, 2.0), (20, 1.0)]
    assert [(event.step, event.value) for event in events.Scalars("val/accuracy")] == [(20, 75.0)]
    assert [(event.step, event.value) for event in events.Scalars("val/recall@5")] == [(20, 0.5)]
    assert [(event.step, event.value) for event in events.Scalars("train/late")] == [(15, 3.0)]
    (image,) = events.Images("digits/seven")
    assert (image.step, image.width, image.height) == (20, 5, 4)
    (text,) = events.Tensors("config/text_summary")
    assert b"depths=[2, 4]" in text.tensor_proto.string_val[0]
    (text,) = events.Tensors("digits/answer/text_summary")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    assert (text.step, lines) == (20, [f"    {line}" for line in TEXT.splitlines()])


def read_mlflow(run_dir: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "first_run"
    assert run.info.status == "FINISHED"
    assert run.data.params == {
        "model.type": "Net",
        "model.depths.0": "2",
        "model.depths.1": "4",
        "seed": "0",
        "rates.head._": "2",
        "note": "n" * 6000,  # as long as MLflow takes
    }
    assert run.data.metrics["val/recall_5"] == 0.5
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(10, 2.0), (20, 1.0)]
    (late,) = client.get_metric_history(run.info.run_id, "train/late")
    assert (late.step, late.value) == (15, 3.0)
    assert next((run_dir.parent / "mlartifacts").rglob("seven_20.png")).read_bytes().startswith(b"\x89PNG")
    assert "depths=[2, 4]" in next((run_dir.parent / "mlartifacts").rglob("config.py")).read_text()
    (text,) = (run_dir.parent / "mlartifacts").rglob("texts/digits/answer_20.txt")
    assert text.read_text(encoding="utf-8") == TEXT


def read_wandb(run_dir: Path) -> None:
    import wandb

    wandb.teardown()  # ends the threads that speak to the process behind the library, which writes what is left
    (log,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    kept = log.read_bytes()
    for word in (b"train/loss", b"val/accuracy", b"train/late", b"global_step", b"first_run", b"digits", b"depths"):
        assert word in kept
    assert list(run_dir.glob("wandb/offline-run-*/files/media/images/digits/seven_*.png"))
    (text,) = run_dir.glob("wandb/offline-run-*/files/media/html/digits/answer_*.html")
    assert "<pre>&lt;b&gt; *forty-two*\n# \u00e9</pre>" in text.read_text(encoding="utf-8")


READ = {"TensorBoardVisualizer": read_tensorboard, "MLflowVisualizer": read_mlflow, "WandbVisualizer": read_wandb}


@pytest.mark.filterwarnings("ignore:.*noload:DeprecationWarning")  # of SQLAlchemy, in MLflow
@pytest.mark.parametrize("name", INSTALLED)
def test_what_is_shown_can_be_read_with_its_library(name: str, run_dir: Path):
    show_everything(build(name), run_dir)
    READ[name](run_dir)


@pytest.mark.parametrize("name", [*INSTALLED, "LocalVisualizer"])
def test_unopened_it_holds_nothing_and_shows_nothing(name: str, run_dir: Path):
    visualizer = build(name)
    with pytest.raises(RuntimeError, match=rf"{name} must be opened"):
        visualizer.add_scalars({"x": 1.0})
    visualizer.close()
    assert list(run_dir.iterdir()) == []


@pytest.mark.parametrize(("name", "library"), [*LIBRARIES.items(), *TRACKERS.items()])
def test_a_missing_library_is_named_with_its_extra(name: str, library: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, library, None)  # keeps it from being found
    with pytest.raises(ConfigError, match=rf"{name} needs the package `{library}`.*lockstep-engine\[") as caught:
        build(name)
    extra = str(caught.value).partition("[")[2].partition("]")[0]
    requirements = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"][extra]
    assert library.replace("_", "-") in requirements[0]


@pytest.mark.parametrize("name", TRACKERS)
def test_unopened_a_tracker_holds_nothing(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lockstep.visualization.library.is_installed", lambda _: True)
    tracker = build(name)
    with pytest.raises(RuntimeError, match=rf"{name} must be opened"):
        tracker.add_scalars({"x": 1.0})
    with pytest.raises(RuntimeError, match=rf"{name} must be opened"):
        tracker.add_config(Config({}))
    with pytest.raises(RuntimeError, match=rf"{name} must be opened"):
        tracker.add_image("seven", PICTURE)
    if name != "DVCLiveVisualizer":  # which shows no texts
        with pytest.raises(RuntimeError, match=rf"{name} must be opened"):
            tracker.add_text("answer", TEXT)
    tracker.close()
    assert TRACKERS[name] not in sys.modules


def test_artifacts_are_files_of_the_folder_itself(tmp_path: Path):
    for name in ("b.py", "a.json", "log.txt", "checkpoints/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.name for path in with_suffix(tmp_path, (".py", ".json"))] == ["a.json", "b.py"]
    assert [path.name for path in with_suffix(tmp_path, ".txt")] == ["log.txt"]
    assert with_suffix(tmp_path, ()) == []


@pytest.mark.parametrize(
    ("published", "own"),
    [
        ("LocalVisBackend", "LocalVisualizer"),
        ("TensorboardVisBackend", "TensorBoardVisualizer"),
        ("MLflowVisBackend", "MLflowVisualizer"),
        ("WandbVisBackend", "WandbVisualizer"),
        ("CometVisBackend", "CometVisualizer"),
        ("AimVisBackend", "AimVisualizer"),
        ("ClearMLVisBackend", "ClearMLVisualizer"),
        ("DVCLiveVisBackend", "DVCLiveVisualizer"),
        ("Visualizer", "Visualizers"),
    ],
)
def test_published_names_mean_the_same(published: str, own: str):
    assert VISUALIZERS[published] is VISUALIZERS[own]


def test_a_folder_of_its_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "left_by_a_tracker").mkdir()
    assert not is_installed("left_by_a_tracker")
    (tmp_path / "left_by_a_tracker" / "__init__.py").touch()
    assert is_installed("left_by_a_tracker")


@pytest.mark.parametrize(
    "name", ["a//b", "/a", "a/", "./a", "a/../b", "..a", ".", "", "l" * 300, "p/" + "q/" * 200, "a b.c:d-e/f"]
)
def test_names_are_such_as_mlflow_takes(name):
    taken = _name_in_mlflow(name)
    path = posixpath.normpath(taken)
    assert path == taken  # its own rule
    assert not path.startswith(("..", "/"))
    assert path != "."
    assert len(taken) <= 250
    assert name != "a b.c:d-e/f" or taken == name
