"""The report and the tables of an inspection, on results that are written by hand."""

import io
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from tests.html_page import Page

from normstream.inspect.anatomy import Anatomy, Call, LayerSite, NormFacts, NormSite, StackAnatomy, Sublayer
from normstream.inspect.inspection import (
    DropRow,
    Growth,
    HeadRow,
    IdentityRow,
    Inspection,
    LayerRow,
    LensRow,
    MassiveActivation,
    ModelFacts,
    StreamRatio,
    SublayerRow,
)
from normstream.inspect.report.findings import findings, headline
from normstream.inspect.report.multipliers import multipliers
from normstream.inspect.report.page import render
from normstream.inspect.report.tables import SHOWN_LAYERS, norm_rows, show, stream_rows
from normstream.inspect.report.wiring import wirings

LAYERS, DIM = 20, 8
PICTURES = ["growth", "headroom", "direction", "importance", "gradients", "massive", "attention", "lens", "identity"]
FACTS = NormFacts("norm", "rms", "one_plus_w", False, 1e-6, "after_gain", DIM, DIM)


def norm(place, path, feeds=(), sublayers=(), layer=None, scope: Any = "stream"):
    return NormSite(Call(path), place, feeds, sublayers, layer, scope, replace(FACTS, path=path))


def sublayer(layer, kind, module, pre):
    call = Call(f"layers.{layer}.{module}")
    name = f"layers.{layer}.{kind}"
    return Sublayer(name, kind, layer, call, call, 1.0, (pre,), pre, None, None, (), ())


@pytest.fixture(scope="module")
def anatomy():
    """A Pre-Norm decoder with misleading names, and a norm on the queries in its first half."""
    norms, layers = [], []
    for i in range(LAYERS):
        a, f = Call(f"layers.{i}.input_layernorm"), Call(f"layers.{i}.post_attention_layernorm")
        pair = sublayer(i, "mixer", "self_attn", a), sublayer(i, "ffn", "mlp", f)
        layers.append(LayerSite(i, Call(f"layers.{i}"), 1.0, pair))
        norms.append(norm("pre", a.path, ("mixer",), (pair[0].name,), i))
        if i < LAYERS // 2:
            norms.append(norm("q", f"layers.{i}.self_attn.q_norm", ("mixer",), (pair[0].name,), i, "per_head"))
        norms.append(norm("pre", f.path, ("ffn",), (pair[1].name,), i))
    norms.append(norm("final", "norm"))
    stack = StackAnatomy("main", tuple(layers), tuple(norms), (Call("embed_tokens"),), 1.0)
    return Anatomy((stack,), Call("lm_head"), True, 1.0)


def sublayer_row(layer, kind, stream="x"):
    size = 1.0 + layer
    return SublayerRow(
        "main", stream, f"layers.{layer}.{kind}", layer, kind, size, 0.5, 10 * size, 5.0, 6550.4 / size,
        0.001 * layer, -0.1, 0.2 / size,
    )  # fmt: skip


def turn(layer):
    return 0.01 if layer in (7, 9, 11) else 0.1


@pytest.fixture(scope="module")
def inspection(anatomy):
    layers = range(LAYERS)
    return Inspection(
        normstream="0.1",
        model=ModelFacts(
            "org/Some-Model", "checkpoint", 1_234_567, LAYERS, DIM, "float32", "eager", 61, "<b>text", 1.5, True
        ),
        anatomy=anatomy,
        placement={"main": "pre"},
        loss=2.5,
        sublayers=tuple(sublayer_row(i, kind) for i in layers for kind in ("mixer", "ffn")),
        identity=tuple(IdentityRow("main", "x", i, 0.9 if i == 3 else 0.5, 1e-7) for i in layers),
        growth=(
            Growth("main", "x", "linear", (1.0, 1.0), {"linear": 0.01}, tuple(1.0 + i for i in range(LAYERS + 1))),
        ),
        massive=(MassiveActivation("main", "x", 4, 0, "<s>", 5, -2000.0, 4000.0),),
        layers=tuple(LayerRow("main", i, turn(i), 1.0, 0.1, 0.3, 0.2, {"x": turn(i)}, {"x": 0.1}) for i in layers),
        heads=tuple(HeadRow("main", f"layers.{i}.mixer", i, (1.0, 30.0 + i)) for i in layers),
        lens=tuple(LensRow("main", "x", i, 5.0 - 0.1 * i, 1.0, 0.5) for i in layers),
        drops=tuple(DropRow("main", f"layers.{i}.{k}", i, k, -0.1) for i in layers for k in ("mixer", "ffn")),
        wiring=wirings(anatomy),
        notes=("one thing could not be measured: a & b",),
    )


