"""A small transformer, its data, and training loops that PyTorch's users would write by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from lockstep.dist import all_gather, get_rank, get_world_size
from lockstep.hooks import Hook
from lockstep.model import train_step
from lockstep.runner import Runner

STEPS, BATCH, LENGTH, WORDS, WIDTH = 20, 8, 12, 17, 16
TEXT = torch.randint(WORDS, (STEPS * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(5))
INPUTS, TARGETS = TEXT[:, :-1].contiguous(), TEXT[:, 1:].contiguous()
# Said outright, because the sums of a fused update may round otherwise.
ADAMW = {"lr": 3e-3, "weight_decay": 0.1, "fused": True}
MAX_NORM = 0.5


class Transformer(nn.Module):
    """Three layers; returns its loss."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.words(inputs) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], device=inputs.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def seeded(make: Callable[[], nn.Module] = Transformer) -> nn.Module:
    torch.manual_seed(11)
    return make()


def own_batches(micro: int = 1, shard: tuple[int, int] | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's shard of each global batch, cut into `micro` batches.

    The samples of one micro-batch are dealt out to the ranks like cards.
    """
    rank, ranks = shard or (get_rank(), get_world_size())
    batches = zip(INPUTS.split(BATCH // micro), TARGETS.split(BATCH // micro), strict=True)
    return [(x[rank::ranks], y[rank::ranks]) for x, y in batches]


def train_by_hand(
    counts: int = 1, clip: bool = False, make: Callable[[], nn.Module] = Transformer
) -> tuple[list[float], list[float]]:
    """Return the losses and gradient norms of a plain loop, over all ranks with DDP."""
    model = seeded(make)
    if get_world_size() > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, norms = [], []
    for index, (inputs, targets) in enumerate(own_batches(counts), start=1):
        loss = model(inputs, targets)
        (loss / counts if counts > 1 else loss).backward()
        losses.append(loss.item())
        if index % counts == 0:
            if clip:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


def train_by_strategy(
    strategy: Any, counts: int = 1, clip: bool = False, make: Callable[[], nn.Module] = Transformer, steps: int = STEPS
) -> tuple[list[float], list[float]]:
    """Return the losses and gradient norms of a strategy's model and optim wrapper, in the first `steps` steps."""
    model, optim_wrapper = strategy.prepare(seeded(make), optim_config(counts, clip))
    optim_wrapper.initialize_count_status(model, 0, steps * counts)
    step = getattr(model, "train_step", partial(train_step, model))
    losses, norms = [], []
    for batch in own_batches(counts, strategy.data_shard)[: steps * counts]:
        losses.append(step(batch, optim_wrapper)["loss"].item())
        if optim_wrapper.grad_norm is not None and optim_wrapper.inner_count % counts == 0:
            norms.append(optim_wrapper.grad_norm.item())
    return losses, norms


class Losses(Hook):
    """Remembers the loss of each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.seen.append(outputs["loss"].item())


def train_by_runner(work_dir: Path, **changes: Any) -> list[float]:
    """Return the losses that a Runner trains with."""
    losses = Losses()
    Runner(
        seeded(),
        work_dir,
        train_dataloader={
            "dataset": TensorDataset(INPUTS, TARGETS), "batch_size": BATCH // get_world_size(), "shuffle": False,
        },
        train_cfg={"max_epochs": 1},
        optim_wrapper=optim_config(),
        custom_hooks=[losses],
        **{"default_hooks": {"checkpoint": None}, **changes},
    ).train()  # fmt: skip
    return losses.seen


def optim_config(counts: int = 1, clip: bool = False) -> dict[str, Any]:
    return {
        "optimizer": {"type": "AdamW", **ADAMW},
        "accumulative_counts": counts,
        "clip_grad": {"max_norm": MAX_NORM} if clip else None,
    }


def mean_over_ranks(values: list[float]) -> list[float]:
    return torch.stack(all_gather(torch.tensor(values, dtype=torch.float64))).mean(0).tolist()
