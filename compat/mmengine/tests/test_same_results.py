"""What structures, datasets, samplers, initial weights and drawings give, beside the real MMEngine."""

from __future__ import annotations

import pytest

STRUCTURES = """
import numpy, torch
from mmengine.structures import *
def told(found):
    return [found.labels.tolist(), found.names, found.array.tolist(), found.boxes.sum().item(), found.size, len(found)]
found = InstanceData(metainfo={"size": 3}, boxes=torch.arange(20.0).view(5, 4), labels=torch.arange(5),
                     names=list("abcde"), array=numpy.arange(5))
indices = [2, -1, slice(1, 4), slice(None, None, 2), [3, 0], torch.tensor([True, False, True, False, True]),
           torch.tensor([4, 4]), numpy.array([1, 2]), [False, True, False, False, True], torch.zeros(5, dtype=bool)]
answers["chosen"] = [told(found[index]) for index in indices]
answers["joined"] = told(InstanceData.cat([found, found[1:3], found[torch.zeros(5, dtype=bool)]]))
maps = PixelData(a=torch.arange(60).view(2, 5, 6), b=numpy.arange(30).reshape(5, 6))
crops = [(slice(1, 3), slice(0, 2)), (2, 3), (slice(None), -1), (0, slice(None, None, 2))]
answers["crops"] = [[maps[crop].a.tolist(), maps[crop].b.tolist(), maps[crop].shape] for crop in crops]
answers["labels"] = [LabelData.label_to_onehot(torch.tensor([2, 0]), 4).tolist(),
                     LabelData.onehot_to_label(torch.tensor([0, 1, 1])).tolist()]
sample = BaseDataElement(metainfo={"m": 1}, x=torch.ones(2), inner=BaseDataElement(y=torch.zeros(1)))
answers["element"] = [sorted(sample.all_keys()), sample.to(torch.float64).inner.y.dtype == torch.float64,
                      sample.pop("m"), sample.get("m", 7), "x" in sample, sorted(sample.new(z=1).keys())]
"""

ORDERS = """
from itertools import islice
from mmengine.dataset import *
from mmengine.dataset.utils import worker_init_fn
import numpy, torch, random
answers["orders"] = []
for seed in (0, 3):
    for size in (1, 7, 50):
        sampler = DefaultSampler(range(size), seed=seed)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            answers["orders"].append(list(sampler))
        endless = InfiniteSampler(range(size), seed=seed)
        answers["orders"].append(list(islice(iter(endless), 3 * size + 2)))
answers["workers"] = []
for worker in range(3):
    worker_init_fn(worker, 3, 1, 5)
    answers["workers"].append([random.random(), numpy.random.rand(), torch.rand(2).tolist()])
"""

DATASETS = """
import json
from mmengine.dataset import *
cats = [[0], [0, 1], [0], [2, 0], [1], [0], [0]]
samples = [{"img_path": f"{i}.png", "height": i, "cats": cats[i]} for i in range(7)]
json.dump({"metainfo": {"classes": ["a"]}, "data_list": samples}, open("ann.json", "w"))
class Things(BaseDataset):
    METAINFO = {"palette": [1]}
    def get_cat_ids(self, idx):
        return self.get_data_info(idx)["cats"]
def made(**kwargs):
    return Things(**{"ann_file": "ann.json", "data_root": "root/..", "data_prefix": {"img_path": "imgs"}, **kwargs})
import os
os.makedirs("root", exist_ok=True)
def all_of(dataset):
    return [dataset[index] for index in range(len(dataset))]
answers["whole"] = [all_of(made()), made().metainfo, all_of(made(serialize_data=False, indices=-2))]
answers["subset"] = all_of(made().get_subset([5, 1]))
answers["joined"] = all_of(ConcatDataset([made(indices=2), made(indices=[6])]))
answers["repeated"] = [s["height"] for s in all_of(RepeatDataset(made(), 2))]
answers["balanced"] = [ClassBalancedDataset(made(), t).repeat_indices for t in (0.1, 0.3, 0.5, 0.8, 1.0)]
answers["bytes"] = [made().data_bytes.shape, made().data_address.tolist()]
import numpy
numpy.random.seed(0)
dropping = made(pipeline=[lambda sample: sample if sample["height"] in (2, 5) else None])
answers["refetched"] = [s["height"] for s in all_of(dropping)]
"""

