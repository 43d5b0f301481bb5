"""The wiring diagrams: of own models against their papers' equations, of probed ones against their families."""

import functools
import math
from xml.etree import ElementTree

import pytest
import torch
from benchmarks.tiny_models import tiny_model

from normstream import initialize
from normstream.inspect import anatomy_of, find_norms
from normstream.inspect.report.diagram import draw_wiring
from normstream.inspect.report.own_wiring import own_wiring
from normstream.inspect.report.wiring import Branch, Wiring, marks, wirings
from normstream.models import DecoderConfig, DecoderLM

LAYERS = 6


@functools.cache
def own(placement: str) -> Wiring | None:
    model = DecoderLM(DecoderConfig(placement=placement, vocab_size=16, dim=16, n_layers=LAYERS, n_heads=2)).eval()
    initialize(model, 0)
    return own_wiring(model, find_norms(model, {"tokens_BT": torch.arange(13)[None]}))


def drawn(placement: str) -> Wiring:
    wiring = own(placement)
    assert wiring is not None
    return wiring


def branches(wiring: Wiring) -> list[Branch]:
    (section,) = wiring.sections
    return list(section.branches)


@pytest.mark.parametrize(("placement", "count"), [("pre", 13), ("post", 12), ("sandwich", 25), ("peri", 26)])
def test_own_models_have_the_norms_of_their_placement(placement: str, count: int) -> None:
    """Six layers: pre 2 each and a final one; post 2 each; sandwich 4 each and a final one; peri one at the start."""
    assert sum(max(1, len(layers)) for _, _, layers in marks(drawn(placement))) == count


def test_siamese_is_the_papers_two_streams() -> None:
    """Algorithm 1 with the released code's constant 1 / sqrt(2 (l + 1))."""
    wiring = drawn("siamese")
    assert wiring.streams == ("x", "y")
    x, y = wiring.start
    assert x.trunk is not None
    assert y.trunk is None
    for branch in branches(wiring):
        assert [(source.stream, source.norm is not None) for source in branch.sources] == [("x", False), ("y", True)]
        assert len(branch.input_norms) == 1
        to_x, to_y = branch.targets
        assert to_x.trunk is not None
        assert to_x.factor.low == pytest.approx(1 / math.sqrt(2 * LAYERS), rel=1e-5)
        assert to_x.factor.high == pytest.approx(1 / math.sqrt(2), rel=1e-5)
        assert (to_y.trunk, to_y.factor.is_one, to_y.skip.is_one) == (None, True, True)


def test_constants_of_the_papers() -> None:
    """DeepNorm's alpha = (2N)^(1/4); LayerNorm Scaling's 1 / sqrt(l) for l = 1 ... N, behind the norm."""
    for branch in branches(drawn("deepnorm")):
        assert branch.targets[0].skip.low == branch.targets[0].skip.high
        assert branch.targets[0].skip.low == pytest.approx((2 * LAYERS) ** 0.25, rel=1e-5)
    for branch in branches(drawn("layernorm_scaling")):
        assert branch.input_factor.low == pytest.approx(1 / math.sqrt(LAYERS), rel=1e-5)
        assert branch.input_factor.high == 1


def test_mixed_placements_have_a_section_for_each_kind() -> None:
    post, pre = drawn("post:0-1,pre:2-").sections
    assert (post.layers, pre.layers) == ((0, 1), (2, 3, 4, 5))
    assert all(branch.targets[0].trunk and not branch.input_norms for branch in post.branches)
    assert all(branch.input_norms and not branch.targets[0].trunk for branch in pre.branches)


@pytest.mark.parametrize("placement", ["hyper_connections", "ngpt", "geo_norm"])
def test_what_is_no_sum_is_not_drawn(placement: str) -> None:
    assert own(placement) is None


@functools.cache
def probed(family: str) -> tuple[Wiring, ...]:
    return wirings(anatomy_of(tiny_model(family)))


def test_cohere_shares_one_norm_between_two_branches() -> None:
    (wiring,) = probed("cohere2")
    mixer, ffn = branches(wiring)
    assert not mixer.is_parallel
    assert ffn.is_parallel
    assert ffn.shares_input
    assert wiring.is_tied


def test_granite_has_its_multipliers() -> None:
    """Those of the tiny configuration: embedding 3, residual 0.22, logits divided by 4."""
    (wiring,) = probed("granite")
    assert (str(wiring.embedding_factor), str(wiring.logit_factor)) == ("3", "0.25")
    assert [str(branch.targets[0].factor) for branch in branches(wiring)] == ["0.22", "0.22"]


def test_t5_has_two_stacks_and_a_cross_attention() -> None:
    encoder, decoder = probed("t5")
    assert encoder.feeds_cross
    assert (encoder.head, decoder.feeds_cross) == (None, False)
    assert [branch.kind for branch in branches(decoder)] == ["mixer", "cross", "ffn"]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bert", "cohere2", "deepseek_v3", "t5"])
def test_diagram_shows_every_norm_and_sum_once(family: str) -> None:
    for wiring in probed(family):
        check_drawing(wiring)


@pytest.mark.parametrize("placement", ["siamese", "siamese_hybrid_pre", "residual", "keel", "parallel(norms=2)"])
def test_diagram_of_own_models_too(placement: str) -> None:
    check_drawing(drawn(placement))


def check_drawing(wiring: Wiring) -> None:
    """Norms and circled pluses are counted; everything lies inside the picture; nothing has an id that could clash."""
    svg = ElementTree.fromstring(draw_wiring(wiring))
    tags = [(element.tag.rsplit("}", 1)[-1], element) for element in svg.iter()]
    shared = sum(branch.shares_input * len(branch.input_norms) for s in wiring.sections for branch in s.branches)
    assert sum(tag == "title" for tag, _ in tags) == len(marks(wiring)) - shared
    sums = sum(
        len(branch.targets) + (len(branch.sources) - 1) * (not branch.shares_input)
        for section in wiring.sections
        for branch in section.branches
    )
    circles = [element for tag, element in tags if tag == "circle" and element.get("class") == "add"]
    assert len(circles) == sums + len(wiring.sources) - 1
    left, top, width, height = map(float, svg.attrib["viewBox"].split())
    moved = len(wiring.sections) > 1
    for tag, element in tags:
        assert "id" not in element.attrib
        if tag == "rect" and not moved:
            x, y = float(element.attrib["x"]), float(element.attrib["y"])
            assert left <= x <= left + width - float(element.attrib["width"])
            assert top <= y <= top + height - float(element.attrib["height"])
    assert "Layers 0" in svg.attrib["aria-label"]
