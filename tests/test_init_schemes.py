"""The table of initializations against the papers' numbers and the statistics of the official code."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from normstream.init import SCHEMES, Matrix, initialize, logical_blocks
from normstream.layers.latent_attention import LatentConfig
from normstream.models import DecoderConfig, DecoderLM
from normstream.norms import NormConfig
from normstream.placements import InitScheme, Stack

GOLDEN = Path(__file__).parent / "golden"
DOCS = Path(__file__).parent.parent / "docs" / "initialization.md"
ROLES = {"q_proj": "query_key", "k_proj": "query_key", "v_proj": "value", "out_proj": "output", "fc1": "ffn_in"}
ROLES |= {"fc2": "output", "output_projection": "vocabulary"}
CUT_AT_3 = math.sqrt(1 - 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2)))


def golden(name: str) -> dict:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def matrix(role: Any, fan_in: int, fan_out: int, **place: Any) -> Matrix:
    return replace(Matrix(role, fan_in, fan_out, dim=512, n_layers=12), **place)


def build(seed: int = 0, **options: Any) -> Any:
    """An initialized DecoderLM; Any, because its layers are of no static type."""
    defaults = DecoderConfig(vocab_size=257, dim=64, n_layers=4, n_heads=4, max_seq_len=16, activation="gelu")
    model = DecoderLM(replace(defaults, **options))
    initialize(model, seed=seed)
    return model


def rms(values: Tensor) -> float:
    return values.detach().square().mean().sqrt().item()


def assert_std(values: Tensor, expected: float) -> None:
    """At 4 standard errors of a normal distribution, which has the widest tails here."""
    assert rms(values) == pytest.approx(expected, rel=4 / math.sqrt(2 * values.numel()))


def test_every_scheme_is_in_the_table_and_in_the_docs():
    assert set(SCHEMES) == set(get_args(InitScheme))
    text = DOCS.read_text(encoding="utf-8")
    assert all(f"\n| `{name}` |" in text for name in SCHEMES)


# --- statistics of the official code --------------------------------------------------------------------------------

STACKS = {
    "N=6,M=6,d=128,ffn=512": {"encoder": (Stack("encoder", 6, 6), 6), "decoder": (Stack("decoder", 6, 6), 6)},
    "N=18,M=6,d=128,ffn=512": {"encoder": (Stack("encoder", 18, 6), 18), "decoder": (Stack("decoder", 18, 6), 6)},
    "encoder-only N=12,d=128,ffn=512": {"layers": (Stack(), 12)},
    "decoder-only M=12,d=128,ffn=512": {"layers": (Stack(), 12)},
}


def official(name: str, fan: dict[str, tuple[int, int]], **place) -> Matrix:
    part = name.split(".")[-2]
    fan_in, fan_out = fan.get(part, fan["other"])
    return matrix(ROLES[part], fan_in, fan_out, cross="encoder_attn" in name, **place)


@pytest.mark.parametrize("case", STACKS)
def test_deepnorm_code_has_the_official_statistics(case):
    fan = {"fc1": (128, 512), "fc2": (512, 128), "other": (128, 128)}
    values = golden("deepnorm_initial_std")["values"][case]
    assert len(values) in (6, 16)
    for name, expected in values.items():
        stack, n_layers = STACKS[case][name.split(".")[0]]
        ours = official(name, fan, dim=128, n_layers=n_layers, stack=stack)
        assert ours.std("deepnorm_code") == pytest.approx(expected, rel=0.01), name


@pytest.mark.parametrize(("case", "scheme"), [("deepnorm_encoder", "deepnorm_code"), ("subln_encoder", "sub_ln_code")])
def test_code_schemes_have_the_statistics_of_the_golden_encoders(case, scheme):
    fan = {"fc1": (32, 48), "fc2": (48, 32), "output_projection": (32, 40), "other": (32, 32)}
    for name, expected in golden(case)["official_initial_std"].items():
        if name != "embed_tokens.weight":  # built outside the official constructor, as a plain nn.Embedding
            ours = official(name, fan, dim=32, n_layers=3)
            assert ours.std(scheme) == pytest.approx(expected, rel=0.01), name


@pytest.mark.parametrize(("placement", "case"), [("deepnorm(constants=code)", "decoder"), ("deepnorm", "encoder")])
def test_a_model_draws_the_official_statistics(placement, case):
    """Root mean squares of the drawn matrices; the golden ones have an error of about 0.2 %, ours of 0.4 %."""
    values = next(v for k, v in golden("deepnorm_initial_std")["values"].items() if k.startswith(f"{case}-only"))
    model = build(
        placement=placement, init="deepnorm_code", dim=128, ffn_dim=512, n_layers=12, causal=case == "decoder"
    )
    attention, feed_forward = model.layers[0].attention, model.layers[0].feed_forward
    ours = {
        "layers.0.self_attn.q_proj.weight": attention.wq,
        "layers.0.self_attn.k_proj.weight": attention.wk,
        "layers.0.self_attn.v_proj.weight": attention.wv,
        "layers.0.self_attn.out_proj.weight": attention.wo,
        "layers.0.ffn.fc1.weight": feed_forward.w_up,
        "layers.0.ffn.fc2.weight": feed_forward.w_down,
    }
    assert ours.keys() == values.keys()
    for name, expected in values.items():
        assert rms(ours[name].weight) == pytest.approx(expected, rel=0.015), name


# --- constants of the papers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "fan_in", "fan_out", "expected"),
    [
        ("query_key", 512, 512, 0.0441942),
        ("value", 512, 512, 0.0141188),
        ("output", 512, 512, 0.0141188),
        ("ffn_in", 512, 2048, 0.0089295),
        ("output", 2048, 512, 0.0089295),
        ("query_key", 512, 128, 0.0559017),
        ("value", 512, 128, 0.0178590),
    ],
)
def test_deepnorm_of_the_paper(role, fan_in, fan_out, expected):
    """facebookresearch/xformers#284 with N = 12: Xavier, times beta = 0.3194716 except on queries and keys."""
    assert matrix(role, fan_in, fan_out).std("deepnorm") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("stack", "n_layers", "beta"),
    [
        (Stack(), 12, 0.3194716),
        (Stack(), 100, 0.188),
        (Stack(), 1000, 0.1057),
        (Stack("encoder", 6, 6), 6, 0.4969892),
        (Stack("decoder", 6, 6), 6, 0.3432945),
        (Stack("encoder", 1000, 1000), 1000, 0.1005),
        (Stack("decoder", 1000, 1000), 1000, 0.0955),
    ],
)
def test_deepnorm_gain_of_each_stack(stack, n_layers, beta):
    place = {"stack": stack, "n_layers": n_layers}
    xavier = math.sqrt(2 / 1024)
    assert matrix("value", 512, 512, **place).std("deepnorm") == pytest.approx(beta * xavier, rel=5e-3)
    assert matrix("query_key", 512, 512, **place).std("deepnorm") == pytest.approx(xavier, rel=1e-12)
    code = matrix("value", 512, 512, **place).std("deepnorm_code") * math.sqrt(3 * 512)
    factor = 1.15 / 0.87 if stack.role == "encoder" else 1.0
    assert code == pytest.approx(beta * factor, rel=5e-3)


