import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from normstream import DecoderConfig, DecoderLM, RMSNorm
from normstream.junctions import Junction, Read, Start
from normstream.norms import Kind, NormConfig
from normstream.optim import (
    OptimizerConfig,
    build_optimizer,
    check_groups,
    group_table,
    parameter_groups,
    parameter_roles,
)
from normstream.optim.roles import GroupRow


class GluedNorm(nn.Module):
    """A norm class the library does not know, with a gain of its own name (as final_norm.scale)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(3, 4, 4))


class Zoo(nn.Module):
    """The names of FR-17, on which exclusion by name fails."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.input_layernorm = nn.RMSNorm(4)
        self.q_norm = RMSNorm(4, eps=1e-6)
        self.ln_f = nn.LayerNorm(4)
        self.norm1 = RMSNorm(4, eps=1e-6, gain="zero_centered")
        self.final_norm = GluedNorm(4)
        self.norm_projection = nn.Linear(4, 4)  # a matrix with "norm" in its name
        self.experts = Experts()
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def test_no_gain_bias_or_embedding_is_decayed_whatever_its_name():
    model = Zoo()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    build_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.1)).step()
    decayed = {"norm_projection.weight", "experts.weights"}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (0.99 if name in decayed else 1.0), rtol=1e-7, atol=0)


def test_a_tied_head_is_one_embedding():
    roles = parameter_roles(Zoo())
    assert roles["embed.weight"] == "embedding"
    assert "head.weight" not in roles


def test_each_decay_switch_moves_its_role():
    switches = {
        "decay_norm_gains": {"norm_gain"},
        "decay_biases": {"bias", "norm_bias"},
        "decay_embeddings": {"embedding"},
        "decay_vectors": {"vector"},
    }
    for switch, roles in switches.items():
        groups = parameter_groups(Zoo(), replace(OptimizerConfig(), **{switch: True}))
        assert {g["role"] for g in groups if g["weight_decay"] > 0} == roles | {"matrix"}


@pytest.mark.parametrize("placement", ["pre", "post", "siamese", "siamese_hybrid_pre"])
@pytest.mark.parametrize("tied", [True, False])
def test_table_counts_every_parameter_once(placement: str, tied: bool):
    model = DecoderLM(DecoderConfig(placement=placement, vocab_size=11, dim=8, n_layers=2, n_heads=2, tied=tied))
    table = {row.group: row for row in group_table(model, OptimizerConfig())}
    assert sum(row.parameters for row in table.values()) == sum(p.numel() for p in model.parameters())
    assert table["embedding"] == GroupRow("embedding", 0.0, 88, 1, "adamw")
    assert table["matrix"].tensors == 2 * 7 + (not tied)
    assert table["matrix"].decay == 0.1


def test_hybrid_pre_has_its_c1_vectors_apart():
    model = DecoderLM(DecoderConfig(placement="siamese_hybrid_pre", vocab_size=11, dim=8, n_layers=2, n_heads=2))
    rows = {row.group: row for row in group_table(model, OptimizerConfig())}
    assert rows["vector"] == GroupRow("vector", 0.0, 2 * 8, 2, "adamw")


class Mixing(Read):
    """A read with a mixing matrix of its own, one in a part of it, a projection and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.ones(2, 3))
        self.part = Experts()
        self.projection = nn.Linear(4, 2)
        self.norm = RMSNorm(4, eps=1e-6)


def test_what_junctions_own_is_never_a_matrix():
    roles = parameter_roles(nn.ModuleDict({"layer": nn.Linear(2, 2), "after": Junction(Start(), Mixing())}))
    assert roles == {
        "layer.weight": "matrix",
        "layer.bias": "bias",
        "after.read.mix": "vector",
        "after.read.part.weights": "vector",
        "after.read.projection.weight": "vector",
        "after.read.projection.bias": "vector",
        "after.read.norm.weight": "norm_gain",
    }


@pytest.mark.parametrize("kind", ["rms", "layer", "dyt", "derf", "pb_relax", "scale"])
def test_every_norm_is_a_norm(kind: Kind):
    norm = NormConfig(kind=kind, bias=kind not in ("rms", "scale")).build(4)
    roles = parameter_roles(norm)
    assert set(roles.values()) <= {"norm_gain", "norm_bias"}
    assert roles["weight"] == "norm_gain"


def test_frozen_parameters_are_in_no_group():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert [row.group for row in group_table(model, OptimizerConfig())] == ["matrix"]


def test_parameter_in_two_groups_or_none():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="in no optimizer group: bias"):
        check_groups(model, [{"params": [model.weight]}])
    with pytest.raises(ValueError, match="in more than one optimizer group: weight"):
        check_groups(model, [{"params": [model.weight, model.bias]}, {"params": [("w", model.weight)]}])


def test_parameter_shared_as_gain_and_bias():
    model = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4))
    model[1].bias = model[0].weight
    with pytest.raises(ValueError, match=r"0\.weight.*bias and as norm_gain"):
        parameter_roles(model)


def test_bfloat16_gain_never_moves_and_is_warned_about():
    updates = {torch.float32: 0.9, torch.bfloat16: 1.0}
    for dtype, expected in updates.items():
        norm = RMSNorm(1, eps=0.0).to(dtype)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            build_optimizer(norm, OptimizerConfig())
        assert bool(caught) == (dtype == torch.bfloat16)
        (gain,) = norm.parameters()
        optimizer = torch.optim.SGD(norm.parameters(), lr=1e-3)
        for _ in range(100):
            gain.grad = torch.ones_like(gain)
            optimizer.step()
        assert gain.item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "wrong", [{"lr": 0.0}, {"betas": (0.9, 1.0)}, {"eps": -1.0}, {"weight_decay": -0.1}, {"lr": float("nan")}]
)
def test_impossible_options(wrong: dict[str, object]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        OptimizerConfig(**wrong)  # pyright: ignore[reportArgumentType]
