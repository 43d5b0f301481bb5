"""The vision Transformer against transformers' ViT and DeiT, by arithmetic, and with every placement."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeiTConfig, DeiTForImageClassificationWithTeacher, ViTForImageClassification
from transformers import ViTConfig as TheirConfig

from normstream import initialize, placements
from normstream.junctions import Drop, set_backend
from normstream.models import ImageConfig, ViT, ViTConfig, preset
from normstream.optim import OptimizerConfig, build_optimizer, parameter_groups

NAMES = placements.names()
SMALL = ViTConfig(
    image_size=12, channels=3, patch_size=4, n_classes=7, dim=24, n_layers=3, n_heads=4, ffn_dim=40, placement="pre"
)


def built(config: ViTConfig) -> ViT:
    model = ViT(config)
    initialize(model, seed=0)
    return model


def images(config: ImageConfig, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, config.channels, config.image_size, config.image_size, generator=generator, dtype=dtype)


def randomize(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def copy_from_transformers(model: ViT, theirs: nn.Module, stem: str) -> None:
    """Every parameter of ours from theirs, whose names those of ``ViTModel`` are; each of theirs is used once."""
    source = dict(theirs.named_parameters())

    def take(name: str) -> Tensor:
        return source.pop(name).data

    embeddings = f"{stem}.embeddings"
    tokens = [take(f"{embeddings}.cls_token")[0]]
    if model.config.distillation:
        tokens.append(take(f"{embeddings}.distillation_token")[0])
    projection = f"{embeddings}.patch_embeddings.projection"
    values = {
        "token_embeddings.weight": torch.cat(tokens),
        "pos_embeddings.weight": take(f"{embeddings}.position_embeddings")[0],
        "patch_embeddings.projection.weight": take(f"{projection}.weight").flatten(1),
        "patch_embeddings.projection.bias": take(f"{projection}.bias"),
    }
    last = f"layers.{model.config.n_layers - 1}.after_feed_forward.read.norm"
    modules = {last: f"{stem}.layernorm"}
    modules |= {"head": "cls_classifier" if model.config.distillation else "classifier"}
    modules |= {"distillation_head": "distillation_classifier"} if model.config.distillation else {}
    for layer in range(model.config.n_layers):
        block = f"{stem}.layers.{layer}"
        first = f"layers.{layer - 1}.after_feed_forward" if layer else "before_layers"
        modules |= {
            f"{first}.read.norm": f"{block}.layernorm_before",
            f"layers.{layer}.after_attention.read.norm": f"{block}.layernorm_after",
            f"layers.{layer}.attention.wq": f"{block}.attention.q_proj",
            f"layers.{layer}.attention.wk": f"{block}.attention.k_proj",
            f"layers.{layer}.attention.wv": f"{block}.attention.v_proj",
            f"layers.{layer}.attention.wo": f"{block}.attention.o_proj",
            f"layers.{layer}.feed_forward.w_up": f"{block}.mlp.fc1",
            f"layers.{layer}.feed_forward.w_down": f"{block}.mlp.fc2",
        }
    values |= {
        f"{ours}.{part}": take(f"{name}.{part}") for ours, name in modules.items() for part in ("weight", "bias")
    }
    assert not source, list(source)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == values.keys()
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)


def test_logits_of_transformers_vit():
    config = TheirConfig(
        hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40, layer_norm_eps=1e-6,
        image_size=12, patch_size=4, num_labels=7,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    theirs = ViTForImageClassification(config).double().eval()
    randomize(theirs)
    model = ViT(SMALL).double()
    copy_from_transformers(model, theirs, "vit")
    batch = images(SMALL, dtype=torch.float64)
    wanted = theirs(batch).logits
    torch.testing.assert_close(model(batch), wanted, rtol=0, atol=1e-10)
    assert wanted.std() > 0.1


def test_logits_of_transformers_distilled_deit():
    config = DeiTConfig(
        hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40, layer_norm_eps=1e-6,
        image_size=12, patch_size=4, num_labels=7,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    theirs = DeiTForImageClassificationWithTeacher(config).double().eval()
    randomize(theirs)
    model = ViT(replace(SMALL, distillation=True)).double()
    copy_from_transformers(model, theirs, "deit")
    batch = images(SMALL, dtype=torch.float64)
    wanted = theirs(batch)
    torch.testing.assert_close(model.eval()(batch), wanted.logits, rtol=0, atol=1e-10)
    logits, distilled = model.train()(batch)
    torch.testing.assert_close(logits, wanted.cls_logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(distilled, wanted.distillation_logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "distillation", "official"),
    [
        ("deit-t", False, 5_717_416),
        ("deit-s", False, 22_050_664),
        ("deit-b", False, 86_567_656),
        ("deit-t", True, 5_910_800),
        ("deit-s", True, 22_436_432),
        ("deit-b", True, 87_338_192),
    ],
)
def test_official_parameter_counts(name: str, distillation: bool, official: int):
    config = replace(preset(name), placement="pre", distillation=distillation)
    with torch.device("meta"):
        model = ViT(config)
    d, layers, tokens = config.dim, 12, 1 + distillation
    block = 4 * d * d + 4 * d + 2 * 4 * d * d + 5 * d + 2 * 2 * d
    by_hand = 768 * d + d + tokens * d + (196 + tokens) * d + layers * block + 2 * d + tokens * (1000 * d + 1000)
    assert by_hand == official
    assert sum(p.numel() for p in model.parameters()) == official


def test_siamese_adds_its_norms_only():
    counts = []
    for placement in ("pre", "siamese"):
        with torch.device("meta"):
            model = ViT(replace(preset("deit-t"), placement=placement))
        counts.append(sum(p.numel() for p in model.parameters()))
    assert counts[1] - counts[0] == 2 * 25 * 2 * 192  # two more norms at 25 junctions, gain and bias


def test_sincos_positions_belong_to_patches():
    """Without blocks' help: what the streams start as, minus the same with a table of zeros."""
    model = built(replace(SMALL, positions="sincos", dim=24))
    batch = images(SMALL)
    embedding = model.embed(batch)
    assert model.pos_embeddings is None
    assert model.token_embeddings is not None
    torch.testing.assert_close(embedding[:, 0], model.token_embeddings.weight.expand(2, -1))
    row, column = 1, 2  # of the 3 x 3 grid
    place = embedding[0, 1 + 3 * row + column] - model.patch_embeddings(batch)[0, 3 * row + column]
    angles = [c * 10_000 ** (-j / 6) for c in (column, row) for j in range(6)]
    wanted = [f(a) for part in (angles[:6], angles[6:]) for f in (math.sin, math.cos) for a in part]
    torch.testing.assert_close(place, torch.tensor(wanted), rtol=0, atol=1e-5)


