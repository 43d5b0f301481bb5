"""DeepNorm, Keel, ResiDual, NormFormer, RealFormer: exact limits of the whole decoder, in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normstream.junctions import Junction
from normstream.models import DecoderConfig, DecoderLM
from normstream.norms import NormConfig

NORMS = [NormConfig(kind="rms", eps=1e-5), NormConfig(kind="layer", eps=1e-5, bias=True)]
TOKENS = torch.randint(0, 23, (2, 9), generator=torch.Generator().manual_seed(0))


def build(placement: str, norm: NormConfig = NORMS[1], **options) -> DecoderLM:
    """Every parameter random: gains and biases too."""
    config = DecoderConfig(
        placement=placement, vocab_size=23, dim=24, n_layers=3, n_heads=4, norm=norm, bias="all", **options
    )
    model = DecoderLM(config).double()
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        values = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.data.copy_(values / p.shape[1] ** 0.5 if p.ndim == 2 else 1 + 0.3 * values)
    return model


def junctions(model: DecoderLM) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Junction)]


def copy_sublayers(source: DecoderLM, target: DecoderLM) -> None:
    def rest(model: DecoderLM) -> dict[str, Tensor]:
        return {n: p for n, p in model.named_parameters() if ".join." not in n and ".read." not in n}

    theirs, ours = rest(source), rest(target)
    assert theirs.keys() == ours.keys()
    for name, parameter in ours.items():
        parameter.data.copy_(theirs[name])


def copy_norms(source: DecoderLM, target: DecoderLM, half: str) -> None:
    for theirs, ours in zip(junctions(source), junctions(target), strict=True):
        pairs = zip(getattr(theirs, half).parameters(), getattr(ours, half).parameters(), strict=True)
        for a, b in pairs:
            b.data.copy_(a)


def assert_same_logits(one: DecoderLM, other: DecoderLM) -> None:
    with torch.no_grad():
        a, b = one(TOKENS), other(TOKENS)
    assert a.abs().max() > 0.1
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS, ids=["rms", "layer"])
def test_residual_without_the_norm_of_d_is_post_norm(norm):
    residual, post = build("residual(scale=0.3)", norm), build("post", norm)
    copy_sublayers(residual, post)
    copy_norms(residual, post, "join")
    for parameter in junctions(residual)[-1].read.parameters():
        parameter.data.zero_()
    assert_same_logits(residual, post)


@pytest.mark.parametrize("norm", NORMS, ids=["rms", "layer"])
def test_keel_without_its_differences_is_post_norm(norm):
    keel, post = build("keel(alpha=1,first_block=none)", norm), build("post", norm)
    copy_sublayers(keel, post)
    copy_norms(keel, post, "join")
    for junction in junctions(keel)[:-1]:
        junction.read.norm = nn.Identity()
    assert_same_logits(keel, post)


@pytest.mark.parametrize("norm", NORMS, ids=["rms", "layer"])
def test_keel_without_outer_norms_and_alpha_one_is_pre_norm(norm):
    keel, pre = build("keel(alpha=1,first_block=none,final_norm=true)", norm), build("pre", norm)
    copy_sublayers(keel, pre)
    copy_norms(keel, pre, "read")
    for junction in junctions(keel)[1:]:
        junction.join.norm = nn.Identity()
    assert_same_logits(keel, pre)


def test_deepnorm_with_alpha_one_is_post_norm():
    deepnorm, post = build("deepnorm"), build("post")
    copy_sublayers(deepnorm, post)
    copy_norms(deepnorm, post, "join")
    with torch.no_grad():
        assert (deepnorm(TOKENS) - post(TOKENS)).abs().max() > 0.1
    for junction in junctions(deepnorm)[1:]:
        junction.join.alpha = 1.0
    assert_same_logits(deepnorm, post)


@pytest.mark.parametrize("norm", NORMS, ids=["rms", "layer"])
def test_residual_scaled_by_one_adds_nothing(norm):
    with_scale, without = build("normformer", norm), build("normformer(residual_scale=false)", norm)
    copy_sublayers(with_scale, without)
    copy_norms(with_scale, without, "read")
    for theirs, ours in zip(junctions(with_scale)[1:], junctions(without)[1:], strict=True):
        if hasattr(theirs.join, "residual_scale"):
            theirs.join.residual_scale.data.fill_(1.0)
        else:
            ours.join.load_state_dict(theirs.join.state_dict())
    assert_same_logits(with_scale, without)


def test_post_norm_realformer_with_one_block_is_post_norm():
    """With one layer there are no earlier scores."""
    realformer, post = (
        DecoderLM(DecoderConfig(placement=name, vocab_size=23, dim=24, n_layers=1, n_heads=4)).double()
        for name in ("realformer", "post")
    )
    post.load_state_dict(realformer.state_dict())
    assert_same_logits(realformer, post)


@pytest.mark.parametrize("base", ["post", "pre"])
def test_realformer_adds_the_scores_of_all_layers_before(base):
    """With keys of zero in every block but the first, all blocks attend by the first one's scores."""
    model: Any = build(f"realformer(base={base})")
    for i in (1, 2):
        for parameter in model.get_submodule(f"layers.{i}.attention.wk").parameters():
            parameter.data.zero_()
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def record(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs.append(args[0])
        outputs.append(output)

    for layer in model.layers:
        layer.attention.register_forward_hook(record)
    with torch.no_grad():
        model(TOKENS)
        weights = attention_weights(model, inputs[0])
        for i in range(3):
            attention = model.layers[i].attention
            v = attention.wv(inputs[i]).unflatten(-1, (4, 6)).transpose(1, 2)
            wanted = attention.wo((weights @ v).transpose(1, 2).flatten(-2))
            torch.testing.assert_close(outputs[i], wanted, rtol=0, atol=1e-12)


def attention_weights(model: Any, z: Tensor) -> Tensor:
    """Those of the first block by hand, the rotary pairs (j, j + 3) as complex numbers."""
    attention = model.layers[0].attention
    turn = torch.exp(1j * torch.arange(9)[:, None] * 10_000 ** (-torch.arange(3, dtype=torch.float64) / 3))
    q, k = (
        torch.complex(*layer(z).unflatten(-1, (4, 6)).transpose(1, 2).chunk(2, dim=-1)) * turn
        for layer in (attention.wq, attention.wk)
    )
    scores = (q @ k.conj().transpose(-1, -2)).real / math.sqrt(6)
    return scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf).softmax(-1)
