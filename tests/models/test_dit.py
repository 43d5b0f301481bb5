"""DiT: Pre-Norm against diffusers, what adaLN-zero makes of every placement at the start, labels, errors, sizes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from torch import Tensor

from normstream import placements
from normstream.init import initialize, logical_blocks
from normstream.layers import Context
from normstream.layers.modulation import Modulated
from normstream.layers.patches import sincos_positions
from normstream.models import DiT, DiTConfig, build_model
from normstream.models.dit_presets import DIT_PRESETS
from normstream.norms import LayerNorm
from normstream.optim import OptimizerConfig
from normstream.optim.roles import parameter_groups, parameter_roles

TINY = DiTConfig(image_size=4, channels=3, dim=16, n_layers=2, n_heads=2, n_classes=3)
PLACEMENTS = (*placements.names(), "parallel(norms=2)", "siamese(pair=pre-pre)")


def inputs(n: int = 2, config: DiTConfig = TINY, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(n, config.channels, config.image_size, config.image_size, generator=generator, dtype=dtype)
    return images, torch.arange(n) * 7, torch.arange(n) % config.n_classes


def scrambled(config: DiTConfig) -> Any:
    """A model in float64 in which nothing is 0."""
    model: Any = DiT(config).double().eval()
    for i, parameter in enumerate(model.parameters()):
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(i))
    return model


# ----- an independent oracle


def diffusers_names(n_layers: int) -> dict[str, str]:
    """Our parameters to diffusers', whose every block has embeddings of timestep and label of its own."""
    names = {
        "patch_embeddings.projection": "pos_embed.proj",
        "final_modulation": "proj_out_1",
        "output": "proj_out_2",
    }
    for i in range(n_layers):
        block, attention = f"transformer_blocks.{i}", f"layers.{i}.attention.sublayer"
        names |= {f"{attention}.w{letter}": f"{block}.attn1.to_{letter}" for letter in "qkv"}
        names |= {
            f"{attention}.wo": f"{block}.attn1.to_out.0",
            f"layers.{i}.feed_forward.sublayer.w_up": f"{block}.ff.net.0.proj",
            f"layers.{i}.feed_forward.sublayer.w_down": f"{block}.ff.net.2",
        }
    return names


class OfficialFeatures(torch.nn.Module):
    """f(t) of the official code, where diffusers' frequencies are 10000^(-j / 127), in float32."""

    def forward(self, timesteps: Tensor) -> Tensor:
        angles = timesteps.double()[:, None] / 10_000 ** (torch.arange(128, dtype=torch.float64) / 128)
        return torch.cat([angles.cos(), angles.sin()], dim=1)


