"""Decoders with experts: every placement, initialization, optimizer groups, sizes, compilation, inspection."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normstream import placements
from normstream.init import initialize
from normstream.inspect.measures.drop import layer_drops, sublayer_drops
from normstream.inspect.measures.join_trace import trace_joins
from normstream.inspect.measures.stream_trace import check_identity
from normstream.layers import KVCache, MoEConfig
from normstream.layers.expert_linear import ExpertLinear
from normstream.models import DecoderConfig, DecoderLM, active_parameters, preset, total_parameters
from normstream.optim import OptimizerConfig, parameter_groups, parameter_roles
from normstream.training.config_file import config_from_dict, config_to_dict
from normstream.training.recompute import wrap_layers

D, F, E, LAYERS = 16, 24, 4, 2
MOE = MoEConfig(n_experts=E, top_k=2, n_shared=1, bias_rate=0.01)
CONFIG = DecoderConfig(
    vocab_size=20, dim=D, n_layers=LAYERS, n_heads=4, n_kv_heads=2, ffn_dim=F, max_seq_len=12, moe=MOE
)


def model_of(**changes: Any) -> DecoderLM:
    model = DecoderLM(replace(CONFIG, **changes)).double().eval()
    initialize(model, seed=0)
    return model


def some_tokens() -> Tensor:
    return torch.randint(20, (2, 12))


@pytest.mark.parametrize("placement", placements.names())
def test_one_expert_is_the_dense_model(placement: str):
    """The same logits, and the same gradients, as the dense model with the expert's weights."""
    one = MoEConfig(n_experts=1, top_k=1)
    dense, moe = model_of(placement=placement, moe=MoEConfig()), model_of(placement=placement, moe=one)
    shapes = {name: p.shape for name, p in dense.named_parameters()}
    names = {name.replace(".experts.", "."): name for name, _ in moe.named_parameters()}
    ours = dict(moe.named_parameters())
    routers = {name for name in ours if ".router." in name}
    assert set(names) - routers == set(shapes)
    with torch.no_grad():
        for name, parameter in dense.named_parameters():
            ours[names[name]].copy_(parameter.view_as(ours[names[name]]))
    tokens = some_tokens()
    expected, logits = dense(tokens), moe(tokens)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (logits * weights).sum().backward()
    for name, parameter in dense.named_parameters():
        if parameter.grad is not None:
            gradient = ours[names[name]].grad
            assert gradient is not None
            torch.testing.assert_close(gradient.view_as(parameter), parameter.grad, rtol=0, atol=1e-9)


