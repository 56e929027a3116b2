"""Train a small network on handwritten digits: lockstep train examples/digits/config.py --nproc 2."""

from digits import Digits, DigitsNet
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from lockstep.evaluator import Accuracy

work_dir = "work_dirs/digits"

model = dict(type=DigitsNet)
train_dataloader = dict(dataset=dict(type=Digits), batch_size=32)  # per rank
val_dataloader = dict(dataset=dict(type=Digits, held_out=True), batch_size=64)
val_evaluator = dict(type=Accuracy)

optim_wrapper = dict(optimizer=dict(type=AdamW, lr=3e-3))
param_scheduler = dict(type=CosineAnnealingLR, by_epoch=False)
train_cfg = dict(by_epoch=True, max_epochs=10, val_interval=1)

default_hooks = dict(checkpoint=dict(max_keep_ckpts=2, save_best="accuracy"))
randomness = dict(seed=0)
