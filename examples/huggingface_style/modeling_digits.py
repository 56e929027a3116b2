"""Two models in the style of the Transformers library: keyword arguments in, an object with a loss out.

They do not depend on lockstep.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it


@dataclass
class MaskedImageModelingOutput:
    loss: Tensor
    reconstruction: Tensor  # [batch, 1, 8, 8]


@dataclass
class ImageClassifierOutput:
    loss: Tensor | None
    logits: Tensor  # [batch, labels]


class DigitsModel(nn.Module):
    """A transformer over the 16 patches of an image [batch, 1, 8, 8]."""

    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
                for _ in range(layers)
            ),
            nn.LayerNorm(width),
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return [batch, 16, width]."""
        return self.layers(self.patches(pixel_values).flatten(2).transpose(1, 2) + self.places)


class DigitsForMaskedImageModeling(nn.Module):
    """Reconstructs images from half of their patches."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.digits = DigitsModel(width)
        self.decoder = nn.Linear(width, 4)

    def forward(self, pixel_values: Tensor) -> MaskedImageModelingOutput:
        seen = torch.rand(len(pixel_values), 1, 4, 4, device=pixel_values.device) < 0.5
        seen = seen.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)  # [batch, 1, 8, 8]
        patches = self.decoder(self.digits(pixel_values * seen))  # [batch, 16, 4]
        reconstruction = F.pixel_shuffle(patches.transpose(1, 2).unflatten(2, (4, 4)), 2)
        loss = F.mse_loss(reconstruction[~seen], pixel_values[~seen])
        return MaskedImageModelingOutput(loss, reconstruction)


class DigitsForImageClassification(nn.Module):
    """Classifies which digit an image shows."""

    def __init__(self, width: int = 64, labels: int = 10) -> None:
        super().__init__()
        self.digits = DigitsModel(width)
        self.classifier = nn.Linear(width, labels)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        logits = self.classifier(self.digits(pixel_values).mean(dim=1))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss, logits)
