"""Real trainings with each tracker's own package, offline: what it keeps is read back, and no other machine is called.

All trainings (`train.py`, on one rank, and with Aim on two) start together, because they also wait. Calls of other
machines are seen in Python, not in processes that a package starts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

SCRIPT = str(Path(__file__).with_name("train.py"))
VISUALIZERS: dict[str, dict[str, Any]] = {
    "comet": {
        "type": "CometVisBackend",
        # The details of the machine include its address, for which Comet asks a name server and the cloud.
        "init_kwargs": {"online": False, "experiment_config": {"tags": ["small"], "log_env_details": False}},
    },
    "aim": {"type": "AimVisBackend"},
    "clearml": {
        "type": "ClearMLVisBackend",
        "offline": True,
        "init_kwargs": {"tags": ["small"], "auto_resource_monitoring": False},
        "artifact_suffix": [".py"],
    },
    "dvclive": {"type": "DVCLiveVisBackend"},
    "trackio": {"type": "TrackioVisualizer"},
}
# Even offline, ClearML asks whether there is a newer version of it.
ASKED = {"clearml": {"updates.clear.ml"}}


@dataclass
class Training:
    folder: Path
    process: subprocess.Popen[str]

    def wait(self) -> Training:
        output, _ = self.process.communicate(timeout=300)
        assert self.process.returncode == 0, output
        assert "has failed" not in output, output
        assert output.count("ended by a bad batch") in (1, 2)
        return self

    def runs(self) -> list[Path]:
        return sorted((self.folder / "work_dirs" / "digits").glob("*_20*"))

    def asked(self) -> set[str]:
        file = self.folder / "network.txt"
        return set(file.read_text().split()) if file.exists() else set()


@pytest.fixture(scope="session")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Training]]:
    started = {}
    for name, visualizer in VISUALIZERS.items():
        job = [*(["-m", "lockstep", "launch", "--nproc", "2"] if name == "aim" else []), SCRIPT, json.dumps(visualizer)]
        folder = tmp_path_factory.mktemp(name)
        # Nothing of a user's account, and no user's folder to write to.
        private = ("COMET_", "CLEARML_", "AIM_", "__AIM", "DVC", "TRACKIO_")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(private)}
        environment |= {
            "HOME": str(folder),
            "CLEARML_CACHE_DIR": str(folder / "clearml"),
            "COMET_ERROR_TRACKING_ENABLE": "false",  # Comet reports its own warnings and errors to its makers
            "DVC_NO_ANALYTICS": "1",
            "TRACKIO_DIR": str(folder / "trackio"),
        }
        process = subprocess.Popen(
            [sys.executable, *job],
            cwd=folder,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it can be ended together with its ranks
        )
        started[name] = Training(folder, process)
    yield started
    for training in started.values():
        if training.process.poll() is None:
            os.killpg(training.process.pid, signal.SIGKILL)
            training.process.communicate()


def losses(run: Path) -> dict[int, float]:
    """What the run itself has recorded."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["iter"]: record["loss"] for record in records if record["mode"] == "train"}


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("name", VISUALIZERS)
def test_two_runs_are_left_and_no_other_machine_is_called(name: str, trainings: dict[str, Training]):
    training = trainings[name].wait()
    first, second = training.runs()
    assert list(losses(first)) == [2, 4]
    assert list(losses(second)) == [2]
    assert training.asked() <= ASKED.get(name, set())


def test_comet(trainings: dict[str, Training]):
    for run, status in zip(trainings["comet"].wait().runs(), ("finished", "failed"), strict=True):
        (archive,) = (run / "comet").glob("*.zip")
        with ZipFile(archive) as files:
            experiment = json.loads(files.read("experiment.json"))
            messages = lines_of(files.read("messages.json").decode())
            images = [m["payload"] for m in messages if m["payload"].get("upload_type") == "visualization"]
            assert files.read(images[0]["file_path"]).startswith(b"\x89PNG")
            (text,) = (m["payload"] for m in messages if m["payload"].get("upload_type") == "text-sample")
            assert files.read(text["file_path"]) == b"forty-two"
        assert (text["metadata"], text["additional_params"]["step"]) == ({"name": "digits/answer"}, 2)
        assert (experiment["project_name"], experiment["tags"]) == ("digits", ["small"])
        metrics = [m["payload"]["metric"] for m in messages if m["type"] == "metric_msg"]
        shown = {m["step"]: m["metricValue"] for m in metrics if m["metricName"] == "train/loss"}
        assert shown == pytest.approx(losses(run))
        assert [(i["additional_params"]["figName"], i["additional_params"]["step"]) for i in images] == [
            ("digits/seven", 2)
        ]
        # A list of values is in another field than a single value.
        parameters = [m["payload"] for m in messages if m["type"] == "parameter_msg"]
        given = [p for p in (p.get("param") or p["params"] for p in parameters) if p["source"] == "manual"]
        assert {p["paramName"]: p["paramValue"] for p in given} == {
            "model|type": "Net",
            "model|depths": [2, 4],
            "seed": 0,
        }
        others = {m["payload"]["key"]: m["payload"]["value"] for m in messages if m["type"] == "log_other"}
        assert (others["Name"], others["status"]) == (run.name, status)


