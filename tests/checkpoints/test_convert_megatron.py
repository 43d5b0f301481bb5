"""What we write for Megatron, run by an independent, plain version of Megatron-Core's GPT, gives transformers' logits.

The forward pass below is written from Megatron-Core's own modules: how ``linear_qkv`` is cut (for each key-value group
its queries, one key, one value), ``linear_fc1`` (gate, then up), which norm stands where in either layout, and what the
arguments mean. It shares no code with the conversion.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.tiny_models import tiny_model
from torch import Tensor

from normstream.checkpoints.conversion.convert import family_of, in_convention, read_tensors_of, write_tensors_of
from normstream.checkpoints.conversion.formats.megatron import arguments
from normstream.checkpoints.save import file_tensors

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


class MegatronGPT:
    """A GPT model of Megatron-Core from its arguments and tensors."""

    def __init__(self, args: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.args, self.tensors = args, tensors

    def get(self, *names: str) -> Tensor | None:
        return next((self.tensors[name] for name in names if name in self.tensors), None)

    def norm(self, x: Tensor, *modules: str) -> Tensor:
        """The norm that one of these modules holds, by its own weight or as ``layer_norm_weight``; else x."""
        alone = [module for module in modules if "norm" in module]
        weight = self.get(*(f"{m}.layer_norm_weight" for m in modules), *(f"{m}.weight" for m in alone))
        bias = self.get(*(f"{m}.layer_norm_bias" for m in modules), *(f"{m}.bias" for m in alone))
        if weight is None:
            return x
        gain = weight + 1 if self.args["layernorm_zero_centered_gamma"] else weight
        eps = self.args["layernorm_epsilon"]
        if self.args["normalization"] == "LayerNorm":
            return F.layer_norm(x, x.shape[-1:], gain, bias, eps)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain

    def linear(self, x: Tensor, module: str) -> Tensor:
        return F.linear(x, self.tensors[f"{module}.weight"], self.get(f"{module}.bias"))

    def rotate(self, x: Tensor, theta: float) -> Tensor:
        """Rotary embedding of (tokens, heads, channels)."""
        n = int(x.shape[-1] * self.args["rotary_percent"])
        angles = torch.arange(x.shape[0])[:, None] * theta ** (-torch.arange(0, n, 2) / n)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        turned, rest = x[..., :n], x[..., n:]
        if self.args["rotary_interleaved"]:
            a, b = turned[..., ::2], turned[..., 1::2]
            pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            pairs = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return torch.cat([pairs, rest], dim=-1)

    def attention(self, x: Tensor, layer: str, is_windowed: bool) -> Tensor:
        args, length, module = self.args, len(x), f"{layer}.self_attention"
        width, groups = args["kv_channels"], args["num_query_groups"]
        per_group = args["num_attention_heads"] // groups
        mixed = self.linear(x, f"{module}.linear_qkv").view(length, groups, (per_group + 2) * width)
        q, k, v = mixed.split([per_group * width, width, width], dim=-1)
        q = q.reshape(length, groups * per_group, width)
        q, k = self.norm(q, f"{module}.q_layernorm"), self.norm(k, f"{module}.k_layernorm")
        if args["position_embedding_type"] == "rope":
            local = is_windowed and args["rotary_base_local"]
            theta = args["rotary_base_local"] if local else args["rotary_base"]
            q, k = self.rotate(q, theta), self.rotate(k, theta)
        k, v = k.repeat_interleave(per_group, 1), v.repeat_interleave(per_group, 1)
        scores = torch.einsum("thc,shc->hts", q, k) * (args["softmax_scale"] or 1 / math.sqrt(width))
        if args["attn_logit_softcapping"]:
            scores = args["attn_logit_softcapping"] * (scores / args["attn_logit_softcapping"]).tanh()
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = distance < 0
        if is_windowed:
            hidden = hidden | (distance > args["window_size"][0])
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return self.linear(torch.einsum("hts,shc->thc", weights, v).flatten(1), f"{module}.linear_proj")

    def mlp(self, x: Tensor, layer: str) -> Tensor:
        hidden, act = self.linear(x, f"{layer}.mlp.linear_fc1"), ACTIVATIONS[self.args["activation_func"]]
        if self.args["gated_linear_unit"]:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = act(gate) * up
        else:
            hidden = act(hidden)
        return self.linear(hidden, f"{layer}.mlp.linear_fc2")

    def __call__(self, tokens: Tensor, embedding_multiplier: float) -> Tensor:
        args = self.args
        x = self.tensors["embedding.word_embeddings.weight"][tokens] * embedding_multiplier
        positions = self.get("embedding.position_embeddings.weight")
        if positions is not None:
            x = x + positions[: len(tokens)]
        every = args["window_attn_skip_freq"]
        for i in range(args["num_layers"]):
            layer = f"decoder.layers.{i}"
            is_windowed = args["window_size"] is not None and (not every or (i + 1) % every != 0)
            z = self.norm(x, f"{layer}.input_layernorm", f"{layer}.self_attention.linear_qkv")
            update = self.attention(z, layer, is_windowed)
            after = (f"{layer}.post_self_attn_layernorm", f"{layer}.self_attention.linear_proj.post_layernorm")
            x = x + self.norm(update, *after)
            z = self.norm(x, f"{layer}.pre_mlp_layernorm", f"{layer}.mlp.linear_fc1")
            after = (f"{layer}.post_mlp_layernorm", f"{layer}.mlp.linear_fc2.post_layernorm")
            x = x + self.norm(self.mlp(z, layer), *after)
        x = self.norm(x, "decoder.final_layernorm")
        tied = args["share_embeddings_and_output_weights"]
        logits = F.linear(x, self.tensors["embedding.word_embeddings.weight" if tied else "output_layer.weight"])
        cap = args["final_logit_softcapping"]
        return cap * (logits / cap).tanh() if cap else logits


@pytest.mark.parametrize("layout", ["megatron", "megatron-fused"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "glm4", "gpt2"])
def test_logits(name, layout):
    model: Any = tiny_model(name)
    one = family_of(name)
    settings = one.settings(model.config.to_dict())
    stored = read_tensors_of("hf", one, settings, file_tensors(model), one.gain)
    written = in_convention(stored, layout)
    tensors = write_tensors_of(layout, written)
    args = arguments(written.settings, written.settings["norm.gain"] == "zero_centered")
    assert any("layer_norm_weight" in tensor for tensor in tensors) == (layout == "megatron-fused")
    tokens = torch.randint(100, (31,))
    with torch.no_grad():
        wanted = model(tokens[None]).logits[0]
        got = MegatronGPT(args, tensors)(tokens, settings["embedding_multiplier"])
    assert (got - wanted).abs().max() < 2e-5 * wanted.abs().max().clamp(min=1)
