"""Train, and save to or load from a bucket: `weights_job.py WORK_DIR save|load URL`."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.runner import Runner

work_dir, verb, url = sys.argv[1:]
words = torch.arange(12) % 5
torch.manual_seed(0)
runner = Runner(
    nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)),
    work_dir,
    train_dataloader={"dataset": TensorDataset(words, words), "batch_size": 2},
    loss=nn.CrossEntropyLoss(),
    train_cfg={"max_epochs": 1},
    optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.5 if verb == "save" else 0.0}},
    strategy="fsdp",
    load_from=url if verb == "load" else None,
)
runner.train()
if verb == "save":
    runner.save_pretrained(url, max_shard_size=40)
