"""The same without a config: lockstep launch examples/digits/train.py --nproc 2, or torchrun, or plain python."""

import torch
from digits import Digits, DigitsNet
from torch.utils.data import DataLoader

from lockstep import Runner

torch.manual_seed(0)  # the weights are drawn here, before the Runner sets its seed
runner = Runner(
    model=DigitsNet(),
    work_dir="work_dirs/digits",
    train_dataloader=DataLoader(Digits(), batch_size=32, shuffle=True),
    val_dataloader=DataLoader(Digits(held_out=True), batch_size=64),
    val_evaluator=dict(type="Accuracy"),
    optim_wrapper=dict(optimizer=dict(type="AdamW", lr=3e-3)),
    train_cfg=dict(by_epoch=True, max_epochs=10, val_interval=1),
    randomness=dict(seed=0),
)
runner.train()