@pytest.mark.parametrize("placement", placements.names())
def test_reports_and_incremental_decoding(placement: str):
    model, tokens = model_of(placement=placement), some_tokens()
    with torch.no_grad():
        _, aux = model.hidden_and_aux(tokens)
        cache = KVCache()
        parts = [model(part, cache=cache) for part in tokens.split([5, 1, 6], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=0, atol=1e-10)
    assert [report.tokens.sum().item() for report in aux] == [2 * 24] * LAYERS


def test_first_blocks_stay_dense():
    model = model_of(moe=replace(MOE, first_dense=1))
    names = [name for name, module in model.named_modules() if isinstance(module, ExpertLinear)]
    assert names == [f"layers.1.feed_forward.experts.{name}" for name in ("w_gate", "w_up", "w_down")]
    assert len(model.hidden_and_aux(some_tokens())[1]) == 1


def test_ngpt_norms_each_expert():
    """Along the axis of width D: rows of what reads the stream, columns of what writes to it; the router's rows too."""
    experts: Any = model_of(placement="ngpt").layers[0].feed_forward
    for name, axis in (("w_gate", 2), ("w_up", 2), ("w_down", 1)):
        lengths = getattr(experts.experts, name).weight.norm(dim=axis)
        torch.testing.assert_close(lengths, torch.ones(E, F, dtype=torch.float64), rtol=0, atol=1e-12)
    lengths = experts.router.scores.weight.norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones(E, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(experts.router.logit_scale(torch.ones(E)).double(), torch.ones(E).double())


XAVIER = math.sqrt(2 / (64 + 96))
STARTS = {
    "plain": (0.02, 0.02, 0.02),
    "gpt2": (0.02, 0.02 / math.sqrt(2 * 3), 0.02),
    "xavier": (XAVIER, XAVIER, math.sqrt(2 / (64 + 8))),
    "deepnorm": ((8 * 3) ** -0.25 * XAVIER, (8 * 3) ** -0.25 * XAVIER, math.sqrt(2 / (64 + 8))),
}


@pytest.mark.parametrize("scheme", STARTS)
def test_initial_std_of_each_expert(scheme: Any):
    """in and out are those of one expert (64 and 96), not of all; DeepNorm's beta of 3 blocks is 24^-1/4."""
    moe = MoEConfig(n_experts=8, ffn_dim=96)
    model = DecoderLM(DecoderConfig(placement="pre", dim=64, n_layers=3, init=scheme, init_std=0.02, moe=moe))
    initialize(model, seed=0)
    w_in, w_out, w_router = STARTS[scheme]
    for layer in model.layers:
        feed_forward: Any = layer.feed_forward
        for name, std in (("w_gate", w_in), ("w_up", w_in), ("w_down", w_out)):
            weight = getattr(feed_forward.experts, name).weight
            for e in range(8):  # 6144 values: the standard deviation is known to 0.9 %
                assert weight[e].std().item() == pytest.approx(std, rel=0.05)
            assert not torch.equal(weight[0], weight[1])
        assert feed_forward.router.scores.weight.std().item() == pytest.approx(w_router, rel=0.12)


def test_roles_and_optimizer_groups():
    """Experts are decayed matrices; of three axes, hence AdamW's where Muon has the others; the bias is in no group."""
    model = DecoderLM(CONFIG)
    roles = parameter_roles(model)
    experts = {name for name in roles if ".experts." in name}
    assert len(experts) == 3 * LAYERS
    assert {roles[name] for name in experts} == {"matrix"}
    assert not any("bias" in name for name in roles)
    groups = parameter_groups(model, OptimizerConfig(kind="muon", weight_decay=0.1))
    of = {name: (g["optimizer"], g["weight_decay"]) for g in groups for name, _ in g["params"]}
    assert {of[name] for name in experts} == {("adamw", 0.1)}
    assert of["layers.0.feed_forward.shared.w_up.weight"] == ("muon", 0.1)


def by_hand(c: DecoderConfig, norms: int, experts: int) -> int:
    """Two tables, attention, router, and as many experts in each layer; gains of RMSNorm."""
    expert = 3 * c.dim * (c.moe.ffn_dim or 0)
    layer = 4 * c.dim * c.dim + c.moe.n_experts * c.dim + experts * expert
    return 2 * c.vocab_size * c.dim + c.n_layers * layer + norms * c.dim


@pytest.mark.parametrize("name", ["moe-tiny", "15b-a2b"])
def test_sizes_of_presets(name: str):
    config = preset(name)
    for placement, norms in (("pre", 2 * config.n_layers + 1), ("siamese", 3 * (2 * config.n_layers + 1))):
        own = replace(config, placement=placement)
        assert total_parameters(own) == by_hand(config, norms, config.moe.n_experts)
        assert active_parameters(own) == by_hand(config, norms, config.moe.top_k)


def test_fifteen_billion_of_which_two_are_active():
    """2 x 103.0 M in tables, and in each of 24 layers 16.8 M of attention, 0.13 M of router, 64 experts of 9.44 M."""
    config = replace(preset("15b-a2b"), placement="pre")
    total = 2 * 50_304 * 2048 + 24 * (4 * 2048**2 + 64 * 2048 + 64 * 3 * 2048 * 1536) + 49 * 2048
    active = 2 * 50_304 * 2048 + 24 * (4 * 2048**2 + 64 * 2048 + 6 * 3 * 2048 * 1536) + 49 * 2048
    assert (total_parameters(config), active_parameters(config)) == (total, active)
    assert (round(total / 1e9, 1), round(active / 1e9, 2)) == (15.1, 1.97)
    assert (config.vocab_size, config.max_seq_len) == (50_304, 2048)
    added = total_parameters(replace(config, placement="siamese")) - total
    assert added == 2 * 49 * 2048  # three norms where Pre-Norm has one
    assert added < 0.001 * active < 0.001 * total


def test_shared_experts_and_dense_blocks_are_active():
    config = replace(CONFIG, placement="pre", n_kv_heads=4, moe=replace(MOE, first_dense=1, ffn_dim=10))
    dense = DecoderConfig(placement="pre", vocab_size=20, dim=D, n_layers=LAYERS, n_heads=4, ffn_dim=F)
    without = total_parameters(dense) - 3 * D * F
    assert total_parameters(config) == without + E * D + (E + 1) * 3 * D * 10
    assert active_parameters(config) == without + E * D + (2 + 1) * 3 * D * 10


def test_a_config_without_experts_is_as_before():
    """A file that does not know the field reads as one without experts, and nothing in such a model has changed."""
    config = preset("tiny")
    values = config_to_dict(config)
    del values["moe"]
    assert config_from_dict(values, DecoderConfig) == config
    assert not any(isinstance(module, ExpertLinear) for module in DecoderLM(config).modules())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": "all"}, "experts have no biases, but bias is all; set bias to none or qkv"),
        ({"moe": replace(MOE, first_dense=2)}, r"moe\.first_dense 2 leaves none of the 2 blocks to experts"),
    ],
)
def test_messages(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)


