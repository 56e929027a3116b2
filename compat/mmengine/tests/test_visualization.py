"""mmengine.visualization: drawing, feature maps, backends. Expected pixels are those of MMEngine 0.10.7."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

import lockstep.visualization
from mmengine.config import Config
from mmengine.registry import VISBACKENDS, VISUALIZERS
from mmengine.visualization import BaseVisBackend, LocalVisBackend, TensorboardVisBackend, Visualizer
from mmengine.visualization.utils import (
    check_length,
    check_type,
    color_str2rgb,
    color_val_matplotlib,
    convert_overlay_heatmap,
    tensor2ndarray,
    value2list,
)

GREY = np.full((20, 30, 3), 100, dtype=np.uint8)


@pytest.fixture
def canvas() -> Visualizer:
    return Visualizer(image=GREY)


class TestDrawing:
    def test_an_image_comes_back_as_it_was(self, canvas: Visualizer) -> None:
        assert np.array_equal(canvas.get_image(), GREY)
        noise = np.random.default_rng(0).integers(0, 256, (37, 53, 3), dtype=np.uint8)
        canvas.set_image(noise)
        assert np.array_equal(canvas.get_image(), noise)
        assert (canvas.width, canvas.height) == (53, 37)

    def test_a_box(self, canvas: Visualizer) -> None:
        assert canvas.draw_bboxes(torch.tensor([2, 3, 10, 12])) is canvas
        drawn = canvas.get_image()
        assert drawn[3, 2:11].tolist() == [[20, 122, 20]] * 9
        assert drawn[12, 5].tolist() == [20, 122, 20]
        assert drawn[7, 6].tolist() == [100, 100, 100]
        assert drawn[16, 20].tolist() == [100, 100, 100]

    def test_several_boxes_each_in_its_colour(self, canvas: Visualizer) -> None:
        boxes = np.array([[1, 1, 6, 6], [12, 10, 20, 16]])
        canvas.draw_bboxes(boxes, edge_colors=["r", (0, 0, 255)], line_widths=[1, 2], alpha=1.0)
        drawn = canvas.get_image().astype(int)
        assert drawn[1, 3, 0] > drawn[1, 3, 2]
        assert drawn[10, 15].tolist() == [0, 0, 255]

    def test_a_filled_box_and_polygons(self, canvas: Visualizer) -> None:
        canvas.draw_bboxes(torch.tensor([2, 3, 10, 12]), face_colors=(0, 0, 255), alpha=1.0)
        assert canvas.get_image()[7, 6].tolist() == [0, 0, 255]
        triangle = torch.tensor([[15, 2], [28, 2], [15, 15]])
        canvas.draw_polygons([triangle, np.array([[1, 15], [5, 15], [3, 19]])], face_colors="r", alpha=1.0)
        assert canvas.get_image()[5, 18].tolist() == [255, 0, 0]
        assert canvas.get_image()[14, 26].tolist() == [100, 100, 100]

    def test_lines_circles_points_and_texts_leave_marks(self) -> None:
        steps: list[Any] = [
            lambda one: one.draw_lines(torch.tensor([2, 25]), torch.tensor([10, 10]), colors="r"),
            lambda one: one.draw_lines(np.array([[2, 9], [3, 3]]), np.array([[2, 2], [5, 9]]), line_styles=["-", "--"]),
            lambda one: one.draw_circles(torch.tensor([15, 10]), torch.tensor([5]), line_widths=1),
            lambda one: one.draw_circles(np.array([[5, 5], [20, 9]]), np.array([2, 3]), face_colors="b"),
            lambda one: one.draw_points(torch.tensor([[3, 4], [9, 9]]), colors=["r", "g"], sizes=np.array([20, 30])),
            lambda one: one.draw_points(np.array([3, 4]), marker="x"),
            lambda one: one.draw_texts("here", torch.tensor([3, 4]), colors="w"),
            lambda one: one.draw_texts(["a", "b"], np.array([[3, 4], [15, 4]]), font_sizes=[3, 4], bboxes={"pad": 0}),
        ]
        for step in steps:
            canvas = Visualizer(image=GREY)
            assert step(canvas) is canvas
            changed = (canvas.get_image() != GREY).any(axis=-1)
            assert 0.005 < changed.mean() < 0.5

    def test_a_line_is_where_it_should_be(self, canvas: Visualizer) -> None:
        canvas.draw_lines(torch.tensor([2, 25]), torch.tensor([10, 10]), colors=(255, 0, 0))
        rows = np.unique(np.nonzero((canvas.get_image() != GREY).any(axis=-1))[0])
        assert rows.min() >= 8
        assert rows.max() <= 11

    @pytest.mark.parametrize(
        ("color", "alpha", "expected"), [("r", 0.5, [178, 50, 50]), ((10, 20, 30), 0.8, [28, 36, 44])]
    )
    def test_a_mask(self, canvas: Visualizer, color: Any, alpha: float, expected: list[int]) -> None:
        mask = np.zeros((20, 30), dtype=bool)
        mask[5:10, 5:10] = True
        canvas.draw_binary_masks(torch.from_numpy(mask), colors=color, alphas=alpha)
        drawn = canvas.get_image()
        assert np.abs(drawn[6, 6].astype(int) - expected).max() <= 1
        assert drawn[12, 12].tolist() == [100, 100, 100]

    def test_several_masks(self, canvas: Visualizer) -> None:
        masks = np.zeros((2, 20, 30), dtype=bool)
        masks[0, :, :10] = masks[1, :, 20:] = True
        drawn = canvas.draw_binary_masks(masks, colors=["r", "b"], alphas=[1.0, 1.0]).get_image()
        assert drawn[5, 5].tolist() == [255, 0, 0]
        assert drawn[5, 25].tolist() == [0, 0, 255]

    def test_whatever_matplotlib_draws(self, canvas: Visualizer) -> None:
        canvas.ax_save.axvline(15, color="r", linewidth=3)
        assert canvas.get_image()[10, 15].tolist() == [255, 0, 0]

    @pytest.mark.parametrize(
        ("call", "error"),
        [
            (lambda one: one.draw_bboxes([1, 2, 3, 4]), TypeError),
            (lambda one: one.draw_bboxes(torch.zeros(3)), AssertionError),
            (lambda one: one.draw_bboxes(torch.tensor([5, 5, 1, 1])), AssertionError),
            (lambda one: one.draw_bboxes(torch.tensor([1, 1, 5, 5]), edge_colors=3), TypeError),
            (lambda one: one.draw_points(np.zeros((2, 3))), AssertionError),
            (lambda one: one.draw_texts(["a", "b"], torch.tensor([[3, 4]])), AssertionError),
            (lambda one: one.draw_texts(3, torch.tensor([3, 4])), TypeError),
            (lambda one: one.draw_texts(["a", "b"], torch.zeros(2, 2), font_sizes=[1]), AssertionError),
            (lambda one: one.draw_lines(torch.tensor([1, 5]), torch.zeros(2, 2)), AssertionError),
            (lambda one: one.draw_circles(torch.tensor([5, 5]), torch.tensor([2, 3])), AssertionError),
            (lambda one: one.draw_binary_masks(np.ones((20, 30))), AssertionError),
            (lambda one: one.draw_binary_masks(np.ones((2, 2), dtype=bool)), AssertionError),
            (lambda one: one.set_image(None), AssertionError),
        ],
    )
    def test_wrong_arguments(self, canvas: Visualizer, call: Any, error: type[Exception]) -> None:
        with pytest.raises(error):
            call(canvas)

    def test_what_lies_outside_is_told(self, canvas: Visualizer) -> None:
        with pytest.warns(UserWarning, match="outside the image"):
            canvas.draw_bboxes(torch.tensor([1, 1, 100, 100]), line_widths=1)
        assert canvas.get_image()[15, 1].tolist() != [100, 100, 100]
        assert canvas.get_image()[15, 25].tolist() == [100, 100, 100]

    def test_nothing_to_draw_on(self) -> None:
        with pytest.raises(AttributeError, match="set_image"):
            Visualizer().draw_points(np.array([1, 1]))
        with pytest.raises(AttributeError, match="set_image"):
            Visualizer().get_image()


class TestFeatureMaps:
    @pytest.mark.parametrize(
        ("options", "shape"),
        [
            ({}, (4, 6, 3)),
            ({"channel_reduction": "select_max"}, (4, 6, 3)),
            ({"channel_reduction": None, "topk": 4, "arrangement": (2, 2)}, (8, 12, 3)),
            ({"overlaid_image": GREY}, (20, 30, 3)),
            ({"resize_shape": (10, 12)}, (10, 12, 3)),
            ({"overlaid_image": GREY, "channel_reduction": None, "topk": 2, "arrangement": (2, 1)}, (40, 30, 3)),
        ],
    )
    def test_shapes(self, options: dict[str, Any], shape: tuple[int, ...]) -> None:
        drawn = Visualizer.draw_featmap(torch.rand(8, 4, 6, requires_grad=True), **options)
        assert drawn.shape == shape
        assert drawn.dtype == np.uint8

    @pytest.mark.parametrize("channels", [1, 3])
    def test_one_or_three_channels_as_an_image(self, channels: int) -> None:
        drawn = Visualizer.draw_featmap(torch.rand(channels, 4, 6), channel_reduction=None, topk=-1)
        assert drawn.shape == (4, 6, 3)

    def test_blue_for_the_least_and_red_for_the_greatest(self) -> None:
        drawn = Visualizer.draw_featmap(torch.arange(24.0).view(1, 4, 6))
        assert drawn[0, 0].tolist() == [0, 0, 128]
        assert drawn[-1, -1].tolist() == [128, 0, 0]

    def test_colours_and_overlay(self) -> None:
        values = np.array([[0, 1], [2, 3]], dtype=np.float32)
        expected = [[[0, 0, 128], [0, 212, 255]], [[255, 212, 0], [128, 0, 0]]]
        assert convert_overlay_heatmap(values).tolist() == expected
        over = convert_overlay_heatmap(torch.from_numpy(values), np.full((2, 2, 3), 100, dtype=np.uint8), 0.3)
        assert over.tolist() == [[[70, 70, 108], [70, 134, 146]], [[146, 134, 70], [108, 70, 70]]]

    @pytest.mark.parametrize(
        ("featmap", "options"),
        [
            (torch.rand(8, 4, 6), {"channel_reduction": "median"}),
            (torch.rand(1, 8, 4, 6), {}),
            (np.zeros((8, 4, 6)), {}),
            (torch.rand(8, 4, 6), {"channel_reduction": None, "topk": 9, "arrangement": (2, 2)}),
            (torch.rand(8, 4, 6), {"channel_reduction": None, "topk": -1}),
        ],
    )
    def test_wrong_arguments(self, featmap: Any, options: dict[str, Any]) -> None:
        with pytest.raises(AssertionError):
            Visualizer.draw_featmap(featmap, **options)


class TestBackends:
    def test_files(self, tmp_path: Path) -> None:
        visualizer = Visualizer(vis_backends=[{"type": "LocalVisBackend"}], save_dir=str(tmp_path))
        visualizer.add_scalar("loss", torch.tensor(0.5), step=3)
        visualizer.add_scalars({"a": 1, "b": np.float32(2.0)}, step=4)
        visualizer.add_scalars({"acc": 0.5, "step": 9}, file_path="20.json")
        visualizer.add_image("inside/it", GREY, step=2)
        visualizer.add_config(Config({"a": 1, "b": {"c": 2}}))
        folder = tmp_path / "vis_data"
        lines = [json.loads(line) for line in (folder / "scalars.json").read_text().splitlines()]
        assert lines == [{"loss": 0.5, "step": 3}, {"a": 1, "b": 2.0, "step": 4}, {"acc": 0.5, "step": 9}]
        assert json.loads((folder / "20.json").read_text()) == {"acc": 0.5, "step": 9}
        assert np.array_equal(cv2.imread(str(folder / "vis_image" / "inside" / "it_2.png")), GREY)
        assert Config.fromfile(folder / "config.py").b.c == 2

    def test_an_image_is_red_first(self, tmp_path: Path) -> None:
        picture = np.zeros((2, 2, 3), dtype=np.uint8)
        picture[..., 0] = 255
        LocalVisBackend(str(tmp_path)).add_image("red", picture)
        assert cv2.imread(str(tmp_path / "vis_image" / "red_0.png"))[0, 0].tolist() == [0, 0, 255]

    def test_tensorboard(self, tmp_path: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        backend = TensorboardVisBackend(str(tmp_path))
        backend.add_scalars({"loss": torch.tensor(0.25), "step": 7, "name": "x"})
        backend.add_image("picture", GREY, step=1)
        backend.add_config(Config({"a": 1}))
        assert isinstance(backend.experiment, SummaryWriter)
        backend.close()
        events = EventAccumulator(str(tmp_path)).Reload()
        (event,) = events.Scalars("loss")
        assert (event.step, event.value) == (7, 0.25)
        assert events.Tags()["images"] == ["picture"]

    def test_names_of_backends(self, tmp_path: Path) -> None:
        given = [{"type": "LocalVisBackend", "name": "one"}, {"type": "LocalVisBackend", "name": "two"}]
        visualizer = Visualizer(vis_backends=given, save_dir=str(tmp_path))
        assert list(visualizer._vis_backends) == ["one", "two"]
        assert isinstance(visualizer.get_backend("one"), LocalVisBackend)
        assert visualizer.get_backend("three") is None
        with pytest.raises(RuntimeError, match="different names"):
            Visualizer(vis_backends=[{"type": "LocalVisBackend"}] * 2, save_dir=str(tmp_path))

    def test_nothing_is_written_before_it_is_needed(self, tmp_path: Path) -> None:
        Visualizer(vis_backends=[{"type": "LocalVisBackend"}], save_dir=str(tmp_path)).close()
        assert list(tmp_path.iterdir()) == []

    def test_a_backend_of_ones_own(self, tmp_path: Path) -> None:
        seen: list[Any] = []

        @VISBACKENDS.register_module(force=True)
        class ListBackend(BaseVisBackend):
            def _init_env(self) -> None:
                seen.append("begun")

            @property
            def experiment(self) -> list[Any]:
                return seen

            def add_scalars(self, scalar_dict, step=0, file_path=None, **kwargs) -> None:
                seen.append((scalar_dict, step, kwargs))

        visualizer = Visualizer(vis_backends=[{"type": "ListBackend"}], save_dir=str(tmp_path))
        visualizer.add_scalars({"a": 1}, step=2, more=3)
        visualizer.add_image("shows none", GREY)
        assert seen == [({"a": 1}, 2, {"more": 3})]

    def test_one_that_fails_is_a_warning(self, tmp_path: Path) -> None:
        (tmp_path / "vis_data").write_text("a file where a folder should be")
        visualizer = Visualizer(vis_backends=[{"type": "LocalVisBackend"}], save_dir=str(tmp_path))
        with pytest.warns(UserWarning, match="LocalVisBackend has failed"):
            visualizer.add_scalar("loss", 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            visualizer.add_scalar("loss", 1.0)

    @pytest.mark.parametrize(
        "call",
        [
            lambda folder: LocalVisBackend(folder, scalar_save_file="x.txt"),
            lambda folder: LocalVisBackend(folder, config_save_file="x.yaml"),
            lambda folder: LocalVisBackend(folder).add_scalars({"a": 1}, file_path="scalars.json"),
            lambda folder: LocalVisBackend(folder).add_scalars(3),
        ],
    )
    def test_wrong_arguments(self, tmp_path: Path, call: Any) -> None:
        with pytest.raises(AssertionError):
            call(str(tmp_path))


class TestInstances:
    def test_they_are_found_by_name(self) -> None:
        one = Visualizer.get_instance("one-of-test")
        assert Visualizer.get_instance("one-of-test") is one
        assert Visualizer.get_current_instance() is one
        assert one.instance_name == one.name == "one-of-test"

    def test_a_subclass_is_found_as_the_visualizer(self) -> None:
        class Own(Visualizer):
            def add_datasample(self, name, image, data_sample=None, *args, **kwargs) -> None:
                self.set_image(image)
                self.draw_bboxes(data_sample)
                self.add_image(name, self.get_image(), kwargs.get("step", 0))

        own = Own.get_instance("own-of-test")
        assert Visualizer.get_current_instance() is own
        own.add_datasample("x", GREY, torch.tensor([1, 1, 5, 5]))
        assert (own.get_image() != GREY).any()

    def test_the_metainfo_of_the_dataset(self) -> None:
        visualizer = Visualizer()
        assert visualizer.dataset_meta is None
        visualizer.dataset_meta = {"classes": ("a",)}
        assert visualizer.dataset_meta["classes"] == ("a",)

    def test_a_runner_of_lockstep_takes_it_for_its_own(self, tmp_path: Path) -> None:
        cfg = {"type": "Visualizer", "vis_backends": [{"type": "LocalVisBackend"}], "name": "run-of-test"}
        visualizer = VISUALIZERS.build(cfg)
        assert isinstance(visualizer, lockstep.visualization.Visualizers)
        assert lockstep.visualization.build_visualizers(visualizer) is visualizer
        visualizer.open(tmp_path)
        visualizer.make_current()
        assert Visualizer.get_current_instance() is visualizer
        visualizer.add_scalars({"train/loss": 0.5}, step=1)
        visualizer.close()
        assert (tmp_path / "vis_data" / "scalars.json").is_file()

    def test_showing_needs_a_known_backend(self) -> None:
        with pytest.raises(ValueError, match="backend"):
            Visualizer(image=GREY).show(backend="paper")

    def test_showing(self) -> None:
        import matplotlib

        before = matplotlib.get_backend()
        matplotlib.use("agg")
        try:
            Visualizer(image=GREY).show(wait_time=0.01)
        finally:
            matplotlib.use(before)


def test_small_functions() -> None:
    assert color_val_matplotlib(["r", (255, 0, 51)]) == ["r", (1.0, 0.0, 0.2)]
    assert (color_str2rgb("red"), color_str2rgb("g")) == ((255, 0, 0), (0, 127, 0))
    assert tensor2ndarray(torch.ones(2)).tolist() == [1, 1]
    assert (value2list(1, int, 3), value2list([1], int, 3)) == ([1, 1, 1], [1])
    with pytest.raises(TypeError, match="x"):
        check_type("x", 1, str)
    with pytest.raises(AssertionError, match="at least 2"):
        check_length("x", [1], 2)
