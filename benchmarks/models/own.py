"""Models written by hand, each with one property that makes layouts difficult.

Their activations are smooth: at the kink of a ReLU the last bit of a sum may decide about a gradient.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, silu

from benchmarks.models.data import CLASSES, VOCABULARY, Batch
from lockstep import dist

WIDTH = 32


class Classifier(nn.Module):
    """A module whose `scores` are trained to tell classes from each other."""

    def scores(self, inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, inputs: Tensor, labels: Tensor | None = None, mode: str = "tensor") -> Any:
        scores = self.scores(inputs)
        return {"loss": cross_entropy(scores, labels)} if mode == "loss" else scores


class Perceptron(Classifier):
    """Two layers."""

    def __init__(self, inputs: int = 16, width: int = WIDTH, outputs: int = CLASSES) -> None:
        super().__init__()
        self.up = nn.Linear(inputs, width)
        self.down = nn.Linear(width, outputs)

    def scores(self, inputs: Tensor) -> Tensor:
        return self.down(silu(self.up(inputs)))


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(silu(self.bn1(self.conv1(images)))))
        return silu(inner + self.shortcut(images))


class ResNet18(Classifier):
    """The network of He et al. with eight blocks, for small images: its first convolution has a stride of 1."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.SiLU())
        widths = (width, width, 2 * width, 4 * width, 8 * width)
        self.blocks = nn.Sequential()
        for stage, (inputs, outputs) in enumerate(pairwise(widths)):
            self.blocks.append(ResidualBlock(inputs, outputs, stride=1 if stage == 0 else 2))
            self.blocks.append(ResidualBlock(outputs, outputs, stride=1))
        self.head = nn.Linear(widths[-1], CLASSES)

    def scores(self, inputs: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(inputs)).mean((2, 3)))


class TwoTowers(nn.Module):
    """Images and captions of the same things, brought together by a contrastive loss over the global batch.

    The temperature is a parameter without dimensions, as in CLIP.
    """

    def __init__(self) -> None:
        super().__init__()
        self.image = Perceptron(16, WIDTH, 8)
        self.caption = Perceptron(12, WIDTH, 8)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor, captions: Tensor, mode: str = "tensor") -> Any:
        of_images, of_captions = normalize(self.image(images)), normalize(self.caption(captions))
        if mode != "loss":
            return of_images * of_captions
        gathered = (torch.cat(dist.all_gather(x, sync_grads=True)) for x in (of_images, of_captions))
        return {"loss": contrastive_loss(*gathered, self.logit_scale)}


def contrastive_loss(of_images: Tensor, of_captions: Tensor, scale: Tensor) -> Tensor:
    """Return how badly each image finds its caption among all, and the other way round."""
    scores = scale.exp() * of_images @ of_captions.T
    own = torch.arange(len(scores))
    return (cross_entropy(scores, own) + cross_entropy(scores.T, own)) / 2


def towers_step(model: TwoTowers, batch: Batch, update: Any) -> dict[str, Tensor]:
    """Train on one batch, with no gathering."""
    towers = model.image(batch["images"]), model.caption(batch["captions"])
    loss = contrastive_loss(*map(normalize, towers), model.logit_scale)
    update(loss)
    return {"loss": loss}


class Experts(Classifier):
    """Each sample goes to one of the experts. In a batch of one rank there may be none for some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, CLASSES, bias=False)
        nn.init.eye_(self.router.weight)  # far from any tie: the classes lie about the first axes
        self.experts = nn.ModuleList(Perceptron(16, WIDTH, WIDTH) for _ in range(CLASSES))
        self.head = nn.Linear(WIDTH, CLASSES)

    def scores(self, inputs: Tensor) -> Tensor:
        weight, choice = self.router(inputs).softmax(1).max(1)
        outputs = inputs.new_zeros(len(inputs), WIDTH)
        for index, expert in enumerate(self.experts):
            if len(chosen := (choice == index).nonzero()[:, 0]):
                outputs = outputs.index_add(0, chosen, weight[chosen, None] * expert(inputs[chosen]))
        return self.head(outputs)


class Backbone(Classifier):
    """A backbone that is frozen at first, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Perceptron(16, WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def scores(self, inputs: Tensor) -> Tensor:
        return self.head(silu(self.backbone(inputs)))


class SpareBranch(Classifier):
    """A network with a branch that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.main = Perceptron()
        self.spare = Perceptron()

    def scores(self, inputs: Tensor) -> Tensor:
        return self.main(inputs)


class MixedDtypes(Classifier):
    """A layer in float64 between layers in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, WIDTH)
        self.exact = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.down = nn.Linear(WIDTH, CLASSES)

    def scores(self, inputs: Tensor) -> Tensor:
        return self.down(silu(self.exact(self.up(inputs).double())).float())


class Scaled(Classifier):
    """A network whose scores are scaled by a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.main = Perceptron()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def scores(self, inputs: Tensor) -> Tensor:
        return self.scale * self.main(inputs)


class Complex(Classifier):
    """A network with a complex layer."""

    def __init__(self, rows: int = 16) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.randn(rows, 16, dtype=torch.complex64) / 4)
        self.down = nn.Linear(rows, CLASSES)

    def scores(self, inputs: Tensor) -> Tensor:
        return self.down((inputs.to(self.waves.dtype) @ self.waves.T).abs())


class SparseWords(Classifier):
    """A mean of word vectors whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def scores(self, inputs: Tensor) -> Tensor:
        return self.head(self.words(inputs).mean(1))
