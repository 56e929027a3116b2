"""A GPT of 124 M parameters, a ResNet-50, and random data for both; small forms of them to try the code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, relu, scaled_dot_product_attention
from torch.utils.data import Dataset


class Block(nn.Module):
    """A layer of GPT-2: causal attention and a perceptron, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        # x: [batch, length, width]
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Returns the loss of the next tokens. The words of input and output are the same parameter."""

    def __init__(self, words: int, length: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.convs = nn.Sequential(
            nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outer, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.convs(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Returns the loss of the classes."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks, inner = [], width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                blocks.append(Bottleneck(inner, width << stage, 2 if stage and not number else 1))
                inner = 4 * (width << stage)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inner, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x.mean((2, 3))), targets)


@dataclass(frozen=True)
class Workload:
    """A model and what it is trained on.

    Attributes:
        name: of the model.
        make: returns the model; its `blocks` are FSDP's units.
        inputs: the inputs that there are, [number, ...]; samples repeat them.
        targets: the same, of targets.
        batch: samples per step and rank.
        unit: what is counted.
        per_sample: how many of it are in a sample.
        is_cast: whether FSDP casts its weights to bfloat16; else, as under DDP, autocast does, because BatchNorm needs
            its own precision.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    batch: int
    unit: str
    per_sample: int
    is_cast: bool


class Repeated(Dataset[tuple[Tensor, Tensor]]):
    """As many samples as a training takes, of the few that there are."""

    def __init__(self, workload: Workload, size: int) -> None:
        self.workload, self.size = workload, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        place = index % len(self.workload.inputs)
        return self.workload.inputs[place], self.workload.targets[place]


def workloads(small: bool) -> list[Workload]:
    draw = torch.Generator().manual_seed(0)
    return [_gpt(small, draw), _resnet(small, draw)]


def _gpt(small: bool, draw: torch.Generator) -> Workload:
    words, length, layers, width, heads, batch = (64, 16, 2, 32, 2, 2) if small else (50_304, 1024, 12, 768, 12, 16)
    text = torch.randint(words, (64, length + 1), generator=draw)
    return Workload(
        "GPT", lambda: GPT(words, length, layers, width, heads), text[:, :-1].contiguous(), text[:, 1:].contiguous(),
        batch, "tokens", length, is_cast=True,
    )  # fmt: skip


def _resnet(small: bool, draw: torch.Generator) -> Workload:
    depths, width, classes, side, batch = ((1, 1), 8, 10, 32, 2) if small else ((3, 4, 6, 3), 64, 1000, 224, 128)
    images = torch.randn(64, 3, side, side, generator=draw)
    targets = torch.randint(classes, (64,), generator=draw)
    return Workload(
        "ResNet", lambda: ResNet(depths, width, classes), images, targets, batch, "images", 1, is_cast=False
    )