@pytest.mark.parametrize("scheme", ["sub_ln", "sub_ln_code"])
@pytest.mark.parametrize(
    ("stack", "n_layers", "gamma"),
    [
        (Stack(), 12, 1.783),
        (Stack(), 24, 1.967),
        (Stack(), 100, 2.302),
        (Stack("encoder", 6, 6), 6, 1.547),
        (Stack("decoder", 6, 6), 6, 1.700),
    ],
)
def test_sub_ln_gain(stack, n_layers, gamma, scheme):
    base = math.sqrt(2 / 1024) if scheme == "sub_ln" else 1 / math.sqrt(3 * 512)
    place = {"stack": stack, "n_layers": n_layers}
    for role in ("value", "output", "ffn_in"):
        assert matrix(role, 512, 512, **place).std(scheme) / base == pytest.approx(gamma, abs=1e-3)
        assert matrix(role, 512, 512, cross=True, **place).std(scheme) == pytest.approx(base, rel=1e-12)
    assert matrix("query_key", 512, 512, **place).std(scheme) == pytest.approx(base, rel=1e-12)


@pytest.mark.parametrize(("n_layers", "expected"), [(12, 0.004082), (48, 0.002041)])
def test_gpt2(n_layers, expected):
    place = {"n_layers": n_layers, "init_std": 0.02}
    assert matrix("output", 512, 512, **place).std("gpt2") == pytest.approx(expected, abs=5e-7)
    for role, start in {
        "vocabulary": 0.02,
        "positions": 0.01,
        "query_key": 0.02,
        "value": 0.02,
        "ffn_in": 0.02,
    }.items():
        assert matrix(role, 512, 512, **place).std("gpt2") == pytest.approx(start, rel=1e-12)


