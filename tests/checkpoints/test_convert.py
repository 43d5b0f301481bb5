"""Conversion by role: field reports 1 to 3 as they are written, and that nothing is lost, guessed or written twice."""

import re

import pytest
import torch
from torch import Tensor, nn

from normstream.checkpoints.conversion.convert import (
    Stored,
    family_of,
    in_convention,
    read_tensors_of,
    release_format,
    write_tensors_of,
)
from normstream.checkpoints.conversion.gains import check_gains, rounding, with_gain
from normstream.checkpoints.conversion.layouts import Layout
from normstream.checkpoints.conversion.roles import Role
from normstream.checkpoints.conversion.settings import Settings
from normstream.norms import Gain, RMSNorm

SIZES = {"vocab_size": 12, "dim": 4, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "ffn_dim": 6, "max_seq_len": 8}
SANDWICH = {
    "input_layernorm": 1.5,
    "post_attention_layernorm": 2.5,
    "pre_feedforward_layernorm": 3.5,
    "post_feedforward_layernorm": 4.5,
}
GLM = {
    "input_layernorm": 1.5,
    "post_self_attn_layernorm": 2.5,
    "post_attention_layernorm": 3.5,
    "post_mlp_layernorm": 4.5,
}
LLAMA = {"input_layernorm": 1.5, "post_attention_layernorm": 3.5}
MEGATRON = {
    "self_attention.linear_qkv.layer_norm_weight": 1.5,
    "self_attention.linear_proj.post_layernorm.weight": 2.5,
    "mlp.linear_fc1.layer_norm_weight": 3.5,
    "mlp.linear_fc2.post_layernorm.weight": 4.5,
}
FAMILIES = {"gemma2": SANDWICH, "glm4": GLM, "llama": LLAMA}


def settings_of(family: str, **more) -> Settings:
    return family_of(family).complete({**SIZES, "n_layers": 1, **more})


def drawn(family: str, settings: Settings) -> dict[str, Tensor]:
    """Random tensors under the names that the family's files have."""
    one = family_of(family)
    shapes = {
        "embed_tokens": (12, 4), "lm_head": (12, 4), "q_proj": (16, 4), "k_proj": (8, 4), "v_proj": (8, 4),
        "o_proj": (4, 16), "gate_proj": (6, 4), "up_proj": (6, 4), "gate_up_proj": (12, 4), "down_proj": (4, 6),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name in one.entries(settings):
        module, part = name.split(".")[-2:]
        shape = shapes.get(module, (4,))
        found[name] = torch.randn(shape[:1] if part == "bias" else shape, generator=generator)
    return found


def with_norms(family: str, settings: Settings) -> dict[str, Tensor]:
    """The tensors of a model with one layer, whose norms are distinct constants."""
    tensors = drawn(family, settings)
    for name, value in FAMILIES[family].items():
        tensors[f"model.layers.0.{name}.weight"] = torch.full((4,), value)
    tensors["model.norm.weight"] = torch.full((4,), 5.5)
    return tensors


def read(family: str, settings: Settings, tensors, source=None) -> Stored:
    one = family_of(family)
    return read_tensors_of(source or release_format(one), one, settings, tensors, one.gain)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_each_norm_lands_where_its_role_is(family):
    """FR-01: the same name is another norm in another family."""
    settings = settings_of(family)
    tensors = with_norms(family, settings)
    fused = write_tensors_of("megatron-fused", read(family, settings, tensors))
    norms = {name: tensor for name, tensor in fused.items() if "norm" in name}
    values = set(FAMILIES[family].values())
    wanted = {f"decoder.layers.0.{name}": value for name, value in MEGATRON.items() if value in values}
    wanted["decoder.final_layernorm.weight"] = 5.5
    assert {name: tensor.unique().tolist() for name, tensor in norms.items()} == {k: [v] for k, v in wanted.items()}
    back = write_tensors_of("hf", read(family, settings, fused, "megatron-fused"))
    assert_equal(back, tensors)


@pytest.mark.parametrize(
    ("family", "name", "role"),
    [
        ("gemma2", "model.layers.0.pre_feedforward_layernorm.weight", "layer 0 ffn_pre_norm"),
        ("gemma2", "model.layers.0.post_attention_layernorm.weight", "layer 0 attention_output_norm"),
        ("llama", "model.layers.0.post_attention_layernorm.weight", "layer 0 ffn_pre_norm"),
        ("glm4", "model.layers.0.post_attention_layernorm.weight", "layer 0 ffn_pre_norm"),
        ("glm4", "model.layers.0.mlp.gate_up_proj.weight", "layer 0 gate"),
        ("llama", "model.norm.weight", "final_norm"),
    ],
)
def test_a_missing_tensor_is_named_with_its_role(family, name, role):
    """FR-01: a source that lacks a norm is refused."""
    settings = settings_of(family)
    tensors = with_norms(family, settings)
    del tensors[name]
    with pytest.raises(ValueError, match=f"{re.escape(role)}.*: {re.escape(name)} is missing"):
        read(family, settings, tensors)


def test_a_tensor_without_a_role_is_named():
    settings = settings_of("llama")
    tensors = {**with_norms("llama", settings), "model.layers.1.input_layernorm.weight": torch.ones(4)}
    with pytest.raises(ValueError, match=r"model\.layers\.1\.input_layernorm\.weight has no role in this model"):
        read("llama", settings, tensors)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.layers.0.self_attn.k_proj.weight", r"layer 0 k .*expected shape \(8, 4\), got \(4, 4\)"),
        ("model.layers.0.input_layernorm.weight", r"attention_pre_norm .*expected shape \(4,\), got \(4, 4\)"),
    ],
)
def test_a_wrong_shape_is_named_with_its_role(name, said):
    settings = settings_of("llama")
    tensors = {**with_norms("llama", settings), name: torch.ones(4, 4)}
    with pytest.raises(ValueError, match=said):
        read("llama", settings, tensors)


