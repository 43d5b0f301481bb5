"""Tiny models of transformers with their wiring written down by hand, as far as interventions need it."""

from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.tiny_models import tiny_model
from torch import nn

from normstream.inspect.anatomy import Anatomy, Call, LayerSite, NormFacts, NormSite, StackAnatomy, Sublayer

N_TOKENS = 11
Parts = dict[str, tuple[str, ...]]
"""By kind: what reads the stream, where the branch ends, what is really added; then perhaps the norm on the stream."""


@dataclass(frozen=True)
class Wired:
    """A model, one sequence for it, and its anatomy."""

    model: Any
    inputs: dict[str, Any]
    anatomy: Anatomy


STACKS: dict[str, dict[str, tuple[str, Parts]]] = {
    "llama": {
        "main": (
            "model.layers",
            {
                "mixer": ("input_layernorm", "self_attn", "self_attn"),
                "ffn": ("post_attention_layernorm", "mlp", "mlp"),
            },
        )
    },
    "gemma2": {
        "main": (
            "model.layers",
            {
                "mixer": ("input_layernorm", "self_attn", "post_attention_layernorm"),
                "ffn": ("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
            },
        )
    },
    "gpt2": {"main": ("transformer.h", {"mixer": ("ln_1", "attn", "attn"), "ffn": ("ln_2", "mlp", "mlp")})},
    "bloom": {
        "main": (
            "transformer.h",
            {
                "mixer": ("input_layernorm", "self_attention.dense", "self_attention.dense"),
                "ffn": ("post_attention_layernorm", "mlp.dense_4h_to_h", "mlp.dense_4h_to_h"),
            },
        )
    },
    "bert": {
        "main": (
            "bert.encoder.layer",
            {
                "mixer": (
                    "attention.self.query",
                    "attention.output.dense",
                    "attention.output.dropout",
                    "attention.output.LayerNorm",
                ),
                "ffn": ("intermediate.dense", "output.dense", "output.dropout", "output.LayerNorm"),
            },
        )
    },
    "t5": {
        "encoder": (
            "encoder.block",
            {
                "mixer": ("layer.0.layer_norm", "layer.0.SelfAttention", "layer.0.SelfAttention"),
                "ffn": ("layer.1.layer_norm", "layer.1.DenseReluDense", "layer.1.DenseReluDense"),
            },
        ),
        "decoder": (
            "decoder.block",
            {
                "mixer": ("layer.0.layer_norm", "layer.0.SelfAttention", "layer.0.SelfAttention"),
                "cross": ("layer.1.layer_norm", "layer.1.EncDecAttention", "layer.1.EncDecAttention"),
                "ffn": ("layer.2.layer_norm", "layer.2.DenseReluDense", "layer.2.DenseReluDense"),
            },
        ),
    },
}
STACKS |= {name: STACKS["llama"] for name in ("mixtral", "gpt_oss")}
STACKS["phi"] = {
    "main": (
        "model.layers",
        {"mixer": ("input_layernorm", "self_attn", "self_attn"), "ffn": ("input_layernorm", "mlp", "mlp")},
    )
}


def wired(name: str, attention: str = "eager") -> Wired:
    """A tiny model, one sequence for it, and its anatomy."""
    model: Any = tiny_model(name)
    model.set_attn_implementation(attention)
    ids = torch.randint(3, 120, (1, N_TOKENS), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids}
    if "decoder" in STACKS[name]:
        inputs["decoder_input_ids"] = ids[:, :7]
    stacks = tuple(stack(model, key, *parts) for key, parts in STACKS[name].items())
    return Wired(model, inputs, Anatomy(stacks, Call("lm_head"), is_tied=False, logit_multiplier=None))


def stack(model: nn.Module, name: str, path: str, parts: Parts) -> StackAnatomy:
    layers = model.get_submodule(path)
    assert isinstance(layers, nn.ModuleList)
    sites = tuple(layer(Call(f"{path}.{index}"), index, parts) for index in range(len(layers)))
    norms = tuple(norm(sub.trunk_norm) for site in sites for sub in site.sublayers if sub.trunk_norm)
    return StackAnatomy(name, sites, norms, (), 1.0)


def layer(call: Call, index: int, parts: Parts, skip: float = 1.0) -> LayerSite:
    return LayerSite(index, call, skip, tuple(sublayer(call, index, kind, *paths) for kind, paths in parts.items()))


def sublayer(layer: Call, index: int, kind: Any, reads: str, output: str, update: str, trunk: str = "") -> Sublayer:
    def inside(path: str) -> Call:
        return Call(f"{layer.path}.{path}", layer.index)

    return Sublayer(
        name=f"layers.{index}.{kind}",
        kind=kind,
        layer=index,
        output=inside(output),
        update=inside(update),
        multiplier=1.0,
        reads=(inside(reads),),
        pre_norm=None,
        output_norm=None,
        trunk_norm=inside(trunk) if trunk else None,
        readers=(),
        writers=(),
    )


def norm(call: Call) -> NormSite:
    facts = NormFacts(call.path, "layer", "plain", has_bias=True, eps=None, cast="unknown", width=32, features=32)
    return NormSite(call, "trunk", (), (), None, "stream", facts)