def test_mitchell():
    """OLMo: 1 / sqrt(d); what writes to the stream is divided by sqrt(2 l) in block l as well, by its own fan-in."""
    model = build(placement="pre", init="mitchell", dim=128, ffn_dim=512)
    for index, layer in enumerate(model.layers):
        assert_std(layer.attention.wo.weight, CUT_AT_3 / math.sqrt(2 * 128 * (index + 1)))
        assert_std(layer.feed_forward.w_down.weight, CUT_AT_3 / math.sqrt(2 * 512 * (index + 1)))
        for linear in (layer.attention.wq, layer.attention.wk, layer.attention.wv, layer.feed_forward.w_up):
            assert_std(linear.weight, CUT_AT_3 / math.sqrt(128))
            assert linear.weight.abs().max() <= 3 / math.sqrt(128) * (1 + 1e-6)
    for table in (model.tok_embeddings, model.lm_head):
        assert_std(table.weight, CUT_AT_3 / math.sqrt(128))


def test_hybridnorm_is_megatron_full_with_small_init():
    """sqrt(2 / (5 d)) = 0.01398 at d = 2048."""
    config = DecoderConfig(placement="hybridnorm", dim=2048)
    assert config.resolved_init_std == pytest.approx(0.01398, abs=5e-6)
    assert DecoderLM(DecoderConfig(placement="hybridnorm", dim=8, n_heads=2)).placement.init == "megatron_full"


def test_ngpt_starts_on_the_sphere():
    model = build(placement="ngpt", init_std=123.0)
    for weight in (model.tok_embeddings.weight, model.lm_head.weight, model.layers[0].attention.wq.weight):
        torch.testing.assert_close(weight.norm(dim=1), torch.ones(weight.shape[0]))
    wo = model.layers[0].attention.wo.weight
    torch.testing.assert_close(wo.norm(dim=0), torch.ones(64))


# --- logical matrices -----------------------------------------------------------------------------------------------


def drawn(scheme: str, **options: Any) -> dict[str, Tensor]:
    return dict(build(placement="pre", init=scheme, **options).named_parameters())


@pytest.mark.parametrize(("scheme", "gain"), [("xavier", 1.0), ("deepnorm", 32**-0.25), ("sub_ln", math.log(8) ** 0.5)])
def test_xavier_schemes_with_grouped_queries(scheme, gain):
    """n_layers = 4. Two of eight heads for keys and values: their fan-out is 32, not 128."""
    weights = drawn(scheme, dim=128, n_heads=8, n_kv_heads=2, activation="swiglu", ffn_dim=256)
    expected = {
        "attention.wq": math.sqrt(2 / 256),
        "attention.wk": math.sqrt(2 / 160),
        "attention.wv": gain * math.sqrt(2 / 160),
        "attention.wo": gain * math.sqrt(2 / 256),
        "feed_forward.w_gate": gain * math.sqrt(2 / 384),
        "feed_forward.w_up": gain * math.sqrt(2 / 384),
        "feed_forward.w_down": gain * math.sqrt(2 / 384),
    }
    for name, std in expected.items():
        assert_std(torch.cat([weights[f"layers.{layer}.{name}.weight"].flatten() for layer in range(4)]), std)
    assert_std(weights["tok_embeddings.weight"], 128**-0.5)
    assert_std(weights["lm_head.weight"], 128**-0.5)


def test_keys_and_values_in_one_weight_are_two_matrices():
    """The trap of a packed weight: beta would miss the values, and Xavier would see the packed fan-out."""
    sizes = LatentConfig(kv_rank=64, q_rank=48, nope_head_dim=24, rope_head_dim=8, v_head_dim=40)
    model = build(placement="pre", init="deepnorm", dim=128, n_layers=12, n_heads=4, latent=sizes)
    attention = model.layers[5].attention
    beta = 96**-0.25
    heads = attention.wkv_up.weight.view(4, 24 + 40, 64)
    assert_std(heads[:, :24], math.sqrt(2 / (64 + 4 * 24)))
    assert_std(heads[:, 24:], beta * math.sqrt(2 / (64 + 4 * 40)))
    assert_std(attention.wkv_down.weight[:64], math.sqrt(2 / (128 + 64)))
    assert_std(attention.wkv_down.weight[64:], math.sqrt(2 / (128 + 8)))
    assert_std(attention.wq_down.weight, math.sqrt(2 / (128 + 48)))
    assert_std(attention.wq.weight, math.sqrt(2 / (48 + 4 * 32)))
    assert_std(attention.wo.weight, beta * math.sqrt(2 / (160 + 128)))


