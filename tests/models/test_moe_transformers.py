"""Models of experts are the same function as Mixtral and DeepSeek-V3 in transformers, on the same random weights."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normstream.layers import MoEConfig
from normstream.models import DecoderConfig, DecoderLM, LatentConfig, family
from normstream.norms import NormConfig

LAYERS, FFN, EXPERT_FFN, E = 3, 48, 20, 8
SIZES: dict[str, Any] = {"dim": 32, "n_heads": 4, "n_layers": LAYERS, "ffn_dim": FFN, "vocab_size": 40}
THEIR_SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": LAYERS, "intermediate_size": FFN},
    **{"vocab_size": 40, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": f"layers.{LAYERS - 1}.after_feed_forward.read.norm",
    **{"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo"},
    **{"q_a_proj": "wq_down", "q_a_layernorm": "q_norm", "q_b_proj": "wq"},
    **{"kv_a_proj_with_mqa": "wkv_down", "kv_a_layernorm": "kv_norm", "kv_b_proj": "wkv_up"},
    **{"gate_proj": "w_gate", "up_proj": "w_up", "down_proj": "w_down", "shared_experts": "shared"},
    **{"mlp.gate.weight": "mlp.router.scores.weight", "mlp.gate.e_score_correction_bias": "mlp.router.bias"},
}


class InDouble(TorchFunctionMode):
    """Every float32 that code names becomes float64, so that only rounding in float64 is left."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def up(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = Tensor.double if func is Tensor.float else func
        return func(*map(up, args), **{key: up(value) for key, value in (kwargs or {}).items()})


def mixtral() -> tuple[DecoderConfig, Any]:
    """Softmax gates, normalized."""
    from transformers import MixtralConfig

    ours = family("llama", **SIZES, n_kv_heads=2, moe=MoEConfig(n_experts=E, top_k=2))
    options = {"num_key_value_heads": 2, "num_local_experts": E, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    return ours, MixtralConfig(**THEIR_SIZES, **options, rope_parameters=rope)


def deepseek_v3() -> tuple[DecoderConfig, Any]:
    """Sigmoid gates, normalized and scaled, a bias for the choice, shared experts, a dense block first."""
    from transformers import DeepseekV3Config

    moe = MoEConfig(
        n_experts=E, top_k=3, ffn_dim=EXPERT_FFN, n_shared=2, gates="sigmoid", scale=2.5, bias_rate=0.1, first_dense=1
    )
    latent = LatentConfig(kv_rank=12, q_rank=20, nope_head_dim=6, rope_head_dim=4, v_head_dim=10)
    ours = family("deepseek_v3", **SIZES, latent=latent, moe=moe)
    options = {
        **{"kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10},
        **{"num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": EXPERT_FFN},
        **{"n_routed_experts": E, "num_experts_per_tok": 3, "n_shared_experts": 2, "routed_scaling_factor": 2.5},
        **{"n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    }
    return ours, DeepseekV3Config(**THEIR_SIZES, **options)


FAMILIES = {"mixtral": mixtral, "deepseek_v3": deepseek_v3}


def their_model(config: Any) -> nn.Module:
    """With random weights, gains and biases of the choice."""
    from transformers import AutoModelForCausalLM

    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            values = torch.randn(tensor.shape, dtype=torch.float64)
            if tensor.ndim > 1:
                tensor.copy_(values / tensor.shape[-1] ** 0.5)
            elif "bias" in name:
                tensor.copy_(0.2 * values)
            else:
                tensor.add_(0.3 * values)
    return model


def in_our_names(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in theirs.items():
        for old, new in NAMES.items():
            name = re.sub(rf"(^|\.){re.escape(old)}(\.|$)", rf"\g<1>{new}\g<2>", name)
        name = name.removeprefix("model.").replace("self_attn.", "attention.").replace("mlp.", "feed_forward.")
        name = name.replace("post_attention_layernorm", "after_attention.read.norm")
        if match := re.fullmatch(r"layers\.(\d+)\.input_layernorm\.weight", name):
            layer = int(match[1])
            before = f"layers.{layer - 1}.after_feed_forward" if layer else "before_layers"
            name = f"{before}.read.norm.weight"
        if name.endswith("experts.gate_up_proj"):
            prefix = name.rpartition(".")[0]
            found[f"{prefix}.w_gate.weight"], found[f"{prefix}.w_up.weight"] = tensor.chunk(2, dim=1)
        elif name.endswith("experts.w_down"):
            found[f"{name}.weight"] = tensor
        else:
            found[name] = tensor
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients(name: str):
    """Logits to 1e-10, every gradient to 1e-9 of its largest entry."""
    config, their_config = FAMILIES[name]()
    with InDouble():
        theirs: Any = their_model(their_config)
    ours = DecoderLM(config).double().eval()
    ours.load_state_dict(in_our_names(theirs.state_dict()))
    tokens = torch.randint(40, (2, 13))
    with InDouble():
        wanted = theirs(input_ids=tokens).logits
    logits = ours(tokens)
    assert wanted.abs().max() > 1
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-10)

    weights = torch.randn_like(wanted)
    (logits * weights).sum().backward()
    (wanted * weights).sum().backward()
    gradients = in_our_names({n: p.grad for n, p in theirs.named_parameters()})
    for parameter_name, parameter in ours.named_parameters():
        expected = gradients[parameter_name]
        assert parameter.grad is not None
        assert expected.abs().max() > 0
        tolerance = 1e-9 * expected.abs().max().item()
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=tolerance, msg=parameter_name)


def test_conventions():
    """What the configurations above rely on."""
    ours, theirs = mixtral()
    assert ours.norm == NormConfig(kind="rms", eps=theirs.rms_norm_eps, cast="before_gain")
    assert [ours.has_experts(layer) for layer in range(LAYERS)] == [True] * 3
    assert [deepseek_v3()[0].has_experts(layer) for layer in range(LAYERS)] == [False, True, True]
