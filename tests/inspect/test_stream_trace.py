"""Traces of foreign models whose wiring is written down by hand."""

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normstream.inspect.anatomy import Anatomy, Call, LayerSite, NormFacts, NormSite, StackAnatomy, Sublayer
from normstream.inspect.measures.stream_trace import Trace, check_identity, identity, trace
from normstream.inspect.probing.probe import anatomy_of

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
INPUTS = {"input_ids": torch.arange(1, 12)[None]}
FACTS = NormFacts("", "rms", "plain", has_bias=False, eps=None, cast="unknown", width=32, features=32)


def branch(layer: str, kind: Any, name: str, **parts: Any) -> Sublayer:
    """A sublayer from the paths of its parts, relative to the layer; what is added is the output norm's output."""
    calls = {part: Call(f"{layer}.{path}") for part, path in parts.items() if isinstance(path, str)}
    return Sublayer(
        name=name,
        kind=kind,
        layer=int(name.split(".")[1]),
        output=calls["output"],
        update=calls.get("output_norm", calls["output"]),
        multiplier=parts.get("multiplier", 1.0),
        reads=(calls.get("pre_norm") or calls["reads"],),
        pre_norm=calls.get("pre_norm"),
        output_norm=calls.get("output_norm"),
        trunk_norm=calls.get("trunk_norm"),
        readers=(),
        writers=(),
        parallel_to=parts.get("parallel_to", ()),
    )


def stack(layers: str, final: str | None, *, name: str = "main", **kinds: dict[str, Any]) -> StackAnatomy:
    """A stack of two equal layers with one sublayer of each kind."""
    sites, norms = [], [] if final is None else [NormSite(Call(final), "final", (), (), None, "stream", FACTS)]
    for index in range(2):
        layer = f"{layers}.{index}"
        found = tuple(branch(layer, kind, f"layers.{index}.{kind}", **parts) for kind, parts in kinds.items())
        sites.append(LayerSite(index, Call(layer), 1.0, found))
        trunk = [part.trunk_norm for part in found if part.trunk_norm]
        norms += [NormSite(call, "trunk", (), (), index, "stream", FACTS) for call in trunk]
    return StackAnatomy(name, tuple(sites), tuple(norms), (), 1.0)


def anatomy(*stacks: StackAnatomy, head: str = "lm_head") -> Anatomy:
    return Anatomy(stacks, Call(head), is_tied=False, logit_multiplier=None)


LLAMA = anatomy(
    stack(
        "model.layers",
        "model.norm",
        mixer={"output": "self_attn", "pre_norm": "input_layernorm"},
        ffn={"output": "mlp", "pre_norm": "post_attention_layernorm"},
    )
)
GEMMA = anatomy(
    stack(
        "model.layers",
        "model.norm",
        mixer={"output": "self_attn", "pre_norm": "input_layernorm", "output_norm": "post_attention_layernorm"},
        ffn={"output": "mlp", "pre_norm": "pre_feedforward_layernorm", "output_norm": "post_feedforward_layernorm"},
    )
)
GLM4 = anatomy(
    stack(
        "model.layers",
        "model.norm",
        mixer={"output": "self_attn", "pre_norm": "input_layernorm", "output_norm": "post_self_attn_layernorm"},
        ffn={"output": "mlp", "pre_norm": "post_attention_layernorm", "output_norm": "post_mlp_layernorm"},
    )
)
OLMO2 = anatomy(
    stack(
        "model.layers",
        "model.norm",
        mixer={"output": "self_attn", "reads": "self_attn.q_proj", "output_norm": "post_attention_layernorm"},
        ffn={"output": "mlp", "reads": "mlp.gate_proj", "output_norm": "post_feedforward_layernorm"},
    )
)
GRANITE = anatomy(
    stack(
        "model.layers",
        "model.norm",
        mixer={"output": "self_attn", "pre_norm": "input_layernorm", "multiplier": 0.22},
        ffn={"output": "mlp", "pre_norm": "post_attention_layernorm", "multiplier": 0.22},
    )
)
BLOOM = anatomy(
    stack(
        "transformer.h",
        "transformer.ln_f",
        mixer={"output": "self_attention.dense", "pre_norm": "input_layernorm"},
        ffn={"output": "mlp.dense_4h_to_h", "pre_norm": "post_attention_layernorm"},
    )
)
NEOX = anatomy(
    stack(
        "gpt_neox.layers",
        "gpt_neox.final_layer_norm",
        mixer={"output": "attention", "pre_norm": "input_layernorm", "parallel_to": ("layers.0.ffn", "layers.1.ffn")},
        ffn={"output": "mlp", "pre_norm": "post_attention_layernorm"},
    )
)
BERT = anatomy(
    stack(
        "bert.encoder.layer",
        None,
        mixer={
            "output": "attention.output.dense",
            "reads": "attention.self.query",
            "trunk_norm": "attention.output.LayerNorm",
        },
        ffn={"output": "output.dense", "reads": "intermediate.dense", "trunk_norm": "output.LayerNorm"},
    ),
    head="cls",
)


