"""mmengine.dataset: datasets from annotation files, wrappers, samplers, collate functions."""

from __future__ import annotations

import json
import pickle
import random
import warnings
from collections import namedtuple
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from mmengine.dataset import (
    BaseDataset,
    ClassBalancedDataset,
    Compose,
    ConcatDataset,
    DefaultSampler,
    InfiniteSampler,
    RepeatDataset,
    default_collate,
    force_full_init,
    pseudo_collate,
    worker_init_fn,
)
from mmengine.registry import DATA_SAMPLERS, DATASETS, FUNCTIONS, TRANSFORMS
from mmengine.structures import BaseDataElement

Pair = namedtuple("Pair", "a b")
SIZE = 5


class Things(BaseDataset):
    """A dataset whose `filter_cfg` names the least height."""

    METAINFO = {"palette": [1], "classes": ("z",)}

    def filter_data(self) -> list[dict[str, Any]]:
        least = (self.filter_cfg or {}).get("least", 0)
        return [sample for sample in self.data_list if sample["height"] >= least]

    def get_cat_ids(self, idx: int) -> list[int]:
        return self.get_data_info(idx)["cats"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    cats = [[0], [0], [0, 1], [0], [2]]
    samples = [{"img_path": f"{i}.png", "height": i, "cats": cats[i]} for i in range(SIZE)]
    annotations = {"metainfo": {"classes": ["a", "b"], "task": "x"}, "data_list": samples}
    (tmp_path / "ann.json").write_text(json.dumps(annotations))
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    return tmp_path


def made(root: Path, kind: type[BaseDataset] = Things, **kwargs: Any) -> Any:
    return kind(**{"ann_file": "ann.json", "data_root": str(root), "data_prefix": {"img_path": "imgs"}, **kwargs})


def heights(dataset: Any) -> list[int]:
    return [dataset[index]["height"] for index in range(len(dataset))]


class TestBaseDataset:
    @pytest.mark.parametrize("serialize", [True, False])
    def test_samples_of_the_annotation_file(self, root: Path, serialize: bool) -> None:
        dataset = made(root, serialize_data=serialize)
        assert len(dataset) == SIZE
        first = {"img_path": str(root / "imgs" / "0.png"), "height": 0, "cats": [0], "sample_idx": 0}
        assert dataset.get_data_info(0) == dataset[0] == first
        assert dataset.get_data_info(-1)["sample_idx"] == SIZE - 1
        with pytest.raises(IndexError, match="idx"):
            dataset.get_data_info(SIZE)

    def test_yaml_and_pickle_are_read_as_well(self, root: Path) -> None:
        annotations = json.loads((root / "ann.json").read_text())
        (root / "ann.yaml").write_text(json.dumps(annotations))
        (root / "ann.pkl").write_bytes(pickle.dumps(annotations))
        assert heights(made(root, ann_file="ann.yaml")) == heights(made(root, ann_file="ann.pkl")) == [0, 1, 2, 3, 4]

    def test_a_sample_can_be_changed_without_harm(self, root: Path) -> None:
        for serialize in (True, False):
            dataset = made(root, serialize_data=serialize)
            dataset[0]["cats"].append(9)
            assert dataset[0]["cats"] == [0]

    def test_metainfo_comes_from_three_places(self, root: Path) -> None:
        assert made(root).metainfo == {"palette": [1], "classes": ("z",), "task": "x"}
        own = made(root, metainfo={"classes": str(root / "classes.txt"), "task": "segmentation", "k": 3}).metainfo
        assert own == {"palette": [1], "classes": ["cat", "dog"], "task": "segmentation", "k": 3}
        assert made(root, BaseDataset).metainfo["classes"] == ["a", "b"]

    def test_metainfo_is_a_copy(self, root: Path) -> None:
        dataset = made(root)
        dataset.metainfo["palette"].append(2)
        assert dataset.metainfo["palette"] == Things.METAINFO["palette"] == [1]

    def test_the_root_is_put_before_relative_paths(self, root: Path) -> None:
        dataset = made(root, lazy_init=True)
        assert dataset.ann_file == str(root / "ann.json")
        assert dataset.data_prefix == {"img_path": str(root / "imgs")}
        absolute = made(root, data_prefix={"img_path": "/somewhere"}, ann_file=str(root / "ann.json"))
        assert absolute[0]["img_path"] == "/somewhere/0.png"
        assert made(root, data_prefix={"img_path": "s3://bucket/x"})[0]["img_path"] == "s3://bucket/x/0.png"

    def test_filter(self, root: Path) -> None:
        assert heights(made(root, filter_cfg={"least": 3})) == [3, 4]

    def test_an_entry_may_be_several_samples(self, root: Path) -> None:
        class Videos(BaseDataset):
            def parse_data_info(self, raw_data_info: dict[str, Any]) -> list[dict[str, Any]]:
                return [{"height": raw_data_info["height"], "frame": frame} for frame in range(2)]

        assert heights(made(root, Videos)) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]

    def test_a_dataset_without_a_file(self) -> None:
        class Computed(BaseDataset):
            def load_data_list(self) -> list[dict[str, Any]]:
                return [{"number": number} for number in range(3)]

        assert [sample["number"] for sample in (Computed()[i] for i in range(3))] == [0, 1, 2]

    @pytest.mark.parametrize("serialize", [True, False])
    @pytest.mark.parametrize(
        ("indices", "expected"),
        [(2, [0, 1]), (-2, [3, 4]), ([0, 3], [0, 3]), ((1,), [1]), (range(2), [0, 1]), ([-1], [4]), (0, [])],
    )
    def test_indices_and_subsets(self, root: Path, serialize: bool, indices: Any, expected: list[int]) -> None:
        assert heights(made(root, indices=indices, serialize_data=serialize)) == expected
        whole = made(root, serialize_data=serialize)
        assert heights(whole.get_subset(indices)) == expected
        assert len(whole) == SIZE
        whole.get_subset_(indices)
        assert heights(whole) == expected

    def test_a_subset_keeps_what_else_the_dataset_is(self, root: Path) -> None:
        subset = made(root, pipeline=[lambda sample: {**sample, "height": -sample["height"]}]).get_subset([4, 1])
        assert heights(subset) == [-4, -1]
        assert subset.metainfo == made(root).metainfo
        assert [subset.get_data_info(i)["sample_idx"] for i in range(2)] == [0, 1]

    def test_lazy_init_loads_nothing_until_it_must(self, root: Path) -> None:
        dataset = made(root, lazy_init=True)
        assert not dataset._fully_initialized
        assert "task" not in dataset.metainfo
        dataset.full_init()
        assert dataset.metainfo["task"] == "x"
        assert len(made(root, lazy_init=True)) == SIZE
        assert made(root, lazy_init=True)[1]["height"] == 1
        assert len(made(root, lazy_init=True).get_subset(2)) == 2

    def test_workers_share_one_array(self, root: Path) -> None:
        dataset = made(root, pipeline=[lambda sample: {"height": sample["height"]}])
        assert dataset.data_list == []
        assert dataset.data_bytes.dtype == np.uint8
        assert len(dataset.data_address) == SIZE
        assert dataset.data_address[-1] == len(dataset.data_bytes)
        loader = DataLoader(dataset, batch_size=2, num_workers=1, collate_fn=pseudo_collate)
        assert [batch["height"] for batch in loader] == [[0, 1], [2, 3], [4]]

    def test_a_dropped_sample_is_replaced_in_training(self, root: Path) -> None:
        dataset = made(root, pipeline=[lambda sample: sample if sample["height"] == 3 else None])
        np.random.seed(0)
        assert heights(dataset) == [3] * SIZE
        with pytest.raises(Exception, match="3 others in a row"):
            made(root, pipeline=[lambda sample: None], max_refetch=3)[0]

    def test_but_not_in_a_test(self, root: Path) -> None:
        with pytest.raises(Exception, match="test mode"):
            made(root, pipeline=[lambda sample: None], test_mode=True)[0]

    @pytest.mark.parametrize(
        ("content", "error"),
        [({"metainfo": {}}, ValueError), ({"data_list": []}, ValueError), ([1], TypeError)],
    )
    def test_annotation_files_of_another_form(self, root: Path, content: Any, error: type[Exception]) -> None:
        (root / "other.json").write_text(json.dumps(content))
        with pytest.raises(error, match=r"other\.json"):
            made(root, ann_file="other.json")

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"metainfo": 3}, TypeError),
            ({"data_prefix": {"img_path": 3}}, TypeError),
            ({"data_prefix": {"seg_path": "x"}}, AssertionError),
            ({"indices": "x"}, TypeError),
            ({"indices": np.array([1])}, TypeError),
            ({"indices": [7]}, IndexError),
            ({"pipeline": [3]}, TypeError),
            ({"pipeline": [{"type": "Nothing"}]}, KeyError),
        ],
    )
    def test_wrong_arguments(self, root: Path, arguments: dict[str, Any], error: type[Exception]) -> None:
        with pytest.raises(error):
            made(root, **arguments)

    def test_wrong_samples_and_subsets(self, root: Path) -> None:
        class Numbers(BaseDataset):
            answer: Any = 3

            def parse_data_info(self, raw_data_info: dict[str, Any]) -> Any:
                return self.answer

        for answer in (3, [3]):
            Numbers.answer = answer
            with pytest.raises(TypeError, match="parse_data_info"):
                made(root, Numbers)
        with pytest.raises(AssertionError, match="indices"):
            made(root).get_subset(10)
        with pytest.raises(NotImplementedError, match="get_cat_ids"):
            made(root, BaseDataset).get_cat_ids(0)

    def test_one_made_from_a_config(self, root: Path) -> None:
        DATASETS.register_module(name="ThingsOfTest", module=Things, force=True)
        cfg = {"type": "ThingsOfTest", "ann_file": "ann.json", "data_root": str(root), "pipeline": [], "indices": 3}
        assert len(DATASETS.build(cfg)) == 3

    def test_a_method_of_ones_own_that_needs_the_data(self, root: Path) -> None:
        class Counting(Things):
            @force_full_init
            def total(self) -> int:
                return sum(self.get_data_info(i)["height"] for i in range(len(self)))

        assert made(root, Counting, lazy_init=True).total() == 10