def test_every_row_of_every_matrix_belongs_to_one_logical_matrix():
    sizes = LatentConfig(kv_rank=6, nope_head_dim=4, rope_head_dim=2, v_head_dim=3)
    choices: list[dict[str, Any]] = [{}, {"latent": sizes}, {"placement": "parallel"}]
    for options in choices:
        with torch.device("meta"):
            model = DecoderLM(replace(DecoderConfig(placement="pre", dim=16, n_layers=2, n_heads=4), **options))
        blocks = logical_blocks(model)
        linears = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
        assert set(blocks) == set(linears)
        for module, parts in blocks.items():
            rows = torch.cat([part.rows for part in parts])
            assert sorted(rows.tolist()) == list(range(module.weight.shape[0]))


def test_parallel_blocks_have_the_same_rules():
    pre, parallel = (build(placement=p, init="deepnorm") for p in ("pre", "parallel"))
    assert_std(parallel.layers[1].parallel.attention.wv.weight, rms(pre.layers[1].attention.wv.weight))
    assert_std(parallel.layers[1].parallel.attention.wq.weight, rms(pre.layers[1].attention.wq.weight))
    assert_std(parallel.layers[1].parallel.feed_forward.w_up.weight, rms(pre.layers[1].feed_forward.w_up.weight))


# --- biases, gains, one scheme per block ----------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_biases(scheme):
    """Zero, except where torch's own start is asked for: uniform up to 1 / sqrt(fan_in), times beta as the weight."""
    weights = drawn(scheme, bias="all", head_bias=True, dim=128)
    biases = {name: p for name, p in weights.items() if name.endswith("bias")}
    assert not biases.pop("lm_head.bias").any()
    if not scheme.endswith("_code"):
        assert not any(p.any() for p in biases.values())
        return
    factor = 32**-0.25 if scheme == "deepnorm_code" else math.log(8) ** 0.5
    for name, bias in biases.items():
        fan_in = weights[name.removesuffix("bias") + "weight"].shape[1]
        bound = (1.0 if ".wq." in name or ".wk." in name else factor) / math.sqrt(fan_in)
        assert 0.9 * bound < bias.abs().max().item() <= bound * (1 + 1e-6), name


def test_gain_init_is_the_effective_gain_of_every_norm():
    x = torch.tensor([[1.0, -1.0] * 32])
    cases: list[tuple[Any, float]] = [("plain", 0.125), ("zero_centered", -0.875)]
    for gain, stored in cases:
        model = build(placement="peri", norm=NormConfig(gain=gain, gain_init=0.125, eps=0.0))
        norm = model.layers[0].after_attention.join.norm_out
        assert norm.weight.tolist() == [stored] * 64
        torch.testing.assert_close(norm(x), x / 8)


def test_each_block_has_the_scheme_of_its_own_placement():
    model = build(placement="sandwich:0-1,deepnorm:2-3", init_std=0.05)
    for layer in range(4):
        expected = 0.05 / math.sqrt(8) if layer < 2 else 32**-0.25 * math.sqrt(2 / 128)
        assert_std(model.layers[layer].attention.wo.weight, expected)
        assert_std(model.layers[layer].attention.wq.weight, 0.05 if layer < 2 else math.sqrt(2 / 128))
    assert_std(model.tok_embeddings.weight, 0.05)
    override = build(placement="sandwich:0-1,deepnorm:2-3", init_std=0.05, init="plain")
    assert all(rms(layer.attention.wo.weight) == pytest.approx(0.05, rel=0.05) for layer in override.layers)


def test_learned_positions():
    for scheme, factor in (("plain", 1.0), ("gpt2", 0.5)):
        options = {"max_seq_len": 512, "positions": replace(DecoderConfig().positions, kind="learned")}
        assert_std(drawn(scheme, init_std=0.02, **options)["pos_embeddings.weight"], 0.02 * factor)