def step(model: DecoderLM) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Loads by layer, and gradients of a loss with those of the routers."""
    torch.manual_seed(0)
    hidden, aux = model.hidden_and_aux(some_tokens())
    loss = hidden.square().mean() + hidden.mean()
    for report in aux:
        loss = loss + report.balance_loss + report.z_loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [report.tokens.tolist() for report in aux], gradients


@pytest.mark.parametrize("what", ["inputs", "selective", "layer"])
def test_recomputation(what: Any):
    """Reports come once, from the forward pass; gradients are the same."""
    results = []
    for recomputed in ("none", what):
        model = model_of(dropout=0.1, moe=replace(MOE, capacity=0.8)).train()
        wrap_layers(model, compiled=False, recomputed=recomputed)
        results.append(step(model))
    assert len(results[0][0]) == LAYERS
    assert results[1][0] == results[0][0]
    torch.testing.assert_close(results[1][1], results[0][1], rtol=0, atol=0)


@pytest.mark.untyped  # the tracer cannot follow the type checks of a test run
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("what", ["selective", "layer"])
def test_compilation(what: Any, monkeypatch: pytest.MonkeyPatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: real(f, backend="aot_eager"))
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = model_of(placement="pre", n_layers=1).train()
        wrap_layers(model, compiled=compiled, recomputed=what if compiled else "none")
        results.append(step(model))
    assert results[1][0] == results[0][0]
    torch.testing.assert_close(results[1][1], results[0][1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("placement", ["pre", "siamese", "parallel"])
def test_inspection(placement: str):
    """Leaving out a sublayer of experts is leaving out what it adds: the trace knows it, and the loss changes."""
    model = model_of(placement=placement)
    inputs = {"tokens_BT": some_tokens()}
    check_identity(trace_joins(model, inputs))
    rows, notes = sublayer_drops(model, inputs, None)
    assert not notes
    assert len(rows) == (LAYERS if placement == "parallel" else 2 * LAYERS)
    assert all(row.loss_increase != 0 for row in rows)
    drops, _ = layer_drops(model, inputs, None)
    assert len(drops) == LAYERS
    by_loss = {row.name: row.loss_increase for row in rows}
    if placement != "pre":
        return
    experts: Any = model.layers[1].feed_forward
    with torch.no_grad():
        experts.experts.w_down.weight.zero_()
        experts.shared.w_down.weight.zero_()
    again, _ = sublayer_drops(model, inputs, None)
    assert {row.name: row.loss_increase for row in again}["layers.1.ffn"] == 0
    assert by_loss["layers.1.ffn"] != 0
