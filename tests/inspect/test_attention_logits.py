"""Largest attention logits, against scores that are made by hand from each model's queries and keys."""

import math
from typing import Any

import pytest
import torch
from tests.inspect.wired import N_TOKENS, sublayer, wired
from torch import Tensor, nn

from normstream.init import initialize
from normstream.inspect.anatomy import Anatomy, Call, LayerSite, StackAnatomy
from normstream.inspect.measures.attention_logits import attention_maxima, fused_scores
from normstream.models import DecoderConfig, DecoderLM

HEADS, WIDTH = 4, 8


def given_to(module: nn.Module, seen: list[tuple[Any, ...]]) -> None:
    module.register_forward_pre_hook(lambda m, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)


def by_head(x: Tensor) -> Tensor:
    """(1, T, H K) to (H, T, K)."""
    return x[0].unflatten(-1, (-1, WIDTH)).transpose(0, 1)


def causal(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)


def maxima(scores: Tensor) -> list[float]:
    return scores.amax((-1, -2)).tolist()


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gpt2(attention: str) -> None:
    case = wired("gpt2", attention)
    seen: list[Any] = []
    for block in case.model.transformer.h:
        block.attn.c_attn.register_forward_hook(lambda module, args, output: seen.append(output))
    rows, notes = attention_maxima(case.model, case.inputs, case.anatomy)
    for row, qkv in zip(rows, seen, strict=True):
        q, k, _ = (by_head(x) for x in qkv.split(HEADS * WIDTH, dim=-1))
        assert row.maxima == pytest.approx(maxima(causal(q @ k.mT / math.sqrt(WIDTH))), rel=1e-4)
    assert [row.name for row in rows] == [f"layers.{index}.mixer" for index in range(4)]
    assert notes == ()


@torch.no_grad()
def test_gemma2_rotates_scales_and_caps() -> None:
    from transformers.models.gemma2.modeling_gemma2 import apply_rotary_pos_emb

    case = wired("gemma2")
    seen: list[Any] = []
    for layer in case.model.model.layers:
        given_to(layer.self_attn, seen)
    rows, _ = attention_maxima(case.model, case.inputs, case.anatomy)
    config = case.model.config
    for row, layer, (_, kwargs) in zip(rows, case.model.model.layers, seen, strict=True):
        z, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        q, k = (by_head(matrix(z))[None] for matrix in (layer.self_attn.q_proj, layer.self_attn.k_proj))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        scores = q[0] @ k[0].repeat_interleave(2, dim=0).mT * config.query_pre_attn_scalar**-0.5
        cap = config.attn_logit_softcapping
        assert row.maxima == pytest.approx(maxima(causal(cap * torch.tanh(scores / cap))), rel=1e-4)


@torch.no_grad()
def test_t5_adds_position_biases_and_attends_across() -> None:
    case = wired("t5")
    seen: list[Any] = []
    cross = case.model.decoder.block[1].layer[1].EncDecAttention
    own = case.model.encoder.block[0].layer[0].SelfAttention
    for module in (own, cross):
        given_to(module, seen)
    rows, _ = attention_maxima(case.model, case.inputs, case.anatomy)
    found = {(row.stack, row.name): row.maxima for row in rows}
    assert len(found) == 4 + 2 * 4
    ((z,), _), ((z_cross,), kwargs) = seen
    bias = own.compute_bias(N_TOKENS, N_TOKENS)[0]
    scores = by_head(own.q(z)) @ by_head(own.k(z)).mT + bias
    assert found["encoder", "layers.0.mixer"] == pytest.approx(maxima(scores), rel=1e-4)
    scores = by_head(cross.q(z_cross)) @ by_head(cross.k(kwargs["key_value_states"])).mT
    assert found["decoder", "layers.1.cross"] == pytest.approx(maxima(scores), rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "bert", "bloom", "t5", "mixtral", "phi"])
def test_eager_and_fused_attention_agree(name: str) -> None:
    eager, fused = (attention_maxima(c.model, c.inputs, c.anatomy)[0] for c in (wired(name), wired(name, "sdpa")))
    assert len(eager) == len(fused) > 0
    for one, other in zip(eager, fused, strict=True):
        assert (one.stack, one.name) == (other.stack, other.name)
        assert one.maxima == pytest.approx(other.maxima, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize("placement", ["siamese", "parallel", "sandwich"])
def test_our_own_attention_says_the_same(placement: str, cap: float | None) -> None:
    """``record_max_logits``, which QK-Clip uses, is other code; it leaves out the cap."""
    config = DecoderConfig(placement=placement, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, attention_cap=cap)
    model: Any = DecoderLM(config).eval()
    initialize(model, seed=0)
    attentions = [module for module in model.modules() if hasattr(module, "max_logits")]
    rows, notes = attention_maxima(model, {"tokens_BT": torch.arange(11)[None]}, None)
    for attention in attentions:
        attention.max_logits = torch.full((4,), -math.inf)
    model(torch.arange(11)[None])
    for row, attention in zip(rows, attentions, strict=True):
        largest = attention.max_logits if cap is None else cap * torch.tanh(attention.max_logits / cap)
        assert row.maxima == pytest.approx(largest.tolist(), rel=1e-4)
    assert notes == ()


def test_a_mask_of_numbers_is_added() -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    bias = torch.randn(1, 2, 3, 3)
    weights = torch.softmax(fused_scores(q, k, k, bias, scale=0.3), -1)
    expected = nn.functional.scaled_dot_product_attention(q, k, torch.eye(3).expand(1, 2, 3, 3), bias, scale=0.3)
    assert torch.allclose(weights, expected, atol=1e-6)


def test_sinks_give_a_note_and_no_number() -> None:
    case = wired("gpt_oss")
    rows, notes = attention_maxima(case.model, case.inputs, case.anatomy)
    assert rows == ()
    assert "sinks" in notes[0]


class Attention(nn.Module):
    def __init__(self, shift: bool, softmax: bool) -> None:
        super().__init__()
        self.shift, self.softmax = shift, softmax

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ x.mT)[:, None]
        if self.shift:
            scores = scores - scores.amax(-1, keepdim=True)
        weights = scores.softmax(-1) if self.softmax else scores.relu()
        return weights[:, 0] @ x


@pytest.mark.parametrize(("shift", "softmax", "reason"), [(True, True, "shifted"), (False, False, "no softmax")])
def test_what_cannot_be_seen_gives_a_note(shift: bool, softmax: bool, reason: str) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(shift, softmax)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attention(x)

    model = nn.Sequential(Layer()).eval()
    site = LayerSite(0, Call("0"), 1.0, (sublayer(Call("0"), 0, "mixer", "attention", "attention", "attention"),))
    anatomy = Anatomy((StackAnatomy("main", (site,), (), (), 1.0),), None, False, None)
    rows, notes = attention_maxima(model, {"input": torch.randn(1, 5, 4)}, anatomy)
    assert rows == ()
    assert reason in notes[0]
    assert "layers.0.mixer" in notes[0]
