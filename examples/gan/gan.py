"""A generator that draws handwritten digits, a discriminator that tells them from real ones, and a metric."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from lockstep.evaluator import BaseMetric
from lockstep.hooks import Hook
from lockstep.model import BaseModel
from lockstep.optim import OptimWrapper, OptimWrapperDict

NOISE = 32


class DigitsGAN(BaseModel):
    """A GAN for images [batch, 1, 8, 8] with values from 0 to 1. It does not use labels.

    Its generator and discriminator each have their own optimizer and, on several ranks, their own DDP wrapper.

    Args:
        width: number of hidden channels in both.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 4 * width),
            nn.Unflatten(1, (width, 2, 2)),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, width // 2, kernel_size=4, stride=2, padding=1),  # [batch, width / 2, 4, 4]
            nn.BatchNorm2d(width // 2),
            nn.ReLU(),
            nn.ConvTranspose2d(width // 2, 1, kernel_size=4, stride=2, padding=1),
            nn.Sigmoid(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, width // 2, kernel_size=4, stride=2, padding=1),  # [batch, width / 2, 4, 4]
            nn.LeakyReLU(0.2),
            nn.Conv2d(width // 2, width, kernel_size=4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(4 * width, 1),  # positive means real
        )

    def forward(self, images: Tensor, labels: Tensor | None = None, mode: str = "tensor") -> Tensor:
        """Return as many drawn images as there are real ones."""
        return self.draw(images)

    def train_step(self, data: Any, optim_wrapper: OptimWrapperDict) -> dict[str, Tensor]:
        images, _ = self.data_preprocessor(data, training=True)
        found_out = self._train_discriminator(images, optim_wrapper["discriminator"])
        failed = self._train_generator(images, optim_wrapper["generator"])
        return {"loss_discriminator": found_out, "loss_generator": failed}

    def draw(self, like: Tensor) -> Tensor:
        return self.generator(torch.randn(len(like), NOISE, device=like.device))

    def _train_discriminator(self, images: Tensor, optim_wrapper: OptimWrapper) -> Tensor:
        with torch.no_grad():
            drawn = self.draw(images)
        with optim_wrapper.optim_context(self.discriminator):
            real, fake = self.discriminator(torch.cat([images, drawn])).chunk(2)
            loss = softplus(-real).mean() + softplus(fake).mean()
        optim_wrapper.update_params(loss)
        return loss.detach()

    def _train_generator(self, images: Tensor, optim_wrapper: OptimWrapper) -> Tensor:
        self.discriminator.requires_grad_(False)  # used here, but not trained
        with optim_wrapper.optim_context(self.generator):
            loss = softplus(-self.discriminator(self.draw(images))).mean()
        optim_wrapper.update_params(loss)
        self.discriminator.requires_grad_(True)
        return loss.detach()


class FrechetDistance(BaseMetric):
    """Squared distance between drawn and real images, each set modeled as a normal distribution of pixels.

    **Source**: Dowson and Landau, The Frechet distance between multivariate normal distributions, 1982.
    """

    def process(self, data_batch: Any, data_samples: Tensor) -> None:
        images, _ = data_batch
        self.results += zip(images.flatten(1), data_samples.flatten(1).cpu(), strict=True)

    def compute_metrics(self, results: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
        real, drawn = (torch.stack(side).double() for side in zip(*results, strict=True))
        covariances = [side.T.cov() for side in (real, drawn)]
        shared = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0).sqrt().sum()
        spread = sum(covariance.trace() for covariance in covariances) - 2 * shared
        return {"frechet_distance": float((real.mean(0) - drawn.mean(0)).square().sum() + spread)}


class ShowDrawings(Hook):
    """Pass the first drawn images of each validation to the visualizer, as one picture.

    Args:
        rows: number of rows and of columns.
    """

    def __init__(self, rows: int = 8) -> None:
        self.rows = rows

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if batch_idx == 0:
            rows = min(self.rows, math.isqrt(len(outputs)))
            images = nn.functional.pad(outputs[: rows * rows, 0], (1, 1, 1, 1))  # [rows * rows, 10, 10]
            picture = torch.cat([torch.cat([*row], dim=1) for row in images.split(rows)])
            large = picture.repeat_interleave(4, dim=0).repeat_interleave(4, dim=1)
            runner.visualizer.add_image("drawings", (255 * large).to(torch.uint8), step=runner.iter)
