"""Gradient norms by layer, against a backward pass."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks.tiny_models import tiny_model
from tests.inspect.wired import layer, wired
from torch import Tensor

from normstream.init import initialize
from normstream.inspect.anatomy import Anatomy, Call, StackAnatomy
from normstream.inspect.measures.gradients import gradient_norms
from normstream.models import DecoderConfig, DecoderLM


def norm_of(parameters: Any) -> float:
    return math.sqrt(sum(p.grad.square().sum().item() for p in parameters if p.grad is not None))


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert"])
def test_the_norms_are_those_of_a_backward_pass(name: str) -> None:
    case = wired(name)
    output = case.model(**case.inputs, labels=case.inputs["input_ids"], output_hidden_states=True)
    entering = output.hidden_states[:-1]
    for stream in entering:
        stream.retain_grad()
    output.loss.backward()
    layers = [case.model.get_submodule(site.call.path) for site in case.anatomy.stacks[0].layers]
    expected = [norm_of(module.parameters()) for module in layers]
    case.model.requires_grad_(False)

    found, notes = gradient_norms(case.model, case.inputs, case.anatomy)
    assert [norms.parameters for norms in found.values()] == pytest.approx(expected, rel=1e-4)
    assert [norms.stream for norms in found.values()] == pytest.approx(
        [s.grad.norm().item() for s in entering], rel=1e-4
    )
    assert [norms.by_stream for norms in found.values()] == [{"x": norms.stream} for norms in found.values()]
    assert notes == ()
    assert not any(parameter.requires_grad for parameter in case.model.parameters())


def test_both_stacks_of_an_encoder_decoder_have_gradients() -> None:
    case = wired("t5")
    labels = torch.cat([case.inputs["decoder_input_ids"][:, 1:], torch.tensor([[-100]])], dim=1)
    case.model(**case.inputs, labels=labels).loss.backward()
    found, _ = gradient_norms(case.model, case.inputs, case.anatomy)
    for (name, index), norms in found.items():
        assert norms.parameters == pytest.approx(norm_of(getattr(case.model, name).block[index].parameters()), rel=1e-4)


def test_the_gradient_of_two_streams_is_that_of_their_state() -> None:
    model: Any = DecoderLM(DecoderConfig(placement="siamese", dim=16, n_layers=2, n_heads=2, tied=True)).eval()
    initialize(model, seed=0)
    tokens = torch.arange(7)[None]
    found, _ = gradient_norms(model, {"tokens_BT": tokens}, None)

    (context,) = model._contexts(torch.arange(7)[None], None, 7, None).values()
    state, z = model.before_layers((), model.tok_embeddings(tokens))
    state, z, _ = model.layers[0](state, z, context)
    leaves: Any = tuple(stream.detach().requires_grad_() for stream in state)
    _, z, _ = model.layers[1](leaves, model.layers[0].after_feed_forward.read(leaves)[1], context)
    loss = torch.nn.functional.cross_entropy(model.lm_head(z)[0, :-1], tokens[0, 1:])
    gradients: tuple[Tensor, ...] = torch.autograd.grad(loss, leaves)
    norms = [gradient.norm().item() for gradient in gradients]
    assert found["main", 1].stream == pytest.approx(math.hypot(*norms), rel=1e-5)
    assert found["main", 1].by_stream == pytest.approx(dict(zip("xy", norms, strict=True)), rel=1e-5)


def test_hyper_connected_streams_have_a_gradient_each() -> None:
    """By backward from the state of the second layer, (B, T, n, D)."""
    config = DecoderConfig(placement="hyper_connections", dim=16, n_layers=2, n_heads=2, tied=True)
    model: Any = DecoderLM(config).eval()
    initialize(model, seed=0)
    tokens, seen = torch.arange(7)[None], []
    model.layers[0].after_feed_forward.join.register_forward_hook(lambda module, args, state: seen.append(state[0]))
    logits = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    (gradient,) = torch.autograd.grad(loss, seen[0])
    found, _ = gradient_norms(model, {"tokens_BT": tokens}, None)
    expected = {f"h_{n + 1}": gradient[..., n, :].norm().item() for n in range(gradient.shape[-2])}
    assert found["main", 1].by_stream == pytest.approx(expected, rel=1e-4)


def test_shared_layers_have_one_gradient_and_a_note() -> None:
    model: Any = tiny_model("albert")
    path = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    parts = {"ffn": ("ffn", "ffn_output", "ffn_output")}
    sites = tuple(layer(Call(path, index), index, parts) for index in range(4))
    anatomy = Anatomy((StackAnatomy("main", sites, (), (), 1.0),), None, False, None)
    ids = torch.arange(3, 14)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    found, notes = gradient_norms(model, {"input_ids": ids}, anatomy)
    expected = norm_of(model.get_submodule(path).parameters())
    assert [norms.parameters for norms in found.values()] == pytest.approx([expected] * 4, rel=1e-4)
    assert "share parameters" in notes[0]


def test_modules_that_are_no_layers_have_no_rows() -> None:
    """Attentions alone, named as layers: what enters one is not what left another."""
    case = wired("llama")
    (stack,) = case.anatomy.stacks
    sites = tuple(replace(site, call=site.sublayers[0].output) for site in stack.layers)
    found, notes = gradient_norms(case.model, case.inputs, Anatomy((replace(stack, layers=sites),), None, False, None))
    assert found == {}
    assert "what enters one is not what left another" in notes[0]


def test_without_a_loss_there_are_no_gradients() -> None:
    case = wired("bert")
    case.model.cls = torch.nn.Linear(32, 5)
    found, notes = gradient_norms(case.model, case.inputs, case.anatomy)
    assert found == {}
    assert "no loss" in notes[0]
