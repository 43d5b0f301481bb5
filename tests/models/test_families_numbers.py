"""Families by their name: numbers that the tiny models of test_families.py replace, and what a user may get wrong."""

import pytest
import torch

from normstream.models import DecoderLM
from normstream.models.families import FAMILIES, family


def test_numbers_are_the_defaults_of_transformers():
    import transformers  # takes seconds

    gemma2, gemma3 = transformers.Gemma2Config(), transformers.Gemma3TextConfig()
    ours = FAMILIES["gemma2"]
    assert (ours.window, ours.attention_cap, ours.logit_cap) == (
        gemma2.sliding_window,
        gemma2.attn_logit_softcapping,
        gemma2.final_logit_softcapping,
    )
    assert (FAMILIES["gemma3"].window, FAMILIES["gemma3"].attention_cap) == (gemma3.sliding_window, None)
    for config in (gemma2, gemma3):  # so that no query_scale is the same
        assert config.query_pre_attn_scalar == config.head_dim
    assert FAMILIES["cohere2"].window == transformers.Cohere2Config().sliding_window


def test_latent_sizes_are_the_defaults_of_transformers():
    import transformers

    theirs, ours = transformers.DeepseekV3Config(), FAMILIES["deepseek_v3"].latent
    assert (ours.kv_rank, ours.q_rank) == (theirs.kv_lora_rank, theirs.q_lora_rank)
    assert (ours.nope_head_dim, ours.rope_head_dim) == (theirs.qk_nope_head_dim, theirs.qk_rope_head_dim)
    assert ours.v_head_dim == theirs.v_head_dim


def test_an_unknown_family_is_told_the_nearest():
    with pytest.raises(ValueError, match="unknown family 'lama'; did you mean 'llama'"):
        family("lama")


def test_sizes_and_conventions_can_be_replaced():
    config = family("gemma2", dim=3072, embedding_multiplier=1.0, attention_cap=None)
    assert (config.embedding_multiplier, config.attention_cap, config.logit_cap) == (1.0, None, 30.0)


@pytest.mark.parametrize(("dtype", "multiplier"), [(torch.bfloat16, 55.5), (torch.float64, 3072**0.5)])
def test_gemmas_multiplier_is_rounded_to_the_dtype_of_the_activations(dtype, multiplier):
    """sqrt(3072) = 55.4256 is 55.5 in bfloat16, as the comment in their code says."""
    model = DecoderLM(family("gemma2", vocab_size=8, dim=3072, n_layers=1, n_heads=2, head_dim=2, ffn_dim=2)).to(dtype)
    seen = []
    model.before_layers.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        model(tokens)
        wanted = (model.tok_embeddings(tokens).double() * multiplier).to(dtype)
    assert torch.equal(seen[0], wanted)
