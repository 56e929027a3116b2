"""Whole programs as users of MMEngine write them, with nothing changed but the import: on one process and on two."""

from __future__ import annotations

import argparse
import logging
import os.path as osp
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import Dataset

from lockstep.config import Config, DictAction
from lockstep.dist import get_world_size, is_main_process, main_process_first
from lockstep.evaluator import BaseMetric
from lockstep.hooks import Hook
from lockstep.lint import check_config
from lockstep.logging import MessageHub
from lockstep.model import BaseModel, ImgDataPreprocessor, MMSeparateDistributedDataParallel
from lockstep.optim import OptimWrapper, OptimWrapperDict
from lockstep.registry import DATASETS as BASE_DATASETS
from lockstep.registry import HOOKS as BASE_HOOKS
from lockstep.registry import METRICS as BASE_METRICS
from lockstep.registry import MODELS as BASE_MODELS
from lockstep.registry import RUNNERS, Registry
from lockstep.registry import TRANSFORMS as BASE_TRANSFORMS
from lockstep.runner import Runner
from lockstep.testing import ranks

logger = logging.getLogger("lockstep.blobs")  # in the place of MMEngine's print_log

# The registries of a library that is built upon the engine, which configs reach by its `default_scope`.
DATASETS = Registry("dataset", parent=BASE_DATASETS, scope="blobs")
HOOKS = Registry("hook", parent=BASE_HOOKS, scope="blobs")
METRICS = Registry("metric", parent=BASE_METRICS, scope="blobs")
MODELS = Registry("model", parent=BASE_MODELS, scope="blobs")
TRANSFORMS = Registry("transform", parent=BASE_TRANSFORMS, scope="blobs")


@TRANSFORMS.register_module()
class Scale:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, results: dict) -> dict:
        results["inputs"] = results["inputs"] * self.by
        return results


class Sample:
    """A sample's data. MMEngine's BaseDataElement and LabelData, which it stands for, are in lockstep-mmengine."""

    def __init__(self, sample_idx: int, gt_label: Tensor) -> None:
        self.sample_idx, self.gt_label = sample_idx, gt_label
        self.pred_score: Tensor | None = None

    def to(self, device: torch.device) -> Sample:
        return Sample(self.sample_idx, self.gt_label.to(device))


@TRANSFORMS.register_module()
class Pack:
    def __call__(self, results: dict) -> dict:
        return {
            "inputs": results["inputs"],
            "data_samples": Sample(results["sample_idx"], torch.tensor([results["gt"]])),
        }


@DATASETS.register_module()
class Blobs(Dataset):
    METAINFO = {"classes": ("left", "middle", "right")}

    def __init__(self, n: int, seed: int = 0, pipeline: Any = (), test_mode: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 3, (n,), generator=generator)
        self.x = torch.randn(n, 4, generator=generator) + 4 * F.one_hot(self.y, 4)
        self.pipeline = [TRANSFORMS.build(transform) for transform in pipeline]
        self.metainfo = self.METAINFO

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict:
        sample = {"inputs": self.x[index], "gt": int(self.y[index]), "sample_idx": index}
        for transform in self.pipeline:
            sample = transform(sample)
        return sample


