"""SiameseNorm's hybrid-pre block as a researcher writes it down from the equations: what normstream has to beat.

    attention      u = c1 * x + N(y);  q, k, v normed head by head;  o = W_o attention(q, k, v)
                   x <- x + o / c;  y <- y + o
    feed-forward   x <- N(x);  o = F(N(x + N(y)));  x <- x + o / c;  y <- y + o
    end            logits = head(N(N(x) + N(y)))
    c = sqrt(2 (l + 1)) for block l = 0, 1, ...;  at the start x = y = embedding

Every norm is a module of its own that computes in float32 with autocast off, casts back and multiplies by its gain; the
residual sums stand in the block. Equations: arXiv 2602.08064; Qwen-Applications/SiameseNorm:OLMo_model_hybrid_pre.py.
A test checks that with the same weights it computes what ``siamese_hybrid_pre`` does.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shapes import ModelShape

EPS = 1e-5


class UnfusedRMSNorm(nn.Module):
    """``y = g x / sqrt(mean(x^2) + eps)``, one torch operation at a time."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            high = x.float()
            normalized = (high * torch.rsqrt(high.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
        return self.weight * normalized


class OfficialBlock(nn.Module):
    """One block; ``(x, y)`` to ``(x, y)``, each (B, T, D)."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        dim, head_dim = shape.dim, shape.dim // shape.n_heads
        self.n_heads, self.c = shape.n_heads, math.sqrt(2 * (layer + 1))
        self.c1 = nn.Parameter(torch.ones(dim))
        self.attention_y_norm, self.x_norm, self.y_norm, self.input_norm = (UnfusedRMSNorm(dim) for _ in range(4))
        self.q_norm, self.k_norm, self.v_norm = (UnfusedRMSNorm(head_dim) for _ in range(3))
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.gate_and_up = nn.Linear(dim, 2 * shape.ffn_dim, bias=False)
        self.down = nn.Linear(shape.ffn_dim, dim, bias=False)

    def forward(self, x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        o = self.attention(self.c1 * x + self.attention_y_norm(y), cos, sin)
        x = x + o / self.c
        y = y + o
        x = self.x_norm(x)
        o = self.feed_forward(self.input_norm(x + self.y_norm(y)))
        return x + o / self.c, y + o

    def attention(self, u: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)) for part in self.qkv(u).chunk(3, dim=-1))
        q, k, v = (h.transpose(1, 2) for h in (self.q_norm(q), self.k_norm(k), self.v_norm(v)))
        q, k = rotated(q, cos, sin).to(v.dtype), rotated(k, cos, sin).to(v.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))

    def feed_forward(self, z: Tensor) -> Tensor:
        gate, up = self.gate_and_up(z).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class OfficialSiamese(nn.Module):
    """A decoder of these blocks; tokens (B, T) to logits (B, T, V)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self.blocks = nn.ModuleList(OfficialBlock(shape, layer) for layer in range(shape.n_layers))
        self.x_norm, self.y_norm, self.final_norm = (UnfusedRMSNorm(shape.dim) for _ in range(3))
        self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        half = shape.dim // shape.n_heads // 2
        frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(shape.seq_len, dtype=torch.float64), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        for matrix in (p for p in self.parameters() if p.ndim == 2):
            nn.init.normal_(matrix, std=math.sqrt(2 / (5 * shape.dim)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = y = self.embedding(tokens)
        for block in self.blocks:
            x, y = block(x, y, self.cos, self.sin)
        return self.head(self.final_norm(self.x_norm(x) + self.y_norm(y)))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, channel i paired with channel i + half."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