def three_layers(norm_kind: str) -> tuple[str, Settings, dict[str, Tensor], dict[str, Tensor]]:
    """A family, and the same model in both Megatron layouts: 3 layers, hidden 8."""
    family = {"rms": "llama", "layer": "gpt2"}[norm_kind]
    sizes = {"dim": 8, "n_layers": 3, "n_heads": 2, "ffn_dim": 32, "vocab_size": 12, "max_seq_len": 8}
    settings = family_of(family).complete(sizes)
    qkv, fc1 = 24, 64 if norm_kind == "rms" else 32
    parts = {"rms": ("weight",), "layer": ("weight", "bias")}[norm_kind]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    alone = {"embedding.word_embeddings.weight": draw(12, 8)}
    if norm_kind == "rms":
        alone["output_layer.weight"] = draw(12, 8)
    else:
        alone["embedding.position_embeddings.weight"] = draw(8, 8)
    fused = dict(alone)
    for layer in range(3):
        start = f"decoder.layers.{layer}"
        for part in parts:
            shapes = {
                "self_attention.linear_qkv": (qkv, 8), "self_attention.linear_proj": (8, 8),
                "mlp.linear_fc1": (fc1, 8), "mlp.linear_fc2": (8, 32),
            }  # fmt: skip
            both = {f"{start}.{n}.{part}": draw(*(s if part == "weight" else s[:1])) for n, s in shapes.items()}
            norms = draw(8), draw(8)
            alone |= both | dict(
                zip((f"{start}.input_layernorm.{part}", f"{start}.pre_mlp_layernorm.{part}"), norms, strict=True)
            )
            attributes = (f"self_attention.linear_qkv.layer_norm_{part}", f"mlp.linear_fc1.layer_norm_{part}")
            fused |= both | dict(zip((f"{start}.{name}" for name in attributes), norms, strict=True))
    for part in parts:
        alone[f"decoder.final_layernorm.{part}"] = fused[f"decoder.final_layernorm.{part}"] = draw(8)
    return family, settings, alone, fused


@pytest.mark.parametrize(("kind", "vectors"), [("rms", 7), ("layer", 14)])
def test_both_layouts_are_read_and_written(kind, vectors):
    """FR-02: norms that are attributes of the next matrix travel too, biases included."""
    family, settings, alone, fused = three_layers(kind)
    models = [read(family, settings, tensors, "megatron") for tensors in (alone, fused)]
    exports = [write_tensors_of("hf", model) for model in models]
    assert_equal(exports[0], exports[1])
    norms = [name for name in exports[0] if re.search(r"norm|ln_", name)]
    assert len(norms) == vectors
    assert_equal(write_tensors_of("megatron", models[1]), alone)
    assert_equal(write_tensors_of("megatron-fused", models[0]), fused)


