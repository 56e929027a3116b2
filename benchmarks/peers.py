"""The same training under other frameworks, each as its documentation shows; see `make bench-peers`.

Their defaults are kept, but for what would only disturb the picture: progress bars, and messages below errors.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.measure import Row, compare
from benchmarks.training import (
    STEPS,
    TUNED,
    Classifier,
    Samples,
    Stopwatch,
    Training,
    compare_trainings,
    loader_of,
    with_runner,
    with_session,
)
from lockstep import dist


def rows() -> Iterator[Row]:
    """Compare with accelerate, Fabric and Lightning; in one process with MMEngine too: it needs no launcher there."""
    warnings.simplefilter("ignore")
    if dist.get_world_size() > 1:
        yield _dict_of_scalars()
    peers: dict[str, Training] = {"accelerate": _accelerate, "Fabric": _fabric, "Lightning": _lightning}
    own: dict[str, Training] = TUNED if dist.get_world_size() > 1 else {"MMEngine": _mmengine}
    yield from compare_trainings({"Runner": with_runner, "Session": with_session, **peers, **own})


def _dict_of_scalars() -> Row:
    from mmengine.dist import all_reduce_dict

    scalars = {f"loss_{i}": torch.zeros(()) for i in range(20)}
    return compare(
        "collectives",
        "all_reduce_dict, 20 scalars",
        ours=lambda: dist.all_reduce_dict(scalars),
        theirs=lambda: all_reduce_dict(scalars),
        baseline="MMEngine",
        rounds=600,
        goal="<= 1.00",
    )


def _strategy() -> str:
    return "ddp" if dist.get_world_size() > 1 else "auto"


def _accelerate(data: Samples, width: int, batch: int) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Classifier(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    watch = Stopwatch()
    for inputs, targets in loader:
        loss = model(inputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        watch.lap()
    return watch.seconds()


def _fabric(data: Samples, width: int, batch: int) -> float:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=_strategy())
    fabric.launch()
    model = Classifier(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=batch, shuffle=True))
    model.train()
    watch = Stopwatch()
    for inputs, targets in loader:
        loss = model(inputs, targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        watch.lap()
    return watch.seconds()


def _lightning(data: Samples, width: int, batch: int) -> float:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Classifier(width)

        def training_step(self, samples: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            loss = self.model(*samples)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Laps(lightning.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            watch.lap()

    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=_strategy(),
            max_epochs=1,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Laps()],
        )
        trainer.fit(Module(), DataLoader(data, batch_size=batch, shuffle=True))
    return watch.seconds()


def _mmengine(data: Samples, width: int, batch: int) -> float:
    from mmengine.hooks import Hook
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.model = Classifier(width)

        def forward(self, inputs: Tensor, targets: Tensor, mode: str) -> dict[str, Tensor]:
            return {"loss": self.model(inputs, targets)}

    class Laps(Hook):
        priority = "LOWEST"

        def after_train_iter(self, *_: Any, **__: Any) -> None:
            watch.lap()

    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        Runner(
            model=Model(),
            work_dir=folder,
            train_dataloader=loader_of(data, batch),
            optim_wrapper=dict(optimizer=dict(type="AdamW", lr=1e-3)),
            train_cfg=dict(by_epoch=False, max_iters=STEPS),
            custom_hooks=[Laps()],
            log_level="ERROR",
            experiment_name=f"bench_{time.monotonic_ns()}",  # it keeps the visualizer of each name for good
        ).train()
    return watch.seconds()