def test_mean_pool_has_no_token():
    model = built(replace(SMALL, pool="mean"))
    assert model.token_embeddings is None
    hidden = model.hidden(images(SMALL))
    assert hidden.shape == (2, 9, 24)
    torch.testing.assert_close(model(images(SMALL)), model.head(sum(hidden.unbind(1)) / 9))


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_normalized_by_the_model(channels: int):
    mean, std = ((0.3,), (0.2,)) if channels == 1 else ((0.3, 0.4, 0.5), (0.2, 0.25, 0.3))
    plain = built(replace(SMALL, channels=channels))
    own = ViT(replace(plain.config, pixel_mean=mean, pixel_std=std))
    own.load_state_dict(plain.state_dict())
    batch = torch.rand(2, channels, 12, 12)
    normalized = torch.stack([(batch[:, c] - mean[c]) / std[c] for c in range(channels)], dim=1)
    torch.testing.assert_close(own(batch), plain(normalized))
    shared = ViT(replace(plain.config, pixel_mean=(0.5,), pixel_std=std))
    shared.load_state_dict(plain.state_dict())
    scale = torch.tensor(std)[:, None, None]
    torch.testing.assert_close(shared(batch), plain((batch - 0.5) / scale))


@pytest.mark.parametrize("distillation", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_placement_learns_a_step(name: str, distillation: bool):
    config = replace(SMALL, placement=name, n_layers=2, distillation=distillation, drop_path=0.2, dropout=0.1)
    model = built(config)
    torch.manual_seed(0)
    batch, labels = images(config, batch=4), torch.tensor([0, 1, 2, 3])
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3))

    def loss() -> Tensor:
        hidden, aux = model.hidden_and_aux(batch)
        assert aux == ()
        return torch.stack([F.cross_entropy(logits, labels) for logits in model.head_logits(hidden)]).mean()

    before = loss()
    before.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert all(g is not None and g.isfinite().all() for g in gradients.values()), name
    norm = torch.stack([g.norm() for g in gradients.values() if g is not None]).norm()
    assert 0 < norm < 1e3
    optimizer.step()
    model.placement.after_step(model)
    assert model.eval()(batch).isfinite().all()
    assert all(p.isfinite().all() for p in model.parameters())


def test_parts_see_each_other_both_ways():
    """The first patch reaches the last one's vector and the other way round: attention is not causal."""
    model = built(SMALL)
    batch = images(SMALL).requires_grad_()
    hidden = model.hidden(batch)
    for patch, (rows, columns) in {9: (slice(0, 4), slice(0, 4)), 1: (slice(8, 12), slice(8, 12))}.items():
        (gradient,) = torch.autograd.grad(hidden[0, patch].sum(), batch, retain_graph=True)
        assert gradient[0, :, rows, columns].abs().min() > 0


def test_drop_path_is_drawn_once_a_sublayer():
    """A block's rate decides how often; the fused junctions and the plain ones make the same of the same draws."""
    model = built(replace(SMALL, placement="siamese", drop_path=0.5)).train()
    batch, outputs = images(SMALL, batch=16), []
    for backend in ("auto", "plain"):
        set_backend(model, backend)
        torch.manual_seed(3)
        outputs.append(model(batch))
    torch.testing.assert_close(*outputs)
    gone: list[tuple[float, Tensor]] = []
    drops = [module for module in model.modules() if isinstance(module, Drop)]

    def note(drop: Drop, args: tuple[Tensor, ...], output: Tensor) -> None:
        gone.append((drop.drop_path, (output == 0).flatten(1).all(1)))

    for drop in drops:
        drop.register_forward_hook(note)
    model(batch)
    assert len(gone) == len(drops) == 2 * SMALL.n_layers
    assert all(not rows.any() for rate, rows in gone if rate == 0)
    assert all(rows.any() and not rows.all() for rate, rows in gone if rate > 0)


