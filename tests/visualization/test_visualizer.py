from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.config import Config
from lockstep.errors import RegistryError
from lockstep.registry import VISUALIZERS
from lockstep.visualization import (
    LocalVisualizer,
    TensorBoardVisualizer,
    Visualizer,
    Visualizers,
    build_visualizers,
)


class Board:
    """Has the one ability that every visualizer must have."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, float], int]] = []

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        self.seen.append((scalar_dict, step))


class Breaking(Board):
    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def open(self, run_dir: Path) -> None:
        raise OSError("nobody answers")

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        raise OSError("the line is dead")

    def add_image(self, name: str, image: Tensor, step: int = 0) -> None:
        raise ValueError

    def add_text(self, name: str, text: str, step: int = 0) -> None:
        raise ValueError

    def add_config(self, config: Config) -> None:
        raise OSError("the line is dead")

    def close(self) -> None:
        self.closed = True
        raise OSError("the line is dead")


def test_each_gets_what_it_can_show(tmp_path: Path):
    board = Board()
    both = Visualizers([board, {"type": "LocalVisBackend"}])
    both.open(tmp_path)
    both.add_config(Config({"a": 1}))
    both.add_scalar("x", 1.0, step=3)
    both.add_image("grey", torch.zeros(2, 2, dtype=torch.uint8), step=3)
    both.add_text("answer", "forty-two", step=3)
    both.close()
    assert (tmp_path / "texts.jsonl").is_file()
    assert board.seen == [({"x": 1.0}, 3)]
    assert (tmp_path / "scalars.jsonl").read_text() == '{"step": 3, "x": 1.0}\n'
    assert (tmp_path / "images" / "grey_3.png").is_file()


def test_all_are_closed_whatever_becomes_of_one():
    first, second = Breaking(), Breaking()
    with pytest.warns(UserWarning, match="the visualizer Breaking has failed: OSError: the line is dead") as warned:
        Visualizers([first, second]).close()
    assert first.closed
    assert second.closed
    assert len(warned) == 2


def test_a_failure_is_a_warning_once_and_the_others_go_on():
    board = Board()
    both = Visualizers([Breaking(), board])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        both.add_scalars({"x": 1.0}, step=1)
        both.add_scalar("x", 2.0, step=2)
        both.add_config(Config({"a": 1}))
        both.add_image("grey", torch.zeros(2, 2, dtype=torch.uint8))
        both.add_text("answer", "forty-two")
        both.close()
    assert [str(warning.message) for warning in warned] == [
        "the visualizer Breaking has failed: OSError: the line is dead. The run goes on without what it could not "
        "show; further failures of it are not reported"
    ]
    assert warned[0].filename == __file__
    assert board.seen == [({"x": 1.0}, 1), ({"x": 2.0}, 2)]


def test_a_failure_is_a_warning_in_each_run(tmp_path: Path):
    both = Visualizers([Unreachable([0.0])])
    for _ in range(2):
        both.open(tmp_path)
        with pytest.warns(UserWarning, match="Unreachable has failed"):
            both.add_scalars({"x": 1.0})


def test_a_failure_without_a_reason_is_named_by_its_kind():
    with pytest.warns(UserWarning, match=r"has failed: ValueError\. The run"):
        Visualizers([Breaking()]).add_image("grey", torch.zeros(2, 2, dtype=torch.uint8))


def test_an_image_that_none_can_show_is_an_error(tmp_path: Path):
    with pytest.raises(TypeError, match="uint8"):
        Visualizers([LocalVisualizer(tmp_path)]).add_image("grey", torch.zeros(2, 2))


def test_the_error_of_one_that_cannot_open_names_it(tmp_path: Path):
    with pytest.raises(OSError, match="nobody answers") as caught:
        Visualizers([Board(), Breaking()]).open(tmp_path)
    assert caught.value.__notes__ == ["while opening the visualizer Breaking"]


def test_a_folder_for_all_of_them(tmp_path: Path):
    cfg = {
        "type": "Visualizer",
        "vis_backends": [{"type": "LocalVisBackend"}],
        "name": "mine",
        "save_dir": str(tmp_path / "vis"),
    }
    visualizer = VISUALIZERS.build(cfg)
    visualizer.open(tmp_path)
    visualizer.add_scalars({"x": 1.0})
    visualizer.close()
    assert visualizer.name == "mine"
    assert (tmp_path / "vis" / "scalars.jsonl").is_file()


def test_by_default_tensorboard():
    (part,) = build_visualizers(None).parts
    assert isinstance(part, TensorBoardVisualizer)


def test_what_may_be_given():
    board = Board()
    several = Visualizers([board])
    assert build_visualizers(several) is several
    assert build_visualizers(board).parts == [board]
    assert build_visualizers([]).parts == []
    built, given = build_visualizers([{"type": "LocalVisualizer"}, local := LocalVisualizer()]).parts
    assert isinstance(built, LocalVisualizer)
    assert given is local
    of_backends = build_visualizers({"type": "Visualizer", "vis_backends": [board]})
    assert isinstance(of_backends, Visualizer)
    assert of_backends.parts == [board]


@VISUALIZERS.register_module()
class Counting(Visualizer):
    """A visualizer of the user's own, which knows how to show a sample."""

    def add_datasample(self, name: str, data_sample: int, step: int = 0) -> None:
        self.add_scalar(name, float(data_sample), step)