class TestCompose:
    def test_transforms_and_configs(self) -> None:
        @TRANSFORMS.register_module(name="AddForTest", force=True)
        class Add:
            def __init__(self, number: int) -> None:
                self.number = number

            def __call__(self, sample: int) -> int:
                return sample + self.number

        assert Compose([{"type": "AddForTest", "number": 3}, lambda sample: sample * 2])(1) == 8
        assert Compose([])(5) == Compose(None)(5) == 5

    def test_the_chain_ends_where_a_sample_is_dropped(self) -> None:
        assert Compose([lambda sample: None, lambda sample: 1 / 0])(1) is None

    def test_its_text_shows_the_transforms(self) -> None:
        assert repr(Compose([len])) == "Compose(\n    <built-in function len>\n)"


class TestWrappers:
    def test_joined(self, root: Path) -> None:
        joined = ConcatDataset([made(root), made(root, indices=2)])
        assert heights(joined) == [0, 1, 2, 3, 4, 0, 1]
        assert joined[-1]["height"] == 1
        assert joined._get_ori_dataset_idx(6) == (1, 1)
        assert joined.get_data_info(6)["sample_idx"] == 1
        assert joined.metainfo == made(root).metainfo
        with pytest.raises(IndexError):
            joined[7]

    def test_joined_must_have_equal_metainfo(self, root: Path) -> None:
        other = made(root, metainfo={"task": "y"})
        with pytest.raises(ValueError, match="'task' of dataset 1"):
            ConcatDataset([made(root), other])
        assert ConcatDataset([made(root), other], ignore_keys="task").metainfo["task"] == "x"
        assert len(ConcatDataset([made(root), other], ignore_keys=["task"])) == 2 * SIZE
        with pytest.raises(TypeError, match="ignore_keys"):
            ConcatDataset([made(root)], ignore_keys=3)

    def test_repeated(self, root: Path) -> None:
        repeated = RepeatDataset(made(root), times=3)
        assert heights(repeated) == [0, 1, 2, 3, 4] * 3
        assert repeated.get_data_info(12)["sample_idx"] == 2
        assert len([sample["height"] for sample in repeated]) == 15

    @pytest.mark.parametrize(
        ("threshold", "expected"),
        [(1e-3, [0, 1, 2, 3, 4]), (0.3, [0, 1, 2, 2, 3, 4, 4]), (1, [0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4])],
    )
    def test_balanced(self, root: Path, threshold: float, expected: list[int]) -> None:
        balanced = ClassBalancedDataset(made(root), threshold)
        assert heights(balanced) == balanced.repeat_indices == expected
        assert balanced.get_cat_ids(len(balanced) - 1) == [2]

    def test_a_balanced_dataset_must_know_its_categories(self, root: Path) -> None:
        with pytest.raises(NotImplementedError, match="get_cat_ids"):
            ClassBalancedDataset(made(root, BaseDataset), 0.1)

    def test_they_are_made_from_configs_and_of_each_other(self, root: Path) -> None:
        DATASETS.register_module(name="ThingsOfTest", module=Things, force=True)
        inner = {"type": "ThingsOfTest", "ann_file": "ann.json", "data_root": str(root), "lazy_init": True}
        cfg = {"type": "RepeatDataset", "times": 2, "dataset": {"type": "ConcatDataset", "datasets": [inner, inner]}}
        assert heights(DATASETS.build(cfg)) == [0, 1, 2, 3, 4] * 4

    def test_lazy_init(self, root: Path) -> None:
        for lazy in (
            ConcatDataset([made(root, lazy_init=True)], lazy_init=True),
            RepeatDataset(made(root, lazy_init=True), 1, lazy_init=True),
            ClassBalancedDataset(made(root, lazy_init=True), 1e-3, lazy_init=True),
        ):
            assert not lazy._fully_initialized
            assert lazy[1]["height"] == 1
            assert lazy._fully_initialized

    def test_subsets_are_refused(self, root: Path) -> None:
        for dataset in (ConcatDataset([made(root)]), RepeatDataset(made(root), 2)):
            with pytest.raises(NotImplementedError, match="subsets"):
                dataset.get_subset([1])
            with pytest.raises(NotImplementedError, match="subsets"):
                dataset.get_subset_([1])

    def test_other_things_are_refused(self) -> None:
        for make in (lambda: ConcatDataset([3]), lambda: RepeatDataset(3, 2), lambda: ClassBalancedDataset(3, 1)):
            with pytest.raises(TypeError, match="BaseDataset"):
                make()