@pytest.mark.parametrize("layer", [1, 2])
def test_drop_path_adds_the_same_update_to_both_streams(layer: int):
    """What is really added, from the streams themselves: y's step is the update, x's before its norm the update / c."""
    model = built(replace(SMALL, placement="siamese", drop_path=0.5)).double().train()
    blocks: Any = model.layers
    join = blocks[layer].after_attention.join
    seen: dict[str, Tensor] = {}
    handles = [
        join.register_forward_hook(lambda m, args, out: seen.update(x=args[0][0], y=args[0][1], new_y=out[1])),
        join.norm_x.register_forward_pre_hook(lambda m, args: seen.update(raw_x=args[0])),
    ]
    torch.manual_seed(4)
    model(images(SMALL, batch=16, dtype=torch.float64))
    for handle in handles:
        handle.remove()
    to_x, to_y = seen["raw_x"] - seen["x"], seen["new_y"] - seen["y"]
    torch.testing.assert_close(to_x * math.sqrt(2 * (layer + 1)), to_y, rtol=0, atol=1e-12)
    zero_x, zero_y = ((added == 0).flatten(1).all(1) for added in (to_x, to_y))
    assert torch.equal(zero_x, zero_y)
    assert 0 < zero_x.sum() < 16


def test_drop_path_is_off_in_evaluation():
    model, plain = built(replace(SMALL, drop_path=0.5)).eval(), built(SMALL)
    torch.testing.assert_close(model(images(SMALL)), plain(images(SMALL)))
    rates = [module.drop_path for module in model.modules() if isinstance(module, Drop)]
    assert rates == [0.0, 0.0, 0.25, 0.25, 0.5, 0.5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 13}, "image_size 13 is not divisible by patch_size 4"),
        ({"patch_size": 5}, "image_size 12 is not divisible by patch_size 5"),
        ({"image_size": 0}, "image_size must be at least 1"),
        ({"channels": 0}, "channels must be at least 1"),
        ({"n_classes": 0}, "n_classes must be at least 1"),
        ({"positions": "rotary"}, "positions cannot be 'rotary'"),
        ({"positions": "sincos", "dim": 12 + 6}, "divisible by"),
        ({"pool": "mean", "distillation": True}, "pool is mean"),
        ({"pixel_mean": (0.1, 0.2)}, r"pixel_mean must have one number, or one a channel \(3\)"),
        ({"pixel_std": (0.0,)}, "pixel_std must be above 0"),
    ],
)
@pytest.mark.untyped
def test_wrong_configurations(changes: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 3, 13, 13), r"must have shape \(B, 3, 12, 12\), got \(2, 3, 13, 13\)"),
        ((2, 3, 12, 16), r"got \(2, 3, 12, 16\); resize them"),
        ((2, 1, 12, 12), r"got \(2, 1, 12, 12\)"),
        ((2, 3, 8, 8), r"got \(2, 3, 8, 8\)"),
    ],
)
def test_wrong_images(shape: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=message):
        built(SMALL)(torch.zeros(shape))


@pytest.mark.untyped
def test_images_without_a_batch_and_whole_numbers():
    with pytest.raises(ValueError, match="must have shape"):
        SMALL.check_images(torch.zeros(3, 12, 12))
    with pytest.raises(ValueError, match=r"floating point, got torch.uint8"):
        SMALL.check_images(torch.zeros(1, 3, 12, 12, dtype=torch.uint8))


def test_ngpt_norms_matrices_along_the_width():
    model = built(replace(SMALL, placement="ngpt"))
    projection, positions = model.patch_embeddings.projection.weight, model.pos_embeddings
    assert positions is not None
    for lengths in (projection.norm(dim=0), positions.weight.norm(dim=1), model.head.weight.norm(dim=1)):
        torch.testing.assert_close(lengths, torch.ones_like(lengths))


def test_muon_leaves_the_heads_alone():
    model = built(replace(SMALL, distillation=True))
    groups = parameter_groups(model, OptimizerConfig(kind="muon"))
    of_muon = {name for group in groups if group["optimizer"] == "muon" for name, _ in group["params"]}
    inside = {name for name, p in model.named_parameters() if name.startswith("layers.") and p.ndim == 2}
    assert of_muon == inside | {"patch_embeddings.projection.weight"}


def test_meta_build_starts_with_the_same_values():
    with torch.device("meta"):
        model = ViT(replace(SMALL, placement="siamese", positions="sincos"))
    model.to_empty(device="cpu")
    initialize(model, seed=0)
    wanted = built(replace(SMALL, placement="siamese", positions="sincos"))
    torch.testing.assert_close(model(images(SMALL)), wanted(images(SMALL)), rtol=0, atol=0)