def test_pre_norm_is_the_dit_of_diffusers():
    """Same weights, same noise and variance and same gradient of the image, in float64."""
    config = replace(TINY, placement="pre", image_size=8, n_classes=5)
    theirs: Any = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=3,
        out_channels=6,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=5,
        norm_eps=1e-6,
        dropout=0.0,
    )
    theirs = theirs.double().eval()
    images, times, labels = inputs(3, config, torch.float64)
    for i, parameter in enumerate(theirs.parameters()):
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(i))
    weights = theirs.state_dict()
    for i in range(2):  # each block has embeddings of its own, the official model one for all
        for name in ("timestep_embedder.linear_1", "timestep_embedder.linear_2", "class_embedder.embedding_table"):
            for part in ("weight", "bias") if "linear" in name else ("weight",):
                own = f"transformer_blocks.{i}.norm1.emb.{name}.{part}"
                weights[own] = weights[f"transformer_blocks.0.norm1.emb.{name}.{part}"]
        theirs.transformer_blocks[i].norm1.emb.time_proj = OfficialFeatures()
    theirs.load_state_dict(weights)
    positions = sincos_positions(16, 4, 4, like=images)
    torch.testing.assert_close(theirs.pos_embed.pos_embed[0], positions, rtol=0, atol=1e-6)
    theirs.pos_embed.pos_embed = positions[None]  # which diffusers keeps in float32

    ours = DiT(config).double().eval()
    state = {}
    for part in ("weight", "bias"):
        for our_name, their_name in diffusers_names(2).items():
            tensor = weights[f"{their_name}.{part}"]
            state[f"{our_name}.{part}"] = tensor.flatten(1) if tensor.ndim == 4 else tensor
        for i in range(2):
            rows = weights[f"transformer_blocks.{i}.norm1.linear.{part}"]
            state[f"layers.{i}.attention.modulation.{part}"] = rows[: 3 * 16]
            state[f"layers.{i}.feed_forward.modulation.{part}"] = rows[3 * 16 :]
        embedder = "transformer_blocks.0.norm1.emb.timestep_embedder"
        state[f"time_embeddings.w_in.{part}"] = weights[f"{embedder}.linear_1.{part}"]
        state[f"time_embeddings.w_out.{part}"] = weights[f"{embedder}.linear_2.{part}"]
    state["label_embeddings.weight"] = weights["transformer_blocks.0.norm1.emb.class_embedder.embedding_table.weight"]
    ours.load_state_dict(state)

    mine, other = (images.clone().requires_grad_() for _ in range(2))
    prediction = ours(mine, times, labels)
    wanted = theirs(other, times, labels).sample
    torch.testing.assert_close(prediction, wanted, rtol=0, atol=1e-9)
    prediction.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-9)


# ----- the start


@pytest.mark.parametrize("name", PLACEMENTS)
def test_at_the_start_every_update_and_the_output_are_zero(name):
    config = replace(TINY, placement=name)
    model = DiT(config)
    initialize(model, seed=0)
    updates, states = [], []
    for module in model.modules():
        if isinstance(module, Modulated):
            module.register_forward_hook(lambda module, args, output: updates.append(output))
    for border in (model.before_layers, *model.layers):
        border.register_forward_hook(lambda module, args, output: states.append(output[0]))
    output = model(*inputs())
    assert output.shape == (2, 6, 4, 4)
    assert output.abs().max() == 0
    assert len(updates) == 4
    assert all(update.abs().max() == 0 for update in updates)
    if "y" in model.streams and "pair" not in name:  # SiameseNorm's un-normed stream
        y = model.streams.index("y")
        embedding = model.patch_embeddings(inputs()[0]) + model._positions()
        assert all(torch.equal(state[y], embedding) for state in states)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_parameter_gets_a_gradient_once_modulations_are_not_zero(name):
    """Labels, timesteps and every norm, matrix and bias change the output, and it is finite; two steps train it."""
    model = scrambled(replace(TINY, placement=name))
    images, times, labels = inputs(dtype=torch.float64)
    loss = model(images, times, labels).square().mean()
    loss.backward()
    without = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()}
    assert not {n for n in without if "modulation" in n or "sublayer" in n}
    with torch.no_grad():
        output = model(images, times, labels)
        assert not torch.equal(model(images, times + 1, labels), output)
        assert not torch.equal(model(images, times, labels + 1), output)


