"""Hyper-Connections, mHC and SiameseNorm with Hyper-Connections as whole models: limits at the start, size, cache."""

from typing import Any

import pytest
import torch
from torch import Tensor

from normstream import placements
from normstream.init import initialize
from normstream.layers import KVCache
from normstream.models import DecoderConfig, DecoderLM
from normstream.norms import NormConfig
from normstream.training.probes import LayerProbe

TOKENS = torch.randint(0, 23, (2, 9), generator=torch.Generator().manual_seed(0))
SPECS = [
    "hyper_connections",
    "hyper_connections(mode=static)",
    "hyper_connections(mapping_norm=code,tanh=false)",
    "mhc",
    "mhc(mapping=code)",
    "siamese_hyper_connections",
]


def build(placement: str, *, eps: float = 0.0, seed: int | None = 0, **options: Any) -> DecoderLM:
    config = DecoderConfig(
        placement=placement, vocab_size=23, dim=24, n_layers=3, n_heads=4, norm=NormConfig(eps=eps), **options
    )
    model = DecoderLM(config)
    if seed is not None:
        initialize(model, seed)
    return model.double()


def randomize(model: DecoderLM) -> DecoderLM:
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        values = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.data.add_(values, alpha=1 / p.shape[0] ** 0.5 if p.ndim == 2 else 0.3)
    return model


def disturb_mixing(model: DecoderLM, size: float) -> None:
    for name, p in model.named_parameters():
        if ".mix." in name:
            p.data.add_(size * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)).double())


def hidden(model: DecoderLM) -> Tensor:
    with torch.no_grad():
        return model.hidden(TOKENS)


# --- at the start ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("options", ["mode=static", "mode=dynamic", "mode=dynamic,mapping_norm=code,tanh=false"])
def test_hyper_connections_start_as_pre_norm(n, options):
    """n times its last stream before the final norm, which at eps 0 does not see the factor."""
    ours, pre = hidden(build(f"hyper_connections(n_streams={n},{options})")), hidden(build("pre"))
    torch.testing.assert_close(ours, pre, rtol=0, atol=1e-12)
    assert pre.std() > 0.5


def test_every_stream_is_pre_norms_stream_at_the_start():
    model, pre = build("hyper_connections(n_streams=3)", eps=1e-5), build("pre", eps=1e-5)
    with LayerProbe(model) as ours, LayerProbe(pre) as theirs:
        hidden(model)
        hidden(pre)
    torch.testing.assert_close(torch.tensor(ours.row(1)["rms"]["h"]), torch.tensor(theirs.row(1)["rms"]["x"]))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_mhc_starts_as_pre_norm(n):
    """Equal streams stay equal and receive the update itself; the sum of what is read, norm or no, is a multiple."""
    ours, pre = hidden(build(f"mhc(n_streams={n})")), hidden(build("pre"))
    torch.testing.assert_close(ours, pre, rtol=0, atol=1e-12)


def test_mhc_of_the_library_starts_with_larger_updates():
    """b = 2 sigmoid(1) = 1.462: Pre-Norm whose updates are so much larger, hence not the same model."""
    factor = 2 / (1 + torch.exp(torch.tensor(-1.0, dtype=torch.float64)))
    pre: Any = build("pre")
    for layer in pre.layers:
        for output in (layer.attention.wo, layer.feed_forward.w_down):
            output.weight.data.mul_(factor)
    ours = hidden(build("mhc(mapping=code)"))
    torch.testing.assert_close(ours, hidden(pre), rtol=0, atol=1e-12)
    assert (ours - hidden(build("pre"))).abs().max() > 1e-3


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("options", ["", "depth_scale=paper,", "embedding_norm=false,input_norm=false,read_out=paper,"])
def test_siamese_hyper_connections_start_as_siamese(n, options):
    """N_y sees n times its stream in the read-out alone, which at eps 0 it does not notice."""
    ours = hidden(build(f"siamese_hyper_connections({options}n_streams={n})"))
    siamese = hidden(build(f"siamese({options.rstrip(',')})"))
    torch.testing.assert_close(ours, siamese, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS)
def test_away_from_the_start_it_is_another_model(spec):
    model = build(spec)
    disturb_mixing(model, 0.3)
    reference = build("siamese" if spec.startswith("siamese") else "pre")
    assert (hidden(model) - hidden(reference)).abs().max() > 1e-2


