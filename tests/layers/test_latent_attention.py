"""Latent attention against the transformers implementation and against its own matrices multiplied out."""

import math

import pytest
import torch
from torch import Tensor

from normstream.layers import Context, KVCache, LatentAttention, LatentConfig
from normstream.layers.masks import attention_mask
from normstream.layers.positions import rope_table
from normstream.norms import RMSNorm

DIM, HEADS, LENGTH = 24, 3, 7
SIZES = {"kv_rank": 10, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 5}


def build(q_rank: int, bias: bool = False) -> LatentAttention:
    attention = LatentAttention(
        DIM,
        n_heads=HEADS,
        sizes=LatentConfig(q_rank=q_rank, **SIZES),
        layer=0,
        kv_norm=RMSNorm(10, eps=1e-6),
        q_norm=RMSNorm(q_rank, eps=1e-6) if q_rank else None,
        bias=bias,
        output_bias=bias,
    ).double()
    generator = torch.Generator().manual_seed(0)
    for p in attention.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / p.shape[-1] ** 0.25)
    return attention


def inputs() -> Tensor:
    return torch.randn(2, LENGTH, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def context(first: int = 0, last: int = LENGTH, cache: KVCache | None = None) -> Context:
    rope = rope_table(torch.arange(first, last)[None], 4, 1e4, torch.float64, "interleaved")
    return Context(rope, attention_mask(None, last - first, last, torch.device("cpu")), cache=cache)


def official(ours: LatentAttention, q_rank: int, bias: bool):
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    config = DeepseekV3Config(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=q_rank or None,
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        attention_bias=bias,
        rope_interleave=True,
    )
    config._attn_implementation = "sdpa"
    theirs = DeepseekV3Attention(config, layer_idx=0).double()
    names = {"kv_a_proj_with_mqa": "wkv_down", "kv_a_layernorm": "kv_norm", "kv_b_proj": "wkv_up", "o_proj": "wo"}
    queries = {"q_a_proj": "wq_down", "q_a_layernorm": "q_norm", "q_b_proj": "wq"} if q_rank else {"q_proj": "wq"}
    for their_name, our_name in {**names, **queries}.items():
        theirs.get_submodule(their_name).load_state_dict(ours.get_submodule(our_name).state_dict())
    return theirs


@pytest.mark.parametrize("q_rank", [0, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_deepseek_v3(q_rank, bias, monkeypatch):
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    def norm_in_double(self, x):
        return self.weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(modeling.DeepseekV3RMSNorm, "forward", norm_in_double)
    ours, z = build(q_rank, bias), inputs()
    angles = torch.arange(LENGTH)[:, None].double() * torch.tensor([1.0, 1e-2], dtype=torch.float64)
    angles = torch.cat((angles, angles), dim=-1)[None]
    with torch.no_grad():
        expected = official(ours, q_rank, bias)(z, (angles.cos(), angles.sin()), attention_mask=None)[0]
        torch.testing.assert_close(ours(z, context()), expected, rtol=0, atol=1e-12)


def test_the_documented_rows_are_what_a_head_is_made_of():
    """Scaling q_nope and k by sqrt(g), q_rope by g and leaving the shared key alone scales one head's logits by g."""
    attention, z, g = build(8), inputs(), 0.3
    before = torch.full((HEADS,), -math.inf, dtype=torch.float64)
    after = before.clone()
    attention.max_logits = before
    attention(z, context())
    head, n, k_dim, kv_dim = 1, 6, 10, 11
    with torch.no_grad():
        attention.wq.weight[head * k_dim : head * k_dim + n] *= math.sqrt(g)
        attention.wq.weight[head * k_dim + n : (head + 1) * k_dim] *= g
        attention.wkv_up.weight[head * kv_dim : head * kv_dim + n] *= math.sqrt(g)
    attention.max_logits = after
    attention(z, context())
    torch.testing.assert_close(after, before * torch.tensor([1.0, g, 1.0], dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunks", [[1] * LENGTH, [4, 1, 2]])
def test_the_cache_holds_the_latent_vector(chunks):
    attention, z, cache = build(8), inputs(), KVCache()
    parts, first = [], 0
    with torch.no_grad():
        for part in z.split(chunks, dim=1):
            parts.append(attention(part, context(first, first + part.shape[1], cache)))
            first += part.shape[1]
        torch.testing.assert_close(torch.cat(parts, dim=1), attention(z, context()), rtol=0, atol=1e-12)
    kept = [x.shape for x in cache._keys_values[0]]
    assert kept == [(2, 1, LENGTH, 10), (2, 1, LENGTH, 4)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kv_rank": -1}, ["latent.kv_rank", "-1"]),
        ({"kv_rank": 4, "rope_head_dim": 3}, ["latent.rope_head_dim", "3", "even"]),
        ({"kv_rank": 4, "v_head_dim": 0}, ["latent.v_head_dim", "0"]),
        ({"q_rank": 4}, ["latent.q_rank", "latent.kv_rank"]),
    ],
)
def test_wrong_sizes(wrong, words):
    with pytest.raises(ValueError, match=r".+") as error:
        LatentConfig(**wrong)
    assert all(word in str(error.value) for word in words)