@pytest.mark.parametrize("name", ["pre", "siamese", "post", "deepnorm", "ngpt", "parallel"])
def test_a_few_steps_lower_the_loss(name):
    model = DiT(replace(TINY, placement=name))
    initialize(model, seed=0)
    images, times, labels = inputs(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(25):
        loss = F.mse_loss(model(images, times, labels)[:, :3], images)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        placements.get(name).after_step(model)
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_inner_matrices_start_by_the_scheme_and_modulations_at_zero():
    model: Any = DiT(replace(TINY, placement="deepnorm"))
    initialize(model, seed=0)
    blocks = logical_blocks(model)
    attention, layer = model.layers[1].attention, model.layers[1]
    assert blocks[attention.modulation][0].matrix.role == "zero"
    assert blocks[attention.sublayer.wo][0].matrix.role == "output"
    assert blocks[attention.sublayer.wv][0].matrix.role == "value"
    assert blocks[attention.sublayer.wq][0].matrix.role == "query_key"
    assert blocks[layer.feed_forward.sublayer.w_up][0].matrix.role == "ffn_in"
    assert blocks[layer.feed_forward.sublayer.w_down][0].matrix.layer == 1
    assert all(attention.modulation.weight.flatten() == 0)
    assert all(attention.modulation.bias == 0)
    assert attention.sublayer.wo.weight.std() > 0
    zero = {n for n, p in model.named_parameters() if p.abs().max() == 0 and n.endswith("weight")}
    modulations = {f"layers.{i}.{kind}.modulation.weight" for i in range(2) for kind in ("attention", "feed_forward")}
    assert zero == modulations | {"final_modulation.weight", "output.weight"}


def test_ngpt_leaves_modulations_as_they_are():
    """Normed after each step, they would jump from 0 to full size; every other matrix has vectors of length 1."""
    model = scrambled(replace(TINY, placement="ngpt"))
    before = {name: p.clone() for name, p in model.named_parameters()}
    placements.get("ngpt").after_step(model)
    for name, parameter in model.named_parameters():
        if "modulation" in name or name.startswith("output") or name.endswith("bias"):
            assert torch.equal(parameter, before[name]), name
    rows = model.layers[0].attention.sublayer.wq.weight.norm(dim=1)
    torch.testing.assert_close(rows, torch.ones_like(rows))


@pytest.mark.parametrize("name", ["pre", "siamese", "peri", "parallel", "parallel(norms=2)"])
def test_norms_right_before_a_modulation_have_no_gain(name):
    model = DiT(replace(TINY, placement=name))
    read = [m for n, m in model.named_modules() if isinstance(m, LayerNorm) and "join" not in n and "norm_y" not in n]
    assert len(read) >= 3
    assert all(norm.weight is None and norm.bias is None and norm.eps == 1e-6 for norm in read)
    others = [m for n, m in model.named_modules() if isinstance(m, LayerNorm) and m not in read]
    assert all(norm.weight is not None and norm.bias is not None for norm in others)
    assert bool(others) == (name in ("siamese", "peri"))


# ----- sublayers


def test_a_modulated_sublayer_by_its_equation():
    """And what the inner sublayer reports is passed on, the update alone being gated."""

    class Reporting(torch.nn.Module):
        def forward(self, z, context):
            return z**2, "report"

    sublayer = Modulated(Reporting(), dim=3).double()
    z, condition = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    update, report = sublayer(z, Context(condition=condition))
    rows = F.linear(F.silu(condition), sublayer.modulation.weight, sublayer.modulation.bias)
    for b in range(2):
        shift, scale, gate = rows[b, :3], rows[b, 3:6], rows[b, 6:]
        torch.testing.assert_close(update[b], gate * (z[b] * (1 + scale) + shift) ** 2)
    assert report == "report"
    with pytest.raises(ValueError, match="needs a condition"):
        sublayer(z, Context())


# ----- labels


def test_label_dropout_draws_from_torchs_generator_in_training_only():
    config = replace(TINY, label_dropout=0.5)
    model = scrambled(config)
    images, times, labels = inputs(dtype=torch.float64)
    images, times, labels = images[:1].expand(64, -1, -1, -1), times[:1].expand(64), labels[:1].expand(64)
    kept, null = (model(images[:1], times[:1], label[None]) for label in (labels[0], torch.tensor(3)))
    assert torch.equal(model(images, times, labels), model(images, times, labels))
    model.train()
    torch.manual_seed(0)
    output = model(images, times, labels)
    torch.manual_seed(0)
    assert torch.equal(model(images, times, labels), output)
    is_kept = (output - kept).abs().amax((1, 2, 3)) < 1e-9
    is_null = (output - null).abs().amax((1, 2, 3)) < 1e-9
    assert torch.equal(is_kept, ~is_null)
    assert 16 < is_null.sum() < 48


def test_without_label_dropout_there_is_no_null_label():
    model = DiT(replace(TINY, label_dropout=0.0)).train()
    assert model.label_embeddings.weight.shape == (3, 16)
    assert DiT(TINY).label_embeddings.weight.shape == (4, 16)
    images, times, _ = inputs()
    with pytest.raises(ValueError, match="labels must be at least 0 and below n_labels 3, got 3"):
        model(images, times, torch.tensor([0, 3]))


# ----- wrong input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": torch.zeros(2, 3, 4, 5)}, r"images must have shape \(B, 3, 4, 4\), got \(2, 3, 4, 5\)"),
        ({"images": torch.zeros(2, 1, 4, 4)}, r"images must have shape \(B, 3, 4, 4\)"),
        ({"times": torch.tensor([0, 1000])}, "timesteps must be at least 0 and below n_timesteps 1000, got 1000"),
        ({"times": torch.tensor([-1, 0])}, "timesteps must be at least 0 and below n_timesteps 1000, got -1"),
        ({"times": torch.tensor([torch.nan, 0.0])}, "timesteps must be"),
        ({"labels": torch.tensor([0, 4])}, "labels must be at least 0 and below n_labels 4, got 4"),
        ({"labels": torch.tensor([-2, 0])}, "labels must be at least 0 and below n_labels 4, got -2"),
    ],
)
def test_inputs_out_of_range(change, message):
    arguments = dict(zip(("images", "times", "labels"), inputs(), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        DiT(TINY)(*arguments.values())


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image_size": 5}, "image_size 5 is not divisible by patch_size 2"),
        ({"n_classes": 0}, "n_classes must be at least 1"),
        ({"n_timesteps": 0}, "n_timesteps must be at least 1"),
        ({"label_dropout": 1.0}, r"label_dropout must be in \[0, 1\)"),
        ({"positions": "sincoss"}, "did you mean 'sincos'"),
        ({"dim": 6, "n_heads": 2}, "dim divisible by 4, got 6"),
    ],
)
def test_wrong_configurations(values, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **values)