def test_the_homes_take_turns():
    row: Any = placements.get("hyper_connections(n_streams=3)").junctions(dim=4, n_layers=2)
    assert [junction.read.mix.static_alpha[:, 0].argmax().item() for junction in row[:-1]] == [0, 1, 2, 0]


# --- size -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "per_sublayer", "norms"),
    [
        ("hyper_connections(mode=static)", lambda d, n: n * (n + 1) + n, (0, 1, 1)),
        ("hyper_connections", lambda d, n: n * (n + 1) + n + d * (n + 1) + d + 2 + 2 * d, (0, 1, 1)),
        ("hyper_connections(mapping_norm=code)", lambda d, n: n * (n + 1) + n + d * (n + 1) + d + 2 + d, (0, 1, 1)),
        ("mhc", lambda d, n: n * (n + 1) + n + n * d * (n * n + 2 * n) + 3, (0, 1, 1)),
        ("mhc(mapping=code)", lambda d, n: n * (n + 1) + n + d * (n + 1) + d + 3 + d, (0, 1, 1)),
        ("siamese_hyper_connections", lambda d, n: n * (n + 1) + n + d * (n + 1) + d + 2 + 2 * d, (1, 3, 2)),
    ],
)
def test_number_of_parameters_of_the_junctions(spec, per_sublayer, norms):
    """On the meta device; ``norms`` counts those of the start, of a sublayer and of the last read."""
    dim, n, sublayers = 16, 4, 6
    with torch.device("meta"):
        row = placements.get(spec).junctions(dim=dim, n_layers=3)
    first, each, last = norms
    wanted = sublayers * per_sublayer(dim, n) + dim * (first + each * sublayers + last)
    assert sum(p.numel() for junction in row for p in junction.parameters()) == wanted


@pytest.mark.parametrize("spec", SPECS)
def test_a_model_from_the_meta_device_starts_with_the_same_values(spec):
    config = build(spec, seed=None).config
    with torch.device("meta"):
        model = DecoderLM(config)
    model.to_empty(device="cpu")
    initialize(model, seed=3)
    other = DecoderLM(config)
    initialize(other, seed=3)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


# --- use ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_logits_with_a_cache_are_those_without(spec):
    model = randomize(build(spec, eps=1e-5))
    cache = KVCache()
    with torch.no_grad():
        whole = model(TOKENS)
        steps = [model(TOKENS[:, i : i + 1], cache=cache) for i in range(TOKENS.shape[1])]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("spec", SPECS)
def test_a_gradient_step_changes_every_parameter(spec):
    """From random weights; what is left out is zero by symmetry.

    The streams start equal, so the matrix that mixes them first does nothing if its columns sum to 1 (mHC); and they
    end summed, so the last one does nothing if its rows do. One of the two sums is exact, the other nearly so.
    """
    model = randomize(build(spec, eps=1e-5))
    model(TOKENS).log_softmax(-1)[..., 0].sum().backward()
    symmetric = {"before_layers.read.mix.scale_res", "layers.2.after_attention.read.mix.scale_res"}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        if not ("mhc" in spec and name in symmetric):
            assert p.grad.abs().max() > 1e-9, name


@pytest.mark.parametrize("spec", SPECS)
def test_bfloat16_logits_are_near_float32(spec):
    model = build(spec, eps=1e-5)
    disturb_mixing(model, 0.1)
    model.float()
    with torch.no_grad():
        exact = model(TOKENS)
        with torch.autocast("cpu", torch.bfloat16):
            rough = model(TOKENS).float()
    assert (rough - exact).square().mean().sqrt() < 0.02 * exact.square().mean().sqrt()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("hyper_connections(n_streams=0)", "n_streams must be at least 1, got 0"),
        ("mhc(n_streams=-1)", "n_streams must be at least 1, got -1"),
        ("mhc(sinkhorn=0)", "sinkhorn must be at least 1, got 0"),
        ("siamese_hyper_connections(n_streams=0)", "n_streams must be at least 1, got 0"),
        ("hyper_connections(n_streams=2.5)", "n_streams"),
        ("hyper_connections(mapping_norm=papr)", "'paper'"),
    ],
)
def test_wrong_options(spec, words):
    with pytest.raises(ValueError, match=words):
        placements.get(spec)