def test_a_missing_fused_norm_is_named():
    """FR-02."""
    family, settings, _, fused = three_layers("rms")
    del fused["decoder.layers.1.mlp.linear_fc1.layer_norm_weight"]
    with pytest.raises(ValueError, match="layer 1 ffn_pre_norm"):
        read(family, settings, fused, "megatron-fused")


def test_a_norm_in_both_layouts_at_once_is_refused():
    family, settings, alone, fused = three_layers("rms")
    twice = {**fused, "decoder.layers.2.input_layernorm.weight": alone["decoder.layers.2.input_layernorm.weight"]}
    with pytest.raises(ValueError, match=r"layer 2 attention_pre_norm .* is there 2 times"):
        read(family, settings, twice, "megatron")


def test_the_convention_of_a_gain_moves_it_once():
    """FR-03: once, not twice and not never."""
    norm = RMSNorm(2, eps=0.0)
    norm.weight = nn.Parameter(with_gain(torch.full((2,), 0.25), "zero_centered", "plain"))
    assert norm(torch.tensor([3.0, 4.0])).tolist() == pytest.approx([1.0606602, 1.4142136], abs=1e-6)
    stored = torch.tensor([-1, -0.5, 0, 0.25, 15.8125])
    there = with_gain(stored, "zero_centered", "plain")
    assert torch.equal(with_gain(there, "plain", "zero_centered"), stored)


def test_one_plus_w_is_summed_in_float32():
    """FR-04: 1 + 15.8125 is 16.75 in bfloat16."""
    found = with_gain(torch.tensor([15.8125], dtype=torch.bfloat16), "zero_centered", "plain")
    assert (found.dtype, found.item()) == (torch.float32, 16.8125)


def test_rounding_is_the_error_of_the_sum():
    weight = torch.tensor([2.0**-24 + 2.0**-25], dtype=torch.float32)  # 1 + w lies between 1 and 1 + 2^-23
    assert rounding(weight, "zero_centered", "plain") == 2.0**-25


def test_a_mixed_model_keeps_both_conventions_right():
    """FR-03: one norm stores w of 1 + w, the others the gain itself."""
    settings = settings_of("llama")
    tensors = with_norms("llama", settings)
    roles = (Role("attention_pre_norm", 0), Role("ffn_pre_norm", 0), Role("final_norm"))
    gains = dict(zip(roles, ("zero_centered", "plain", "plain"), strict=True))
    stored = read_tensors_of("hf", family_of("llama"), settings, tensors, gains)
    plain = write_tensors_of("normstream", in_convention(stored, "normstream"))
    assert plain["before_layers.read.norm.weight"].tolist() == [2.5] * 4
    assert plain["layers.0.after_attention.read.norm.weight"].tolist() == [3.5] * 4
    zero_centered = in_convention(stored, "megatron", "zero_centered")
    assert zero_centered.settings["norm.gain"] == "zero_centered"
    assert zero_centered.tensors[roles[0]].tolist() == [1.5] * 4
    assert zero_centered.tensors[roles[1]].tolist() == [2.5] * 4


def test_a_release_has_the_gains_of_its_code():
    settings = settings_of("gemma2")
    stored = read("gemma2", settings, with_norms("gemma2", settings))
    with pytest.raises(ValueError, match="the code of gemma2 takes gains as zero_centered"):
        in_convention(stored, "hf", "plain")
    folded = in_convention(stored, "megatron", "plain")
    assert folded.tensors[Role("ffn_pre_norm", 0)].tolist() == [4.5] * 4
    assert_equal(write_tensors_of("hf", in_convention(folded, "hf")), with_norms("gemma2", settings))