# ----- sizes


@pytest.mark.parametrize(
    ("name", "official"),
    # of the official code: sum of all numbers in its parameters, the fixed table of positions being one of them
    [("dit-s-2", 32.96e6), ("dit-b-2", 130.51e6), ("dit-l-4", 458.05e6)],
)
def test_presets_have_the_official_numbers_of_parameters(name, official):
    config = replace(DIT_PRESETS[name], placement="pre")
    with torch.device("meta"):
        model = build_model(config)
    count = sum(p.numel() for p in model.parameters())
    d, n, p = config.dim, config.n_layers, config.patch_size
    block = (3 * d + 3) * d + (d + 1) * d + 8 * d * d + 5 * d + 6 * (d + 1) * d
    ends = (4 * p * p + 1) * d + (256 + 1) * d + (d + 1) * d + 1001 * d + 2 * (d + 1) * d + 8 * p * p * (d + 1)
    assert count == n * block + ends
    assert count + config.n_patches * d == pytest.approx(official, abs=5e3)


def test_roles_of_parameters():
    roles = parameter_roles(DiT(TINY))
    assert roles["label_embeddings.weight"] == "embedding"
    assert roles["layers.0.attention.modulation.weight"] == "matrix"
    assert roles["layers.0.attention.modulation.bias"] == "bias"


def test_muon_leaves_what_makes_pixels_alone() -> None:
    model = DiT(DiTConfig(dim=8, n_layers=1, n_heads=2))
    groups = parameter_groups(model, OptimizerConfig(kind="muon"))
    of_muon = {name for group in groups if group["optimizer"] == "muon" for name, _ in group["params"]}
    assert not of_muon & {"output.weight", "final_modulation.weight", "label_embeddings.weight"}
    assert "layers.0.attention.sublayer.wq.weight" in of_muon
