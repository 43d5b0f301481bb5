"""The probe against what the models' code says, read by hand, and against small models that are written out here."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.tiny_models import tiny_model
from tests.inspect import hand_written as hand
from torch import nn

from normstream.inspect.anatomy import Anatomy, Call, StackAnatomy, Sublayer
from normstream.inspect.inputs import make_inputs
from normstream.inspect.probing.probe import anatomy_of


def places(stack: StackAnatomy, layer: int | None) -> dict[str, str]:
    """Place and kind of sublayer of the norms of one layer, by the last parts of their paths that the code uses."""
    prefix = "" if layer is None else f"{stack.layers[layer].call.path}."
    sites = [norm for norm in stack.norms if norm.layer == layer]
    return {str(norm.call).removeprefix(prefix): " ".join([norm.place, *norm.feeds]) for norm in sites}


def tiny(family: str) -> Any:
    """A model of transformers, whose attributes no type checker knows."""
    return tiny_model(family)


def sublayer(anatomy: Anatomy, name: str, stack: int = 0) -> Sublayer:
    return next(found for found in anatomy.stacks[stack].sublayers if found.name == name)


def paths(calls: tuple[Call, ...]) -> set[str]:
    return {call.path.split(".")[-1] for call in calls}


# Families, as their code in transformers reads -----------------------------------------------------------------------


def test_llama() -> None:
    anatomy = anatomy_of(tiny("llama"))
    (stack,) = anatomy.stacks
    assert (stack.name, stack.placement) == ("main", "pre")
    assert places(stack, 1) == {"input_layernorm": "pre mixer", "post_attention_layernorm": "pre ffn"}
    assert places(stack, None) == {"model.norm": "final"}
    mixer, ffn = stack.layers[1].sublayers
    assert mixer.output == mixer.update == Call("model.layers.1.self_attn")
    assert paths(mixer.readers) == {"q_proj", "k_proj", "v_proj"}
    assert paths(mixer.writers) == {"o_proj"}
    assert mixer.reads == (Call("model.layers.1.input_layernorm"),)
    assert paths(ffn.readers) == {"gate_proj", "up_proj"}
    assert paths(ffn.writers) == {"down_proj"}
    assert all(layer.skip == 1 for layer in stack.layers)
    assert all(found.multiplier == found.skip == 1 for found in stack.sublayers)
    assert (anatomy.head, anatomy.logit_multiplier, anatomy.notes) == (Call("lm_head"), 1, ())
    assert stack.end_readers == (Call("lm_head"),)
    assert stack.embeddings == (Call("model.embed_tokens"),)


def test_gemma2_has_output_norms_and_multiplies_its_embedding() -> None:
    model = tiny("gemma2")
    anatomy = anatomy_of(model)
    (stack,) = anatomy.stacks
    assert stack.placement == "sandwich"
    assert places(stack, 0) == {
        "input_layernorm": "pre mixer",
        "post_attention_layernorm": "output mixer",
        "pre_feedforward_layernorm": "pre ffn",
        "post_feedforward_layernorm": "output ffn",
    }
    mixer = sublayer(anatomy, "layers.0.mixer")
    assert mixer.output == Call("model.layers.0.self_attn")
    assert mixer.update == mixer.output_norm == Call("model.layers.0.post_attention_layernorm")
    assert stack.embedding_multiplier == pytest.approx(model.config.hidden_size**0.5, rel=1e-4)
    assert anatomy.logit_multiplier is None  # a soft cap
    assert anatomy.is_tied


def test_glm4_norms_have_misleading_names() -> None:
    (stack,) = anatomy_of(tiny("glm4")).stacks
    assert places(stack, 1) == {
        "input_layernorm": "pre mixer",
        "post_self_attn_layernorm": "output mixer",
        "post_attention_layernorm": "pre ffn",
        "post_mlp_layernorm": "output ffn",
    }


def test_olmo2_reads_the_raw_stream() -> None:
    (stack,) = anatomy_of(tiny("olmo2")).stacks
    assert stack.placement == "reordered"
    assert places(stack, 0) == {
        "self_attn.q_norm": "q mixer",
        "self_attn.k_norm": "k mixer",
        "post_attention_layernorm": "output mixer",
        "post_feedforward_layernorm": "output ffn",
    }
    scopes = {norm.call.path.split(".")[-1]: norm.scope for norm in stack.norms}
    assert scopes["q_norm"] == scopes["k_norm"] == "flattened"
    assert paths(stack.sublayers[1].reads) == {"gate_proj", "up_proj"}


def test_gemma3_norms_each_head() -> None:
    (stack,) = anatomy_of(tiny("gemma3_text")).stacks
    assert {norm.scope for norm in stack.norms if norm.place in ("q", "k")} == {"per_head"}


def test_post_norm_of_gte_and_bert() -> None:
    (gte,) = anatomy_of(tiny("gte")).stacks
    assert gte.placement == "post"
    assert places(gte, 0) == {"post_attention_layernorm": "trunk mixer", "post_mlp_layernorm": "trunk ffn"}
    anatomy = anatomy_of(tiny("bert"))
    (bert,) = anatomy.stacks
    assert bert.placement == "post"
    outside = places(bert, None)
    assert outside == {"bert.embeddings.LayerNorm": "embedding", "cls.predictions.transform.LayerNorm": "head"}
    mixer = sublayer(anatomy, "layers.1.mixer")
    assert mixer.trunk_norm == Call("bert.encoder.layer.1.attention.output.LayerNorm")
    assert mixer.output == Call("bert.encoder.layer.1.attention.output.dense")
    assert mixer.pre_norm is None
    assert paths(mixer.reads) == {"query", "key", "value"}
    assert paths(bert.embeddings) == {"word_embeddings", "position_embeddings", "token_type_embeddings"}
    assert bert.end_readers == (Call("cls.predictions.transform.dense"),)


@pytest.mark.parametrize(("family", "attention"), [("gpt2", "attn"), ("bloom", "self_attention.dense")])
def test_residuals_that_are_added_outside_and_inside_the_attention_module(family: str, attention: str) -> None:
    (stack,) = anatomy_of(tiny(family)).stacks
    assert stack.placement == "pre"
    mixer = stack.sublayers[0]
    assert mixer.output == Call(f"transformer.h.0.{attention}")
    assert paths(mixer.writers) == {"c_proj" if family == "gpt2" else "dense"}
    assert [norm.place for norm in stack.norms].count("embedding") == (family == "bloom")


@pytest.mark.parametrize(("family", "placement"), [("gpt_neox", "parallel"), ("phi", "parallel with one norm")])
def test_parallel_sublayers(family: str, placement: str) -> None:
    (stack,) = anatomy_of(tiny(family)).stacks
    assert stack.is_parallel
    assert stack.placement == f"pre, {placement}"
    assert stack.sublayers[0].parallel_to == ("layers.0.ffn",)
    assert stack.sublayers[1].parallel_to == ()


def test_both_stacks_of_t5() -> None:
    anatomy = anatomy_of(tiny("t5"))
    encoder, decoder = anatomy.stacks
    assert (encoder.name, decoder.name) == ("encoder", "decoder")
    assert places(encoder, 1) == {"layer.0.layer_norm": "pre mixer", "layer.1.layer_norm": "pre ffn"}
    assert places(decoder, 1) == {
        "layer.0.layer_norm": "pre mixer",
        "layer.1.layer_norm": "pre cross",
        "layer.2.layer_norm": "pre ffn",
    }
    assert places(encoder, None) == {"encoder.final_layer_norm": "final"}
    assert places(decoder, None) == {"decoder.final_layer_norm": "final"}
    read_by_decoder = {call.path for call in encoder.end_readers}
    assert read_by_decoder == {
        f"decoder.block.{n}.layer.1.EncDecAttention.{matrix}" for n in range(len(decoder.layers)) for matrix in "kv"
    }


def test_latent_norms_and_experts_of_deepseek() -> None:
    (stack,) = anatomy_of(tiny("deepseek_v3")).stacks
    found = places(stack, 1)
    assert found["self_attn.q_a_layernorm"] == "latent_q mixer"
    assert found["self_attn.kv_a_layernorm"] == "latent_kv mixer"
    dense, mixture = stack.layers[0].sublayers[1], stack.layers[1].sublayers[1]
    assert paths(dense.writers) == {"down_proj"}
    assert {call.path for call in mixture.writers} == {
        "model.layers.1.mlp.experts",
        "model.layers.1.mlp.shared_experts.down_proj",
    }


def test_multipliers_of_granite() -> None:
    model = tiny("granite")
    anatomy = anatomy_of(model)
    (stack,) = anatomy.stacks
    assert {found.multiplier for found in stack.sublayers} == {model.config.residual_multiplier}
    assert stack.embedding_multiplier == model.config.embedding_multiplier
    assert anatomy.logit_multiplier == pytest.approx(1 / model.config.logits_scaling)


def test_albert_calls_one_layer_again_and_again() -> None:
    model = tiny("albert")
    (stack,) = anatomy_of(model).stacks
    path = "albert.encoder.albert_layer_groups.0"
    assert [layer.call for layer in stack.layers] == [Call(path, n) for n in range(model.config.num_hidden_layers)]
    inside = f"{path}.albert_layers.0"
    assert stack.layers[1].sublayers[0].trunk_norm == Call(f"{inside}.attention.LayerNorm", 1)
    assert stack.layers[1].sublayers[1].trunk_norm == Call(f"{inside}.full_layer_layer_norm", 1)
    factorised = next(norm for norm in stack.norms if norm.place == "embedding")
    assert factorised.scope == "latent"  # a matrix stands between it and the stream


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_router_and_experts_read_the_stream(family: str) -> None:
    (stack,) = anatomy_of(tiny(family)).stacks
    mixture = stack.sublayers[1]
    assert mixture.kind == "ffn"
    assert paths(mixture.readers) == {"gate", "experts"}
    assert paths(mixture.writers) == {"experts"}


def test_vision_transformer() -> None:
    anatomy = anatomy_of(tiny("vit"))
    (stack,) = anatomy.stacks
    assert stack.placement == "pre"
    assert anatomy.head == Call("classifier")
    assert paths(stack.embeddings) == {"projection"}


# Models written out in plain torch -----------------------------------------------------------------------------------

WORDS = {
    "pre": lambda: [hand.Layer("pre") for _ in range(2)],
    "post": lambda: [hand.Layer("trunk") for _ in range(2)],
    "sandwich": lambda: [hand.Layer("pre+output") for _ in range(2)],
    "reordered": lambda: [hand.Layer("output") for _ in range(2)],
    "post with output norm": lambda: [hand.Layer("output+trunk") for _ in range(2)],
    "hybrid: layer 0 post, layer 1 pre": lambda: [hand.Layer("trunk"), hand.Layer("pre")],
    "hybrid: layers 0-1 post, layers 2-3 pre": lambda: [hand.Layer(s) for s in ("trunk", "trunk", "pre", "pre")],
    "pre, parallel": lambda: [hand.ParallelLayer(shared=False)],
    "pre, parallel with one norm": lambda: [hand.ParallelLayer(shared=True)],
    "no norm": lambda: [hand.Layer("")],
}


@pytest.mark.parametrize("words", WORDS)
def test_name_of_the_placement(words: str) -> None:
    (stack,) = anatomy_of(hand.Decoder(WORDS[words](), final=True)).stacks
    assert stack.placement == words
    assert places(stack, None) == {"last": "final"}


def test_skip_multiplier_with_norms_before_and_behind() -> None:
    """Keel: x <- N(a x + g F(N(x)))."""
    (stack,) = anatomy_of(hand.Decoder([hand.Layer("pre+trunk", skip=3.0, gain=0.5) for _ in range(2)])).stacks
    assert places(stack, 0) == {
        "n.0.pre": "pre mixer",
        "n.0.trunk": "trunk mixer",
        "n.1.pre": "pre ffn",
        "n.1.trunk": "trunk ffn",
    }
    assert [layer.skip for layer in stack.layers] == [9, 9]  # norms count as identities
    assert {(found.skip, found.multiplier) for found in stack.sublayers} == {(3.0, 0.5)}
    assert stack.placement == "pre and post, scaled skip"


def test_inner_norms() -> None:
    (stack,) = anatomy_of(hand.Decoder([hand.Layer("pre", inner_norms=True)])).stacks
    inner = {name: place for name, place in places(stack, 0).items() if name.startswith("f.")}
    assert inner == {"f.0.on_a": "q mixer", "f.0.on_b": "k mixer", "f.0.on_c": "v mixer", "f.0.on_d": "sub mixer"}
    assert {norm.scope for norm in stack.norms if norm.place in "qkv"} == {"flattened"}


def test_adding_in_place_changes_nothing() -> None:
    (stack,) = anatomy_of(hand.Decoder([hand.InPlaceLayer() for _ in range(2)])).stacks
    assert places(stack, 1) == {"one": "pre mixer", "two": "pre ffn"}
    assert {found.multiplier for found in stack.sublayers} == {1.0}


def test_multipliers_of_embedding_and_logits() -> None:
    anatomy = anatomy_of(hand.Decoder([hand.Layer("pre")], multiplier=4.0))
    assert anatomy.stacks[0].embedding_multiplier == 4
    assert anatomy.logit_multiplier == 0.25
    assert anatomy.is_tied


def test_experts_that_no_token_was_sent_to() -> None:
    anatomy = anatomy_of(hand.Decoder([hand.ExpertLayer() for _ in range(2)]))
    ffn = sublayer(anatomy, "layers.1.ffn")
    assert {call.path for call in ffn.writers} == {f"blocks.1.mixture.experts.{n}.f" for n in range(3)}
    assert {call.path for call in ffn.readers} == {f"blocks.1.mixture.experts.{n}.e" for n in range(3)}


def test_norm_on_what_cross_attention_reads() -> None:
    encoder, decoder = anatomy_of(hand.EncoderDecoder()).stacks
    assert len(decoder.layers) == 4
    assert places(decoder, 1) == {"on_stream": "pre cross", "on_context": "context cross"}
    assert {call.path for call in encoder.end_readers} == set()  # a norm stands between


def test_torch_encoder_layers() -> None:
    for norm_first, words in ((True, "pre"), (False, "post")):
        layers = [
            nn.TransformerEncoderLayer(hand.DIM, 2, 32, norm_first=norm_first, batch_first=True) for _ in range(2)
        ]
        (stack,) = anatomy_of(hand.Decoder(list(layers))).stacks
        assert stack.placement == words
        assert [found.kind for found in stack.layers[0].sublayers] == ["mixer", "ffn"]


def test_stages_have_a_stream_each() -> None:
    first, second = anatomy_of(hand.Decoder([hand.Stage(), hand.Stage()])).stacks
    assert (first.name, second.name) == ("stack_0", "stack_1")
    assert [layer.call for layer in second.layers] == [Call("blocks.1.layers.0"), Call("blocks.1.layers.1")]
    assert [[found.kind for found in layer.sublayers] for layer in first.layers] == [["mixer", "ffn"]] * 2
    assert first.placement == second.placement == "pre"


# What cannot be shown -------------------------------------------------------------------------------------------------


def test_learned_scale_of_zero_is_named() -> None:
    anatomy = anatomy_of(hand.Decoder([hand.ZeroScaleLayer()]))
    assert places(anatomy.stacks[0], 0) == {"norm": "pre ffn"}
    assert anatomy.notes == ("blocks.0.scale is zero: what it scales would have no effect, it was probed as one",)


def test_biases_of_zero_are_not_named() -> None:
    """They silence nothing; beside them a scale of zero is named all the same."""
    anatomy = anatomy_of(hand.Decoder([hand.ZeroBiasLayer(is_scaled=False)]))
    assert places(anatomy.stacks[0], 0) == {"norm": "pre ffn"}
    assert anatomy.notes == ()
    assert anatomy_of(hand.Decoder([hand.ZeroBiasLayer(is_scaled=True)])).notes == (
        "blocks.0.affine.scale is zero: what it scales would have no effect, it was probed as one",
    )


def test_scale_of_each_channel_is_named() -> None:
    anatomy = anatomy_of(hand.Decoder([hand.ChannelScaleLayer()]))
    assert places(anatomy.stacks[0], 0) == {"norm": "pre ffn"}
    (note,) = anatomy.notes
    assert "layers.0.ffn" in note
    assert "multiplier is a mean" in note


def test_branch_that_does_not_read_the_stream_is_named() -> None:
    anatomy = anatomy_of(hand.Decoder([hand.ConstantLayer()]))
    assert [found.kind for found in anatomy.stacks[0].sublayers] == ["other", "ffn"]
    assert anatomy.notes == ("layers.0.other (blocks.0.position): does not react to its layer's input",)


def no_skip() -> nn.Module:
    return hand.Decoder([hand.NoSkipLayer(), hand.NoSkipLayer()])


@pytest.mark.parametrize(
    ("build", "assumption"),
    [(no_skip, "expected layers whose output follows their input"), (hand.UnlistedLayers, "expected a list of layers")],
)
def test_model_without_a_stream(build: Callable[[], nn.Module], assumption: str) -> None:
    anatomy = anatomy_of(build())
    assert {norm.place for norm in anatomy.norms} == {"unknown"}
    assert any(note.startswith(assumption) for note in anatomy.notes)
    assert anatomy.head == Call("out")


def test_model_without_layers_and_norms() -> None:
    with pytest.raises(ValueError, match="expected a list of layers"):
        anatomy_of(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10)))


def test_model_that_does_not_run() -> None:
    with pytest.raises(ValueError, match=r"does not run with input_ids \(1, 3\)"):
        anatomy_of(hand.Decoder([hand.Layer("pre")]), {"input_ids": torch.full((1, 3), 10**6)})


def test_the_model_itself_is_left_alone() -> None:
    model = hand.Decoder([hand.InPlaceLayer()])
    before = copy.deepcopy(model.state_dict())
    anatomy_of(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all("forward" not in vars(module) and not module._forward_hooks for module in model.modules())
    assert model.training


# Inputs ---------------------------------------------------------------------------------------------------------------


def test_inputs_follow_the_signature() -> None:
    assert set(make_inputs(tiny("llama"))) == {"input_ids", "attention_mask", "use_cache"}
    both = make_inputs(tiny("t5"), n_tokens=30)
    assert both["input_ids"].shape == (1, 29)
    assert both["decoder_input_ids"].shape == (1, 23)
    assert set(make_inputs(tiny("vit"))) == {"pixel_values"}
    assert make_inputs(hand.Listener())["input_values"].ndim == 2


def test_inputs_are_no_longer_than_the_positions() -> None:
    model = tiny("gpt2")
    assert make_inputs(model, n_tokens=1000)["input_ids"].shape[1] <= model.config.n_positions


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="needs a tokenizer"):
        make_inputs(tiny("llama"), text="Norms.")


def test_signature_that_says_nothing() -> None:
    with pytest.raises(ValueError, match="pass inputs"):
        make_inputs(nn.Bilinear(2, 3, 4))


def test_readers_of_deep_post_norm_layers() -> None:
    """Random Post-Norm layers make all tokens alike, and attention over equal values does not need its queries."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 128}
    model = BertModel(BertConfig(**sizes, num_hidden_layers=12)).eval()
    for layer in anatomy_of(model).stacks[0].layers:
        names = [call.path.rpartition(".")[2] for call in layer.sublayers[0].readers]
        assert names == ["query", "key", "value"], layer.index
