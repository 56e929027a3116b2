"""Datasets, transforms, samplers and batches, as MMEngine's documentation of them shows."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
import torch

from mmengine.dataset import (
    BaseDataset,
    ClassBalancedDataset,
    Compose,
    ConcatDataset,
    DefaultSampler,
    InfiniteSampler,
    RepeatDataset,
    default_collate,
    pseudo_collate,
    worker_init_fn,
)
from mmengine.registry import DATASETS, TRANSFORMS
from mmengine.structures import BaseDataElement


@pytest.fixture
def annotated(tmp_path):
    """An annotation file in the format of MMEngine's documentation, and its folder."""
    entries = [
        {"img_path": f"{index}.jpg", "height": 10 * (index + 1), "width": 20, "instances": [{"bbox_label": index % 2}]}
        for index in range(6)
    ]
    values = {"metainfo": {"dataset_type": "toy", "task_name": "detect"}, "data_list": entries}
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "train.json").write_text(json.dumps(values))
    return tmp_path


class Toy(BaseDataset):
    METAINFO = {"classes": ("cat", "dog"), "palette": [1, 2]}


def toy(root, **kwargs):
    given = dict(ann_file="annotations/train.json", data_root=str(root), data_prefix=dict(img_path="train/"))
    return Toy(**{**given, **kwargs})


def test_an_annotation_file_becomes_samples(annotated):
    dataset = toy(annotated)
    assert len(dataset) == 6
    assert dataset.get_data_info(0)["height"] == 10
    assert dataset[1]["img_path"] == str(annotated / "train" / "1.jpg")
    assert dataset[5]["sample_idx"] == 5


def test_metainfo_of_the_class_the_file_and_the_argument(annotated):
    dataset = toy(annotated, metainfo=dict(classes=("cat",)))
    assert dataset.metainfo["classes"] == ("cat",)
    assert dataset.metainfo["palette"] == [1, 2]
    assert dataset.metainfo["task_name"] == "detect"
    dataset.metainfo["classes"] = ()
    assert dataset.metainfo["classes"] == ("cat",)


def test_classes_may_lie_in_a_file(annotated):
    (annotated / "classes.txt").write_text("owl\nfox\n")
    assert toy(annotated, metainfo=dict(classes=str(annotated / "classes.txt"))).metainfo["classes"] == ["owl", "fox"]


def test_entries_are_parsed_and_filtered(annotated):
    class Tall(Toy):
        def parse_data_info(self, raw_data_info):
            info = super().parse_data_info(raw_data_info)
            info["tall"] = info["height"] > 30
            return info

        def filter_data(self):
            return [info for info in self.data_list if info["height"] >= self.filter_cfg["least"]]

    dataset = Tall("annotations/train.json", data_root=str(annotated), filter_cfg=dict(least=20), serialize_data=False)
    assert [info["tall"] for info in dataset.data_list] == [False, False, True, True, True]


def test_data_lists_of_ones_own():
    class Own(BaseDataset):
        def load_data_list(self):
            return [dict(number=number) for number in range(3)]

    assert [Own()[index]["number"] for index in range(3)] == [0, 1, 2]


def test_a_pipeline_is_applied(annotated):
    @TRANSFORMS.register_module(force=True)
    class DocumentedScale:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, results):
            return {**results, "height": results["height"] * self.factor}

    dataset = toy(annotated, pipeline=[dict(type="DocumentedScale", factor=3), lambda results: results["height"]])
    assert dataset[1] == 60
    assert dataset.prepare_data(0) == 30


def test_a_sample_that_a_transform_drops_is_replaced(annotated):
    dataset = toy(annotated, pipeline=[lambda results: None if results["height"] < 60 else results])
    assert dataset[0]["height"] == 60
    with pytest.raises(Exception, match=r"Test|test|None"):
        toy(annotated, test_mode=True, pipeline=[lambda results: None])[0]


def test_too_many_dropped_samples_are_an_error(annotated):
    with pytest.raises(Exception, match=r"3|max_refetch"):
        toy(annotated, pipeline=[lambda results: None], max_refetch=3)[0]


def test_data_is_loaded_late(annotated):
    dataset = toy(annotated, lazy_init=True)
    assert dataset.metainfo["classes"] == ("cat", "dog")
    assert not dataset._fully_initialized
    dataset.full_init()
    assert len(dataset) == 6


@pytest.mark.parametrize(("indices", "heights"), [(2, [10, 20]), (-2, [50, 60]), ([0, 5], [10, 60])])
def test_a_part_of_the_data(annotated, indices, heights):
    assert [one["height"] for one in toy(annotated, indices=indices)] == heights
    dataset = toy(annotated)
    assert [one["height"] for one in dataset.get_subset(indices)] == heights
    dataset.get_subset_(indices)
    assert len(dataset) == len(heights)


