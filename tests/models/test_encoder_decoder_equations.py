"""ResiDual and SiameseNorm post-pre encoder-decoders, and the original Transformer, written out in plain torch.

ResiDual's conventions are those of its code on fairseq: embeddings times sqrt(d), no shared ones, the head tied to the
decoder's, relu, biases everywhere, an eps of 1e-7 in the norm of the dual stream and 1e-5 elsewhere.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normstream
from normstream.layers import PositionConfig
from normstream.models import EncoderDecoder, EncoderDecoderConfig
from normstream.norms import NormConfig

D, H, N, M, VOCAB = 16, 4, 3, 2, 21
Weights = dict[str, Tensor]


def build(placement: str, **changes: Any) -> EncoderDecoder:
    """In float64, every parameter random, norms and biases too."""
    options: dict[str, Any] = {"positions": PositionConfig(kind="none"), "shared_embeddings": False, "tied": True}
    config = EncoderDecoderConfig(
        placement=placement,
        vocab_size=VOCAB,
        dim=D,
        n_layers=M,
        n_encoder_layers=N,
        n_heads=H,
        ffn_dim=24,
        activation="relu",
        bias="all",
        norm=NormConfig(kind="layer", eps=1e-5, bias=True),
        embedding_multiplier=math.sqrt(D),
        max_seq_len=16,
        **(options | changes),
    )
    model = EncoderDecoder(config).double()
    normstream.initialize(model, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def layer_norm(w: Weights, name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def attention(w: Weights, name: str, x: Tensor, memory: Tensor, unseen: Tensor, links: Weights | None) -> Tensor:
    """Softmax attention; ``unseen`` is True where a query may not look; RealFormer's scores add up in ``links``."""
    q, k, v = (
        linear(w, f"{name}.{matrix}", read).unflatten(-1, (H, -1)).transpose(1, 2)
        for matrix, read in (("wq", x), ("wk", memory), ("wv", memory))
    )
    scores = q @ k.mT / math.sqrt(D / H)
    if links is not None:
        kind = name.rpartition(".")[-1]
        scores = links[kind] = scores + links.get(kind, 0)
    weights = scores.masked_fill(unseen, -math.inf).softmax(-1)
    return linear(w, f"{name}.wo", (weights @ v).transpose(1, 2).flatten(-2))


def feed_forward(w: Weights, name: str, x: Tensor) -> Tensor:
    return linear(w, f"{name}.w_down", linear(w, f"{name}.w_up", x).clamp(min=0))


Sublayer = tuple[str, int, Callable[[Tensor], Tensor]]
Stack = Callable[[Weights, str, Tensor, list[Sublayer]], Tensor]


def sublayers(
    w: Weights, stack: str, padding: Tensor, length: int, memory: Tensor | None, linked: bool
) -> list[Sublayer]:
    """The row of a stack: name of the junction after the sublayer, its block, and the sublayer."""
    padded, links = padding[:, None, None], {} if linked else None
    unseen = padded if memory is None else torch.ones(length, length).triu(1).bool()

    def run(kind: str, name: str, z: Tensor) -> Tensor:
        if kind == "feed_forward":
            return feed_forward(w, name, z)
        if memory is None or kind == "attention":
            return attention(w, name, z, z, unseen, links)
        return attention(w, name, z, memory, padded, links)

    kinds = ("attention", *([] if memory is None else ["cross_attention"]), "feed_forward")
    places = [(kind, block, f"{stack}.layers.{block}") for block in range(N if memory is None else M) for kind in kinds]
    return [(f"{at}.after_{kind}", block, partial(run, kind, f"{at}.{kind}")) for kind, block, at in places]


def post_norm(w: Weights, stack: str, e: Tensor, row: list[Sublayer]) -> Tensor:
    for name, _, f in row:
        e = layer_norm(w, f"{name}.join.norm", e + f(e))
    return e


def residual(w: Weights, stack: str, e: Tensor, row: list[Sublayer], alpha: float = 0.7, s: float = 0.05) -> Tensor:
    """x <- LN(x + f(x)), dual <- dual + s f(x), out = alpha x + LN_1e-7(dual); the dual stream starts at s e."""
    x, dual = e, s * e
    for name, _, f in row:
        update = f(x)
        dual = dual + s * update
        x = layer_norm(w, f"{name}.join.norm", x + update)
    return alpha * x + layer_norm(w, f"{row[-1][0]}.read.norm_d", dual, eps=1e-7)