@MODELS.register_module()
class Backbone(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@MODELS.register_module()
class Classifier(BaseModel):
    def __init__(self, backbone: dict, num_classes: int, data_preprocessor=None, init_cfg=None) -> None:
        super().__init__(data_preprocessor=data_preprocessor, init_cfg=init_cfg)
        self.backbone = MODELS.build(backbone)
        self.head = nn.Linear(backbone["width"], num_classes)
        logger.info("classifier built")

    def init_weights(self) -> None:
        super().init_weights()
        nn.init.zeros_(self.head.bias)

    def forward(self, inputs, data_samples=None, mode: str = "tensor"):
        scores = self.head(self.backbone(torch.stack(inputs)))
        if mode == "tensor":
            return scores
        if mode == "loss":
            hub = MessageHub.get_current_instance()
            assert 0 <= hub.get_info("iter") < hub.get_info("max_iters")
            target = torch.cat([sample.gt_label for sample in data_samples])
            return {"loss_cls": F.cross_entropy(scores, target), "acc": (scores.argmax(1) == target).float().mean()}
        for sample, score in zip(data_samples, scores, strict=True):
            sample.pred_score = score
        return data_samples


@METRICS.register_module()
class BlobAccuracy(BaseMetric):
    default_prefix = "blobs"

    def process(self, data_batch: Any, data_samples: Any) -> None:
        for sample in data_samples:
            self.results.append(int(sample.pred_score.argmax() == sample.gt_label[0]))

    def compute_metrics(self, results: list) -> dict:
        logger.info(f"{len(results)} samples of {self.dataset_meta['classes']}")
        return {"acc": 100 * sum(results) / len(results)}


@HOOKS.register_module()
class Spy(Hook):
    priority = "LOW"

    def __init__(self, every: int) -> None:
        self.every = every

    def before_run(self, runner) -> None:
        runner.logger.info(f"to {osp.join(runner.work_dir, runner.run_dir.name)}")

    def before_train(self, runner) -> None:
        assert any(isinstance(hook, Spy) for hook in runner.hooks)
        assert len(runner.train_dataloader.dataset) == 60

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if self.every_n_train_iters(runner, self.every):
            runner.message_hub.update_scalar("train/spied", runner.iter)
            runner.visualizer.add_scalar("spied", outputs["loss"].item(), step=runner.iter)

    def _after_epoch(self, runner, mode: str = "train") -> None:
        runner.message_hub.update_info("last_mode", mode)

    def after_train(self, runner) -> None:
        hub = runner.message_hub
        assert hub.get_info("last_mode") == "val"
        assert hub.get_scalar("train/loss").mean(10) > 0
        assert hub.get_scalar("train/spied").max() > 0
        assert Path(hub.get_info("best_ckpt")).parents[1] == runner.work_dir


BASES = {
    "models/net.py": "model = dict(type='Classifier', backbone=dict(type='Backbone', width=8), num_classes=3)\n",
    "datasets/blobs.py": """
dataset_type = 'Blobs'
data_preprocessor = dict(type='BaseDataPreprocessor')
pipeline = [dict(type='Scale', by=0.5), dict(type='Pack')]
train_dataloader = dict(
    batch_size=6, num_workers=0, persistent_workers=False,
    dataset=dict(type=dataset_type, n=60, pipeline=pipeline),
    sampler=dict(type='DefaultSampler', shuffle=True),
    collate_fn=dict(type='pseudo_collate'))
val_dataloader = dict(
    batch_size=8, num_workers=0, drop_last=False,
    dataset=dict(type=dataset_type, n=21, seed=1, pipeline=pipeline, test_mode=True),
    sampler=dict(type='DefaultSampler', shuffle=False),
    collate_fn=dict(type='pseudo_collate'))
val_evaluator = dict(type='BlobAccuracy')
test_dataloader = val_dataloader
test_evaluator = val_evaluator
""",
    "schedules/short.py": """
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1, momentum=0.9, weight_decay=1e-4),
                     clip_grad=dict(max_norm=5, norm_type=2))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=5, verbose=False),
    dict(type='MultiStepLR', by_epoch=True, begin=0, end=3, milestones=[2], gamma=0.1)]
train_cfg = dict(by_epoch=True, max_epochs=3, val_interval=1)
val_cfg = dict()
test_cfg = dict()
auto_scale_lr = dict(base_batch_size=256)
""",
    "default_runtime.py": """
default_scope = 'blobs'
default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=10),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(type='CheckpointHook', interval=1, max_keep_ckpts=2, save_best='auto'),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    runtime_info=dict(type='RuntimeInfoHook'))
env_cfg = dict(cudnn_benchmark=False, mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
               dist_cfg=dict(backend='nccl'))
vis_backends = [dict(type='LocalVisBackend')]
visualizer = dict(type='Visualizer', vis_backends=vis_backends, name='visualizer')
log_processor = dict(type='LogProcessor', window_size=50, by_epoch=True)
log_level = 'INFO'
load_from = None
resume = False
randomness = dict(seed=7, deterministic=False)
""",
}
CONFIG = """
_base_ = ['./_base_/models/net.py', './_base_/datasets/blobs.py', './_base_/schedules/short.py',
          './_base_/default_runtime.py']
custom_hooks = [dict(type='Spy', every=5, priority='LOW'), dict(type='EMAHook', momentum=0.5),
                dict(type='EarlyStoppingHook', monitor='blobs/acc', rule='greater', patience=10)]
work_dir = './work_dirs/{{ fileBasenameNoExtension }}'
"""


def tools_train(arguments: list[str]) -> Runner:
    """Do what the training script of every library upon MMEngine does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--work-dir")
    parser.add_argument("--resume", nargs="?", type=str, const="auto")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--auto-scale-lr", action="store_true")
    parser.add_argument("--cfg-options", nargs="+", action=DictAction)
    args = parser.parse_args(arguments)
    cfg = Config.fromfile(args.config)
    assert osp.basename(cfg.work_dir) == "net_blobs"
    if args.cfg_options is not None:
        cfg.merge_from_dict(args.cfg_options)
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    if args.amp:
        cfg.optim_wrapper.type = "AmpOptimWrapper"
        cfg.optim_wrapper.setdefault("loss_scale", "dynamic")
    if args.auto_scale_lr:
        cfg.auto_scale_lr.enable = True
    if args.resume == "auto":
        cfg.resume = True
        cfg.load_from = None
    check_config(cfg)
    return Runner.from_cfg(cfg) if "runner_type" not in cfg else RUNNERS.build(cfg)


def write_configs(folder: Path) -> None:
    for name, text in BASES.items():
        (folder / "_base_" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "_base_" / name).write_text(text)
    (folder / "net_blobs.py").write_text(CONFIG)


@ranks(1, 2)
def test_a_library_trains_resumes_and_tests_from_its_configs(tmp_path: Path):
    with main_process_first():
        if is_main_process():
            write_configs(tmp_path)
    common = [str(tmp_path / "net_blobs.py"), "--work-dir", str(tmp_path / "runs")]
    runner = tools_train([*common, "--amp", "--cfg-options", "train_cfg.max_epochs=2", "model.backbone.width=16"])
    runner.train()
    assert runner.epoch == 2
    assert runner.val_loop.metrics["blobs/acc"] > 80
    again = tools_train([*common, "--amp", "--resume", "--auto-scale-lr", "--cfg-options", "model.backbone.width=16",
                         "runner_type=Runner"])  # fmt: skip
    again.train()
    assert again.epoch == 3
    tested = again.test()
    best = tools_train([*common, "--cfg-options", "model.backbone.width=16"])
    best.load_checkpoint(again.message_hub.get_info("last_ckpt"))
    assert best.test() == tested == again.val_loop.metrics
    log = (runner.run_dir / "log.txt").read_text() if again.rank == 0 else "classifier built"
    assert "classifier built" in log


class Generator(nn.Module):
    def __init__(self, noise: int) -> None:
        super().__init__()
        self.layer = nn.Linear(noise, 16)

    def forward(self, z: Tensor) -> Tensor:
        return self.layer(z).tanh().view(-1, 1, 4, 4)


class GAN(BaseModel):
    def __init__(self, generator: nn.Module, discriminator: nn.Module, noise: int, data_preprocessor) -> None:
        super().__init__(data_preprocessor=data_preprocessor)
        self.noise = noise
        self.generator = generator
        self.discriminator = discriminator

    def train_step(self, data: Any, optim_wrapper: OptimWrapperDict) -> dict[str, Tensor]:
        images = self.data_preprocessor(data, True)["inputs"]
        wrapper = optim_wrapper["discriminator"]
        with wrapper.optim_context(self.discriminator):
            with torch.no_grad():
                fakes = self.generator(torch.randn(len(images), self.noise))
            fake, real = self.discriminator(fakes), self.discriminator(images)
            loss, log_vars = self.parse_losses({"loss_disc": F.softplus(fake) + F.softplus(-real)})
        wrapper.update_params(loss)
        wrapper = optim_wrapper["generator"]
        self.discriminator.requires_grad_(False)
        with wrapper.optim_context(self.generator):
            fake = self.discriminator(self.generator(torch.randn(len(images), self.noise)))
            loss, gen_vars = self.parse_losses({"loss_gen": F.softplus(-fake)})
        wrapper.update_params(loss)
        self.discriminator.requires_grad_(True)
        return {**log_vars, **gen_vars}

    def forward(self, inputs: Tensor, data_samples: Any = None, mode: str | None = None) -> Tensor:
        return self.generator(torch.randn(len(inputs), self.noise))


class Pictures(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict:
        return {"inputs": torch.full((1, 4, 4), 16.0 * index)}


@ranks(1, 2, fresh=True)
@pytest.mark.parametrize("as_objects", [True, False])
def test_a_gan_with_an_optimizer_for_each_part(as_objects: bool, tmp_path: Path):
    generator, discriminator = Generator(4), nn.Sequential(nn.Flatten(), nn.Linear(16, 1))
    model = GAN(generator, discriminator, 4, ImgDataPreprocessor(mean=[127.5], std=[127.5]))
    optim_wrapper: Any = OptimWrapperDict(
        generator=OptimWrapper(Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))),
        discriminator=OptimWrapper(Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))),
    )
    if not as_objects:
        optim_wrapper = {part: {"optimizer": {"type": "Adam", "lr": 1e-3}} for part in ("generator", "discriminator")}
    runner = Runner(
        model,
        train_dataloader={
            "batch_size": 4,
            "num_workers": 0,
            "sampler": {"type": "DefaultSampler", "shuffle": True},
            "dataset": Pictures(),
            "collate_fn": {"type": "default_collate"},
        },
        train_cfg={"by_epoch": True, "max_epochs": 2},
        optim_wrapper=optim_wrapper,
        work_dir=str(tmp_path),
        cfg={"model_wrapper_cfg": {"type": "MMSeparateDistributedDataParallel", "find_unused_parameters": False}},
        launcher="pytorch",
        env_cfg={"dist_cfg": {"backend": "gloo"}},
    )
    runner.train()
    assert runner.iter == 8 // get_world_size()
    assert runner.optim_wrapper.get_lr() == {"generator.lr": [1e-3], "discriminator.lr": [1e-3]}
    assert isinstance(runner.model, MMSeparateDistributedDataParallel if get_world_size() == 2 else GAN)
