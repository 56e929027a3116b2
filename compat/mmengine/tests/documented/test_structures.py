"""Data elements, drawing and small functions, as MMEngine's documentation shows them."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mmengine.dist import (
    all_gather,
    all_reduce,
    all_reduce_dict,
    broadcast,
    collect_results,
    gather,
    get_dist_info,
    get_rank,
    get_world_size,
    is_main_process,
    master_only,
)
from mmengine.infer import BaseInferencer
from mmengine.registry import VISUALIZERS
from mmengine.structures import BaseDataElement, InstanceData, LabelData, PixelData
from mmengine.utils import (
    ProgressBar,
    Timer,
    apply_to,
    check_file_exist,
    concat_list,
    deprecated_api_warning,
    digit_version,
    has_method,
    import_modules_from_strings,
    is_list_of,
    is_method_overridden,
    is_seq_of,
    is_str,
    is_tuple_of,
    iter_cast,
    mkdir_or_exist,
    scandir,
    slice_list,
    symlink,
    to_2tuple,
    track_iter_progress,
    track_parallel_progress,
    track_progress,
)
from mmengine.visualization import LocalVisBackend, Visualizer

# Data elements.


def test_an_element_has_data_and_metainfo():
    element = BaseDataElement(metainfo=dict(img_shape=(4, 5)), boxes=torch.rand(3, 4))
    element.scores = torch.ones(3)
    assert element.img_shape == (4, 5)
    assert set(element.keys()) == {"boxes", "scores"}
    assert set(element.metainfo_keys()) == {"img_shape"}
    assert set(element.all_keys()) == {"boxes", "scores", "img_shape"}
    assert dict(element.metainfo_items()) == {"img_shape": (4, 5)}
    assert len(list(element.values())) == 2
    assert element.get("nothing", 3) == 3
    assert "boxes" in element
    assert element.pop("scores").tolist() == [1, 1, 1]
    del element.boxes
    assert not hasattr(element, "boxes")


def test_metainfo_is_changed_only_on_purpose():
    element = BaseDataElement(metainfo=dict(size=3))
    with pytest.raises(AttributeError):
        element.size = 4
    element.set_metainfo(dict(size=5, name="x"))
    assert (element.size, element.name) == (5, "x")
    element.set_field(name="ratio", value=2.0, field_type="metainfo", dtype=float)
    assert "ratio" in element.metainfo_keys()


def test_a_new_element_of_an_old_one():
    element = BaseDataElement(metainfo=dict(size=3), a=torch.zeros(2))
    changed = element.new(metainfo=dict(size=4), a=torch.ones(2))
    assert (changed.size, changed.a.sum().item(), element.size) == (4, 2, 3)
    copied = element.clone()
    copied.set_metainfo(dict(size=8))
    copied.a = torch.ones(2)
    assert (element.size, element.a[0].item()) == (3, 0)
    element.update(BaseDataElement(metainfo=dict(size=7), b=1))
    assert (element.size, element.b) == (7, 1)


def test_an_element_is_moved_and_converted():
    element = BaseDataElement(a=torch.ones(2, requires_grad=True), nested=BaseDataElement(b=torch.ones(1)))
    assert element.to(torch.float64).nested.b.dtype == torch.float64
    assert not element.detach().a.requires_grad
    assert isinstance(element.detach().numpy().a, np.ndarray)
    assert isinstance(element.detach().numpy().to_tensor().a, torch.Tensor)
    assert element.cpu().a.device.type == "cpu"
    assert set(element.to_dict()["nested"]) == {"b"}
    assert "nested" in repr(element)


def test_elements_with_typed_fields():
    class Sample(BaseDataElement):
        @property
        def gt(self):
            return self._gt

        @gt.setter
        def gt(self, value):
            self.set_field(value, "_gt", dtype=InstanceData)

        @gt.deleter
        def gt(self):
            del self._gt

    sample = Sample()
    sample.gt = InstanceData(labels=torch.tensor([1]))
    assert "gt" in sample
    with pytest.raises(AssertionError):
        sample.gt = torch.ones(1)
    del sample.gt
    assert "gt" not in sample


def test_instances_have_one_length():
    found = InstanceData(boxes=torch.rand(3, 4), names=["a", "b", "c"])
    assert len(found) == 3
    with pytest.raises(AssertionError):
        found.scores = torch.ones(2)
    found.scores = torch.tensor([0.1, 0.9, 0.5])
    assert found[found.scores > 0.4].names == ["b", "c"]
    assert found[0].boxes.shape == (1, 4)
    assert found[1:].names == ["b", "c"]
    assert found["names"] == ["a", "b", "c"]
    assert found[[2, 0]].names == ["c", "a"]
    assert len(InstanceData.cat([found, found[:1]])) == 4
    with pytest.raises(IndexError):
        found[5]


def test_pixels_have_one_shape():
    maps = PixelData(metainfo=dict(name="x"), image=np.zeros((3, 4, 6)), labels=torch.zeros(4, 6))
    assert maps.shape == (4, 6)
    assert maps.labels.shape == (1, 4, 6)
    assert maps[1:3, 2:5].shape == (2, 3)
    with pytest.raises(AssertionError):
        maps.other = torch.zeros(3, 5, 6)


def test_labels_become_onehot_and_back():
    onehot = LabelData.label_to_onehot(label=torch.tensor([1, 3]), num_classes=4)
    assert onehot.tolist() == [0, 1, 0, 1]
    assert LabelData.onehot_to_label(onehot).tolist() == [1, 3]
    with pytest.raises(AssertionError):
        LabelData.label_to_onehot(label=torch.tensor([9]), num_classes=4)


# Drawing.


@pytest.fixture
def image():
    return np.full((40, 60, 3), 255, dtype=np.uint8)


def changed(visualizer, image):
    drawn = visualizer.get_image()
    assert drawn.shape == image.shape
    return (drawn != image).any()


@pytest.mark.parametrize(
    "draw",
    [
        lambda v: v.draw_bboxes(torch.tensor([5, 5, 20, 20])),
        lambda v: v.draw_bboxes(torch.tensor([[5, 5, 20, 20], [10, 10, 30, 30]]), edge_colors=["r", (0, 0, 255)]),
        lambda v: v.draw_texts("word", torch.tensor([10, 20])),
        lambda v: v.draw_texts(["a", "b"], torch.tensor([[10, 20], [30, 10]]), colors=["r", "b"]),
        lambda v: v.draw_lines(torch.tensor([1, 30]), torch.tensor([1, 30])),
        lambda v: v.draw_circles(torch.tensor([20, 20]), torch.tensor([10])),
        lambda v: v.draw_polygons(torch.tensor([[1, 1], [20, 2], [10, 30]]), face_colors="g"),
        lambda v: v.draw_points(torch.tensor([[10, 10]]), colors="r"),
        lambda v: v.draw_binary_masks(np.eye(40, 60, dtype=bool)),
        lambda v: v.draw_bboxes(torch.tensor([5, 5, 20, 20])).draw_texts("x", torch.tensor([1, 1])),
    ],
)
def test_things_are_drawn_on_an_image(image, draw):
    visualizer = Visualizer(image=image)
    draw(visualizer)
    assert changed(visualizer, image)


def test_a_feature_map_is_an_image(image):
    features = torch.rand(8, 10, 15)
    assert Visualizer.draw_featmap(features).shape == (10, 15, 3)
    assert Visualizer.draw_featmap(features, channel_reduction="select_max").shape == (10, 15, 3)
    assert Visualizer.draw_featmap(features, image).shape == (40, 60, 3)
    assert Visualizer.draw_featmap(features, resize_shape=(20, 30)).shape == (20, 30, 3)
    assert Visualizer.draw_featmap(features, channel_reduction=None, topk=4, arrangement=(2, 2)).ndim == 3
    with pytest.raises(AssertionError):
        Visualizer.draw_featmap(features, channel_reduction=None, topk=-1)


def test_a_visualizer_writes_to_its_backends(tmp_path, image):
    visualizer = Visualizer(vis_backends=[dict(type="LocalVisBackend")], save_dir=str(tmp_path), name="documented_vis")
    visualizer.add_scalar("loss", 0.5, step=1)
    visualizer.add_scalars(dict(acc=0.9, time=2.0), step=2)
    visualizer.add_image("picture", image, step=3)
    (file,) = tmp_path.rglob("scalars.json")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [{"loss": 0.5, "step": 1}, {"acc": 0.9, "time": 2.0, "step": 2}]
    assert [path.name for path in tmp_path.rglob("*.png")] == ["picture_3.png"]
    assert visualizer.get_backend("LocalVisBackend").experiment is not None
    visualizer.close()


def test_a_visualizer_is_found_by_name():
    first = Visualizer.get_instance("documented_named")
    assert Visualizer.get_instance("documented_named") is first
    assert Visualizer.get_current_instance() is first


def test_a_visualizer_of_ones_own(image):
    @VISUALIZERS.register_module(force=True)
    class DocumentedVisualizer(Visualizer):
        def add_datasample(self, name, image, data_sample=None, draw_gt=True, draw_pred=True, show=False, **kwargs):
            self.set_image(image)
            self.draw_bboxes(data_sample["boxes"])
            return self.get_image()

    built = VISUALIZERS.build(dict(type="DocumentedVisualizer", name="documented_own"))
    assert (built.add_datasample("x", image, dict(boxes=torch.tensor([5, 5, 20, 20]))) != image).any()


def test_a_backend_stands_alone(tmp_path, image):
    backend = LocalVisBackend(save_dir=str(tmp_path), img_save_dir="pictures", scalar_save_file="values.json")
    backend.add_image("b", image)
    backend.add_scalar("x", 1)
    assert (tmp_path / "values.json").is_file()
    assert list((tmp_path / "pictures").rglob("*.png"))


# Communication: one process is a group of one.


def test_a_group_of_one():
    assert (get_rank(), get_world_size(), get_dist_info(), is_main_process()) == (0, 1, (0, 1), True)
    data = torch.tensor([1.0, 2.0])
    all_reduce(data)
    broadcast(data)
    assert data.tolist() == [1, 2]
    assert torch.equal(all_gather(data)[0], data)
    assert torch.equal(gather(data)[0], data)
    assert collect_results([1, 2, 3], 3) == [1, 2, 3]
    values = dict(a=torch.ones(1))
    all_reduce_dict(values)
    assert values["a"].item() == 1
    assert master_only(lambda: 5)() == 5


# Inference.


def test_an_inferencer_has_four_steps():
    class Twice(BaseInferencer):
        visualize_kwargs = {"show"}
        postprocess_kwargs = {"unit"}

        def _init_pipeline(self, cfg):
            return lambda number: torch.tensor(float(number))

        def forward(self, inputs, **kwargs):
            return [2 * one for one in inputs]

        def visualize(self, inputs, preds, show=False, **kwargs):
            return ["shown"] * len(preds) if show else None

        def postprocess(self, preds, visualization, return_datasample=False, unit="", **kwargs):
            return {"predictions": [f"{one.item()}{unit}" for one in preds], "visualization": visualization}

        def _init_model(self, cfg, weights, device="cpu"):
            return torch.nn.Identity()

        def _init_collate(self, cfg):
            return lambda batch: batch

        def _init_visualizer(self, cfg):
            return None

    inferencer = Twice(
        model=dict(model=dict(type="x")), weights=None, device="cpu", scope="mmengine", show_progress=False
    )
    assert inferencer([1, 2, 3], batch_size=2, unit="m")["predictions"] == ["2.0m", "4.0m", "6.0m"]
    assert inferencer([1], show=True)["visualization"] == ["shown"]
    with pytest.raises(ValueError):
        inferencer([1], unknown=3)


# Small functions.


def test_progress_is_shown():
    assert track_progress(lambda value: value + 1, [1, 2, 3]) == [2, 3, 4]
    assert list(track_iter_progress([1, 2])) == [1, 2]
    assert track_parallel_progress(abs, [-1, -2], nproc=2) == [1, 2]
    stream = io.StringIO()
    bar = ProgressBar(2, file=stream)
    bar.update()
    assert "1/2" in stream.getvalue()


def test_time_is_measured():
    with Timer() as timer:
        time.sleep(0.01)
        assert timer.since_start() >= 0.01
        assert timer.since_last_check() < timer.since_start()
        assert timer.is_running
    assert not timer.is_running


def test_paths(tmp_path):
    mkdir_or_exist(tmp_path / "a" / "b")
    (tmp_path / "a" / "x.txt").write_text("")
    check_file_exist(str(tmp_path / "a" / "x.txt"))
    with pytest.raises(FileNotFoundError):
        check_file_exist(str(tmp_path / "nothing.txt"))
    assert list(scandir(str(tmp_path), suffix=".txt", recursive=True)) == [str(Path("a", "x.txt"))]
    symlink(str(tmp_path / "a" / "x.txt"), str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()


def test_types_of_sequences():
    assert is_str("a")
    assert is_seq_of([1, 2], int)
    assert is_list_of(["a"], str)
    assert not is_list_of(("a",), str)
    assert is_tuple_of((1.0,), float)
    assert list(iter_cast([1, 2], str)) == ["1", "2"]
    assert slice_list([1, 2, 3, 4], [1, 3]) == [[1], [2, 3, 4]]
    assert concat_list([[1], [2, 3]]) == [1, 2, 3]
    assert to_2tuple(3) == (3, 3)
    assert has_method("text", "upper")
    assert apply_to([1, {"a": 2}], lambda value: isinstance(value, int), lambda value: value + 1) == [2, {"a": 3}]


def test_modules_by_name():
    import os.path

    assert import_modules_from_strings("os.path") is os.path
    assert import_modules_from_strings(["os", "sys"])[1].__name__ == "sys"
    with pytest.raises(ImportError):
        import_modules_from_strings("no_such_module_anywhere")
    with pytest.warns(UserWarning, match="no_such_module"):
        import_modules_from_strings(["no_such_module"], allow_failed_imports=True)


def test_versions_are_ordered():
    assert digit_version("1.10.0") > digit_version("1.9.0")
    assert digit_version("1.0.0rc1") < digit_version("1.0.0")


def test_overridden_methods_and_old_names():
    class Base:
        def run(self):
            return 1

    class Child(Base):
        def run(self):
            return 2

    assert is_method_overridden("run", Base, Child)
    assert not is_method_overridden("run", Base, Base())

    @deprecated_api_warning(dict(old="new"), cls_name="Documented")
    def function(new=0):
        return new

    with pytest.warns(DeprecationWarning, match="old"):
        assert function(old=3) == 3