class TestSamplers:
    """The orders are those of MMEngine 0.10.7."""

    def test_a_new_order_in_each_epoch(self) -> None:
        sampler = DefaultSampler(range(7), seed=3)
        assert list(sampler) == [5, 3, 4, 6, 0, 2, 1]
        sampler.set_epoch(2)
        assert list(sampler) == [1, 0, 4, 2, 6, 5, 3]

    def test_how_many(self) -> None:
        sampler = DefaultSampler(range(7), shuffle=False, shard=(1, 2))
        assert (len(sampler), sampler.num_samples, sampler.total_size) == (4, 4, 8)
        assert list(sampler) == [1, 3, 5, 0]
        sampler = DefaultSampler(range(7), shuffle=False, round_up=False, shard=(1, 2))
        assert (len(sampler), sampler.num_samples, sampler.total_size) == (3, 3, 7)
        assert sampler.dataset == range(7)

    def test_endless_orders_come_from_one_generator(self) -> None:
        sampler = InfiniteSampler(range(4), seed=3)
        assert list(islice(sampler, 12)) == [2, 3, 1, 0, 3, 2, 1, 0, 0, 3, 1, 2]
        assert list(islice(sampler, 3)) == [2, 3, 1]
        assert len(sampler) == 4
        assert list(islice(InfiniteSampler(range(3), shuffle=False), 7)) == [0, 1, 2, 0, 1, 2, 0]

    def test_endless_orders_are_split_over_the_ranks(self) -> None:
        whole = list(islice(InfiniteSampler(range(5), seed=1, shard=(0, 1)), 20))
        for rank in range(2):
            assert list(islice(InfiniteSampler(range(5), seed=1, shard=(rank, 2)), 10)) == whole[rank::2]

    def test_endless_orders_begin_where_a_run_resumes(self) -> None:
        whole = list(islice(InfiniteSampler(range(5), seed=1), 30))
        sampler = InfiniteSampler(range(5), seed=1)
        sampler.begin_at(13)
        assert list(islice(sampler, 10)) == whole[13:23]

    def test_they_are_registered(self) -> None:
        assert isinstance(DATA_SAMPLERS.build({"type": "InfiniteSampler", "dataset": range(3)}), InfiniteSampler)
        assert isinstance(DATA_SAMPLERS.build({"type": "DefaultSampler", "dataset": range(3)}), DefaultSampler)


