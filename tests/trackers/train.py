"""Two short trainings with one tracker in work_dirs/digits: the first ends well, the second fails in iteration 3.

Called with the visualizer as JSON. A connection to another machine is refused, and its host added to network.txt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

THIS_MACHINE = ("127.0.0.1", "::1", "localhost", "0.0.0.0", None)
NETWORK = Path("network.txt").resolve()


def refuse_network(event: str, args: tuple[Any, ...]) -> None:
    if event == "socket.connect" and isinstance(args[1], tuple):
        host = args[1][0]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = args[0]
    else:
        return
    if host not in THIS_MACHINE:
        with NETWORK.open("a") as file:
            print(host, file=file)
        raise OSError(f"{host} is another machine")


sys.addaudithook(refuse_network)

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from lockstep.config import Config  # noqa: E402
from lockstep.hooks import Hook  # noqa: E402
from lockstep.runner import Runner  # noqa: E402


class Shows(Hook):
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter == 1:
            runner.visualizer.add_image("digits/seven", torch.arange(60, dtype=torch.uint8).reshape(4, 5, 3), step=2)
            runner.visualizer.add_text("digits/answer", "forty-two", step=2)
        if runner.iter == 2 and self.fails:
            raise ValueError("a bad batch")


def train(visualizer: dict[str, Any], name: str, fails: bool) -> None:
    data = TensorDataset(torch.randn(8, 2, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2)
    cfg = Config({"model": {"type": "Net", "depths": [2, 4]}, "seed": 0})
    runner = Runner(
        nn.Linear(2, 2),
        work_dir="work_dirs/digits",
        loss=nn.CrossEntropyLoss(),
        train_dataloader=DataLoader(data, batch_size=1),
        train_cfg={"by_epoch": False, "max_iters": 4},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.125}},
        default_hooks={"logger": {"interval": 2}, "checkpoint": None},
        custom_hooks=[Shows(fails)],
        visualizer=visualizer,
        cfg=cfg,
        experiment_name=name,
    )
    runner.train()


if __name__ == "__main__":
    visualizer = json.loads(sys.argv[1])
    train(visualizer, "first", fails=False)
    try:
        train(visualizer, "second", fails=True)
    except ValueError as error:
        print("ended by", error)
