"""What leaving out layers and sublayers costs, against models from which they were really removed."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.inspect.wired import Wired, wired
from torch import nn

from normstream import placements
from normstream.init import initialize
from normstream.inspect.measures.drop import layer_drops, sublayer_drops
from normstream.inspect.measures.loss import loss_of
from normstream.models import DecoderConfig, DecoderLM
from normstream.norms import NormConfig

WRITERS = {
    ("llama", "mixer"): "self_attn.o_proj",
    ("llama", "ffn"): "mlp.down_proj",
    ("gpt2", "mixer"): "attn.c_proj",
    ("gpt2", "ffn"): "mlp.c_proj",
    ("bloom", "mixer"): "self_attention.dense",
    ("bloom", "ffn"): "mlp.dense_4h_to_h",
    ("bert", "mixer"): "attention.output.dense",
    ("bert", "ffn"): "output.dense",
    ("phi", "mixer"): "self_attn.dense",
    ("phi", "ffn"): "mlp.fc2",
}


def zero(module: nn.Module, value: float = 0.0) -> None:
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)


def loss(case: Wired, model: nn.Module) -> float:
    found = loss_of(model, case.inputs, case.anatomy)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "attention"), [("llama", "eager"), ("llama", "sdpa"), ("gemma2", "eager"), ("bert", "eager")]
)
def test_a_layer_left_out_is_a_layer_removed(name: str, attention: str) -> None:
    case = wired(name, attention)
    found, notes = layer_drops(case.model, case.inputs, case.anatomy)
    (stack,) = case.anatomy.stacks
    path = stack.layers[0].call.path.rpartition(".")[0]
    whole = loss(case, case.model)
    for index in range(len(stack.layers)):
        shorter = copy.deepcopy(case.model)
        del shorter.get_submodule(path)[index]
        left = replace(case.anatomy, stacks=(replace(stack, layers=stack.layers[:-1]),))
        expected = loss(replace(case, anatomy=left), shorter) - whole
        assert found["main", index] == pytest.approx(expected, abs=1e-6)
    assert len(found) == len(stack.layers)
    assert notes == ()


def test_layers_of_both_stacks_are_left_out() -> None:
    case = wired("t5")
    found, _ = layer_drops(case.model, case.inputs, case.anatomy)
    assert {stack for stack, _ in found} == {"encoder", "decoder"}
    silent = copy.deepcopy(case.model)
    for part in silent.encoder.block[1].layer:
        zero(part)
    assert found["encoder", 1] == pytest.approx(loss(case, silent) - loss(case, case.model), abs=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "bert", "phi"])
def test_a_sublayer_left_out_has_an_output_matrix_of_zeros(name: str) -> None:
    case = wired(name)
    rows, notes = sublayer_drops(case.model, case.inputs, case.anatomy)
    whole = loss(case, case.model)
    assert len(rows) == len(case.anatomy.stacks[0].sublayers)
    for row in rows:
        silent = copy.deepcopy(case.model)
        layer = case.anatomy.stacks[0].layers[row.layer].call.path
        zero(silent.get_submodule(f"{layer}.{WRITERS[name, row.kind]}"))
        assert row.loss_increase == pytest.approx(loss(case, silent) - whole, abs=1e-6)
        assert row.name == f"layers.{row.layer}.{row.kind}"
    assert notes == ()


def test_behind_an_output_norm_the_gain_is_zero() -> None:
    case = wired("gemma2")
    rows, _ = sublayer_drops(case.model, case.inputs, case.anatomy)
    for row in rows:
        silent = copy.deepcopy(case.model)
        norm = {"mixer": "post_attention_layernorm", "ffn": "post_feedforward_layernorm"}[row.kind]
        zero(silent.get_submodule(f"model.layers.{row.layer}.{norm}"), -1.0)  # used as 1 + w
        assert row.loss_increase == pytest.approx(loss(case, silent) - loss(case, case.model), abs=1e-6)


def test_cross_attention_is_left_out() -> None:
    case = wired("t5")
    rows, _ = sublayer_drops(case.model, case.inputs, case.anatomy)
    row = next(row for row in rows if (row.stack, row.name) == ("decoder", "layers.1.cross"))
    silent = copy.deepcopy(case.model)
    zero(silent.decoder.block[1].layer[1].EncDecAttention.o)
    assert row.loss_increase == pytest.approx(loss(case, silent) - loss(case, case.model), abs=1e-6)


def test_a_wrong_update_gives_a_note_and_no_number() -> None:
    """Gemma 2 with the module's output, which a norm follows, named as what is added."""
    case = wired("gemma2")
    (stack,) = case.anatomy.stacks
    first, *others = stack.layers
    wrong = replace(first, sublayers=tuple(replace(s, update=s.output) for s in first.sublayers))
    anatomy = replace(case.anatomy, stacks=(replace(stack, layers=(wrong, *others)),))
    rows, notes = sublayer_drops(case.model, case.inputs, anatomy)
    assert {row.layer for row in rows} == {1, 2, 3}
    assert "layers 0 of main" in notes[0]