COLLATE = """
import torch, numpy
from collections import namedtuple
from mmengine.dataset import default_collate, pseudo_collate
Pair = namedtuple("Pair", "a b")
def text(value):
    return f"{type(value).__name__} {value}"
sample = {"t": torch.ones(2), "n": 3, "f": 0.5, "s": "x", "p": Pair(1, "q"), "l": [1, torch.zeros(1)], "u": (1, (2, 3)),
          "a": numpy.ones(2), "d": {"e": 1}}
answers["pseudo"] = {key: text(value) for key, value in pseudo_collate([sample, sample]).items()}
answers["default"] = {key: text(value) for key, value in default_collate([sample, sample]).items()}
answers["tuples"] = [text(pseudo_collate([(1, "a"), (2, "b")])), text(default_collate([(1, "a"), (2, "b")]))]
"""

WEIGHTS = """
import torch
from torch import nn
from mmengine.model import *
class Block(BaseModule):
    def __init__(self, init_cfg=None):
        super().__init__(init_cfg)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.plain = nn.Sequential(nn.Linear(5, 6), Leaf())
        self.list = ModuleList([Leaf(), Leaf()])
class Leaf(BaseModule):
    def __init__(self):
        super().__init__(dict(type="TruncNormal", layer="Linear", std=0.02, bias=0.1))
        self.linear = nn.Linear(8, 7)
cfgs = [None, dict(type="Xavier", layer=["Conv2d", "Linear"]),
        dict(type="Normal", layer="Linear", std=0.01, bias_prob=0.01),
        dict(type="Kaiming", layer="Conv2d", distribution="uniform", mode="fan_in", nonlinearity="leaky_relu", a=0.2),
        [dict(type="Constant", layer="BatchNorm2d", val=0.5), dict(type="Caffe2Xavier", layer="_ConvNd")],
        dict(type="Uniform", a=-1, b=2, layer="Linear", override=dict(type="TruncNormal", name="conv", a=-0.1, b=0.1))]
answers["weights"] = []
for cfg in cfgs:
    torch.manual_seed(11)
    block = Block(cfg)
    block.init_weights()
    answers["weights"].append([[value.flatten().tolist() for value in block.parameters()], torch.rand(1).item()])
torch.manual_seed(0)
images = [torch.randint(0, 256, (3, 30, 40), dtype=torch.uint8), torch.randint(0, 256, (3, 33, 20), dtype=torch.uint8)]
preprocessor = ImgDataPreprocessor([123.675, 116.28, 103.53], [58.395, 57.12, 57.375], pad_size_divisor=32,
                                   bgr_to_rgb=True, pad_value=1)
answers["images"] = preprocessor(dict(inputs=images))["inputs"].flatten().tolist()
answers["stacked"] = stack_batch([torch.ones(1, 2, 3), torch.ones(1, 3, 2)], 4, 0.5).tolist()
"""