@pytest.fixture(scope="module")
def html(inspection):
    return render(inspection)


def test_report_needs_nothing_from_outside(html):
    page = Page(html)
    assert not page.open
    assert "://" not in html.replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"url\((?!#)", html)
    assert not {tag for tag, _ in page.tags} & {"script", "iframe", "img", "object", "embed"}
    assert all(href.startswith(("#", "data:")) for href in page.having("href"))
    ids = page.having("id")
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([\w-]+)', html)) <= set(ids)


def test_report_has_every_picture_and_the_wiring(html):
    page = Page(html)
    assert [i for i in page.having("id") if i in PICTURES] == PICTURES
    labels = [attributes["aria-label"] for tag, attributes in page.tags if tag == "svg" and "role" in attributes]
    assert all(labels)
    assert any(label.startswith("Wiring of main. Layers 0 to 9:") for label in labels)
    assert any("rows influence, loss without the layer" in label for label in labels)


def test_report_escapes_what_it_was_given(html):
    assert "<b>text" not in html
    assert "&lt;b&gt;text" in html
    assert "a &amp; b" in html
    assert "&lt;s&gt;" in html


def test_report_is_the_same_for_the_same_inspection(html, inspection):
    assert render(inspection) == html


@pytest.fixture
def two_streams(inspection):
    """The same with a second stream, which turns by 0.3 in every layer; the joint influence is the mean."""
    rows = tuple(sublayer_row(i, kind, s) for i in range(LAYERS) for kind in ("mixer", "ffn") for s in "xy")
    layers = tuple(
        LayerRow("main", i, 0.2, 1.0, 0.5, 0.7, 0.25, {"x": 0.1, "y": 0.3}, {"x": 0.3, "y": 0.4}) for i in range(LAYERS)
    )
    ratios = tuple(StreamRatio("main", i, 2.0) for i in range(LAYERS))
    return replace(inspection, sublayers=rows, layers=layers, ratios=ratios)


def test_report_of_two_streams(two_streams):
    text = render(two_streams)
    assert 'id="ratio"' in text
    _, x, y, joint = re.split("<h3>(?:stream x|stream y|all streams together)</h3>", text)
    assert ("<td>0.100</td></tr>" in x, "<td>0.300</td></tr>" in y) == (True, True)
    assert not any("loss<br>without" in table for table in (x, y))
    for shown in ("<td>0.200</td>", "<td>0.7</td>", "<td>0.5</td>", "<td>+0.250</td>", "loss<br>without"):
        assert shown in joint
    assert any(
        "rows influence on stream x, influence on stream y" in label for label in Page(text).having("aria-label")
    )


def test_terminal_shows_what_is_joint_once(two_streams):
    """The influence of each stream in its table; loss and Jacobian of the layer in a third."""
    text = printed(two_streams, 80)
    x, y, joint = re.split("stream y\n|all streams together\n", text.split("stream x\n")[1])
    assert re.search(r"^ +0 .* 0\.100$", x, re.M)
    assert re.search(r"^ +0 .* 0\.300$", y, re.M)
    assert re.search(r"^ +0 +0\.200 +0\.7 +1 +\+0\.250$", joint, re.M)
    assert "+0.250" not in x + y
    assert "the streams turn on average by 36.0" in " ".join(
        findings(replace(two_streams, layers=(*two_streams.layers[1:], replace(two_streams.layers[0], influence=0.3))))
    )


def test_report_of_what_could_not_be_measured(inspection):
    facts = inspection.model
    bare = Inspection("0.1", replace(facts, n_layers=0), None, {"main": "unknown"}, None, notes=("nothing was found",))
    text = render(bare)
    assert "nothing was found" in text
    assert "No diagram of this model can be drawn" in text
    assert not [i for i in Page(text).having("id") if i in PICTURES]


def test_report_of_a_stream_that_overflows(inspection):
    rows = tuple(
        replace(row, rms=math.inf, max_abs=math.inf, headroom_fp16=0.0, cosine=math.nan) for row in inspection.sublayers
    )
    text = render(replace(inspection, sublayers=rows, growth=()))
    assert 'class="bad">0<' in text
    assert any("above fp16's 65,504" in sentence for sentence in findings(replace(inspection, sublayers=rows)))