def own(placement: str, n_layers: int = 3, **options: Any) -> DecoderLM:
    model = DecoderLM(DecoderConfig(placement=placement, dim=16, n_layers=n_layers, n_heads=2, **options)).eval()
    initialize(model, seed=0)
    for module in model.modules():  # no two norms alike
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.ndim == 1:
            nn.init.uniform_(weight, 0.5, 1.5)
    return model


TOKENS = {"tokens_BT": torch.arange(1, 8)[None]}


def test_a_layer_of_our_own_left_out_is_a_layer_removed() -> None:
    """The norm before a layer is in the junction that ends the one before it, so removing layer i moves norms."""
    model = own("pre")
    found, _ = layer_drops(model, TOKENS, None)
    before: dict[str, Any] = {
        "0": model.before_layers.read.norm,
        **{str(i + 1): model.layers[i].after_feed_forward.read.norm for i in range(3)},  # type: ignore[union-attr]
    }
    for index in range(3):
        left = [i for i in range(3) if i != index]
        shorter: Any = own("pre", n_layers=2)
        shorter.load_state_dict({k: v for k, v in model.state_dict().items() if "layers" not in k}, strict=False)
        for new, old in enumerate(left):
            shorter.layers[new].load_state_dict(model.layers[old].state_dict())
        norms = [before[str(i)] for i in (*left, 3)]
        shorter.before_layers.read.norm.load_state_dict(norms[0].state_dict())
        for layer, norm in zip(shorter.layers, norms[1:], strict=True):
            layer.after_feed_forward.read.norm.load_state_dict(norm.state_dict())
        whole, without = loss_of(model, TOKENS, None), loss_of(shorter, TOKENS, None)
        assert whole is not None
        assert without is not None
        assert found["main", index] == pytest.approx(without - whole, abs=1e-6)


@pytest.mark.parametrize("placement", ["pre", "post", "siamese", "hyper_connections", "deepnorm", "ngpt", "span_norm"])
def test_a_sublayer_of_our_own_left_out_has_an_output_matrix_of_zeros(placement: str) -> None:
    model = own(placement)
    rows, _ = sublayer_drops(model, TOKENS, None)
    whole = loss_of(model, TOKENS, None)
    assert whole is not None
    for row in rows:
        silent: Any = copy.deepcopy(model)
        layer = silent.layers[row.layer]
        nn.init.zeros_(layer.attention.wo.weight if row.kind == "mixer" else layer.feed_forward.w_down.weight)
        without = loss_of(silent, TOKENS, None)
        assert without is not None
        assert row.loss_increase == pytest.approx(without - whole, abs=1e-6)


def test_the_bias_of_an_output_norm_is_left_out_too() -> None:
    model: Any = own("olmo2", norm=NormConfig(kind="layer", eps=1e-5, bias=True))
    for layer in model.layers:
        nn.init.uniform_(layer.after_attention.join.norm_out.bias)
    rows, _ = sublayer_drops(model, TOKENS, None)
    silent: Any = copy.deepcopy(model)
    zero(silent.layers[1].after_attention.join.norm_out)
    whole, without = loss_of(model, TOKENS, None), loss_of(silent, TOKENS, None)
    assert whole is not None
    assert without is not None
    assert rows[2].name == "layers.1.mixer"
    assert rows[2].loss_increase == pytest.approx(without - whole, abs=1e-6)


@pytest.mark.parametrize("placement", placements.names())
def test_in_every_placement_layers_and_sublayers_can_be_left_out(placement: str) -> None:
    model = own(placement, n_layers=2)
    whole = loss_of(model, TOKENS, None)
    layers, _ = layer_drops(model, TOKENS, None)
    rows, _ = sublayer_drops(model, TOKENS, None)
    assert len(layers) == 2
    assert len(rows) == sum(len(layer.kinds) for layer in model.layers)  # type: ignore[arg-type]
    assert all(torch.tensor(value).isfinite() for value in (*layers.values(), *(row.loss_increase for row in rows)))
    assert loss_of(model, TOKENS, None) == whole  # nothing is left behind
