"""Detectors, whose losses match boxes with predictions: RetinaNet by hand, and DETR of HuggingFace."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, interpolate, one_hot, silu, smooth_l1_loss

from benchmarks.models import data
from benchmarks.models.data import CLASSES
from benchmarks.models.row import Row

SIZE, STRIDES = 32, (4, 8)


class Retina(nn.Module):
    """The detector of Lin et al.: a pyramid of features, two heads that all its levels share, and the focal loss.

    Each place of a level has one anchor, twice as wide as the level's stride.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.fine = nn.Conv2d(3, width, 7, stride=4, padding=3)
        self.coarse = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.lateral = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in STRIDES)
        self.classes = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, CLASSES, 3, padding=1)
        )
        self.boxes = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, 4, 3, padding=1))
        self.register_buffer("anchors", torch.cat([_anchors(stride) for stride in STRIDES]))  # [places, 4]

    def forward(self, images: Tensor, boxes: Tensor, classes: Tensor, mode: str = "tensor") -> Any:
        fine = silu(self.fine(images))
        coarse = silu(self.coarse(fine))
        below = self.lateral[1](coarse)
        levels = (self.lateral[0](fine) + interpolate(below, scale_factor=2.0), below)
        scores, offsets = (
            torch.cat([head(level).flatten(2) for level in levels], 2).transpose(1, 2)
            for head in (self.classes, self.boxes)
        )
        if mode != "loss":
            return scores
        return {"loss": self.losses(scores, offsets, SIZE * boxes, classes).mean()}

    def losses(self, scores: Tensor, offsets: Tensor, boxes: Tensor, classes: Tensor) -> Tensor:
        """Return the loss of each image, divided by the number of its anchors that lie on a box."""
        overlap = _overlap(self.anchors[:, None], boxes[:, None])  # [images, places, boxes]
        overlap, best = torch.where(overlap == overlap.amax(1, keepdim=True), 1.0, overlap).max(2)
        is_on = overlap >= 0.5
        counted = (is_on | (overlap < 0.4))[..., None]
        target = one_hot(classes.gather(1, best), CLASSES) * is_on[..., None]
        missed = torch.where(target == 1, 1 - scores.sigmoid(), scores.sigmoid())
        weight = torch.where(target == 1, 0.25, 0.75) * missed.square() * counted
        focal = (weight * binary_cross_entropy_with_logits(scores, target.float(), reduction="none")).sum((1, 2))
        own = boxes.gather(1, best[..., None].expand(-1, -1, 4))
        wanted = torch.cat(
            [(own[..., :2] - self.anchors[:, :2]) / self.anchors[:, 2:], (own[..., 2:] / self.anchors[:, 2:]).log()], 2
        )
        off = (smooth_l1_loss(offsets, wanted, reduction="none", beta=0.1).sum(2) * is_on).sum(1)
        return (focal + off) / is_on.sum(1)


def _anchors(stride: int) -> Tensor:
    """Return boxes about the places of a level, by centre and size."""
    centres = stride * (torch.arange(SIZE // stride) + 0.5)
    rows, columns = torch.meshgrid(centres, centres, indexing="ij")
    sizes = torch.full((centres.numel() ** 2, 2), 2.0 * stride)
    return torch.cat([torch.stack([columns, rows], 2).flatten(0, 1), sizes], 1)


def _overlap(first: Tensor, second: Tensor) -> Tensor:
    """Return the intersection over union of boxes by centre and size."""
    (begin, end), (other_begin, other_end) = (
        (box[..., :2] - box[..., 2:] / 2, box[..., :2] + box[..., 2:] / 2) for box in (first, second)
    )
    shared = (torch.minimum(end, other_end) - torch.maximum(begin, other_begin)).clamp(min=0).prod(-1)
    return shared / (first[..., 2:].prod(-1) + second[..., 2:].prod(-1) - shared)


class Detr(nn.Module):
    """DETR on batches of equally many boxes."""

    def __init__(self) -> None:
        super().__init__()
        backbone = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", hidden_act="silu",
            out_features=["stage2"],
        )  # fmt: skip
        config = transformers.DetrConfig(
            use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone,
            num_queries=5, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, dropout=0.0, num_labels=CLASSES,
            activation_function="silu",
        )  # fmt: skip
        self.detector = transformers.DetrForObjectDetection(config)

    def forward(self, images: Tensor, boxes: Tensor, classes: Tensor, mode: str = "tensor") -> Any:
        if mode != "loss":
            return self.detector(images).logits
        targets = [{"boxes": own, "class_labels": kinds} for own, kinds in zip(boxes, classes, strict=True)]
        return {"loss": self.detector(images, labels=targets).loss}


ROWS = (
    Row("RetinaNet", Retina, data.box_columns, note="by hand, with two levels."),
    Row(
        "DETR",
        Detr,
        data.box_columns,
        plan={"*.fc1": "colwise", "*.fc2": "rowwise"},
        note="of HuggingFace, with two stages of a ResNet; SciPy matches boxes.",
    ),
)
