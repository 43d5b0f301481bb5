"""Traces of normstream's own models: every placement, one stream or several."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normstream import placements
from normstream.init import initialize
from normstream.inspect.measures.statistics import stream_ratios, sublayer_rows
from normstream.inspect.measures.stream_trace import check_identity, identity, trace
from normstream.junctions import Drop, OutputNormJoin, ResiDualReadOut, State
from normstream.models import DecoderConfig, DecoderLM
from normstream.norms import NormConfig, RMSNorm

INPUTS = {"tokens_BT": torch.arange(1, 8)[None]}
ON_A_SPHERE = {"geo_norm", "ngpt"}
NORMS_THE_UPDATE = ["gemma2", "gemma3", "glm4", "olmo2", "peri", "sandwich", "swin_v2"]


def drawn(placement: str, **options: Any) -> DecoderLM:
    """A model in which every parameter is random, gains too."""
    model = DecoderLM(
        DecoderConfig(**{"placement": placement, "vocab_size": 50, "dim": 16, "n_layers": 3, "n_heads": 2} | options)
    )
    initialize(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()


class Constant(nn.Module):
    """A sublayer that always returns the same update."""

    def __init__(self, update: Tensor) -> None:
        super().__init__()
        self.update = update

    def forward(self, z: Tensor, context: Any) -> Tensor:
        return self.update.to(z.dtype).expand_as(z)


def constant(placement: str, update: list[float], embedding: list[float], n_layers: int, eps: float = 0.0) -> DecoderLM:
    """A model whose sublayers all return ``update`` and whose tokens all have the same embedding."""
    dim = len(update)
    config = DecoderConfig(
        placement=placement, vocab_size=8, dim=dim, n_layers=n_layers, n_heads=1, norm=NormConfig(eps=eps)
    )
    model = DecoderLM(config)
    initialize(model, 0)
    for layer in model.layers:
        layer.attention = Constant(torch.tensor(update))
        layer.feed_forward = Constant(torch.tensor(update))
    with torch.no_grad():
        model.tok_embeddings.weight.copy_(torch.tensor(embedding).expand(8, dim))
    return model.eval()


@pytest.mark.parametrize("placement", sorted(set(placements.names()) - ON_A_SPHERE))
def test_the_true_updates_explain_every_layer_of_every_placement(placement: str) -> None:
    found = trace(drawn(placement), INPUTS)
    check_identity(found)
    rows = identity(found)
    assert len(rows) == 3 * len(found.stacks[0].streams)
    assert max(row.true for row in rows) < 1e-5
    assert found.notes == ()


@pytest.mark.parametrize("placement", NORMS_THE_UPDATE)
def test_the_sublayers_outputs_do_not_explain_a_layer_that_norms_them(placement: str) -> None:
    assert min(row.naive for row in identity(trace(drawn(placement), INPUTS))) > 0.1


@pytest.mark.parametrize("placement", sorted(ON_A_SPHERE))
def test_streams_on_a_sphere_have_no_identity_and_say_so(placement: str) -> None:
    found = trace(drawn(placement), INPUTS)
    assert identity(found) == ()
    assert "no residual identity behind layers.0.attention" in found.notes[0]
    lengths = torch.stack([layer.after["x"].norm(dim=-1) for layer in found.stacks[0].layers])
    torch.testing.assert_close(lengths, lengths[:1].expand_as(lengths))


def test_a_join_that_says_one_thing_and_adds_another_is_caught() -> None:
    class Liar(OutputNormJoin):
        def contributions(self, update: Tensor) -> State:
            return (self.drop(update),)

        def forward(self, state: State, update: Tensor) -> State:
            return (state[0] + self.norm_out(update),)

    model: Any = drawn("sandwich")
    model.layers[1].after_attention.join = Liar(RMSNorm(16, eps=1e-5), Drop()).eval()
    with pytest.raises(ValueError, match="layer 1 of stack 'main', stream x"):
        sublayer_rows(trace(model, INPUTS))


def test_pre_norm_is_the_embedding_plus_all_updates() -> None:
    model: Any = drawn("pre")
    found = trace(model, INPUTS)
    total = model.tok_embeddings(INPUTS["tokens_BT"]) + sum(part.update["x"] for part in found.sublayers)
    torch.testing.assert_close(found.stacks[0].layers[-1].after["x"], total)
    final = model.layers[-1].after_feed_forward.read.norm
    torch.testing.assert_close(found.stacks[0].hidden, final(total))
    torch.testing.assert_close(found.logits, model(**INPUTS))


def test_post_norm_has_its_sums_before_the_norm_and_the_next_sublayer_reads_behind_it() -> None:
    model: Any = drawn("post")
    one, two, *_ = trace(model, INPUTS).sublayers
    torch.testing.assert_close(one.after["x"], one.before["x"] + one.output)
    torch.testing.assert_close(two.before["x"], model.layers[0].after_attention.join.norm(one.after["x"]))
    torch.testing.assert_close(two.input, two.before["x"])


def test_both_streams_of_siamese_norm() -> None:
    """``y`` is the plain sum of the updates; ``x <- N_x(x + o / c)``; ``z = N_in(x + N_y(y))``."""
    model: Any = drawn("siamese")
    found = trace(model, INPUTS)
    total = model.tok_embeddings(INPUTS["tokens_BT"]) + sum(part.output for part in found.sublayers)
    torch.testing.assert_close(found.stacks[0].layers[-1].after["y"], total)
    one, two, *_ = found.sublayers
    after = model.layers[0].after_attention
    torch.testing.assert_close(one.update["x"], one.output * after.join.scale)
    torch.testing.assert_close(two.before["x"], after.join.norm_x(one.before["x"] + one.update["x"]))
    torch.testing.assert_close(two.input, after.read.norm_in(two.before["x"] + after.read.norm_y(two.before["y"])))


def test_deepnorm_keeps_alpha_times_the_stream() -> None:
    """alpha = (2 N)^(1/4) for a decoder or encoder of N blocks by itself (arXiv 2203.00555)."""
    one, *_ = trace(drawn("deepnorm", n_layers=3), INPUTS).sublayers
    torch.testing.assert_close(one.kept["x"], 6**0.25 * one.before["x"])
    torch.testing.assert_close(one.after["x"], one.kept["x"] + one.update["x"])


def test_hyper_connections_have_one_stream_for_each_row() -> None:
    """At the start every stream receives the update itself, and the final norm reads the sum of the streams."""
    model: Any = DecoderLM(
        DecoderConfig(placement="hyper_connections(n_streams=3)", vocab_size=50, dim=16, n_layers=2, n_heads=2)
    )
    initialize(model, 0)
    found = trace(model.eval(), INPUTS)
    assert found.stacks[0].streams == ("h_1", "h_2", "h_3")
    for part in found.sublayers:
        torch.testing.assert_close(part.update, dict.fromkeys(part.update, part.output))
    final = model.layers[-1].after_feed_forward.read.norm
    torch.testing.assert_close(found.stacks[0].hidden, final(sum(found.stacks[0].layers[-1].after.values())))


def test_names_of_two_streams() -> None:
    found = trace(drawn("siamese"), INPUTS)
    assert {"layers.1.mixer.update.x", "layers.1.mixer.update.y", "layers.1.ffn.input", "layers.2.after.y"} <= set(
        found.named()
    )


def test_the_plain_sum_of_residual_overflows_in_fp16_unless_it_is_scaled() -> None:
    """80 updates [1000, -500, 250, 250] on a stream that starts at 0: the expected numbers are the report's."""
    update, zero = [1000.0, -500.0, 250.0, 250.0], [0.0] * 4
    model = constant("residual", update, zero, n_layers=40, eps=1e-5).to(torch.float16)
    assert trace(model, INPUTS).stacks[0].layers[-1].after["d"][0, 0, 0] == float("inf")
    scaled = constant("residual(scale=0.0625,alpha=0,dual_eps=0)", update, zero, n_layers=40, eps=1e-5).to(
        torch.float16
    )
    (main,) = trace(scaled, INPUTS).stacks
    assert main.layers[-1].after["d"][0, 0].tolist() == [4996.0, -2498.0, 1249.0, 1249.0]
    closing = torch.tensor([1.7056057, -0.8528029, 0.4264014, 0.4264014])
    torch.testing.assert_close(main.hidden[0, 0].float(), closing, rtol=1e-3, atol=0)


