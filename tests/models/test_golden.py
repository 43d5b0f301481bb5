"""Decoders under their public placement names against numbers of the official codes: outputs, streams, gradients.

The map says where each official weight lives in our decoder; no equation is repeated here. Official code that keeps
several of our matrices in one tensor is cut by rows.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from normstream.models import DecoderConfig, DecoderLM
from normstream.norms import NormConfig

FOLDER = Path(__file__).parents[1] / "golden"


@dataclass(frozen=True)
class Part:
    """One of our parameters, as rows ``start:stop`` of an official one (all rows if stop is None)."""

    official: str
    start: int = 0
    stop: int | None = None


def junction_before(layer: int, kind: str) -> str:
    """Name of the junction whose read makes the input of a sublayer."""
    if kind == "feed_forward":
        return f"layers.{layer}.after_attention"
    return "before_layers" if layer == 0 else f"layers.{layer - 1}.after_feed_forward"


def hybrid_pre_map(n_layers: int) -> dict[str, Part]:
    """SiameseNorm hybrid-pre. att_proj is q | k | v, ff_proj is a | b with ff_out(a * silu(b)): b is the gate."""
    names = {"tok_embeddings.weight": Part("transformer.wte.weight")}
    for layer in range(n_layers):
        ours, official = f"layers.{layer}", f"transformer.blocks.{layer}"
        attention_read, ffn_read = junction_before(layer, "attention"), junction_before(layer, "feed_forward")
        names |= {
            f"{ours}.attention.wq.weight": Part(f"{official}.att_proj.weight", 0, 32),
            f"{ours}.attention.wk.weight": Part(f"{official}.att_proj.weight", 32, 48),
            f"{ours}.attention.wv.weight": Part(f"{official}.att_proj.weight", 48, 64),
            f"{ours}.attention.wo.weight": Part(f"{official}.attn_out.weight"),
            f"{ours}.feed_forward.w_up.weight": Part(f"{official}.ff_proj.weight", 0, 32),
            f"{ours}.feed_forward.w_gate.weight": Part(f"{official}.ff_proj.weight", 32, 64),
            f"{ours}.feed_forward.w_down.weight": Part(f"{official}.ff_out.weight"),
            f"{attention_read}.read.c1": Part(f"{official}.c1"),
            f"{attention_read}.read.norm_y.weight": Part(f"{official}.attn_y_norm.weight"),
            f"{ours}.after_attention.join.norm_x.weight": Part(f"{official}.ff_norm.weight"),
            f"{ffn_read}.read.norm_y.weight": Part(f"{official}.ff_y_norm.weight"),
            f"{ffn_read}.read.norm_in.weight": Part(f"{official}.ff_input_norm.weight"),
        }
        for head in "qkv":
            names[f"{ours}.attention.{head}_norm.weight"] = Part(f"{official}.{head}_norm.weight")
    last = f"layers.{n_layers - 1}.after_feed_forward"
    return names | {
        f"{last}.join.norm_x.weight": Part("transformer.ln_f.weight"),
        f"{last}.read.norm_y.weight": Part("transformer.ln_y_f.weight"),
        f"{last}.read.norm_in.weight": Part("transformer.ln_final_f.weight"),
    }


def llama_map(n_layers: int, placement: str) -> dict[str, Part]:
    """The Llama names of the Mix-LN repository; post_attention_layernorm changes its role with the placement."""
    names = {"tok_embeddings.weight": Part("embed_tokens.weight"), "lm_head.weight": Part("head.weight")}
    for layer in range(n_layers):
        name = f"layers.{layer}"
        for letter in "qkvo":
            names[f"{name}.attention.w{letter}.weight"] = Part(f"{name}.self_attn.{letter}_proj.weight")
        for part in ("gate", "up", "down"):
            names[f"{name}.feed_forward.w_{part}.weight"] = Part(f"{name}.mlp.{part}_proj.weight")
        if placement == "pre":
            attention_read, ffn_read = junction_before(layer, "attention"), junction_before(layer, "feed_forward")
            names[f"{attention_read}.read.norm.weight"] = Part(f"{name}.input_layernorm.weight")
            names[f"{ffn_read}.read.norm.weight"] = Part(f"{name}.post_attention_layernorm.weight")
        else:
            names[f"{name}.after_attention.join.norm.weight"] = Part(f"{name}.post_attention_layernorm.weight")
            names[f"{name}.after_feed_forward.join.norm.weight"] = Part(f"{name}.post_feedforward_layernorm.weight")
    return names | {f"layers.{n_layers - 1}.after_feed_forward.read.norm.weight": Part("norm.weight")}


LLAMA = {
    "vocab_size": 40,
    "dim": 32,
    "n_layers": 4,
    "n_heads": 4,
    "ffn_dim": 48,
    "max_seq_len": 32,
    "norm": NormConfig(eps=1e-6),
    "tied": False,
}
CASES = {
    "siamese_hybrid_pre_lm": (
        DecoderConfig(
            placement="siamese_hybrid_pre",
            vocab_size=48,
            dim=32,
            n_layers=3,
            n_heads=4,
            n_kv_heads=2,
            ffn_dim=32,
            max_seq_len=16,
            norm=NormConfig(eps=1e-5),
            tied=True,
        ),
        hybrid_pre_map(3),
    ),
    "mixln_repo_pre_norm_lm": (DecoderConfig(placement="pre", **LLAMA), llama_map(4, "pre")),
    "mixln_repo_post_norm_lm": (DecoderConfig(placement="post(final_norm=true)", **LLAMA), llama_map(4, "post")),
}


@dataclass
class Case:
    name: str
    golden: dict[str, Tensor]
    names: dict[str, Part]
    model: DecoderLM


@pytest.fixture(scope="module", params=CASES)
def case(request) -> Case:
    config, names = CASES[request.param]
    golden, model = load_file(FOLDER / f"{request.param}.safetensors"), DecoderLM(config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = names[name]
            parameter.copy_(golden[f"param.{part.official}"][part.start : part.stop])
    return Case(request.param, golden, names, model.eval())


def rows_used(case: Case, prefix: str) -> dict[str, list[int]]:
    used: dict[str, list[int]] = {}
    for part in case.names.values():
        n_rows = len(case.golden[prefix + part.official])
        used.setdefault(part.official, []).extend(range(n_rows)[part.start : part.stop])
    return used


def test_the_map_is_complete(case):
    """Each official row is read once, each parameter of ours written once; gradients exist for the same names."""
    ours = [name for name, _ in case.model.named_parameters()]
    assert sorted(ours) == sorted(case.names)
    for prefix in ("param.", "grad."):
        used = rows_used(case, prefix)
        official = {name.removeprefix(prefix) for name in case.golden if name.startswith(prefix)}
        assert set(used) == official
        for name, rows in used.items():
            assert sorted(rows) == list(range(len(case.golden[prefix + name]))), name


def test_outputs(case):
    tokens = case.golden["input.input_ids"]
    with torch.no_grad():
        hidden, logits = case.model.hidden(tokens), case.model(tokens)
    torch.testing.assert_close(hidden, case.golden["output.final_hidden"], rtol=0, atol=1e-9)
    torch.testing.assert_close(logits, case.golden["output.logits"], rtol=0, atol=1e-9)


def test_every_gradient(case):
    case.model.zero_grad()
    loss = (case.golden["loss.weight"] * case.model(case.golden["input.input_ids"])).sum()
    assert abs(loss.item() - case.golden["loss.value"].item()) < 1e-9
    loss.backward()
    assert json.loads((FOLDER / f"{case.name}.json").read_text())["zero_gradient"] == []
    parameters = dict(case.model.named_parameters())
    for name, part in case.names.items():
        wanted = case.golden[f"grad.{part.official}"]
        error = (parameters[name].grad - wanted[part.start : part.stop]).abs().max().item()
        assert error <= 1e-7 * wanted.abs().max().item(), f"{part.official}: {error}"


def recorded(case: Case) -> dict[str, Tensor]:
    """A forward pass with hooks, under the names of the official file."""
    model, seen = case.model, {}
    two_streams = case.model.streams == ("x", "y")

    def keep(name: str, pick):
        return lambda module, args, output=None: seen.__setitem__(name, pick(args, output))

    hooks = []
    for i, layer in enumerate(model.layers):
        for ours, official in (("attention", "attn"), ("feed_forward", "ffn")):
            sublayer = getattr(layer, ours)
            hooks.append(sublayer.register_forward_hook(keep(f"hidden.{i}.{official}_input", lambda a, o: a[0])))
            hooks.append(sublayer.register_forward_hook(keep(f"hidden.{i}.{official}_update", lambda a, o: o)))
        hooks.append(layer.register_forward_hook(keep(f"hidden.{i}.x" if two_streams else f"hidden.{i}", first_stream)))
        hooks.append(layer.register_forward_hook(keep(f"hidden.{i}.y", lambda a, o: o[0][-1])))
    if two_streams:  # official code leaves the last x raw and norms it at the head; ours norms it in the last join
        last_norm = model.get_submodule(f"layers.{len(model.layers) - 1}.after_feed_forward.join.norm_x")
        hooks.append(last_norm.register_forward_pre_hook(keep("last x", lambda a, o: a[0])))
    hooks.append(model.before_layers.register_forward_pre_hook(keep("hidden.embed", lambda a, o: a[1])))
    with torch.no_grad():
        model(case.golden["input.input_ids"])
    for hook in hooks:
        hook.remove()
    if two_streams:
        seen[f"hidden.{len(model.layers) - 1}.x"] = seen.pop("last x")
    return seen


def first_stream(args, output) -> Tensor:
    state, _ = output
    return state[0]


def test_streams_and_sublayers(case):
    seen = recorded(case)
    names = [name for name in case.golden if name.startswith("hidden.")]
    assert len(names) >= 4 * len(case.model.layers)
    for name in names:
        torch.testing.assert_close(
            seen[name], case.golden[name], rtol=0, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
        )