def test_data_is_kept_as_bytes_unless_told_otherwise(annotated):
    assert toy(annotated).data_bytes.dtype == np.uint8
    assert toy(annotated).data_list == []
    assert len(toy(annotated, serialize_data=False).data_list) == 6


def test_datasets_are_joined(annotated):
    joined = ConcatDataset([toy(annotated), toy(annotated, indices=2)])
    assert len(joined) == 8
    assert joined[6]["height"] == 10
    assert joined.metainfo["classes"] == ("cat", "dog")
    DATASETS.register_module(name="DocumentedToy", module=Toy, force=True)
    part = dict(type="DocumentedToy", ann_file="annotations/train.json", data_root=str(annotated))
    assert len(DATASETS.build(dict(type="ConcatDataset", datasets=[part, part]))) == 12


def test_joined_datasets_have_equal_metainfo(annotated):
    parts = [toy(annotated), toy(annotated, metainfo=dict(classes=("a",)))]
    with pytest.raises(ValueError, match="meta"):
        ConcatDataset(parts)
    assert len(ConcatDataset(parts, ignore_keys=["classes"])) == 12


def test_a_dataset_is_repeated(annotated):
    repeated = RepeatDataset(toy(annotated), times=3)
    assert len(repeated) == 18
    assert repeated[7]["height"] == 20
    with pytest.raises(NotImplementedError):
        repeated.get_subset([1])


def test_rare_classes_are_repeated(annotated):
    class Balanced(Toy):
        def get_cat_ids(self, idx):
            return [0] if idx < 5 else [1]

    dataset = Balanced("annotations/train.json", data_root=str(annotated))
    assert len(ClassBalancedDataset(dataset, oversample_thr=0.5)) == 7
    assert len(ClassBalancedDataset(dataset, oversample_thr=1e-3)) == 6


# Transforms.


def test_transforms_are_composed():
    chain = Compose([lambda results: results + 1, lambda results: results * 2])
    assert chain(3) == 8
    assert "Compose(" in repr(chain)
    assert Compose(None)(5) == 5
    assert Compose([lambda results: None, lambda results: 1 / 0])(1) is None
    with pytest.raises(TypeError):
        Compose([3])


# Samplers.


def test_the_default_sampler_gives_each_sample_once():
    sampler = DefaultSampler(range(10), shuffle=False)
    assert list(sampler) == list(range(10))
    assert (len(sampler), sampler.num_samples, sampler.total_size) == (10, 10, 10)


def test_the_order_changes_with_the_epoch():
    sampler = DefaultSampler(range(50), shuffle=True, seed=3)
    first = list(sampler)
    assert sorted(first) == list(range(50))
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(DefaultSampler(range(50), shuffle=True, seed=3)) == first
    assert list(DefaultSampler(range(50), shuffle=True, seed=4)) != first


def test_the_infinite_sampler_never_ends():
    sampler = InfiniteSampler(range(4), shuffle=False)
    assert list(islice(sampler, 10)) == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert len(sampler) == 4
    shuffled = list(islice(InfiniteSampler(range(4), shuffle=True, seed=0), 8))
    assert sorted(shuffled[:4]) == sorted(shuffled[4:]) == [0, 1, 2, 3]
    sampler.set_epoch(3)


# Batches.


def test_pseudo_collate_stacks_nothing():
    element = BaseDataElement(metainfo=dict(size=3))
    batch = pseudo_collate([dict(inputs=torch.ones(2), sample=element), dict(inputs=torch.zeros(3), sample=element)])
    assert [one.shape for one in batch["inputs"]] == [(2,), (3,)]
    assert batch["sample"] == [element, element]


def test_default_collate_stacks():
    batch = default_collate([dict(x=torch.ones(2), n=1), dict(x=torch.zeros(2), n=2)])
    assert batch["x"].shape == (2, 2)
    assert torch.equal(torch.as_tensor(batch["n"]), torch.tensor([1, 2]))


def test_unequal_samples_are_no_batch():
    with pytest.raises(RuntimeError):
        pseudo_collate([[1, 2], [1]])


def test_workers_have_seeds_of_their_own():
    worker_init_fn(0, num_workers=2, rank=0, seed=5)
    first = torch.rand(1).item(), np.random.rand()
    worker_init_fn(1, num_workers=2, rank=0, seed=5)
    assert (torch.rand(1).item(), np.random.rand()) != first
