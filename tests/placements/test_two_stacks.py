"""The rows of both stacks of an encoder-decoder, whose decoder blocks have three sublayers, against their equations."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normstream import placements
from normstream.norms import NormConfig
from normstream.placements import Slot, Stack

DIM, ENCODER, DECODER = 6, 3, 2
KINDS = ("attention", "cross_attention", "feed_forward")
LAYER = NormConfig(kind="layer", eps=1e-5, bias=True)


def decoder_row(spec: str) -> Any:
    """The decoder's junctions with random parameters, in float64."""
    stack = Stack("decoder", ENCODER, DECODER)
    row = placements.get(spec).junctions(dim=DIM, n_layers=DECODER, sublayers=KINDS, norm=LAYER, stack=stack)
    generator = torch.Generator().manual_seed(0)
    row = nn.ModuleList(row).double()
    for parameter in row.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return row


def sublayers(n: int) -> list[Callable[[Tensor], Tensor]]:
    weights = torch.randn(n, DIM, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [lambda z, w=w: torch.sin(z @ w) for w in weights]


EMBEDDING = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
Block = Sequence[Callable[[Tensor], Tensor]]


# --- references: the row's parameters, the embedding and the six sublayers to the final hidden vector -----------------


def pre_norm(row: Any, x: Tensor, f: Block) -> Tensor:
    """Sub-LN: self-attention's and the feed-forward's norms are inside them, cross-attention has none."""
    for s, sublayer in enumerate(f):
        x = x + sublayer(row[s].read.norm(x))
    return row[-1].read.norm(x)


def deepnorm(row: Any, x: Tensor, f: Block) -> Tensor:
    for s, sublayer in enumerate(f):
        x = row[s + 1].join.norm((3 * DECODER) ** 0.25 * x + sublayer(x))
    return x


def deepnorm_by_its_flag_alone(row: Any, x: Tensor, f: Block) -> Tensor:
    """torchscale before 0.3: the decoder stays Pre-Norm, residual times (3M)^(1/4), final norm."""
    for s, sublayer in enumerate(f):
        x = (3 * DECODER) ** 0.25 * x + sublayer(row[s].read.norm(x))
    return row[-1].read.norm(x)


def residual(row: Any, x: Tensor, f: Block) -> Tensor:
    """Self-attention, cross-attention and feed-forward each enter the dual stream."""
    dual = 0.05 * x
    for s, sublayer in enumerate(f):
        update = sublayer(x)
        dual, x = dual + 0.05 * update, row[s + 1].join.norm(x + update)
    return x + row[-1].read.norm_d(dual)


def normformer(row: Any, x: Tensor, f: Block) -> Tensor:
    """fairseq: attn_ln after self-attention only, w_resid on the feed-forward's residual only."""
    for s, sublayer in enumerate(f):
        update = sublayer(row[s].read.norm(x))
        match s % 3:
            case 0:
                x = x + row[s + 1].join.norm_out(update)
            case 1:
                x = x + update
            case 2:
                x = row[s + 1].join.residual_scale * x + update
    return row[-1].read.norm(x)


def hybridnorm(row: Any, x: Tensor, f: Block) -> Tensor:
    """One norm a block, before the feed-forward and its residual; both attentions read the stream itself."""
    for s in range(0, len(f), 3):
        x = x + f[s](x)
        x = row[s + 2].join.norm(x + f[s + 1](x))
        x = x + f[s + 2](x)
    return row[-1].read.norm(x)


def keel(row: Any, x: Tensor, f: Block) -> Tensor:
    """alpha counts the sublayers, six here; in the first block it is 1, and the very first update has no outer norm."""
    for s, sublayer in enumerate(f):
        x = (1 if s < 3 else 6) * x + sublayer(row[s].read.norm(x))
        x = x if s == 0 else row[s + 1].join.norm(x)
    return x


def siamese(row: Any, x: Tensor, f: Block) -> Tensor:
    """c is that of the block: three sublayers share it."""
    y, x = x, row[0].join.norm_x(x)
    for s, sublayer in enumerate(f):
        update = sublayer(row[s].read.norm_in(x + row[s].read.norm_y(y)))
        x, y = row[s + 1].join.norm_x(x + update / math.sqrt(2 * (s // 3 + 1))), y + update
    return row[-1].read.norm_in(x + row[-1].read.norm_y(y))


def span_norm(row: Any, x: Tensor, f: Block) -> Tensor:
    """Post-Norm inside a block; the feed-forward's residual is the block's input; the first attention reads N(x)."""
    first = row[0].read.norm(x)
    for s in range(0, len(f), 3):
        y = row[s + 1].read.norm_span(x + f[s](first if s == 0 else x))
        y = row[s + 2].read.norm_span(y + f[s + 1](y))
        x = row[s + 3].join.norm(x + f[s + 2](y))
    return x


def siamese_hybrid_pre(row: Any, x: Tensor, f: Block) -> Tensor:
    """Both attentions read c1 x + N_y(y); x is normed before the feed-forward, which alone has an input norm."""
    y = x
    for s, sublayer in enumerate(f):
        read, c = row[s].read, math.sqrt(2 * (s // 3 + 1))
        u = read.norm_in(x + read.norm_y(y)) if s % 3 == 2 else read.c1 * x + read.norm_y(y)
        update = sublayer(u)
        x, y = x + update / c, y + update
        x = x if s in (0, 2, 3) else row[s + 1].join.norm_x(x)  # before a feed-forward, and at the end
    return row[-1].read.norm_in(x + row[-1].read.norm_y(y))


REFERENCES = {
    "sub_ln": pre_norm,
    "deepnorm": deepnorm,
    "deepnorm(base=pre)": deepnorm_by_its_flag_alone,
    "residual(scale=0.05)": residual,
    "normformer": normformer,
    "hybridnorm": hybridnorm,
    "keel": keel,
    "siamese": siamese,
    "siamese_hybrid_pre": siamese_hybrid_pre,
    "span_norm": span_norm,
}


@pytest.mark.parametrize("spec", REFERENCES)
def test_final_hidden_vector_of_the_decoder(spec, run_row):
    row, f = decoder_row(spec), sublayers(3 * DECODER)
    _, inputs = run_row(row, EMBEDDING, f)
    torch.testing.assert_close(inputs[-1], REFERENCES[spec](row, EMBEDDING, f), rtol=0, atol=1e-12)


@pytest.mark.parametrize("role", ["encoder", "decoder"])
@pytest.mark.parametrize("name", placements.names())
def test_every_placement_has_rows_for_both_stacks(name, role, run_row):
    placement = placements.get(name)
    kinds = KINDS if role == "decoder" else ("attention", "feed_forward")
    stack = Stack(role, ENCODER, DECODER)
    n_layers = DECODER if role == "decoder" else ENCODER
    row = placement.junctions(dim=DIM, n_layers=n_layers, sublayers=kinds, norm=LAYER, stack=stack)
    slots = Slot.row(placement.blocks(n_layers, kinds))
    assert len(slots) == n_layers * (1 if placement.parallel else len(kinds))
    states, inputs = run_row(nn.ModuleList(row).double(), EMBEDDING, sublayers(len(slots)))
    assert len(states[-1]) == len(placement.streams)
    assert all(z.shape == EMBEDDING.shape and z.isfinite().all() for z in inputs)


def test_span_norm_says_which_blocks_it_takes():
    with pytest.raises(ValueError, match="feed_forward, got attention, feed_forward, cross_attention"):
        placements.get("span_norm").blocks(DECODER, ("attention", "feed_forward", "cross_attention"))