@pytest.mark.parametrize(("gain", "value"), [("zero_centered", 1.0), ("plain", 0.0)])
def test_values_can_contradict_the_convention_but_not_choose_it(gain: Gain, value: float):
    roles = [Role("attention_pre_norm", layer) for layer in range(3)]
    gains: dict[Role, Gain] = dict.fromkeys(roles, gain)
    with pytest.raises(ValueError, match="the values of 3 of 3 norms look as if"):
        check_gains(dict.fromkeys(roles, torch.full((4,), value)), gains)
    mixed = dict(zip(roles, (torch.full((4,), v) for v in (value, value, 1 - value)), strict=True))
    with pytest.raises(ValueError, match="the values of 2 of 3 norms look as if"):
        check_gains(mixed, gains)
    fewer = dict(zip(roles, (torch.full((4,), v) for v in (value, 1 - value, 1 - value)), strict=True))
    check_gains(fewer, gains)  # trained gains wander
    check_gains(dict.fromkeys(roles, torch.full((4,), 7.0)), gains)  # says nothing


def test_small_trained_gains_are_no_offsets():
    """The first norms of trained Llamas have gains around 0.1, hardly one of them negative."""
    roles = [Role("attention_pre_norm", layer) for layer in range(3)]
    check_gains(dict.fromkeys(roles, torch.linspace(0.02, 0.2, 8)), dict.fromkeys(roles, "plain"))


def test_queries_keys_and_values_are_split_by_logical_head():
    """Two groups of two query heads, head width 2: rows by hand."""
    q, k, v = torch.arange(8), torch.arange(100, 104), torch.arange(200, 204)
    joined = Layout("groups").join([q, k, v], head_dim=2)
    assert joined.tolist() == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]
    parts = Layout("groups").split(joined, [8, 4, 4], head_dim=2)
    assert [part.tolist() for part in parts] == [q.tolist(), k.tolist(), v.tolist()]
    with pytest.raises(ValueError, match=r"expected 8 \+ 4 \+ 4 rows, got 15"):
        Layout("groups").split(joined[:15], [8, 4, 4], head_dim=2)


@pytest.mark.parametrize("width", [1, 16])
def test_a_gain_over_each_head_is_not_one_over_all_heads(width):
    """FR-16: OLMo 2 norms all heads together, Qwen3 each head."""
    settings = settings_of("qwen3")
    tensors = drawn("qwen3", settings)
    tensors |= {f"model.layers.0.self_attn.{x}_norm.weight": torch.ones(8) for x in "qk"}
    read("qwen3", settings, tensors)
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(width)
    with pytest.raises(ValueError, match=rf"layer 0 q_norm .*expected shape \(8,\), got \({width},\)"):
        read("qwen3", settings, tensors)


def test_tied_copies_must_be_equal():
    settings = settings_of("llama", tied=True)
    tensors = with_norms("llama", settings)
    copy = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    assert_equal(write_tensors_of("hf", read("llama", settings, copy)), tensors)
    with pytest.raises(ValueError, match=r"lm_head\.weight must be equal to model\.embed_tokens\.weight"):
        read("llama", settings, {**copy, "lm_head.weight": torch.zeros(12, 4)})


@pytest.mark.parametrize(
    ("family", "target", "said"),
    [
        ("gpt_neox", "megatron", "no layer with the placement"),
        ("olmo", "megatron", "norms without gains"),
        ("olmo2", "megatron-fused", "no layer with the placement 'olmo2'"),
        ("llama", "siamese-lm", "no format of the family llama"),
    ],
)
def test_a_format_that_cannot_hold_a_model_says_so(family, target, said):
    one = family_of(family)
    with pytest.raises(ValueError, match=said):
        write_tensors_of(target, Stored(one, settings_of(family), {}, {}))


@pytest.mark.parametrize("key", ["attention_bias", "rms_norm_eps"])
def test_a_configuration_that_means_another_function_is_refused(key):
    config = {
        "vocab_size": 12, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 6, "max_position_embeddings": 8, "tie_word_embeddings": False, "head_dim": 2,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    assert family_of("llama").settings(config)["norm.eps"] == 1e-5
    if key == "rms_norm_eps":
        del config[key]
        said = "lacks rms_norm_eps"
    else:
        config[key] = True
        said = "attention_bias is True"
    with pytest.raises(ValueError, match=said):
        family_of("llama").settings(config)