DRAWINGS = """
import hashlib, numpy, torch
from mmengine.visualization import Visualizer
image = numpy.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=numpy.uint8)
mask = numpy.zeros((120, 160), dtype=bool)
mask[20:70, 30:90] = True
pair = torch.tensor([[10, 20, 60, 90], [5, 5, 100, 50]])
places = torch.tensor([[50, 50], [90, 60]])
xs, ys = torch.tensor([[3, 99], [50, 50]]), torch.tensor([[5, 5], [5, 110]])
drawings = {
    "none": lambda v: v,
    "boxes": lambda v: v.draw_bboxes(pair, edge_colors=["r", (0, 9, 200)]),
    "filled": lambda v: v.draw_bboxes(numpy.array([10, 20, 60, 90]), face_colors="b", alpha=0.4, line_widths=3),
    "polygons": lambda v: v.draw_polygons([torch.tensor([[10, 10], [90, 15], [40, 80]])], face_colors="y"),
    "lines": lambda v: v.draw_lines(xs, ys, line_styles=["-", "--"]),
    "circles": lambda v: v.draw_circles(places, torch.tensor([20, 30]), face_colors=["r", "g"]),
    "points": lambda v: v.draw_points(places, colors=["r", "b"], sizes=numpy.array([20, 30])),
    "texts": lambda v: v.draw_texts(["one", "two"], places, font_sizes=[12, 9], colors=["w", "r"],
                                    vertical_alignments="center", bboxes=dict(facecolor="k", alpha=0.5)),
    "masks": lambda v: v.draw_binary_masks(numpy.stack([mask, ~mask]), colors=["r", (0, 255, 0)], alphas=[0.3, 0.6]),
    "chain": lambda v: v.draw_bboxes(pair).draw_binary_masks(mask).draw_texts("x", torch.tensor([9, 9])),
}
answers["drawings"] = {}
for name, draw in drawings.items():
    visualizer = Visualizer(image=image)
    draw(visualizer)
    answers["drawings"][name] = hashlib.sha1(visualizer.get_image().tobytes()).hexdigest()
features = torch.rand(6, 10, 14, generator=torch.Generator().manual_seed(1))
options = [{}, dict(channel_reduction="select_max"), dict(resize_shape=(20, 30)), dict(overlaid_image=image, alpha=0.3),
           dict(channel_reduction=None, topk=4, arrangement=(2, 2))]
maps = [numpy.ascontiguousarray(Visualizer.draw_featmap(features, **one)) for one in options]
answers["features"] = [hashlib.sha1(one.tobytes()).hexdigest() for one in maps]
"""

VISUALIZERS = """
import hashlib, numpy, torch
from mmengine.structures import InstanceData, PixelData
image = numpy.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=numpy.uint8)
def digest(visualizer):
    return hashlib.sha1(numpy.ascontiguousarray(visualizer.get_image()).tobytes()).hexdigest()

from mmpretrain.structures import DataSample
from mmpretrain.visualization import UniversalVisualizer
one = UniversalVisualizer()
one.dataset_meta = {"classes": ["cat", "dog", "bird"]}
sample = DataSample(metainfo={"img_shape": (120, 160)}).set_gt_label(1).set_pred_label(2)
sample.set_pred_score(torch.tensor([0.1, 0.2, 0.7]))
answers["classes"] = hashlib.sha1(one.visualize_cls(image, sample).tobytes()).hexdigest()
answers["sample"] = [sorted(sample.all_keys()), sample.gt_label.tolist(), sample.to("cpu").pred_score.tolist()]

from mmseg.structures import SegDataSample
from mmseg.visualization import SegLocalVisualizer
two = SegLocalVisualizer(alpha=0.4)
two.dataset_meta = {"classes": ("a", "b"), "palette": [[255, 0, 0], [0, 0, 255]]}
label = (torch.arange(120 * 160).view(1, 120, 160) // 3000) % 2
two.add_datasample("x", image, SegDataSample(gt_sem_seg=PixelData(data=label)), with_labels=False)
answers["segments"] = digest(two)

from mmdet.structures import DetDataSample
from mmdet.visualization import DetLocalVisualizer
three = DetLocalVisualizer()
three.dataset_meta = {"classes": ("car", "man"), "palette": [(220, 20, 60), (0, 0, 142)]}
boxes = torch.tensor([[10.0, 20, 60, 90], [50, 15, 140, 70]])
found = InstanceData(bboxes=boxes, labels=torch.tensor([0, 1]), scores=torch.tensor([0.9, 0.6]))
three.add_datasample("x", image, DetDataSample(pred_instances=found), draw_gt=False, pred_score_thr=0.3)
answers["boxes"] = digest(three)
plain = DetDataSample(pred_instances=found).numpy().pred_instances
answers["chosen"] = [len(found[found.scores > 0.7]), plain.bboxes.sum().item()]
"""


@pytest.mark.parametrize("name", ["STRUCTURES", "ORDERS", "DATASETS", "COLLATE", "WEIGHTS", "DRAWINGS", "VISUALIZERS"])
def test_same_results(name, both) -> None:
    ours, theirs = both(globals()[name])
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key] == value, key
