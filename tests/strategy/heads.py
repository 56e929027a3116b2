"""A transformer as language models have it now: separate projections by heads, normed queries, tied words, a gate."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

VOCABULARY, WIDTH, HEAD_WIDTH = 20, 16, 4


class Attention(nn.Module):
    def __init__(self, heads: int, norm: bool) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * HEAD_WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(heads * HEAD_WIDTH, WIDTH, bias=False)
        self.q_norm = nn.RMSNorm(HEAD_WIDTH) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD_WIDTH)) for part in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in (self.q_norm(q), k, v))
        heads = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(heads.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, heads: int, norm: bool, dropout: float) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(heads, norm), Mlp()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Heads(nn.Module):
    """Two layers; returns its loss."""

    _tp_plan = {
        "embed": "rowwise",
        "blocks.*.attn.[qkv]": "colwise",
        "blocks.*.attn.q_norm": "replicated_with_grad_allreduce",
        "blocks.*.attn.o": "rowwise",
        "blocks.*.mlp.gate": "colwise",
        "blocks.*.mlp.up": "local_colwise",
        "blocks.*.mlp.down": "local_rowwise",
        "blocks.*.mlp": "gather",
        "blocks.*.norm1": "replicate",
        "head": "colwise_rep",
    }

    def __init__(self, heads: int = 4, norm: bool = True, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(heads, norm, dropout) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
