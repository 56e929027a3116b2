"""A transformer that predicts text byte by byte, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from lockstep.evaluator import BaseMetric
from lockstep.model import BaseModel

BYTES = 256


class Block(nn.Module):
    """Causal attention, then a feed-forward network at each position, both with residual connections."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries = nn.Linear(width, width, bias=False)
        self.keys = nn.Linear(width, width, bias=False)
        self.values = nn.Linear(width, width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.network = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.attention_norm(x)
        q, k, v = (
            # -1: under tensor parallelism, each rank has only some of the heads.
            part(normed).view(batch, length, -1, self.head_width).transpose(1, 2)  # [batch, heads, length, head_width]
            for part in (self.queries, self.keys, self.values)
        )
        attended = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + self.dropout(self.projection(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.network(x))


def turned(x: Tensor) -> Tensor:
    """Apply rotary embeddings: rotate each pair of numbers by an angle that grows with the position.

    **Shapes**: [..., length, even]. **Source**: Su et al., RoFormer, 2021 (2104.09864), equation 34.
    """
    length, size = x.shape[-2:]
    # In radians per position; the paper uses 10,000 instead of 1000, for longer texts.
    speeds = 1000 ** -(torch.arange(0, size, 2, device=x.device) / size)
    angles = torch.arange(length, device=x.device).unsqueeze(1) * speeds  # [length, size / 2]
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).type_as(x)


class ByteTransformer(BaseModel):
    """Scores each possible next byte at every position of a text.

    Args:
        width: size of the vector at each position.
        layers: number of blocks.
        heads: number of attention heads in each block.
        dropout: part of the numbers that training leaves out, in what each half of a block adds.
    """

    # How a strategy splits the blocks for tensor parallelism.
    _tp_plan = {
        "blocks.*.queries": "colwise",
        "blocks.*.keys": "colwise",
        "blocks.*.values": "colwise",
        "blocks.*.projection": "rowwise",
        "blocks.*.network.1": "colwise",
        "blocks.*.network.3": "rowwise",
    }

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor, mode: str = "tensor") -> Any:
        """Return scores [batch, length, 256] ("tensor"), the loss ("loss"), or each text's loss [batch] ("predict").

        In the modes "loss" and "predict", the last byte of `text` is only a target.
        """
        text = text.long()
        if mode == "tensor":
            return self.score(text)
        scores, next_bytes = self.score(text[:, :-1]), text[:, 1:]
        losses = F.cross_entropy(scores.transpose(1, 2), next_bytes, reduction="none")  # [batch, length], in nats
        return {"loss": losses.mean()} if mode == "loss" else losses.mean(dim=1)

    def score(self, text: Tensor) -> Tensor:
        x = self.bytes(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class NatsPerByte(BaseMetric):
    """Mean cross-entropy of a byte, in nats: 5.5 for uniform guessing; one bit is ln 2 nats."""

    def process(self, data_batch: Tensor, data_samples: Tensor) -> None:
        self.results += data_samples.tolist()

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"nats_per_byte": sum(results) / len(results)}
