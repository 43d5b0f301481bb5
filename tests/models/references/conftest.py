"""Short models from papers and released code to compare decoders with; the cases are in the test files of this folder.

A reference is a function of ``Weights`` and the embedding to the final hidden vector: the official equations, in which
``m.F(s, z)`` is the update of sublayer s and ``m.N(j, name, x)`` a norm of junction j, by its public parameter name.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normstream.models import DecoderConfig, DecoderLM

HEADS, HEAD_DIM, VOCAB = 4, 6, 23
TOKENS = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))


@dataclass
class Weights:
    """The parameters of a model, and its sublayers and norms written out.

    Sublayer s is read by junction s and joined by junction s + 1; the last junction ends the model.
    """

    w: dict[str, Tensor]
    config: DecoderConfig

    @property
    def n(self) -> int:
        return 2 * self.config.n_layers

    def of(self, junction: int, name: str) -> Tensor:
        return self.w[f"{self.place(junction)}.{name}"]

    def place(self, junction: int) -> str:
        if junction == 0:
            return "before_layers"
        return f"layers.{(junction - 1) // 2}.after_{('attention', 'feed_forward')[(junction - 1) % 2]}"

    def N(self, junction: int, name: str, x: Tensor) -> Tensor:
        return self.norm(f"{self.place(junction)}.{name}", x)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """The model's norm; code that stores a gain as its offset from 1 is no other function."""
        if self.config.norm.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        y = self.w[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + self.config.norm.eps).sqrt()
        return y + self.w.get(f"{name}.bias", 0)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)

    def F(self, s: int, z: Tensor) -> Tensor:
        """The update of sublayer s for its input z."""
        layer = f"layers.{s // 2}"
        return self.feed_forward(f"{layer}.feed_forward", z) if s % 2 else self.attention(f"{layer}.attention", z)

    def attention(self, name: str, z: Tensor, mix: Callable[..., Tensor] = lambda q, k, v: v) -> Tensor:
        """``mix`` changes the values, given queries, keys and values as (B, H, T, K)."""

        def heads(letter: str) -> Tensor:
            x = self.linear(f"{name}.w{letter}", z).unflatten(-1, (-1, HEAD_DIM))
            return self.head_norm(f"{name}.{letter}_norm", x) if f"{name}.{letter}_norm.weight" in self.w else x

        q, k, v = (heads(letter).transpose(1, 2) for letter in "qkv")
        if self.config.positions.kind == "rotary":
            q, k = rotated(q), rotated(k)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, mix(q, k, v)))
        later = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
        scores = (q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)).masked_fill(later, -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2)
        gamma = self.w.get(f"{name}.head_scale.weight", torch.ones(HEADS)).repeat_interleave(HEAD_DIM)
        after = "head_scale=code" in self.config.placement
        mixed = mixed.flatten(-2) * (1 if after else gamma)
        if f"{name}.context_norm.weight" in self.w:
            mixed = self.norm(f"{name}.context_norm", mixed)
        return self.linear(f"{name}.wo", mixed) * (gamma if after else 1)

    def head_norm(self, name: str, x: Tensor) -> Tensor:
        """The model's norm on each head or on all; LayerNorm in codes with gains (and biases) for each head."""
        if self.config.inner_of(0).qk_statistics == "all_heads":
            return self.norm(name, x.flatten(-2)).view_as(x)
        if self.w[f"{name}.weight"].numel() == HEAD_DIM:
            return self.norm(name, x)
        x = x - x.mean(-1, keepdim=True)
        y = (x / (x.square().mean(-1, keepdim=True) + self.config.norm.eps).sqrt()).flatten(-2)
        return (y * self.w[f"{name}.weight"] + self.w.get(f"{name}.bias", 0)).view_as(x)

    def feed_forward(self, name: str, z: Tensor) -> Tensor:
        hidden = self.linear(f"{name}.w_up", z)
        gated = self.config.activation == "swiglu"
        hidden = F.silu(self.linear(f"{name}.w_gate", z)) * hidden if gated else F.gelu(hidden)
        if f"{name}.hidden_norm.weight" in self.w:
            hidden = self.norm(f"{name}.hidden_norm", hidden)
        return self.linear(f"{name}.w_down", hidden)


def rotated(x: Tensor) -> Tensor:
    """x (B, H, T, K): pairs (j, j + K/2) as complex numbers, turned by t theta_j."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * 10_000 ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def build(placement: str, **options: Any) -> DecoderLM:
    """A small model in float64 with random parameters, gains and factors about 1."""
    config: dict[str, Any] = {
        "vocab_size": VOCAB,
        "dim": HEADS * HEAD_DIM,
        "n_layers": 3,
        "n_heads": HEADS,
        "ffn_dim": 16,
        "max_seq_len": 8,
    }
    config |= options
    model = DecoderLM(DecoderConfig(placement=placement, **config)).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = values / parameter.shape[1] ** 0.5 if parameter.ndim == 2 else 1 + 0.3 * values
    return model


@pytest.fixture(scope="session")
def check_reference() -> Callable[..., None]:
    """A function of (placement, reference, options of the configuration): logits and every gradient, in float64."""

    def check(placement: str, reference: Callable[[Weights, Tensor], Tensor], options: dict[str, Any]) -> None:
        model = build(placement, **options)
        weights = Weights(dict(model.named_parameters()), model.config)
        embedding = weights.w["tok_embeddings.weight"][TOKENS]
        if model.config.positions.kind == "learned":
            embedding = embedding + weights.w["pos_embeddings.weight"][: TOKENS.shape[1]]
        wanted = reference(weights, embedding) @ weights.w["lm_head.weight"].T
        ours = model(TOKENS)
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-9)
        assert ours.std() > 0.1
        weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = [torch.autograd.grad((weight * x).sum(), parameters) for x in (ours, wanted)]
        for name, one, other in zip(names, *gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")

    return check
