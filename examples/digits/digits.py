"""The 1,797 handwritten digits that ship with scikit-learn, and a small network that classifies them."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.model import BaseModel

HELD_OUT = 359  # a prime, so no number of ranks divides it


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Images [1, 8, 8] with values from 0 to 1, and the digits they show.

    Args:
        held_out: use the images kept for validation, otherwise all others. The split never changes.
    """

    metainfo = {"classes": tuple("0123456789")}

    def __init__(self, held_out: bool = False) -> None:
        data = load_digits()
        order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
        chosen = order[:HELD_OUT] if held_out else order[HELD_OUT:]
        self.images = torch.as_tensor(data.images, dtype=torch.float32)[chosen].unsqueeze(1) / 16
        self.labels = torch.as_tensor(data.target)[chosen]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


class DigitsNet(BaseModel):
    """Two convolutions and a linear layer."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),  # [batch, width, 8, 8]
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),  # [batch, 2 * width, 4, 4]
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(32 * width, 10),
        )

    def forward(self, images: Tensor, labels: Tensor | None = None, mode: str = "tensor"):
        scores = self.layers(images)
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(scores, labels)}
        return (scores, labels) if mode == "predict" else scores