def test_a_class_of_ones_own_keeps_its_methods_and_can_be_had_anywhere():
    board = Board()
    build_visualizers({"type": "Counting", "vis_backends": [board]}).make_current()
    current = Visualizer.get_current_instance()
    assert isinstance(current, Counting)
    current.add_datasample("x", 3, step=2)
    assert board.seen == [({"x": 3.0}, 2)]


def test_the_names_of_files_may_be_others(tmp_path: Path):
    local = LocalVisualizer(img_save_dir="vis_image", scalar_save_file="scalars.json", config_save_file="cfg.py")
    local.open(tmp_path)
    local.add_scalars({"x": 1.0})
    local.add_image("grey", torch.zeros(2, 2, dtype=torch.uint8))
    local.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scalars.json", "vis_image"]


def test_what_may_not():
    for other in (3, Board):
        with pytest.raises(
            TypeError, match=f"`visualizer` must be an object with a method add_scalars, but is {other}"
        ):
            build_visualizers([Board(), other])
    with pytest.raises(RegistryError, match="TensorBoardVisualizer"):
        build_visualizers({"type": "TensorBordVisualizer"})


class Unreachable:
    """Fails when its timeout has passed, until its server answers."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.steps, self.answers = clock, list[int](), False

    def add_scalars(self, scalar_dict: dict[str, float], step: int = 0) -> None:
        self.steps.append(step)
        if not self.answers:
            self.clock[0] += 30.0
            raise OSError("timed out")


def test_a_server_that_does_not_answer_costs_its_timeout_now_and_then(monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]
    monkeypatch.setattr("lockstep.visualization.visualizer.monotonic", lambda: clock[0])
    part = Unreachable(clock)
    shown = Visualizers([part])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(200):
            clock[0] += 10.0
            part.answers = step >= 100
            shown.add_scalars({"loss": 1.0}, step)
    assert len(told) == 1
    assert part.steps == [0, 60, *range(120, 200)]


def test_a_visualizer_that_the_end_of_the_training_has_closed_says_how_to_show_more(tmp_path: Path):
    pytest.importorskip("tensorboard")
    board = Visualizers([TensorBoardVisualizer()])
    board.open(tmp_path)
    board.close()
    with pytest.warns(UserWarning, match="TensorBoardVisualizer shows nothing more: .*inside `with session:`"):
        board.add_scalars({"val/accuracy": 1.0}, 4)
    board.open(tmp_path)
    board.add_scalars({"val/accuracy": 1.0}, 4)
    board.close()