def test_the_streams_of_residual_are_joined_once() -> None:
    model, calls = drawn("residual", n_layers=6), []
    for module in model.modules():
        if isinstance(module, ResiDualReadOut):
            module.register_forward_hook(lambda *_: calls.append(1))
    trace(model, INPUTS)
    assert len(calls) == 1


@pytest.mark.parametrize("placement", ["residual(scale=0.25)", "siamese"])
def test_two_streams_without_updates(placement: str) -> None:
    """One stream keeps the embedding (times its scale), the other one the normed embedding; gains 1, eps 0."""
    found = trace(constant(placement, [0.0, 0.0], [3.0, 4.0], n_layers=2), INPUTS)
    normed, raw = torch.tensor([3.0, 4.0]) / 12.5**0.5, torch.tensor([3.0, 4.0])
    expected = normed, 0.25 * raw if placement.startswith("residual") else raw
    for layer in found.stacks[0].layers:
        for stream, values in zip(layer.after.values(), expected, strict=True):
            torch.testing.assert_close(stream[0, 0], values)
    size = expected[1].square().mean().sqrt().item()
    assert [row.ratio for row in stream_ratios(found)] == pytest.approx([1 / size] * 2, rel=1e-6)


@pytest.mark.parametrize(("placement", "expected"), [("pre", [1.6970563, 1.1313708]), ("post", [2.3533936, 0.7844645])])
def test_the_final_norm_is_there_once_in_pre_norm_and_not_at_all_in_post_norm(
    placement: str, expected: list[float]
) -> None:
    model = constant(placement, [0.0, 0.0], [3.0, 4.0], n_layers=1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.get_parameter("weight").copy_(torch.tensor([2.0, 1.0]))
    torch.testing.assert_close(trace(model, INPUTS).stacks[0].hidden[0, 0], torch.tensor(expected))


@pytest.mark.parametrize(("placement", "n_norms"), [("pre", 13), ("post", 12), ("sandwich", 25), ("olmo2", 13)])
def test_the_number_of_norms_of_six_layers(placement: str, n_norms: int) -> None:
    """Norms of q and k apart."""
    model = drawn(placement, n_layers=6)
    norms = [name for name, module in model.named_modules() if isinstance(module, RMSNorm)]
    assert len([name for name in norms if ".attention." not in name]) == n_norms


class InPlace(nn.Module):
    """A sublayer that changes its input."""

    def forward(self, z: Tensor, context: Any) -> Tensor:
        return z.add_(1)


def test_a_sublayer_that_changes_its_input_in_place() -> None:
    model: Any = drawn("pre")
    model.layers[0].attention = InPlace()
    one, *_ = trace(model, INPUTS).sublayers
    torch.testing.assert_close(one.input, model.before_layers.read.norm(one.before["x"]))
    torch.testing.assert_close(one.update["x"], one.input + 1)


def test_a_trace_makes_the_models_own_code_run_and_leaves_no_hooks() -> None:
    model = drawn("siamese")
    before = model(**INPUTS)
    found = trace(model, INPUTS)
    torch.testing.assert_close(found.logits, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
