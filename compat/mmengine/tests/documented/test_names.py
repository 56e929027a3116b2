"""Names that are not in MMEngine's tutorials, but that packages for it use."""

from __future__ import annotations

import sys
from copy import deepcopy

import pytest
from environments import LOCKSTEP
from torch import nn
from torch.utils.data import DataLoader

from mmengine.config import ConfigDict
from mmengine.config.utils import MODULE2PACKAGE
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.model import ExponentialMovingAverage
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from mmengine.runner.loops import _InfiniteDataloaderIterator
from mmengine.utils.dl_utils.parrots_wrapper import SyncBatchNorm_
from mmengine.utils.progressbar import init_pool


def test_distributions_of_packages():
    assert len(MODULE2PACKAGE) == 19
    assert MODULE2PACKAGE["mmseg"] == "mmsegmentation"
    assert MODULE2PACKAGE["mmpose"] == "mmpose"


def test_the_norm_over_ranks_is_that_of_torch():
    assert SyncBatchNorm_ is nn.SyncBatchNorm


def test_a_pool_calls_its_initializer():
    with init_pool(1, sys.setrecursionlimit, (1234,)) as pool:
        assert pool.apply(sys.getrecursionlimit) == 1234
    with init_pool(1) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]


def test_a_loader_goes_on_for_ever(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # MMEngine waits between two passes
    batches = _InfiniteDataloaderIterator(DataLoader(range(4), batch_size=2))
    assert [next(batches).tolist() for _ in range(5)] == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


class Sigmas(BaseMetric):
    """A metric that takes from the dataset what it needs."""

    @BaseMetric.dataset_meta.setter
    def dataset_meta(self, dataset_meta):
        self._dataset_meta = {**dataset_meta, "sigmas": dataset_meta["sigmas"] * 2}

    def process(self, data_batch, data_samples):
        self.results += data_samples

    def compute_metrics(self, results):
        return {"sum": sum(results) * self.dataset_meta["sigmas"]}


def test_a_metric_may_override_what_is_done_with_the_metainfo():
    evaluator = Evaluator([Sigmas()])
    assert evaluator.metrics[0].dataset_meta is None
    evaluator.dataset_meta = {"sigmas": 3}
    evaluator.process([1, 2])
    assert evaluator.evaluate(2) == {"sum": 18}


@pytest.mark.parametrize("update_buffers", [False, True])
def test_a_subclass_of_an_average_updates_by_name(update_buffers):
    class Own(ExponentialMovingAverage):
        def update_parameters(self, model):
            source = model.state_dict()
            for name, average in self.avg_parameters.items():
                if average.dtype.is_floating_point:
                    self.avg_func(average.data, source[name].data, self.steps)
            self.steps += 1

    net = nn.BatchNorm1d(2)
    average = Own(net, momentum=0.5, update_buffers=update_buffers)
    names = ["weight", "bias"] + ["running_mean", "running_var", "num_batches_tracked"] * update_buffers
    assert list(average.avg_parameters) == names
    assert average.avg_parameters["weight"].data_ptr() == average.module.weight.data_ptr()
    for value in net.state_dict().values():
        value.fill_(3)
    average.update_parameters(net)
    assert average.module.weight.tolist() == [2, 2]
    assert average.module.running_mean.tolist() == ([1.5, 1.5] if update_buffers else [0, 0])
    assert average.module.num_batches_tracked.item() == 0


PACKAGE = {
    "__init__": "",
    "registry": "from mmengine.registry import DATASETS as PARENT, Registry\n"
    "DATASETS = Registry('dataset', parent=PARENT, scope='latepackage', locations=['latepackage.data'])\n",
    "data": "from mmengine.dataset import COLLATE_FUNCTIONS\n"
    "from latepackage.registry import DATASETS\n"
    "@COLLATE_FUNCTIONS.register_module()\n"
    "def add_up(batch, times=1):\n"
    "    return sum(batch) * times\n"
    "@DATASETS.register_module()\n"
    "class Ten:\n"
    "    def __len__(self):\n"
    "        return 10\n"
    "    def __getitem__(self, index):\n"
    "        return index\n",
}


def test_the_package_of_the_dataset_may_have_the_collate_function(tmp_path, monkeypatch):
    (tmp_path / "latepackage").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "latepackage" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with DefaultScope.overwrite_default_scope("latepackage"):
        cfg = dict(dataset=dict(type="Ten"), batch_size=5, sampler=dict(type="DefaultSampler", shuffle=False))
        loader = Runner.build_dataloader({**cfg, "collate_fn": dict(type="add_up", times=2)})
        assert list(loader) == [20, 70]
        says = "did you mean `add_up`" if LOCKSTEP else "must be callable"
        with pytest.raises((TypeError, ValueError), match=says):
            Runner.build_dataloader({**cfg, "collate_fn": dict(type="add_upp", times=2)})


def test_update_merges_dicts():
    cfg = ConfigDict(model=dict(preprocessor=dict(mean=1, std=2), size=3), lr=4)
    other = deepcopy(cfg)
    cfg.update(model=dict(preprocessor=dict(std=5), head=6))
    assert cfg == dict(model=dict(preprocessor=dict(mean=1, std=5), size=3, head=6), lr=4)
    other |= dict(model=dict(preprocessor=dict(std=5), head=6))
    assert other == cfg
    assert (other | dict(model=dict(size=7))).model == {**cfg.model, "size": 7}
    assert (dict(model=dict(size=7, new=8)) | other).model == {**cfg.model, "new": 8}
    assert other == cfg
