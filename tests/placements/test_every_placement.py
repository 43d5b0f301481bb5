"""What has to hold for every placement, whatever its equations. A new one needs a line in NORM_PARAMETERS."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from normstream import placements
from normstream.data import DataConfig
from normstream.generation import generate
from normstream.init import initialize
from normstream.layers.head_norm import HeadNorm
from normstream.models import DecoderConfig, DecoderLM
from normstream.norms import NormConfig
from normstream.optim import OptimizerConfig
from normstream.training import TrainConfig, train
from normstream.training.step import wrap_layers

NAMES = placements.names()
CONFIG = DecoderConfig(vocab_size=20, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=24, max_seq_len=12)
D, L, H, G, K, F = 16, 2, 4, 2, 4, 24

# Parameters of norms, counted by hand from the equations (one gain vector each; the LayerNorm over hyper-connected
# streams has a bias too): D is the width, L the blocks, H and G the
# query and key-value heads, K the width of a head, F that of the feed-forward.
NORM_PARAMETERS = {
    "pre": (2 * L + 1) * D,
    "gpt2": (2 * L + 1) * D,
    "bloom": (2 * L + 2) * D,
    "post": 2 * L * D,
    "realformer": 2 * L * D,
    "deepnorm": 2 * L * D,
    "layernorm_scaling": (2 * L + 1) * D,
    "mix_ln": (2 * L + 1) * D,
    "sandwich": (4 * L + 1) * D,
    "peri": (4 * L + 2) * D,
    "gemma2": (4 * L + 1) * D,
    "gemma3": (4 * L + 1) * D + L * 2 * K,
    "glm4": (4 * L + 1) * D,
    "olmo2": (2 * L + 1) * D + L * (H * K + G * K),
    "swin_v2": (2 * L + 2) * D + L * (H + G),
    "parallel": (L + 1) * D,
    "hybridnorm": (L + 1) * D + L * 3 * K,
    "hybridnorm_star": (L + 2) * D + L * 3 * K,
    "normformer": (3 * L + 1) * D + L * F,
    "sub_ln": (2 * L + 1) * D + L * (H * K + F),
    "keel": (4 * L - 1) * D,
    "residual": (2 * L + 1) * D,
    "span_norm": (2 * L + 1) * D,
    "geo_norm": D,
    "ngpt": L * (H * K + G * K),
    "hyper_connections": (2 * L + 1) * D + 2 * L * 2 * D,
    "mhc": (2 * L + 1) * D,
    "siamese": 3 * (2 * L + 1) * D,
    "siamese_hybrid_pre": (4 * L + 3) * D + L * 3 * K,
    "siamese_depth_attention": (4 * L + 3) * D + L * (H * K + G * K),
    "siamese_hyper_connections": 3 * (2 * L + 1) * D + 2 * L * 2 * D,
}

# Parameters that a step of SGD leaves alone, and why.
UNMOVED = {
    "mhc": {"before_layers.read.mix.scale_res": "all streams are equal there, and every mixing matrix keeps their sum"}
}


def model_of(name: str, **changes) -> DecoderLM:
    model = DecoderLM(replace(CONFIG, placement=name, **changes))
    initialize(model, seed=0)
    return model


def randomize(model: nn.Module) -> None:
    """Every parameter, gains and mixing weights included, away from values that hide something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += (0.2 * noise).to(parameter.dtype)


def tokens(batch: int = 2, length: int = 8) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (batch, length), generator=torch.Generator().manual_seed(2))


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, HeadNorm) or type(module).__module__.startswith("normstream.norms")


