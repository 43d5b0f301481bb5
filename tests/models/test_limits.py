"""SiameseNorm contains Pre-Norm and Post-Norm: exact limits of the whole decoder, in float64."""

import pytest
import torch
from torch import Tensor, nn

from normstream.junctions import Junction
from normstream.layers.inner import Inner
from normstream.models import DecoderConfig, DecoderLM
from normstream.norms import NormConfig

NORMS = [NormConfig(kind="rms", eps=1e-5), NormConfig(kind="layer", eps=1e-5, bias=True)]


def build(placement: str, norm: NormConfig, **options) -> DecoderLM:
    config = DecoderConfig(
        placement=placement,
        vocab_size=23,
        dim=24,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        norm=norm,
        bias="all",
        **options,
    )
    return DecoderLM(config).double()


def junctions(model: DecoderLM) -> list[Junction]:
    """In the order of the row."""
    return [module for module in model.modules() if isinstance(module, Junction)]


def randomize(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        values = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.data.copy_(values / p.shape[1] ** 0.5 if p.ndim == 2 else 1 + 0.3 * values)


def copy_sublayers(source: DecoderLM, target: DecoderLM) -> None:
    """Everything but the junctions has the same names in every placement."""

    def rest(model: DecoderLM) -> dict[str, Tensor]:
        return {n: p for n, p in model.named_parameters() if ".join." not in n and ".read." not in n}

    theirs, ours = rest(source), rest(target)
    assert theirs.keys() == ours.keys()
    for name, parameter in ours.items():
        parameter.data.copy_(theirs[name])


def copy_half(source: Junction, target: Junction, half: str, source_half: str | None = None) -> None:
    theirs = list(getattr(source, source_half or half).parameters())
    ours = list(getattr(target, half).parameters())
    assert len(theirs) == len(ours)
    for a, b in zip(theirs, ours, strict=True):
        b.data.copy_(a)


def zero(module: nn.Module) -> None:
    assert list(module.parameters()), "nothing to set to zero"
    for parameter in module.parameters():
        parameter.data.zero_()


def assert_same_logits(one: DecoderLM, other: DecoderLM) -> None:
    tokens = torch.randint(0, 23, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        a, b = one(tokens), other(tokens)
    assert a.abs().max() > 0.1
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS, ids=["rms", "layer"])
@pytest.mark.parametrize("depth_scale", ["code", "none"])
def test_x_gains_zero_is_pre_norm(norm, depth_scale):
    """The x stream is silenced, the first norm included: what is left is y, read through its own norm."""
    siamese = build(f"siamese(input_norm=false,read_out=paper,depth_scale={depth_scale})", norm)
    randomize(siamese)
    for junction in junctions(siamese):
        zero(junction.join)
    pre = build("pre", norm)
    copy_sublayers(siamese, pre)
    for ours, theirs in zip(junctions(pre), junctions(siamese), strict=True):
        copy_half(theirs, ours, "read")
    assert_same_logits(pre, siamese)


@pytest.mark.parametrize("norm", NORMS, ids=["rms", "layer"])
def test_y_gains_zero_is_post_norm(norm):
    siamese = build("siamese(input_norm=false,read_out=paper,embedding_norm=false,depth_scale=none)", norm)
    randomize(siamese)
    for junction in junctions(siamese):
        zero(junction.read)
    post = build("post", norm)
    copy_sublayers(siamese, post)
    for ours, theirs in zip(junctions(post), junctions(siamese), strict=True):
        copy_half(theirs, ours, "join")
    assert_same_logits(post, siamese)


@pytest.mark.parametrize("norm", NORMS, ids=["rms", "layer"])
def test_hybrid_pre_with_x_gains_and_c1_zero_is_pre_norm_with_head_norms(norm):
    hybrid = build("siamese_hybrid_pre(input_norm=false,read_out=paper)", norm)
    randomize(hybrid)
    for i, junction in enumerate(junctions(hybrid)):
        if i % 2 == 1 or i == 6:  # after attention, and the last one
            zero(junction.join)
        if i % 2 == 0 and i < 6:  # before attention
            next(p for n, p in junction.read.named_parameters() if n == "c1").data.zero_()
    pre = build("pre", norm, inner=Inner(qk="model", v="model"))
    copy_sublayers(hybrid, pre)
    for ours, theirs in zip(junctions(pre), junctions(hybrid), strict=True):
        y_norm = [p for name, p in theirs.read.named_parameters() if not name.endswith("c1")]
        for a, b in zip(y_norm, ours.read.parameters(), strict=True):
            b.data.copy_(a)
    assert_same_logits(pre, hybrid)


@pytest.mark.parametrize("norm", NORMS, ids=["rms", "layer"])
def test_without_the_limits_the_placements_differ(norm):
    """The weights copied above are not what makes the models equal."""
    siamese, pre = build("siamese(input_norm=false,read_out=paper)", norm), build("pre", norm)
    randomize(siamese)
    copy_sublayers(siamese, pre)
    for ours, theirs in zip(junctions(pre), junctions(siamese), strict=True):
        copy_half(theirs, ours, "read")
    tokens = torch.arange(9)[None]
    assert (siamese(tokens) - pre(tokens)).abs().max() > 0.1