def test_norms_are_gathered_by_role(inspection):
    rows = {row.path: row for row in norm_rows(inspection)}
    assert list(rows) == [
        "layers.*.input_layernorm",
        "layers.*.self_attn.q_norm",
        "layers.*.post_attention_layernorm",
        "norm",
    ]
    feed_forward = rows["layers.*.post_attention_layernorm"]
    assert (feed_forward.place, feed_forward.meaning, feed_forward.count) == ("pre", "before the feed-forward", LAYERS)
    assert (feed_forward.kind, feed_forward.gain, feed_forward.eps) == ("RMS", "1 + w", "1e-6")
    assert rows["layers.*.self_attn.q_norm"].layers == tuple(range(LAYERS // 2))
    assert rows["layers.*.self_attn.q_norm"].over == "each head 8"


def test_stream_rows_put_a_layers_sublayers_together(inspection):
    row = stream_rows(inspection)[3]
    assert (row.layer, row.rms, row.max_abs) == (3, 4.0, 40.0)
    assert row.update_share == {"mixer": 0.125, "ffn": 0.125}
    assert (row.influence, row.loss_increase) == (0.1, 0.2)


def test_findings_name_the_worst_and_the_least(inspection):
    text = " ".join(findings(inspection))
    assert "wrong by up to 90 % (layer 3)" in text
    assert "from 1 to 21 over 20 layers; its growth is linear, 1 + 1 l (error 1 %)" in text
    assert "The largest entry of the stream is 200, behind layers.19.mixer: 328 times below fp16's 65,504." in text
    assert "the largest is -2000, 4000 times the median, in layer 4, token 0 ('<s>'), channel 5" in text
    assert "Layers 7, 9 and 11 have the least influence: the stream turns by 1.8, 1.8 and 1.8 degrees" in text
    assert "The largest attention logit is 49, in head 1 of layers.19.mixer." in text
    assert headline(inspection) == "Some-Model: pre; 20 layers of width 8"


def test_findings_on_what_is_as_it_seems(inspection):
    plain = replace(inspection, identity=(IdentityRow("main", "x", 0, 1e-7, 1e-7),), massive=())
    text = " ".join(findings(plain))
    assert "return is what is added to the stream" in text
    assert "No massive activations" in text


@pytest.mark.parametrize(
    ("true", "words"),
    [
        (0.3, "leave a relative error of 0.3 (layer 2); the wiring is not fully understood"),
        (1e-3, "leave a relative error of 0.001 (layer 2); the wiring is not fully understood"),
    ],
)
def test_updates_that_do_not_explain_the_stream_are_not_called_what_is_added(inspection, true, words):
    """Where the identity fails there are no statistics of sublayers; module outputs may miss it by as much or more."""
    rows = tuple(IdentityRow("main", "x", i, 0.31, true if i == 2 else 1e-7) for i in range(4))
    text = " ".join(findings(replace(inspection, identity=rows, sublayers=())))
    assert words in text
    assert "return is" not in text
    assert "really added sums up" not in text


def test_an_identity_that_rounding_hides(inspection):
    rows = (IdentityRow("main", "x", 0, 0.6, 0.5),)
    model = replace(inspection.model, dtype="bfloat16")
    text = " ".join(findings(replace(inspection, identity=rows, model=model)))
    assert "relative error of 0.5 (layer 0); rounding in bfloat16 hides it" in text
    assert "return is" not in text


def test_an_identity_of_a_stream_that_is_not_finite_is_left_to_the_note(inspection):
    rows = (IdentityRow("main", "x", 0, 1e-7, 1e-7), IdentityRow("main", "x", 1, math.nan, math.nan))
    assert not any("added" in line for line in findings(replace(inspection, identity=rows, sublayers=())))


def test_multipliers_in_one_line(inspection, anatomy):
    """Granite 4's kinds: what is 1 is left out, kinds that differ are named."""
    (stack,) = anatomy.stacks

    def with_factors(mixer, ffn, **changes):
        layers = tuple(
            replace(
                site,
                sublayers=tuple(
                    replace(s, multiplier=factor) for s, factor in zip(site.sublayers, (mixer, ffn), strict=True)
                ),
            )
            for site in stack.layers
        )
        changed = replace(stack, layers=layers, embedding_multiplier=5.000001)
        return replace(inspection, wiring=wirings(replace(anatomy, stacks=(changed,), **changes)))

    assert multipliers(inspection) == "head tied to the embedding"
    same = with_factors(0.22, 0.2200001, logit_multiplier=1 / 3)
    line = "embedding x 5, residual x 0.22, logits x 0.333, head tied to the embedding"
    assert multipliers(same) == line
    assert line in printed(same, 80)
    assert f"E{line[1:]}." in render(same)
    untied = replace(with_factors(0.5, 1.0), model=replace(inspection.model, is_tied=False))
    assert multipliers(untied) == "embedding x 5, mixer residual x 0.5, head not tied to the embedding"
    headless = replace(inspection, model=replace(inspection.model, is_tied=None))
    assert multipliers(headless) == ""


def test_terminal_of_80_columns(inspection, anatomy):
    """Paths are broken before dots or underscores, never inside a word; no header is cut."""
    (stack,) = anatomy.stacks
    path = "bert.encoder.layer.{}.attention.output.very_long_output_layernorm_name"
    norms = tuple(
        replace(site, call=Call(path.format(site.layer))) if site.place == "pre" else site for site in stack.norms
    )
    text = printed(replace(inspection, anatomy=replace(anatomy, stacks=(replace(stack, norms=norms),))), 80)
    tables = text[: text.index("\n* ")]
    assert "…" not in tables
    assert max(map(len, tables.splitlines())) <= 80
    for line in (
        r"pre +mixer +bert\.encoder\.layer\.\*\.attention",
        r" +\.output",
        r" +\.very_long_output_layernorm_name",
    ):
        assert re.search(f"^{line}", tables, re.M)
    assert re.search(r"^layer +rms +\|h\| +room +/ h +/ h +lost +cos +turn +w/o$", tables, re.M)


def test_sizes_of_a_stream_with_norms_on_it_say_which_are_meant(inspection, anatomy):
    """Post-Norm: the table is about the sum before the norm, the growth law about what the norm gives."""
    assert "before the norm on the stream" not in printed(inspection, 80)
    (stack,) = anatomy.stacks
    trunk = Call("layers.0.input_layernorm")
    sites = tuple(replace(s, place="trunk") if s.call == trunk else s for s in stack.norms)
    first, *rest = stack.layers
    mixer, ffn = first.sublayers
    first = replace(first, sublayers=(replace(mixer, pre_norm=None, trunk_norm=trunk), ffn))
    post = replace(anatomy, stacks=(replace(stack, layers=(first, *rest), norms=sites),))
    text = printed(replace(inspection, anatomy=post, wiring=wirings(post)), 80)
    assert "rms and max |h| before the norm on the stream\n" in text
    assert "The RMS of the stream, behind the norm on it, goes from 1 to 21" in text
    assert "behind layers.19.mixer, before the norm there:" in text


def test_only_the_layers_index_is_a_star(inspection, anatomy):
    """T5's three sublayers have norms of one name in a list of their own."""
    (stack,) = anatomy.stacks
    layers = tuple(replace(site, call=Call(f"block.{site.index}")) for site in stack.layers)
    places: list[Any] = [("pre", kind) for kind in ("mixer", "cross", "ffn")]
    norms = tuple(
        norm(place, f"block.{i}.layer.{n}.layer_norm", (kind,), (), i)
        for i in range(LAYERS)
        for n, (place, kind) in enumerate(places)
    )
    t5 = Anatomy((replace(stack, layers=layers, norms=norms),), None, False, None)
    found = replace(inspection, anatomy=t5)
    assert [(row.path, row.of, row.count) for row in norm_rows(found)] == [
        (f"block.*.layer.{n}.layer_norm", kind, LAYERS) for n, (_, kind) in enumerate(places)
    ]


def printed(inspection, width):
    console = Console(file=io.StringIO(), width=width)
    show(inspection, console, None)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


def test_terminal_shows_some_of_many_layers(inspection):
    text = printed(inspection, 120)
    assert f"{SHOWN_LAYERS} of {LAYERS} layers" in text
    assert re.search(r"^ +0 +1 +10 +6550 +50 % +50 %", text, re.M)
    assert re.search(r"^ +19 +20 +200 ", text, re.M)
    assert "layers.*.self_attn.q_norm  (layers 0 to 9)" in text
    assert "note: one thing could not be measured: a & b" in text