def test_every_placement_has_a_count():
    assert set(NORM_PARAMETERS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_norm_parameters_on_meta(name):
    with torch.device("meta"):
        model = DecoderLM(replace(CONFIG, placement=name))
    gains = [p for m in model.modules() if is_norm(m) for p in m.parameters(recurse=False)]
    assert all(p.is_meta for p in gains)
    assert sum(p.numel() for p in gains) == NORM_PARAMETERS[name]


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("name", NAMES)
def test_junctions_gradcheck(name, kind):
    """Analytic against numeric derivatives of the whole row of a block, sublayers replaced by a fixed smooth map."""
    norm = NormConfig(kind=kind, eps=1e-3, bias=kind == "layer")
    row = nn.ModuleList(placements.get(name).junctions(dim=5, n_layers=2, norm=norm)).double()
    randomize(row)
    parameters = list(row.parameters())

    def run(embedding: Tensor, *_: Tensor) -> Tensor:
        state, z = row[0]((), embedding)
        for number, junction in enumerate(row[1:]):
            state, z = junction(state, torch.sin(z + number))
        return z

    embedding = torch.randn(1, 2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (embedding, *parameters), fast_mode=True, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_sgd_moves_every_parameter(name):
    model = model_of(name).double()
    randomize(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens()).logsumexp(-1).square().mean().backward()
    optimizer.step()
    moved = {n: (p.detach() - before[n]).abs().max().item() for n, p in model.named_parameters()}
    stuck = {n for n, by in moved.items() if by < 1e-9}  # rounding alone is no movement
    assert stuck == set(UNMOVED.get(name, {})), moved


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_logits_are_within_two_percent(name):
    config = replace(CONFIG, placement=name, dim=64, n_layers=4, ffn_dim=96, vocab_size=64)
    model = DecoderLM(config).eval()
    initialize(model, seed=0)
    with torch.no_grad():
        exact = model(tokens())
        with torch.autocast("cpu", torch.bfloat16):
            rough = model(tokens())
    error = (rough.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 0.02, error.item()


@pytest.mark.parametrize("name", NAMES)
def test_meta_then_to_empty_starts_with_the_same_values(name):
    with torch.device("meta"):
        model = DecoderLM(replace(CONFIG, placement=name))
    model.to_empty(device="cpu")
    initialize(model, seed=0)
    torch.testing.assert_close(model(tokens()), model_of(name)(tokens()), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_shorter_prefix_gives_the_same_logits(name):
    """No placement may leak from later positions to earlier ones."""
    model = model_of(name).double().eval()
    randomize(model)
    with torch.no_grad():
        whole, prefix = model(tokens()), model(tokens()[:, :5])
    torch.testing.assert_close(prefix, whole[:, :5], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_float16_with_loss_scaling_trains_fifty_steps(name, tmp_path):
    """The losses are finite and end below those of a uniform guess over the few words of the text."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 60)
    data = DataConfig(source=str(tmp_path / "text.txt"), seq_len=16, validation_fraction=0.2)
    config = TrainConfig(
        model=replace(CONFIG, placement=name, max_seq_len=16),
        data=data,
        optimizer=OptimizerConfig(lr=1e-2),
        precision="fp16",
        steps=50,
        batch_size=4,
        eval_every=50,
        eval_batches=2,
        device="cpu",
    )
    result = train(config, tmp_path / "run")
    assert result.steps == 50
    assert not result.diverged, result.cause
    assert result.train_loss is not None
    assert result.train_loss < 4.0 < math.log(257)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_parameters_of_low_precision(name, dtype):
    model = model_of(name).to(dtype)
    logits = model(tokens())
    assert logits.dtype == dtype
    logits.float().logsumexp(-1).mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_streams_keep_their_dtype_and_rows_their_values(name):
    """Updates in bfloat16 never pull a stream down, and a NaN stays in its row."""
    row = nn.ModuleList(placements.get(name).junctions(dim=8, n_layers=2))
    n_streams = len(placements.get(name).streams)

    def run(embedding: Tensor) -> Tensor:
        state, z = row[0]((), embedding)
        for junction in row[1:]:
            before = [s.clone() for s in state]
            old, (state, z) = state, junction(state, torch.sin(z).bfloat16())
            assert all(s.dtype == embedding.dtype for s in (*state[:n_streams], z))
            torch.testing.assert_close(list(old), before, rtol=0, atol=0, equal_nan=True)
        return z

    embedding = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(3))
    hurt = embedding.clone()
    hurt[1, 2] = torch.nan
    whole, rest = run(embedding), run(hurt)
    assert rest[1, 2].isnan().any()
    assert torch.equal(rest[0], whole[0])
    assert torch.equal(rest[1, :2], whole[1, :2])
    assert run(embedding[:0]).shape == (0, 3, 8)


@pytest.mark.parametrize("name", NAMES)
def test_generation_with_a_cache_is_that_without(name):
    model = model_of(name).double().eval()
    randomize(model)
    wanted = tokens()[:, :3]
    with torch.no_grad():
        for _ in range(6):
            wanted = torch.cat((wanted, model(wanted)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(generate(model, tokens()[:, :3], 6), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_recomputed_activations_give_the_same_gradients(name):
    """With dropout: the draws are repeated too."""

    def gradients(*, checkpointed: bool) -> dict[str, Tensor | None]:
        model = model_of(name, dropout=0.1, drop_path=0.1).train()
        randomize(model)
        wrap_layers(model, compiled=False, recomputed="layer" if checkpointed else "none")
        torch.manual_seed(0)
        model(tokens()).logsumexp(-1).square().mean().backward()
        return {n: p.grad for n, p in model.named_parameters()}

    torch.testing.assert_close(gradients(checkpointed=True), gradients(checkpointed=False), rtol=0, atol=0)