def t5() -> Anatomy:
    def part(index: int, module: str) -> dict[str, str]:
        return {"output": f"layer.{index}.{module}", "pre_norm": f"layer.{index}.layer_norm"}

    mixer = part(0, "SelfAttention")
    return anatomy(
        stack("encoder.block", "encoder.final_layer_norm", name="encoder", mixer=mixer, ffn=part(1, "DenseReluDense")),
        stack(
            "decoder.block",
            "decoder.final_layer_norm",
            name="decoder",
            mixer=mixer,
            cross=part(1, "EncDecAttention"),
            ffn=part(2, "DenseReluDense"),
        ),
    )


FAMILIES: dict[str, tuple[str, dict[str, Any], Anatomy]] = {
    "llama": ("LlamaForCausalLM", GROUPED, LLAMA),
    "gemma2": ("Gemma2ForCausalLM", GROUPED, GEMMA),
    "gemma3_text": ("Gemma3ForCausalLM", GROUPED, GEMMA),
    "glm4": ("Glm4ForCausalLM", GROUPED, GLM4),
    "olmo2": ("Olmo2ForCausalLM", GROUPED, OLMO2),
    "granite": ("GraniteForCausalLM", GROUPED | {"residual_multiplier": 0.22}, GRANITE),
    "bloom": ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}, BLOOM),
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES, NEOX),
    "bert": ("BertForMaskedLM", SIZES, BERT),
    "t5": ("T5ForConditionalGeneration", SIZES | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}, t5()),
}


@functools.cache
def model_of(family: str) -> nn.Module:
    """A tiny model: matrices of gain 1, gains around 1, biases around 0, so that every part has an effect."""
    import transformers

    name, sizes, _ = FAMILIES[family]
    kind: Any = transformers.CONFIG_MAPPING[family]
    config = kind(**sizes, pad_token_id=0)
    model = getattr(transformers, name)._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.3
            parameter.copy_(scale * noise + (parameter.ndim == 1) * parameter)
    return model


@functools.cache
def trace_of(family: str) -> Trace:
    inputs = INPUTS | ({"decoder_input_ids": torch.arange(20, 27)[None]} if family == "t5" else {})
    return trace(model_of(family), inputs, FAMILIES[family][2])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_true_updates_explain_every_layer(family: str) -> None:
    found = trace_of(family)
    check_identity(found)
    assert max(row.true for row in identity(found)) < 1e-5


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "glm4", "olmo2", "granite"])
def test_the_modules_outputs_do_not_explain_a_layer_that_norms_or_scales_them(family: str) -> None:
    assert min(row.naive for row in identity(trace_of(family))) > 0.1


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "bert", "t5"])
def test_the_modules_outputs_explain_other_layers(family: str) -> None:
    assert max(row.naive for row in identity(trace_of(family))) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "glm4", "olmo2", "granite", "bloom", "gpt_neox"])