def read_aim(training: Training) -> dict[str, dict[str, Any]]:
    command = [sys.executable, str(Path(__file__).with_name("read_aim.py")), "work_dirs/digits"]
    done = subprocess.run(command, cwd=training.folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_aim_on_two_ranks(trainings: dict[str, Training]):
    training = trainings["aim"].wait()
    kept = read_aim(training)
    assert sorted(kept) == [run.name for run in training.runs()]
    for folder, status in zip(training.runs(), ("finished", "failed"), strict=True):
        run = kept[folder.name]
        assert (run["experiment"], run["status"], run["active"]) == ("digits", status, False)
        assert run["hparams"] == {"model": {"type": "Net", "depths": [2, 4]}, "seed": 0}
        assert dict(run["losses"]) == pytest.approx(losses(folder))
        assert run["images"] == [[2, 5, 4]]
        assert run["texts"] == [[2, "forty-two"]]


def test_clearml(trainings: dict[str, Training]):
    training = trainings["clearml"].wait()
    tasks = {}
    for file in (training.folder / "clearml" / "offline").glob("*/task.json"):
        task = json.loads(file.read_text())
        tasks[task["name"]] = task, file.parent
    for run, tags in zip(training.runs(), (["small"], ["small", "failed"]), strict=True):
        task, folder = tasks[run.name]
        assert (task["project_name"], sorted(task["tags"])) == ("digits", sorted(tags))
        assert "depths = [2, 4]" in task["configuration"]["config"]["value"]
        assert [artifact["key"] for artifact in task["execution"]["artifacts"]] == ["config.py"]
        events = [event for line in (folder / "metrics.jsonl").read_text().splitlines() for event in json.loads(line)]
        named = [event for event in events if (event["metric"], event["variant"]) == ("train", "loss")]
        assert {event["iter"]: event["value"] for event in named} == pytest.approx(losses(run))
        files = {event["variant"]: event for event in events if event["type"] == "training_debug_image"}
        assert [(file["metric"], file["iter"]) for file in files.values()] == [("digits", 2)] * 2
        image, text = files["seven"], files["answer"]
        assert (folder / "data" / text["key"]).read_text() == "forty-two"
        assert (folder / "data" / image["key"]).read_bytes().startswith(b"\xff\xd8")


def test_dvclive(trainings: dict[str, Training]):
    import yaml

    training = trainings["dvclive"].wait()
    for run, status in zip(training.runs(), ("finished", "failed"), strict=True):
        folder = run / "dvclive"
        header, *rows = (folder / "plots" / "metrics" / "train" / "loss.tsv").read_text().splitlines()
        assert header == "step\tloss"
        table = {int(step): float(loss) for step, loss in (row.split("\t") for row in rows)}
        assert table == pytest.approx(losses(run))
        summary = json.loads((folder / "metrics.json").read_text())
        assert (summary["status"], summary["step"]) == (status, max(table))
        assert yaml.safe_load((folder / "params.yaml").read_text()) == {
            "model": {"type": "Net", "depths": [2, 4]},
            "seed": 0,
        }
        assert (folder / "plots" / "images" / "digits" / "seven" / "2.png").read_bytes().startswith(b"\x89PNG")
    # Nothing was written beside the run's folder.
    assert {path.name for path in training.folder.iterdir()} <= {"work_dirs"}


def ask_trackio(training: Training, *words: str) -> dict[str, Any]:
    command = [str(Path(sys.executable).with_name("trackio")), *words, "--project", "digits", "--json"]
    environment = os.environ | {"TRACKIO_DIR": str(training.folder / "trackio")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_trackio(trainings: dict[str, Training]):
    training = trainings["trackio"].wait()
    for run in training.runs():
        values = ask_trackio(training, "get", "metric", "--run", run.name, "--metric", "train/loss")["values"]
        assert {value["step"]: value["value"] for value in values} == pytest.approx(losses(run))
        config = ask_trackio(training, "get", "run", "--run", run.name)["config"]
        assert (config["model"], config["seed"]) == ({"type": "Net", "depths": [2, 4]}, 0)
        (image,) = (training.folder / "trackio" / "media" / "digits" / run.name / "2").glob("*.png")
        assert image.read_bytes().startswith(b"\x89PNG")
    assert b"forty-two" in (training.folder / "trackio" / "digits.db").read_bytes()
    (alert,) = ask_trackio(training, "list", "alerts")["alerts"]
    assert (alert["run"], alert["title"]) == (training.runs()[1].name, "the training failed")


GOES_ON = """
from pathlib import Path
from lockstep.visualization import DVCLiveVisualizer
for step in (1, 2):
    visualizer = DVCLiveVisualizer()
    visualizer.open(Path())
    visualizer.add_scalars({"loss": step / 2}, step)
    visualizer.close()
"""


def test_dvclive_goes_on_where_the_same_run_has_been(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", GOES_ON], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "dvclive" / "plots" / "metrics" / "loss.tsv").read_text() == "step\tloss\n1\t0.5\n2\t1.0\n"