class TestCollate:
    def test_nothing_is_stacked(self) -> None:
        batch = pseudo_collate(
            [
                {"inputs": torch.ones(2), "name": "x", "size": (1, 2), "pair": Pair(1, "q"), "none": None},
                {"inputs": torch.zeros(3), "name": "y", "size": (3, 4), "pair": Pair(2, "r"), "none": None},
            ]
        )
        assert [len(image) for image in batch["inputs"]] == [2, 3]
        assert batch["name"] == ["x", "y"]
        assert batch["size"] == [(1, 3), (2, 4)]
        assert batch["pair"] == Pair((1, 2), ("q", "r"))
        assert batch["none"] == [None, None]
        assert pseudo_collate([(1, "a"), (2, "b")]) == [(1, 2), ("a", "b")]

    def test_tensors_arrays_and_numbers_are_stacked(self) -> None:
        element = BaseDataElement(x=1)
        sample = {"t": torch.ones(2), "a": np.ones(3), "n": 3, "f": 0.5, "s": "x", "d": element, "p": Pair(1, 2.0)}
        batch = default_collate([sample, sample])
        assert batch["t"].shape == (2, 2)
        assert batch["a"].shape == (2, 3)
        assert batch["n"].tolist() == [3, 3]
        assert batch["f"].dtype == torch.float64
        assert batch["s"] == ["x", "x"]
        assert batch["d"] == [element, element]
        assert batch["p"].a.tolist() == [1, 1]
        assert [part.tolist() for part in default_collate([(1, 2), (3, 4)])] == [[1, 3], [2, 4]]

    @pytest.mark.parametrize("collate", [pseudo_collate, default_collate])
    def test_sequences_must_be_equally_long(self, collate: Any) -> None:
        with pytest.raises(RuntimeError, match="equally long"):
            collate([[1, 2], [1]])

    @pytest.mark.parametrize("collate", [pseudo_collate, default_collate])
    def test_containers_keep_their_type(self, collate: Any) -> None:
        class Dict(dict):
            pass

        class List(list):
            pass

        assert type(collate([Dict(a=1)])) is Dict
        assert type(collate([List([1])])) is List

    def test_they_are_registered(self) -> None:
        assert FUNCTIONS.get("pseudo_collate") is pseudo_collate
        assert FUNCTIONS.get("default_collate") is default_collate


def test_workers_draw_what_mmengines_draw() -> None:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        worker_init_fn(1, num_workers=2, rank=1, seed=7)
        assert np.random.rand() == pytest.approx(0.771320643266746, abs=1e-15)
        assert torch.rand(1).item() == pytest.approx(0.4581, abs=1e-4)
        assert random.random() == random.Random(10).random()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            worker_init_fn(1, 2, 1, 7, disable_subprocess_warning=True)
            warnings.warn("hidden", stacklevel=1)
        assert not caught
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