def test_the_embedding_plus_all_updates_is_what_the_final_norm_reads(family: str) -> None:
    """At every position; the final norm's input is taken by a hook of the test's own."""
    model, (main,) = model_of(family), trace_of(family).stacks
    read: list[Tensor] = []
    (site,) = FAMILIES[family][2].norms
    handle = model.get_submodule(site.call.path).register_forward_pre_hook(lambda module, args: read.append(args[0]))
    with torch.no_grad():
        model(**INPUTS)
    handle.remove()
    total = main.layers[0].before["x"] + sum(sublayer.update["x"] for sublayer in main.sublayers)
    assert ((total - read[0]).norm(dim=-1) / read[0].norm(dim=-1)).max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_logits_are_those_of_the_model(family: str) -> None:
    """The model's own ``hidden_states``: the stream entering each layer, the last one behind the final norm."""
    model, found = model_of(family), trace_of(family)
    inputs = INPUTS | ({"decoder_input_ids": torch.arange(20, 27)[None]} if family == "t5" else {})
    with torch.no_grad():
        own = model(**inputs, output_hidden_states=True)
    torch.testing.assert_close(found.logits, own.logits)
    for stack_trace in found.stacks:
        name = {"main": "hidden_states"}.get(stack_trace.name, f"{stack_trace.name}_hidden_states")
        *entering, hidden = own[name]
        torch.testing.assert_close([layer.before["x"] for layer in stack_trace.layers], entering)
        torch.testing.assert_close(stack_trace.hidden, hidden)


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_check(family: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(model_of(family)).to(dtype)
    check_identity(trace(model, INPUTS, FAMILIES[family][2]))


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "glm4", "olmo2"])
def test_an_adapter_that_takes_the_modules_output_for_the_update_is_caught(family: str) -> None:
    (main,) = FAMILIES[family][2].stacks
    layers = tuple(
        replace(layer, sublayers=tuple(replace(part, update=part.output) for part in layer.sublayers))
        for layer in main.layers
    )
    wrong = anatomy(replace(main, layers=layers))
    with pytest.raises(ValueError, match=r"layer 0 of stack 'main', stream x.*not understood"):
        check_identity(trace(model_of(family), INPUTS, wrong))


def test_an_adapter_that_forgets_a_multiplier_or_a_sublayer_is_caught() -> None:
    (main,) = GRANITE.stacks
    layers = tuple(
        replace(layer, sublayers=tuple(replace(part, multiplier=1.0) for part in layer.sublayers))
        for layer in main.layers
    )
    with pytest.raises(ValueError, match="not understood"):
        check_identity(trace(model_of("granite"), INPUTS, anatomy(replace(main, layers=layers))))
    (main,) = LLAMA.stacks
    layers = tuple(replace(layer, sublayers=layer.sublayers[:1]) for layer in main.layers)
    with pytest.raises(ValueError, match="not understood"):
        check_identity(trace(model_of("llama"), INPUTS, anatomy(replace(main, layers=layers))))


def test_a_stream_that_overflows_is_named() -> None:
    model = copy.deepcopy(model_of("llama")).to(torch.float16)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.down_proj.weight").mul_(60000)
    with pytest.raises(ValueError, match="layer 1 of stack 'main', stream x: not finite"):
        check_identity(trace(model, INPUTS, LLAMA))


def test_a_model_in_training_mode_and_a_call_that_does_not_happen_are_errors() -> None:
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        trace(copy.deepcopy(model_of("llama")).train(), INPUTS, LLAMA)
    (main,) = LLAMA.stacks
    never = NormSite(Call("model.norm", 7), "final", (), (), None, "stream", FACTS)
    with pytest.raises(ValueError, match=r"model.norm \(call 7\), which did not run"):
        trace(model_of("llama"), INPUTS, anatomy(replace(main, norms=(never,))))


def test_the_hooks_are_gone_and_the_model_is_as_before() -> None:
    model = model_of("gemma2")
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    with torch.no_grad():
        before = model(**INPUTS).logits
        trace(model, INPUTS, GEMMA)
        after = model(**INPUTS).logits
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


def test_names_of_tensors() -> None:
    found = trace_of("gemma2").named()
    layer = found["layers.1.before.x"] + found["layers.1.mixer.update.x"] + found["layers.1.ffn.update.x"]
    torch.testing.assert_close(layer, found["layers.1.after.x"])
    assert {"layers.0.ffn.input", "layers.0.ffn.output", "layers.0.ffn.after.x", "hidden", "logits"} <= set(found)
    assert {"encoder.layers.1.mixer.update.x", "decoder.layers.1.cross.update.x", "encoder.hidden", "logits"} <= set(
        trace_of("t5").named()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_with_a_probed_anatomy_the_trace_is_the_same(family: str) -> None:
    """The wiring found by the probe gives the tensors that the wiring written down by hand gives."""
    inputs = INPUTS | ({"decoder_input_ids": torch.arange(20, 27)[None]} if family == "t5" else {})
    found, expected = trace(model_of(family), inputs).named(), trace_of(family).named()
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("family", "n_norms"), [("llama", 5), ("bert", 4), ("gemma2", 9), ("olmo2", 5)], ids=lambda value: str(value)
)
def test_the_number_of_norms_on_and_around_the_stream(family: str, n_norms: int) -> None:
    """2 L + 1 in Pre-Norm and with output norms alone, 2 L in Post-Norm, 4 L + 1 in a sandwich, for L = 2."""
    found = anatomy_of(model_of(family), INPUTS).norms
    assert len([site for site in found if site.place in ("pre", "output", "trunk", "final")]) == n_norms
