"""Small models written out in plain torch, each with one trait that a probe has to find."""

from typing import Any

import torch
from torch import Tensor, nn

DIM, N_HEADS, VOCABULARY = 24, 3, 61


class Attention(nn.Module):
    """Causal attention; with ``inner_norms``, norms on queries, keys and values and one before the output matrix."""

    def __init__(self, inner_norms: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(DIM, DIM) for _ in range(4))
        self.on_a, self.on_b, self.on_c, self.on_d = (
            nn.LayerNorm(DIM) if inner_norms else nn.Identity() for _ in range(4)
        )

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        source = x if context is None else context
        q, k, v = self.on_a(self.a(x)), self.on_b(self.b(source)), self.on_c(self.c(source))
        q, k, v = (t.unflatten(-1, (N_HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if context is None:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.d(self.on_d(mixed))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.f = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(torch.tanh(self.e(x)))


class Layer(nn.Module):
    """Two sublayers F with the norms N that a list of slots gives to each: pre, output, trunk; and a skip gain."""

    def __init__(self, slots: str, skip: float = 1.0, gain: float = 1.0, inner_norms: bool = False) -> None:
        super().__init__()
        self.slots, self.skip, self.gain = slots.split("+") if slots else [], skip, gain
        self.f = nn.ModuleList([Attention(inner_norms), FeedForward()])
        self.n = nn.ModuleList(nn.ModuleDict({slot: nn.LayerNorm(DIM) for slot in self.slots}) for _ in range(2))

    def norm(self, slot: str, which: int, x: Tensor) -> Tensor:
        norms: Any = self.n[which]
        return norms[slot](x) if slot in self.slots else x

    def forward(self, x: Tensor) -> Tensor:
        for which, f in enumerate(self.f):
            update = self.norm("output", which, f(self.norm("pre", which, x)))
            x = self.norm("trunk", which, self.skip * x + self.gain * update)
        return x


class InPlaceLayer(nn.Module):
    """Adds to its own input, which spoils whatever kept that tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x += self.attention(self.one(x))
        x += self.feed_forward(self.two(x))
        return x


class ParallelLayer(nn.Module):
    """Attention and feed-forward side by side, on a norm each or on a shared one."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.one = nn.LayerNorm(DIM)
        self.two = self.one if shared else nn.LayerNorm(DIM)
        self.shared = shared
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        z = self.one(x)
        return x + self.attention(z) + self.feed_forward(z if self.shared else self.two(x))


class RarelyUsed(nn.Module):
    """A mixture of experts that sends every token to the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(FeedForward() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x)


class ExpertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(DIM), RarelyUsed()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixture(self.norm(x))


class ZeroScaleLayer(nn.Module):
    """ReZero: a learned scale of the branch that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed_forward, self.scale = nn.LayerNorm(DIM), FeedForward(), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.feed_forward(self.norm(x))


class Affine(nn.Module):
    """A gain and a bias that start at one or zero, and zero."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.full((DIM,), scale)), nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.bias


class ZeroBiasLayer(nn.Module):
    """An affine map behind the branch, whose bias, and with ``is_scaled`` the gain too, starts at zero."""

    def __init__(self, is_scaled: bool) -> None:
        super().__init__()
        self.norm, self.feed_forward, self.affine = nn.LayerNorm(DIM), FeedForward(), Affine(0.0 if is_scaled else 1.0)
        self.bias = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.affine(self.feed_forward(self.norm(x))) + self.bias


class ChannelScaleLayer(nn.Module):
    """LayerScale: a learned gain for each channel of the update."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed_forward = nn.LayerNorm(DIM), FeedForward()
        self.scale = nn.Parameter(torch.linspace(1e-4, 1, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.feed_forward(self.norm(x))


class ConstantLayer(nn.Module):
    """Adds something that does not depend on its input, besides a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed_forward, self.position = nn.LayerNorm(DIM), FeedForward(), nn.Linear(1, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position(torch.ones(*x.shape[:-1], 1))
        return x + self.feed_forward(self.norm(x))


class NoSkipLayer(nn.Module):
    """No residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed_forward = nn.LayerNorm(DIM), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return self.feed_forward(self.norm(x))


class Stage(nn.Module):
    """Layers, and a matrix between this stage's stream and the next one's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer("pre") for _ in range(2))
        self.down = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.down(x)


class Listener(nn.Module):
    """Takes sound, as long as it likes."""

    def forward(self, input_values: Tensor) -> Tensor:
        return input_values


class UnlistedLayers(nn.Module):
    """Layers that are in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, DIM)
        self.one, self.two = InPlaceLayer(), InPlaceLayer()
        self.out = nn.Linear(DIM, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.out(self.two(self.one(self.table(input_ids))))


class CrossLayer(nn.Module):
    """Cross-attention that norms what it reads from the other stack."""

    def __init__(self) -> None:
        super().__init__()
        self.on_stream, self.on_context, self.attention = nn.LayerNorm(DIM), nn.LayerNorm(DIM), Attention()

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return x + self.attention(self.on_stream(x), self.on_context(context))


class Decoder(nn.Module):
    """Embedding times a multiplier, layers, perhaps a final norm, and a tied head times another multiplier."""

    def __init__(self, layers: list[nn.Module], final: bool = False, multiplier: float = 1.0) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(layers)
        self.last = nn.LayerNorm(DIM) if final else nn.Identity()
        self.out = nn.Linear(DIM, VOCABULARY, bias=False)
        self.out.weight = self.table.weight
        self.multiplier = multiplier

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.multiplier * self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.out(self.last(x)) / self.multiplier


class EncoderDecoder(nn.Module):
    """Two stacks; the second one reads the end of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, DIM)
        self.first = nn.ModuleList(Layer("pre") for _ in range(2))
        self.second: Any = nn.ModuleList(nn.ModuleList([Layer("pre"), CrossLayer()]) for _ in range(2))

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        context, x = self.table(input_ids), self.table(decoder_input_ids)
        for layer in self.first:
            context = layer(context)
        for own, cross in self.second:
            x = cross(own(x), context)
        return x
