"""Teach a network to draw digits: lockstep train examples/gan/config.py --nproc 2."""

from gan import DigitsGAN, FrechetDistance, ShowDrawings
from torch.optim import Adam

from lockstep.config import read_base
from lockstep.visualization import LocalVisualizer

with read_base():
    from ..digits.config import train_dataloader, val_dataloader  # noqa: F401 - now keys of this config

work_dir = "work_dirs/gan"

model = dict(type=DigitsGAN)
val_evaluator = dict(type=FrechetDistance)

strategy = dict(type="ddp", model_wrapper=dict(type="MMSeparateDistributedDataParallel"))
optim_wrapper = dict(
    generator=dict(optimizer=dict(type=Adam, lr=5e-4, betas=(0.5, 0.99))),
    discriminator=dict(optimizer=dict(type=Adam, lr=1e-3, betas=(0.5, 0.99))),
)
train_cfg = dict(by_epoch=False, max_iters=1400, val_interval=200)

default_hooks = dict(checkpoint=dict(max_keep_ckpts=1))
custom_hooks = [dict(type=ShowDrawings)]
visualizer = dict(type=LocalVisualizer)  # writes images/drawings_ITER.png into the run's folder
randomness = dict(seed=0)  # each rank draws its own noise
