"""Initialization schemes, and what their values depend on."""

import hashlib
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normstream.init import SCHEMES, initialize
from normstream.layers.inner import Inner
from normstream.models import DecoderConfig, DecoderLM
from normstream.norms import NormConfig

STD, N_LAYERS = 0.03, 8
CONFIG = DecoderConfig(
    placement="pre", vocab_size=257, dim=64, n_layers=N_LAYERS, n_heads=4, max_seq_len=16, tied=False, init_std=STD
)
BRANCH = STD / math.sqrt(2 * N_LAYERS)
CUT_AT_3 = math.sqrt(1 - 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2)))


def build(seed: int = 0, **options) -> DecoderLM:
    model = DecoderLM(replace(CONFIG, **options))
    initialize(model, seed=seed)
    return model


def is_branch_output(name: str) -> bool:
    return name.endswith(("attention.wo.weight", "feed_forward.w_down.weight"))


def matrices(model: DecoderLM) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if p.ndim == 2}


def assert_std(values: list[Tensor], expected: float) -> None:
    """At 4 standard errors."""
    flat = torch.cat([v.flatten() for v in values])
    assert flat.mean().item() == pytest.approx(0, abs=4 * expected / math.sqrt(flat.numel()))
    assert flat.square().mean().sqrt().item() == pytest.approx(expected, rel=4 / math.sqrt(2 * flat.numel()))


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize(
    ("scheme", "branch", "factor"), [("plain", STD, 1.0), ("gpt2", BRANCH, 1.0), ("megatron_full", BRANCH, CUT_AT_3)]
)
def test_standard_deviations(scheme, branch, factor, activation):
    """GPT-2: 1/sqrt(2L) on the two matrices a block that write to the stream; Megatron-full cuts at 3 sigma as well."""
    model = build(init=scheme, activation=activation)
    weights = matrices(model)
    outputs = [w for n, w in weights.items() if is_branch_output(n)]
    rest = {n: w for n, w in weights.items() if not is_branch_output(n)}
    assert len(outputs) == 2 * N_LAYERS
    assert_std(outputs, branch * factor)
    for name, weight in rest.items():
        assert_std([weight], STD * factor)
        assert weight.abs().max() > 2.5 * STD, name
    if scheme == "megatron_full":
        assert max(w.abs().max().item() for w in outputs) <= 3 * BRANCH * (1 + 1e-6)
        assert max(w.abs().max().item() for w in rest.values()) <= 3 * STD * (1 + 1e-6)
    else:
        assert max(w.abs().max().item() for w in rest.values()) > 3.2 * STD


def test_gpt2_constants():
    """Radford et al. 2019: 0.004082 for 12 blocks with std 0.02."""
    config = replace(CONFIG, n_layers=12, init="gpt2", init_std=0.02)
    model = DecoderLM(config)
    initialize(model, seed=0)
    assert_std([w for n, w in matrices(model).items() if is_branch_output(n)], 0.004082)


def test_norms_biases_and_c1():
    norm = NormConfig(kind="layer", bias=True)
    for placement in ("pre", "post", "siamese", "siamese_hybrid_pre"):
        model = DecoderLM(
            replace(CONFIG, placement=placement, norm=norm, bias="all", inner=Inner(qk="model", v="model"))
        )
        for p in model.parameters():
            p.data.fill_(7.0)
        initialize(model, seed=0)
        for name, p in model.named_parameters():
            if p.ndim == 1:
                assert torch.equal(p.data, torch.zeros_like(p) if name.endswith("bias") else torch.ones_like(p)), name
            else:
                assert p.abs().max() < 1, name
    zero_centred = build(norm=NormConfig(gain="zero_centered"))
    assert all(not p.any() for n, p in zero_centred.named_parameters() if p.ndim == 1)


@pytest.mark.parametrize(("placement", "cut"), [("siamese_hybrid_pre", True), ("siamese", False), ("pre", False)])
def test_the_scheme_of_the_placement(placement, cut):
    """Hybrid-pre's released code is Megatron-full; the others leave the tails alone."""
    largest = max(w.abs().max().item() for w in matrices(build(placement=placement)).values())
    assert (largest <= 3 * STD * (1 + 1e-6)) == cut


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_built_on_the_meta_device_gets_the_same_values(scheme, tied):
    config = replace(CONFIG, placement="siamese_hybrid_pre", init=scheme, tied=tied, n_layers=3)
    with torch.device("meta"):
        late = DecoderLM(config)
    late = late.to_empty(device="cpu")
    initialize(late, seed=3)
    early = DecoderLM(config)
    initialize(early, seed=3)
    assert late.state_dict().keys() == early.state_dict().keys()
    for name, value in early.state_dict().items():
        assert torch.equal(value, late.state_dict()[name]), name
    assert (late.lm_head.weight is late.tok_embeddings.weight) == tied
    row = torch.arange(10)[None]
    assert torch.equal(early(row), late(row))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sublayers_start_equal_under_every_placement(scheme):
    models = [build(placement=p, init=scheme) for p in ("pre", "post", "siamese", "siamese(depth_scale=paper)")]
    models.append(build(placement="siamese_hybrid_pre", init=scheme))
    reference = matrices(models[0])
    for model in models[1:]:
        weights = matrices(model)
        assert weights.keys() == reference.keys()
        assert all(torch.equal(weights[name], reference[name]) for name in reference)


def test_values_come_from_the_seed_and_the_name_to_the_last_bit():
    """Fixed for good: a new version must not start an old configuration anew."""
    models = {scheme: build(seed=5, init=scheme) for scheme in ("plain", "gpt2", "megatron_full")}
    for name in ("tok_embeddings", "layers.3.attention.wv", "layers.7.feed_forward.w_down"):
        digest = hashlib.sha256(f"5:{name}.weight".encode()).digest()
        for scheme, model in models.items():
            std = BRANCH if scheme != "plain" and name.endswith("w_down") else STD
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
            weight = model.get_parameter(f"{name}.weight")
            if scheme == "megatron_full":
                cut = (-3 * std, 3 * std)
                expected = torch.nn.init.trunc_normal_(torch.empty(weight.shape), 0.0, std, *cut, generator=generator)
            else:
                expected = torch.empty(weight.shape).normal_(0.0, std, generator=generator)
            assert torch.equal(weight, expected), (scheme, name)


def test_the_seed_decides_and_nothing_else():
    torch.manual_seed(1)
    one = matrices(build(seed=0))
    torch.manual_seed(2)
    same, other = matrices(build(seed=0)), matrices(build(seed=1))
    for name, weight in one.items():
        assert torch.equal(weight, same[name])
        assert (weight - other[name]).abs().mean() > 0.1 * weight.std()


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    model = DecoderLM(CONFIG)
    torch.manual_seed(0)
    initialize(model, seed=5)
    assert torch.equal(torch.rand(3), expected)


def test_no_two_matrices_start_equal():
    weights = list(matrices(build()).values())
    for i, a in enumerate(weights):
        for b in weights[i + 1 :]:
            n = min(a.numel(), b.numel(), 256)
            x, y = a.flatten()[:n], b.flatten()[:n]
            assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1].item()) < 0.4