def siamese(w: Weights, stack: str, e: Tensor, row: list[Sublayer]) -> Tensor:
    """Norms where the released code has them: x is normed before it is read, y where it is, their sum once more."""
    before = f"{stack}.before_layers"
    x, y = e, e
    for name, block, f in row:
        x = layer_norm(w, f"{before}.join.norm_x", x)
        z = layer_norm(w, f"{before}.read.norm_in", x + layer_norm(w, f"{before}.read.norm_y", y))
        update = f(z)
        x, y, before = x + update / math.sqrt(2 * (block + 1)), y + update, name
    total = layer_norm(w, f"{before}.join.norm_x", x) + layer_norm(w, f"{before}.read.norm_y", y)
    return layer_norm(w, f"{before}.read.norm_in", total)


def logits(w: Weights, placement: str, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
    run, linked = CASES[placement], placement == "realformer"
    e = w["encoder_tok_embeddings.weight"][source] * math.sqrt(D) * ~padding[..., None]
    memory = run(w, "encoder", e, sublayers(w, "encoder", padding, source.shape[1], None, linked))
    e = w["decoder_tok_embeddings.weight"][target] * math.sqrt(D)
    final = run(w, "decoder", e, sublayers(w, "decoder", padding, target.shape[1], memory, linked))
    return final @ w["decoder_tok_embeddings.weight"].T


CASES: dict[str, Stack] = {
    "post": post_norm,
    "realformer": post_norm,
    "residual(scale=0.05,alpha=0.7)": residual,
    "siamese": siamese,
}


@pytest.mark.parametrize("placement", CASES)
def test_logits_and_gradients(placement):
    model = build(placement)
    generator = torch.Generator().manual_seed(2)
    source, target = (torch.randint(VOCAB, (2, n), generator=generator) for n in (6, 5))
    padding = torch.arange(6) >= torch.tensor([[6], [4]])
    ours = model(source, target, padding)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    theirs = logits(weights, placement, source, target, padding)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    for loss in (ours.logsumexp(-1).sum(), theirs.logsumexp(-1).sum()):
        loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-9, msg=name)


def test_post_norm_is_the_transformer_of_torch():
    """nn.Transformer with its own weights, sinusoidal positions written out as in the paper, one shared embedding."""
    model = build("post", positions=PositionConfig(kind="sinusoidal"), shared_embeddings=True)
    reference = nn.Transformer(D, H, N, M, 24, dropout=0.0, batch_first=True, dtype=torch.float64)
    reference.encoder.norm = reference.decoder.norm = None
    norms = {"attention": "norm1", "cross_attention": "norm2"}
    for stack in ("encoder", "decoder"):
        layers: Any = model.get_submodule(f"{stack}.layers")
        others: Any = reference.get_submodule(f"{stack}.layers")
        for layer, theirs in zip(layers, others, strict=True):
            for kind in layer.kinds:
                last = "norm2" if stack == "encoder" else "norm3"
                theirs.get_submodule(norms.get(kind, last)).load_state_dict(
                    layer.get_submodule(f"after_{kind}").join.norm.state_dict()
                )
            for kind, name in (("attention", "self_attn"), ("cross_attention", "multihead_attn")):
                if kind in layer.kinds:
                    ours, target = layer.get_submodule(kind), theirs.get_submodule(name)
                    for part in ("weight", "bias"):
                        joint = torch.cat([getattr(ours.get_submodule(m), part) for m in ("wq", "wk", "wv")])
                        getattr(target, f"in_proj_{part}").data.copy_(joint)
                    target.out_proj.load_state_dict(ours.wo.state_dict())
            theirs.linear1.load_state_dict(layer.feed_forward.w_up.state_dict())
            theirs.linear2.load_state_dict(layer.feed_forward.w_down.state_dict())

    def embed(tokens: Tensor) -> Tensor:
        waves = [(f, 10_000 ** (2 * i / D)) for i in range(D // 2) for f in (math.sin, math.cos)]
        table = [[f(p / length) for f, length in waves] for p in range(tokens.shape[1])]
        return F.embedding(tokens, model.lm_head.weight) * math.sqrt(D) + torch.tensor(table, dtype=torch.float64)

    source, target = torch.randint(VOCAB, (2, 6)), torch.randint(VOCAB, (2, 5))
    padding = torch.arange(6) >= torch.tensor([[6], [4]])
    causal = torch.ones(5, 5).triu(1).bool()
    with torch.no_grad():
        hidden = reference.train()(
            embed(source),
            embed(target),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        torch.testing.assert_close(model.hidden(source, target, padding), hidden, rtol=1e-11, atol=1e-11)
